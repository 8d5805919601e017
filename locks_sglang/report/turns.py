"""Time to first token by turn of a conversation."""

from collections.abc import Sequence
from dataclasses import replace

from . import views
from .charts import Series, line_chart, log_axis, nice_axis
from .data import Results, Row
from .html import Markup, count, joined, milliseconds, shown, table, tag
from .parts import Sources, figure, missing, section


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
