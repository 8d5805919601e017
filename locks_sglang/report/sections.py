"""The sections of the page. Each says what it shows, shows it, and names its sources or the command that makes them."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

from ..benchmarks.decode import CONTEXTS, GPU_BACKENDS
from ..kernels.common import PAGE_SIZE
from . import views
from .charts import Series, line_chart, log_axis, nice_axis, stacked_bars
from .data import KINDS, Figure, Results, Row
from .heatmap import DARK, LIGHT, picture, script_data
from .html import (
    Markup,
    count,
    gibibytes,
    joined,
    milliseconds,
    percent,
    shown,
    table,
    tag,
    times,
    tokens,
)

STEP_KERNELS = ("scan", "select", "attend", "tail", "merge")
RANKS = range(1, 16)
TABLE_RANKS = (8, 4, 2)
DIMS = (128, 64)
CHARTED = ("oracle", "locks-r8", "locks-r4", "locks-r2", "min-max", "page-mean")
"""Methods that get a line; the table has all."""
MASS_STYLES = ("dense-0", "locks", "other-0", "other-1", "dense-2", "dense-1")
MOST_READ = 5
LOWEST, HIGHEST = 120, 640
"""Pixels of a map."""


@dataclass(frozen=True)
class Sources:
    """Numbers of the files on the page."""

    numbers: Mapping[str, int]

    def refs(self, files: Iterable[str]) -> Markup:
        """Marks that lead to the footnotes of these files."""
        found = sorted({self.numbers[file] for file in files})
        return joined(tag("a", f"[{n}]", href=f"#source-{n}", class_="ref") for n in found)


def section(name: str, title: str, *children: object) -> Markup:
    """A part of the page with a heading."""
    return tag("section", tag("h2", title, id=name), *children, aria_labelledby=name)


def missing(kind: str, what: str) -> Markup:
    """In place of a section without results: how to make them. No number is invented."""
    command = tag("code", KINDS[kind].made_by)
    return tag("p", tag("strong", "Not measured. "), f"{what} ", command, " makes these results.", class_="missing")


def figure(chart: Markup, *caption: object) -> Markup:
    """A chart with what it says above it."""
    return tag("figure", tag("figcaption", *caption), chart)


# --- at a glance ------------------------------------------------------------------------------------------------------------


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
    longest, shortest = points[-1], points[0]
    faster, slower = [p for p in points if p.ratio.value >= 1], [p for p in points if p.ratio.value < 1]

    def at(point: views.Speedup) -> Markup:
        return shown(point.context, tokens(point.context.value))

    def said(point: views.Speedup) -> Markup:
        return joined((shown(point.ratio, times(point.ratio.value)), " as fast at ", at(point), " tokens"))

    title = [said(longest), " of context" if longest.ratio.value >= 1 else " of context: slower than dense"]
    if slower and shortest is not longest:
        title += [", slower at ", at(shortest)]
    advice: list[object] = []
    if faster and slower:
        advice = ["Faster from ", at(faster[0]), " tokens on, slower at ", at(slower[-1]), "; nothing between was measured. "]
    elif slower:
        advice = ["Slower at every context measured. "]
    elif faster:
        advice = ["Faster at every context measured, from ", at(faster[0]), " tokens on. "]
    where = [
        f"Time per token of dense decode over that of locks: {case.model}, batch ",
        shown(case.batch),
        f", {case.gpu}, against the fastest dense backend measured.",
    ]
    if faster and slower:
        where += [" Below the crossover ", tag("code", "--locks-min-context-tokens"), " decodes dense."]
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


# --- speed ------------------------------------------------------------------------------------------------------------------


def speed(results: Results, sources: Sources) -> Markup:
    """Time per token and speed-up against context, case by case."""
    found = views.cases(results)
    title = "Speed against context"
    if not found:
        return section("speed", title, missing("decode", "Time per token at long contexts, beside dense backends."))
    note = tag(
        "p",
        "SGLang's own model runner with its decode graph, on random weights and a cache of synthetic keys: what a step costs, "
        "not what it answers. Medians; below them in the table the tenth, ninetieth and ninety-ninth percentiles. Of repeated "
        "measurements the last one counts.",
    )
    first, *rest = [_case(case, results, sources) for case in found]
    more = [tag("details", tag("summary", "Other shapes, machines and batches"), *rest)] if rest else []
    return section("speed", title, note, first, *more)


def _case(case: views.Case, results: Results, sources: Sources) -> Markup:
    styles = _styles(case)
    lines = [
        Series(_line_name(name), styles[name], [(row.figure("context"), row.figure("token_ms.p50")) for row in rows])
        for name, rows in case.series.items()
    ]
    files = {row.file for rows in case.series.values() for row in rows}
    x = log_axis([at for line in lines for at, _ in line.points], tokens)
    highest = [value.value for line in lines for _, value in line.points]
    time = figure(
        line_chart(
            lines,
            x,
            nice_axis(highest, lambda value: f"{value:g}"),
            title=f"Time per token against context: {case.model}",
            x_title="tokens of context",
            text=milliseconds,
        ),
        tag("strong", "Milliseconds a token. "),
        "Without attention the rest of the step stays: the floor. ",
        sources.refs(files),
    )
    head = tag("h3", f"{case.model}, batch ", shown(case.batch), f", {case.gpu}")
    charts = [time]
    ratio = _ratio_chart(case, results, sources)
    if ratio:
        charts.append(ratio)
    return tag("div", head, tag("div", *charts, class_="charts"), _times_table(case), class_="case")


def _styles(case: views.Case) -> dict[str, str]:
    """Style of every series."""
    styles = {name: ("locks", "other-0", "other-1", "other-2")[min(n, 3)] for n, name in enumerate(case.locks)}
    styles |= {name: f"dense-{min(n, 3)}" for n, name in enumerate(case.dense)}
    return styles | {name: "none" for name in case.series if name not in styles}


def _line_name(name: str) -> str:
    return "no attention" if name == views.NONE else name


def _ratio_chart(case: views.Case, results: Results, sources: Sources) -> Markup | None:
    styles = _styles(case)
    files: set[str] = set()
    lines = []
    for name in case.locks:
        points = case.speedups(name)
        if points:
            lines.append(Series(name, styles[name], [(point.context, point.ratio) for point in points]))
            files |= {row.file for point in points for row in (point.locks, point.dense)}
    if not lines:
        return None
    caption: list[object] = [tag("strong", "Speed-up: "), "time of the fastest dense backend over that of locks. "]
    for row in results.of("published"):
        if row.model == case.model and row.get("batch") == case.batch.value:
            rows = sorted(range(len(row.get("rows"))), key=lambda n: row.get(f"rows.{n}.context"))
            of = [
                (row.figure(f"rows.{n}.context"), row.figure(f"rows.{n}.dense_ms") / row.figure(f"rows.{n}.locks_ms"))
                for n in rows
            ]
            lines.append(Series("published", "published", of))
            caption.append(f"“Published” is not ours: {row.get('title')}, {row.machine}, for comparison alone. ")
            files.add(row.file)
    x = log_axis([at for line in lines for at, _ in line.points], tokens)
    values = [value.value for line in lines for _, value in line.points]
    chart = line_chart(
        lines,
        x,
        nice_axis([*values, 1.0], lambda value: f"{value:g}"),
        title=f"Speed-up against context: {case.model}",
        x_title="tokens of context",
        text=times,
        level=1.0,
        below="slower than dense",
    )
    return figure(chart, *caption, sources.refs(files))


def _times_table(case: views.Case) -> Markup:
    """Every measured time of a case, and the ratios."""
    contexts = {row.get("context"): row.figure("context") for rows in case.series.values() for row in rows}
    ratios = {(name, point.context.value): point.ratio for name in case.locks for point in case.speedups(name)}
    head = ["ms a token", *(shown(contexts[at], tokens(at)) for at in sorted(contexts))]
    rows: list[list[object]] = []
    for name, measured in case.series.items():
        by_context = {row.get("context"): row for row in measured}
        rows.append([_line_name(name), *(_time_cell(by_context.get(at)) for at in sorted(contexts))])
    for name in case.locks:
        cells = [ratios.get((name, at)) for at in sorted(contexts)]
        rows.append([f"speed-up, {name}", *(shown(cell, times(cell.value)) if cell else "–" for cell in cells)])  # noqa: RUF001
    return table(head, rows)


def _time_cell(row: Row | None) -> object:
    """Median, and below it the other percentiles."""
    if row is None:
        return tag("span", "not measured", class_="unmeasured")
    middle, *others = [row.figure(f"token_ms.{name}") for name in ("p50", "p10", "p90", "p99")]
    rest = joined((shown(each, milliseconds(each.value)) for each in others), " / ")
    return joined((tag("strong", shown(middle, milliseconds(middle.value))), tag("small", rest)))


def kernels(results: Results, sources: Sources) -> Markup:
    """What a step of one layer is made of."""
    title = "What a layer's step costs"
    rows = results.last("kernels", "kernel", "heads", "group", "dim", "rank", "context", "batch", "budget_pages", "tail", "gpu")
    if not rows:
        return section("kernels", title, missing("kernels", "Time of every kernel of a decode step."))
    by_size: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row.get("kernel") in STEP_KERNELS:
            size = tuple(row.get(key) for key in ("batch", "heads", "group", "dim", "context", "rank", "gpu"))
            by_size.setdefault(size, {})[row.get("kernel")] = row
    by_batch: dict[int, list[tuple[list[object], dict[str, Figure], Figure]]] = {}
    for size, measured in sorted(by_size.items(), key=lambda item: [str(part).rjust(12) for part in item[0]]):
        parts = {name: measured[name].figure("us") for name in STEP_KERNELS if name in measured}
        whole = reduce(add, parts.values())
        by_batch.setdefault(size[0], []).append((_size_name(next(iter(measured.values()))), parts, whole))
    if not by_batch:
        return section("kernels", title, missing("kernels", "Time of every kernel of a decode step."))
    files = {row.file for row in rows}
    note = tag(
        "p",
        "Microseconds a layer, every kernel on its own with a cold cache, launch included; in a step they overlap, so a step "
        "takes less than the sum. ",
        sources.refs(files),
    )
    first, *rest = [stacked_bars(bars, _microseconds) for bars in by_batch.values()]
    more = [tag("details", tag("summary", "Larger batches"), *rest)] if rest else []
    return section("kernels", title, note, first, *more)


def _size_name(row: Row) -> list[object]:
    context, heads, group, dim, batch = (row.figure(key) for key in ("context", "heads", "group", "dim", "batch"))
    shape = ("KV heads ", shown(heads), ", group ", shown(group), ", dimension ", shown(dim), ", batch ", shown(batch))
    return [tag("strong", shown(context, tokens(context.value))), tag("small", *shape)]


def _microseconds(value: float) -> str:
    return f"{value:.1f} µs" if value < 100 else f"{value:.0f} µs"


# --- quality and memory -----------------------------------------------------------------------------------------------------


def quality(results: Results, sources: Sources) -> Markup:
    """Attention mass captured against the budget."""
    title = "Quality against budget"
    rows = results.last("mass", "model.name", "text.name", "text.tokens", "settings")
    if not rows:
        return section("quality", title, missing("mass", "Attention mass that the chosen pages hold, by budget."))
    first, *rest = [_mass(row, sources) for row in reversed(rows)]
    more = [tag("details", tag("summary", "Other models and texts"), *rest)] if rest else []
    return section("quality", title, first, *more)


def _mass(row: Row, sources: Sources) -> Markup:
    methods = {entry["name"]: (n, entry) for n, entry in enumerate(row.get("methods"))}
    budgets = [row.figure(f"budgets.{n}") for n in range(len(row.get("budgets")))]
    length, late = row.figure("text.tokens"), row.figure("late_queries")

    def of(index: int) -> list[Figure]:
        return [row.figure(f"methods.{index}.mass.{n}") for n in range(len(budgets))]

    charted = [name for name in CHARTED if name in methods] or list(methods)[: len(MASS_STYLES)]
    lines = [
        Series(methods[name][1]["label"], style, list(zip(budgets, of(methods[name][0]), strict=True)))
        for name, style in zip(charted, MASS_STYLES, strict=False)
    ]
    chart = line_chart(
        lines,
        log_axis(budgets, tokens),
        nice_axis([value.value for line in lines for _, value in line.points], lambda value: f"{100 * value:.0f} %", None),
        title=f"Attention mass captured against budget: {row.model}",
        x_title="budget in tokens",
        text=percent,
    )
    caption = [
        tag("strong", "Share of the attention that falls on the pages read. "),
        f"{row.model}, ",
        shown(length, count(length.value)),
        f" tokens of {row.get('text.description') or row.get('text.name')}; mean over layers, heads and the last ",
        shown(late),
        " positions. ",
        sources.refs((row.file,)),
    ]
    unit = tag("span", " tokens", class_="narrow")
    head = ["captured, by budget in tokens", "bytes a page", *(joined((shown(b, count(b.value)), unit)) for b in budgets)]
    body: list[list[object]] = []
    for index, entry in methods.values():
        size = row.figure(f"methods.{index}.bytes_per_page")
        body.append([entry["label"], shown(size, count(size.value)), *(shown(m, percent(m.value)) for m in of(index))])
    return tag("div", tag("div", figure(chart, *caption), table(head, body), class_="beside"), class_="case")


def _dim_name(dim: int, value_mean: bool) -> str:
    """A head dimension, whose letter and number stay together, with or without what the tail correction keeps."""
    return f"D\u00a0{dim} with tail" if value_mean else f"D\u00a0{dim}"


def memory(results: Results, sources: Sources) -> Markup:
    """Bytes of summaries against rank, from the code that lays the record out, and what a GPU measured."""
    lines = []
    for dim, style_with, style_without in ((128, "locks", "other-0"), (64, "dense-0", "dense-1")):
        for value_mean, style in ((True, style_with), (False, style_without)):
            points = [(Figure(rank, f"{rank}"), views.summary_bytes(dim, rank, value_mean)) for rank in RANKS]
            lines.append(Series(_dim_name(dim, value_mean), style, points))
    ticks = [Figure(rank, f"{rank}") for rank in (1, 2, 4, 8, 12, 15)]
    axis = log_axis(ticks, lambda value: f"{value:.0f}")
    x = replace(axis, log=False)
    highest = [value.value for line in lines for _, value in line.points]
    chart = line_chart(
        lines,
        x,
        nice_axis(highest, count),
        title="Bytes of a page's summary against rank",
        x_title="rank",
        text=lambda value: f"{value:.0f} bytes",
    )
    caption = [
        tag("strong", "Bytes of a page's summary, one KV head. "),
        "D is the head dimension; the tail correction keeps the mean value of a page. Records are padded, hence the steps. "
        "Exact, computed from the record's layout.",
    ]
    head: list[object] = ["bytes, and share of the cache", *(_dim_name(dim, tail) for dim in DIMS for tail in (True, False))]
    body = []
    for rank in TABLE_RANKS:
        cells: list[object] = []
        for dim in DIMS:
            for value_mean in (True, False):
                size, share = views.summary_bytes(dim, rank, value_mean), views.cache_share(dim, rank, value_mean)
                cells.append(joined((tag("strong", shown(size)), tag("small", shown(share, percent(share.value))))))
        body.append([joined(("rank ", shown(Figure(rank, f"{rank}")))), *cells])
    return section(
        "memory",
        "Memory against rank",
        tag(
            "div", figure(chart, *caption), tag("div", table(head, body), *_measured_memory(results, sources)), class_="beside"
        ),
    )


def _measured_memory(results: Results, sources: Sources) -> list[Markup]:
    for case in views.cases(results):
        for point in reversed(case.longest()):
            row = point.locks
            if row.get("memory.summaries") and row.get("memory.cache"):
                size, cache = row.figure("memory.summaries"), row.figure("memory.cache")
                share = size / cache
                text = [
                    f"Measured on {case.gpu} with {case.model}: ",
                    shown(size, gibibytes(size.value)),
                    " of summaries beside ",
                    shown(cache, gibibytes(cache.value)),
                    " of keys and values, ",
                    shown(share, percent(share.value)),
                    ". SGLang's memory plan counts them. ",
                    sources.refs((row.file,)),
                ]
                return [tag("p", *text)]
    return []


# --- conversations ----------------------------------------------------------------------------------------------------------


def turns(results: Results, sources: Sources) -> Markup:
    """Time to first token by turn."""
    title = "Time to first token by turn"
    rows = results.last("serve", "model", "gpu", "backend", "users", "turn", "settings", "weights")
    if not rows:
        what = (
            "A second turn finds the first one's pages and summaries in the cache; how soon it begins is what counts in a chat."
        )
        return section("turns", title, missing("serve", what))
    blocks = []
    for model, machine, users in sorted({(row.model, row.machine, row.get("users")) for row in rows}):
        members = [r for r in rows if (r.model, r.machine, r.get("users")) == (model, machine, users)]
        blocks.append(_turns_of(members, sources))
    return section("turns", title, tag("div", *blocks, class_="charts"))


def _turns_of(rows: Sequence[Row], sources: Sources) -> Markup:
    users = rows[0].figure("users")
    names = sorted({str(row.get("backend")) for row in rows}, key=lambda name: name != views.LOCKS)
    lines, body = [], []
    every = sorted({row.get("turn") for row in rows})
    for n, name in enumerate(names):
        by_turn = {row.get("turn"): row for row in rows if row.get("backend") == name}
        style = "locks" if name == views.LOCKS else f"dense-{min(n - (views.LOCKS in names), 3)}"
        points = [(by_turn[turn].figure("turn"), by_turn[turn].figure("first_token_ms.p50")) for turn in sorted(by_turn)]
        lines.append(Series(name, style, points))
        body.append([name, *(_turn_cell(by_turn.get(turn)) for turn in every)])
    ticks = [next(row.figure("turn") for row in rows if row.get("turn") == turn) for turn in every]
    x = replace(log_axis(ticks, count), log=False)
    y = nice_axis([value.value for line in lines for _, value in line.points], lambda value: f"{value:g}")
    title = f"Time to first token by turn: {rows[0].model}"
    chart = line_chart(lines, x, y, title=title, x_title="turn", text=milliseconds)
    weights = f", {rows[0].get('weights')} weights" if rows[0].get("weights") else ""
    caption = [
        tag("strong", "Milliseconds to the first token. "),
        f"{rows[0].model}{weights}, {rows[0].machine}, users: ",
        shown(users),
        ". ",
        sources.refs({row.file for row in rows}),
    ]
    head = ["ms to first token", *(joined(("turn ", shown(tick))) for tick in ticks)]
    return tag("div", figure(chart, *caption), table(head, body))


def _turn_cell(row: Row | None) -> object:
    if row is None:
        return tag("span", "not measured", class_="unmeasured")
    middle, high = row.figure("first_token_ms.p50"), row.figure("first_token_ms.p99")
    return joined(
        (tag("strong", shown(middle, milliseconds(middle.value))), tag("small", shown(high, milliseconds(high.value))))
    )


# --- attention map ----------------------------------------------------------------------------------------------------------


def attention_map(results: Results, sources: Sources) -> Markup:
    """Where one request looked."""
    title = "Where one request looked"
    if not results.of("map"):
        return section("map", title, missing("map", "Which pages every KV head read while one real request was answered."))
    maps = [_map(row, sources) for row in results.last("map", "model.name", "text", "question", "settings")]
    return section("map", title, *maps)


def _map(row: Row, sources: Sources) -> Markup:
    sums = views.totals(row)
    steps, prompt = row.figure("steps"), row.figure("prompt_tokens")
    lead = tag(
        "p",
        f"{row.model} answers one request: ",
        shown(prompt, count(prompt.value)),
        " tokens of prompt, ",
        shown(steps),
        " decode steps. In each of them every KV head read ",
        shown(sums.budget, count(sums.budget.value)),
        " of ",
        shown(sums.pages, count(sums.pages.value)),
        " pages. Together they came by ",
        shown(sums.ever, count(sums.ever.value)),
        "; a single one, in the median, by ",
        shown(sums.by_head, count(sums.by_head.value)),
        ". ",
        shown(sums.beyond, percent(sums.beyond.value)),
        " of all reads went to pages that a sliding window of the same budget would have missed. ",
        sources.refs((row.file,)),
    )
    asked = []
    if row.get("question"):
        asked.append(tag("p", tag("b", "Asked "), row.get("question"), class_="said"))
    if row.get("answer"):
        asked.append(tag("p", tag("b", "Answered "), row.get("answer"), class_="said"))
    buttons = [
        tag("button", sign, type="button", data_key=key, aria_label=label)
        for sign, key, label in (
            ("←", "ArrowLeft", "page before"),
            ("→", "ArrowRight", "next page"),
            ("↑", "ArrowUp", "KV head before"),
            ("↓", "ArrowDown", "next KV head"),
        )
    ]
    key = tag(
        "p",
        tag("span", "never read"),
        tag("i", class_="ramp", aria_hidden="true"),
        tag("span", "read in every step"),
        tag("span", *buttons, class_="buttons"),
        class_="map-key",
    )
    hint = "Point at the map, tap it, or focus it and use the arrow keys to read a page."
    readout = tag("div", tag("p", hint), class_="readout", aria_live="polite")
    data = tag("script", Markup(script_data(row)), type="application/json")
    drawn = tag("div", key, _plot(row, sums), readout, data, _most_read(row), class_="map")
    return tag("div", lead, *asked, drawn, class_="case")


def _plot(row: Row, sums: views.MapTotals) -> Markup:
    """The profile of all heads above the picture, layers at its left, pages below."""
    pages, layers = len(row.get("pages")), row.get("layers")
    highest = max(sums.share) or 1.0
    path = "".join(f"M{page + 0.5} 100V{100 - 100 * share / highest:.1f}" for page, share in enumerate(sums.share))
    profile = tag(
        "svg",
        tag("title", "Mean share of steps in which a page was read, over all layers and KV heads"),
        tag("path", d=path, class_="profile"),
        viewBox=f"0 0 {pages} 100",
        preserveAspectRatio="none",
        role="img",
        class_="profile-box",
    )
    image = tag(
        "picture",
        Markup(f'<source media="(prefers-color-scheme: dark)" srcset="{picture(row, DARK)}">'),
        Markup(f'<img src="{picture(row, LIGHT)}" alt="Reads by page (across) and by layer and KV head (down)">'),
    )
    lines = [tag("i", class_="across"), tag("i", class_="down")]
    cells = tag(
        "div",
        image,
        *lines,
        class_="cells",
        tabindex="0",
        role="application",
        aria_label="Attention map. Arrow keys go from page to page and from KV head to KV head.",
        style=f"height:{min(max(4 * len(layers) * row.get('kv_heads'), LOWEST), HIGHEST)}px",
    )
    every = max(1, -(-len(layers) // 6))
    marks = [
        tag("span", f"{layer}", style=f"top:{100 * (n + 0.5) / len(layers):.2f}%", class_="scale")
        for n, layer in enumerate(layers)
        if n % every == 0
    ]
    step = next(step for power in itertools.count() for step in (10**power, 2 * 10**power, 5 * 10**power) if pages / step <= 6)
    below = [
        tag("span", f"{page}", style=f"left:{100 * (page + 0.5) / pages:.2f}%", class_="scale")
        for page in range(0, pages, step)
    ]
    return tag(
        "div",
        tag("span", "all", class_="side"),
        profile,
        tag("span", tag("span", "layer", class_="turned"), *marks, class_="side layers"),
        cells,
        tag("span", "page", class_="side"),
        tag("span", *below, class_="pages"),
        class_="plot",
    )


def _most_read(row: Row) -> Markup:
    """What the model came back to, in words."""
    items = []
    for page, share in views.most_read(row, MOST_READ):
        number = tag("button", f"page {page}", type="button", data_page=page)
        items.append(tag("li", number, " ", shown(share, percent(share.value)), tag("q", row.get(f"pages.{page}"))))
    note = "Read most of all that such a window would miss: share of the steps, over all layers and heads."
    return tag("div", tag("p", note), tag("ol", *items), class_="most-read") if items else Markup("")


# --- what is not there, and where all comes from ----------------------------------------------------------------------------


def unmeasured(results: Results, sources: Sources) -> Markup:
    """What a reader might take for measured and is not."""
    items: list[Markup] = []
    found = views.cases(results)
    if found and found[0].longest():
        items += _gaps(found[0])
    names = {row.model for row in results.of("mass")}
    fast = {case.model for case in found}
    if names and fast and not names & fast:
        items.append(
            tag("li", f"Quality of the model whose speed is shown: quality was measured on {', '.join(sorted(names))}.")
        )
    if not results.of("serve"):
        items.append(tag("li", "The real server under chat: time to first token, many users at once."))
    loose = sorted({row.file for rows in results.rows.values() for row in rows if _loose(row)})
    for file in loose:
        text = "rows name no commit, or one with changes on top: what ran there cannot be had again exactly. "
        items.append(tag("li", tag("code", file), f": {text}", sources.refs((file,))))
    for file in results.skipped:
        items.append(tag("li", tag("code", file), " lies beside the results and is of no kind that is drawn here."))
    if not items:
        items = [tag("li", "Nothing that this page knows of.")]
    return section("unmeasured", "Not measured", tag("ul", *items))


def _loose(row: Row) -> bool:
    """Whether a row of a bench or map does not name a commit."""
    made = row.get("command") is not None
    commit = row.get("commit")
    return made and (commit is None or str(commit).endswith("+"))


def _gaps(case: views.Case) -> list[Markup]:
    """Contexts and dense backends that `bench decode` would measure and the case lacks."""
    there = {point.context.value for point in case.longest()}
    items = []
    absent = [context for context in CONTEXTS if context not in there]
    if absent:
        ladder = joined((shown(Figure(n, f"CONTEXTS.{CONTEXTS.index(n)}"), tokens(n)) for n in absent), ", ")
        items.append(tag("li", f"{case.model}, contexts of ", ladder, " tokens."))
    dense = {rows[0].get("backend") for rows in case.series.values()}
    lacking = [name for name in GPU_BACKENDS if name not in dense]
    if lacking:
        items.append(tag("li", f"{case.model} with the dense backends {' and '.join(lacking)}."))
    return items


def footnotes(results: Results, sources: Sources) -> Markup:
    """Every file: what it holds, the machine, the versions, the commit and the command."""
    items = []
    by_file: dict[str, list[Row]] = {}
    kinds: dict[str, str] = {}
    for kind, rows in results.rows.items():
        for row in rows:
            by_file.setdefault(row.file, []).append(row)
            kinds[row.file] = kind
    for file, number in sources.numbers.items():
        rows = by_file[file]
        facts: list[tuple[str, Iterable[Any]]] = [
            ("machine", (row.machine for row in rows)),
            ("versions", (row.versions for row in rows)),
            ("commit", (row.get("commit") or "not named" for row in rows if row.get("command"))),
            ("command", (row.get("command") for row in rows)),
            ("source", (row.get("source") for row in rows)),
        ]
        lines = []
        for name, values in facts:
            distinct = list(dict.fromkeys(str(value) for value in values if value))
            if distinct:
                lines += [
                    tag("dt", name),
                    *(tag("dd", tag("code", value) if name == "command" else value) for value in distinct),
                ]
        if kinds[file] == "mass":
            lines += [tag("dt", "command"), tag("dd", tag("code", KINDS["mass"].made_by))]
        head = tag("h3", f"[{number}] ", tag("code", file), f" {KINDS[kinds[file]].what}")
        items.append(tag("li", head, tag("dl", *lines), id=f"source-{number}"))
    note = "Every number says on the page where it stands: rest a pointer on it, or read its data-at attribute."
    return section("sources", "Sources", tag("p", note), tag("ol", *items, class_="sources"))
