"""What a reader might take for measured and is not, and where all the rest comes from."""

from collections.abc import Iterable
from typing import Any

from ..benchmarks.decode import CONTEXTS, GPU_BACKENDS
from . import views
from .data import KINDS, Figure, Results, Row
from .html import Markup, joined, shown, tag, tokens
from .parts import Sources, section


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
        items.append(
            tag(
                "li",
                tag("code", file),
                " lies beside the results. It holds something else than this page draws and was left out; that is no error.",
            )
        )
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
        items.append(tag("li", f"{case.model} with the dense backend{'s' * (len(lacking) > 1)} {' and '.join(lacking)}."))
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
        if not any(row.get("command") or row.get("source") for row in rows):
            lines += [tag("dt", "made by"), tag("dd", tag("code", KINDS[kinds[file]].made_by))]
        head = tag("h3", f"[{number}] ", tag("code", file), f" {KINDS[kinds[file]].what}")
        items.append(tag("li", head, tag("dl", *lines), id=f"source-{number}"))
    note = "Every number says on the page where it stands: rest a pointer on it, or read its data-at attribute."
    return section("sources", "Sources", tag("p", note), tag("ol", *items, class_="sources"))
