"""The head of the page: the verdict, and the numbers that it rests on."""

from collections.abc import Sequence

from ..kernels.common import PAGE_SIZE
from . import views
from .data import KINDS, Figure, Results
from .html import Markup, count, joined, milliseconds, percent, shown, tag, times, tokens
from .parts import DIMS, Sources


def headline(results: Results, sources: Sources) -> Markup:
    """The verdict, and a row of the numbers that it rests on."""
    found = views.cases(results)
    points = found[0].longest() if found else []
    title, text = _verdict(found[0], points) if points else (Markup("No speed measured yet"), Markup(""))
    tiles = [*_speed_tiles(points, sources), _share_tile(points, sources), _mass_tile(results, points, sources)]
    tiles.append(_bytes_tile(points))
    return tag(
        "header", tag("p", "locks-sglang report", class_="kicker"), tag("h1", title), text, tag("div", *tiles, class_="tiles")
    )


def _verdict(case: views.Case, points: Sequence[views.Speedup]) -> tuple[Markup, Markup]:
    """What the measured speed-ups say, ascending in context: from where on `locks` is faster, if it stays so to the end."""
    longest = points[-1]
    slower = [n for n, point in enumerate(points) if point.ratio.value < 1]
    faster = points[slower[-1] + 1 :] if slower else points

    def at(point: views.Speedup) -> Markup:
        return shown(point.context, tokens(point.context.value))

    def said(point: views.Speedup) -> Markup:
        return joined((shown(point.ratio, times(point.ratio.value)), " as fast at ", at(point), " tokens"))

    title = [said(longest), " of context" if faster else " of context: slower than dense"]
    if faster and slower:
        last = at(points[slower[-1]])
        title += [", slower at ", last]
        advice = ["Faster from ", at(faster[0]), " tokens on, slower at ", last, "; nothing between was measured. "]
    elif faster:
        advice = ["Faster at every context measured, from ", at(faster[0]), " tokens on. "]
    elif len(slower) == len(points):
        advice = ["Slower at every context measured. "]
    else:
        advice = ["Slower at the longest context measured, and not at every other one. "]
    where = [
        f"Time per token of dense decode over that of locks: {case.model}, batch ",
        shown(case.batch),
        f", {case.gpu}, against the fastest dense backend measured.",
    ]
    if faster and slower:
        threshold = faster[0].context
        flag = tag("code", "--locks-min-context-tokens ", shown(threshold, str(threshold.value)))
        where += [
            " Where shorter contexts come too, start with ",
            flag,
            ": a batch in which all are shorter then decodes dense.",
        ]
    return joined(title), tag("p", tag("strong", *advice), *where, class_="lead")


def _tile(name: str, number: Markup, *text: object) -> Markup:
    return tag("div", tag("h3", name), tag("p", number, class_="big"), tag("p", *text), class_="tile")


def _none_tile(name: str, kind: str) -> Markup:
    return _tile(name, tag("span", "not measured", class_="unmeasured"), tag("code", KINDS[kind].made_by), " measures it")


def _speed_tiles(points: Sequence[views.Speedup], sources: Sources) -> list[Markup]:
    names = ("Longest context", "Shortest context")
    if not points:
        return [_none_tile(name, "decode") for name in names]
    tiles = []
    for name, point in zip(names, (points[-1], points[0]), strict=True):
        word = "faster" if point.ratio.value >= 1 else "slower"
        locks, dense = point.locks.figure("token_ms.p50"), point.dense.figure("token_ms.p50")
        text = [
            tag("strong", f"{word} "),
            "at ",
            shown(point.context, tokens(point.context.value)),
            ": ",
            shown(locks, milliseconds(locks.value)),
            " ms a token, ",
            shown(dense, milliseconds(dense.value)),
            f" with {point.dense.get('backend')} ",
            sources.refs((point.locks.file, point.dense.file)),
        ]
        tiles.append(_tile(name, shown(point.ratio, times(point.ratio.value)), *text))
    return tiles


def _share_tile(points: Sequence[views.Speedup], sources: Sources) -> Markup:
    name = "Pages read"
    if not points or points[-1].locks.get("counted.pages_held") is None:
        return _none_tile(name, "decode")
    row = points[-1].locks
    share = row.figure("counted.pages_read") / row.figure("counted.pages_held")
    context = points[-1].context
    text: list[object] = ["of those held, by each KV head and step, at ", shown(context, tokens(context.value))]
    if row.get("settings.budget_tokens"):
        budget = row.figure("settings.budget_tokens")
        text += [": a budget of ", shown(budget, count(budget.value)), " tokens"]
    return _tile(name, shown(share, percent(share.value)), *text, " ", sources.refs((row.file,)))


def _mass_tile(results: Results, points: Sequence[views.Speedup], sources: Sources) -> Markup:
    name = "Attention captured"
    if not results.of("mass"):
        return _none_tile(name, "mass")
    row = results.of("mass")[-1]
    settings = points[-1].locks.get("settings") if points else None
    rank, budget = (settings or {}).get("rank", 8), (settings or {}).get("budget_tokens", 2048)
    found, oracle = views.mass_at(row, f"locks-r{rank}", budget), views.mass_at(row, "oracle", budget)
    if found is None or oracle is None:
        return _none_tile(name, "mass")
    mass, at = found
    length = row.figure("text.tokens")
    return _tile(
        name,
        shown(mass, percent(mass.value)),
        "with ",
        shown(at, count(at.value)),
        " of ",
        shown(length, count(length.value)),
        f" tokens on {row.model}; choosing by exact attention gets ",
        shown(oracle[0], percent(oracle[0].value)),
        " ",
        sources.refs((row.file,)),
    )


def _bytes_tile(points: Sequence[views.Speedup]) -> Markup:
    row = points[-1].locks if points else None
    rank, dim, tail = Figure(8, "8"), Figure(DIMS[0], str(DIMS[0])), True
    if row and row.get("settings.rank"):
        rank, dim = row.figure("settings.rank"), row.figure("shape.dim")
        tail = row.get("settings.tail_correction") != "off"
    size, share = views.summary_bytes(dim.value, rank.value, tail), views.cache_share(dim.value, rank.value, tail)
    return _tile(
        "Memory on top",
        shown(size, f"{size.value} B"),
        "a page of ",
        shown(Figure(PAGE_SIZE, "PAGE_SIZE")),
        " tokens and KV head: ",
        shown(share, percent(share.value)),
        " of its cache, at rank ",
        shown(rank),
        " and head dimension ",
        shown(dim),
    )
