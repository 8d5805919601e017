"""Attention mass against the budget, and bytes against the rank."""

from dataclasses import replace

from ..evaluation import WIDTHS
from . import views
from .charts import Series, line_chart, log_axis, nice_axis
from .data import Figure, Results, Row
from .html import Markup, count, gibibytes, joined, percent, shown, table, tag, tokens
from .parts import DIMS, Sources, figure, missing, section

RANKS = range(1, 16)
TABLE_RANKS = (8, 4, 2)
CHARTED = ("oracle", "locks-r8", "locks-r4", "locks-r2", "min-max", "page-mean")
"""Methods that get a line; the table has all but other widths of the records."""
OUTPUTS = ("oracle", "locks-r8", "locks-r4", "min-max", "page-mean")
"""Choices of pages whose output errors are shown, with all their corrections."""
MASS_STYLES = ("dense-0", "locks", "other-0", "other-1", "dense-2", "dense-1")

WORDS = {
    "oracle": "The oracle chooses pages by their exact attention, reading every key: no choice of pages holds more. ",
    "global": "A global sketch describes all keys of a KV head in one basis; locks gives every page a basis of its own. ",
}
"""What methods are, by how their names begin."""


def quality(results: Results, sources: Sources) -> Markup:
    """Attention mass captured against the budget."""
    title = "Quality against budget"
    rows = results.last("mass", "model.name", "text.name", "text.tokens", "settings")
    if not rows:
        return section("quality", title, missing("mass", "Attention mass that the chosen pages hold, by budget."))
    first, *rest = [_mass(row, sources) for row in reversed(rows)]
    more = [tag("details", tag("summary", "Other models and texts"), *rest)] if rest else []
    errors = [
        _output(row, sources) for row in reversed(results.last("output", "model.name", "text.name", "text.tokens", "settings"))
    ]
    outputs = [tag("details", tag("summary", "Error of the attention output"), *errors)] if errors else []
    return section("quality", title, first, *more, *outputs)


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
        if entry["family"] == WIDTHS:
            continue
        size = row.figure(f"methods.{index}.bytes_per_page")
        body.append([entry["label"], shown(size, count(size.value)), *(shown(m, percent(m.value)) for m in of(index))])
    words = [text for start, text in WORDS.items() if any(name.startswith(start) for name in methods)]
    beside = tag("div", figure(chart, *caption), tag("div", table(head, body), tag("p", *words)), class_="beside")
    return tag("div", beside, class_="case")


def _output(row: Row, sources: Sources) -> Markup:
    length, late = row.figure("text.tokens"), row.figure("late_queries")
    budgets = [row.figure(f"budgets.{n}") for n in range(len(row.get("budgets")))]
    body: list[list[object]] = []
    for index, entry in enumerate(row.get("methods")):
        if entry["selector"] not in OUTPUTS:
            continue
        size = row.figure(f"methods.{index}.bytes_per_page")
        errors = [row.figure(f"methods.{index}.error.{n}") for n in range(len(budgets))]
        body.append([entry["label"], shown(size, count(size.value)), *(shown(e, percent(e.value)) for e in errors)])
    told = tag(
        "p",
        tag("strong", "Difference from the exact attention output, relative to its size. "),
        f"{row.model}, ",
        shown(length, count(length.value)),
        f" tokens of {row.get('text.description') or row.get('text.name')}; mean over layers, heads and the last ",
        shown(late),
        " positions. Tail: what is not read is estimated from weights and mean values. ",
        sources.refs((row.file,)),
    )
    head = ["error, by budget in tokens", "bytes a page", *(shown(budget, count(budget.value)) for budget in budgets)]
    return tag("div", told, table(head, body), class_="case")


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
