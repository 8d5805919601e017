"""Time per token, speed-up, and what a step of one layer is made of."""

from functools import reduce
from operator import add
from typing import Any

from . import views
from .charts import Series, line_chart, log_axis, nice_axis, stacked_bars
from .data import Figure, Results, Row
from .html import Markup, joined, milliseconds, shown, table, tag, times, tokens
from .parts import Sources, figure, missing, section

STEP_KERNELS = ("scan", "select", "attend", "tail", "merge")


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
        "Without attention the rest of the step stays: the floor. " if views.NONE in case.series else "",
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
