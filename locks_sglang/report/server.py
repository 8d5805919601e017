"""What a running server tells of itself, as a section of the page."""

from collections.abc import Mapping
from typing import Any

from ..admin import states
from ..counters import TOLD
from .data import Figure, Row
from .html import Markup, count, gibibytes, joined, percent, shown, table, tag
from .parts import section

TIMEOUT_S = 60.0
APART = ("pages_held", "pages_read", "dense_rows", "summaries_built")
"""Counters that are shown otherwise: as a share, by reason, and one that is the same in every layer."""


def ask(url: str) -> list[Row]:
    """State of every scheduler of a server.

    Raises:
        AdminError: see `states`.
    """
    return [Row("server", number, state) for number, state in enumerate(states(url, TIMEOUT_S), 1)]


def live(rows: list[Row], url: str, when: str) -> Markup:
    """Settings, sizes and counters, scheduler by scheduler."""
    note = tag("p", f"{url}, asked for its /server_info at {when}.")
    return section("server", "The server now", note, *(_scheduler(row) for row in rows))


def _scheduler(row: Row) -> Markup:
    lines: list[list[object]] = []
    if row.get("counters.pages_held"):
        share = row.figure("counters.pages_read") / row.figure("counters.pages_held")
        of = (_counted(row, "counters.pages_read"), " of ", _counted(row, "counters.pages_held"))
        lines.append(["pages read by a KV head, of those held", joined((*of, ": ", shown(share, percent(share.value))))])
    if row.get("summary_bytes"):
        lines.append(["summaries", shown(row.figure("summary_bytes"), gibibytes(row.get("summary_bytes")))])
    if row.get("summary_bytes_per_page"):
        lines.append(["bytes of a page's summaries, all layers and heads", _counted(row, "summary_bytes_per_page")])
    told = [name for name in TOLD if name not in APART and row.get(f"counters.{name}") is not None]
    lines += [[TOLD[name].replace("`", ""), _counted(row, f"counters.{name}")] for name in told]
    built: Mapping[str, int] = row.get("counters.summaries_built") or {}
    lines += [
        ["pages summarised, in every layer", _counted(row, f"counters.summaries_built.{layer}")] for layer in [*built][:1]
    ]
    dense: Mapping[str, Any] = row.get("counters.dense_rows") or {}
    lines += [[f"rows decoded dense: {reason}", _counted(row, f"counters.dense_rows.{reason}")] for reason in dense]
    settings: Mapping[str, Any] = row.get("config") or {}
    chosen = [[name.replace("_", " "), shown(row.figure(f"config.{name}"))] for name in settings]
    return tag("div", table(["counted since its start", ""], lines), table(["setting", ""], chosen), class_="beside even")


def _counted(row: Row, path: str) -> Markup:
    figure: Figure = row.figure(path)
    return shown(figure, count(figure.value))
