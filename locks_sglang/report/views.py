"""What the page says, derived from rows: cases that are compared, speed-ups, sizes, and what a map adds up to."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..kernels.build_page_summaries import RecordLayout
from ..kernels.common import PAGE_SIZE
from .data import Figure, Results, Row

LOCKS = "locks"
NONE = "none"
"""The backend of `bench decode` that attends to nothing."""
BF16_BYTES = 2


@dataclass(frozen=True)
class Speedup:
    """Dense time over that of `locks` at one context: the fastest dense backend measured there."""

    context: Figure
    ratio: Figure
    dense: Row
    locks: Row


@dataclass(frozen=True)
class Case:
    """Rows of `bench decode` that can be compared: one model's shape, one machine, one batch size.

    Args:
        series: rows by what decoded, ascending in context. Rows of one backend with different settings are apart.
    """

    model: str
    gpu: str
    batch: Figure
    series: Mapping[str, Sequence[Row]]

    @property
    def dense(self) -> list[str]:
        """Series of dense backends."""
        return [name for name, rows in self.series.items() if rows[0].get("backend") not in (LOCKS, NONE)]

    @property
    def locks(self) -> list[str]:
        """Series of `locks`."""
        return [name for name, rows in self.series.items() if rows[0].get("backend") == LOCKS]

    def speedups(self, name: str) -> list[Speedup]:
        """Of one series of `locks`, at every context at which a dense backend was measured too."""
        found = []
        for row in self.series[name]:
            dense = [other for series in self.dense for other in self.series[series]]
            there = [other for other in dense if other.get("context") == row.get("context")]
            if there:
                fastest = min(there, key=lambda other: other.get("token_ms.p50"))
                ratio = fastest.figure("token_ms.p50") / row.figure("token_ms.p50")
                found.append(Speedup(row.figure("context"), ratio, fastest, row))
        return found

    def longest(self) -> list[Speedup]:
        """Speed-ups of the series of `locks` that reaches farthest and has most contexts."""
        found = [self.speedups(name) for name in self.locks]
        return max(found, key=lambda points: (points[-1].context.value, len(points)) if points else (0, 0), default=[])


def cases(results: Results) -> list[Case]:
    """Cases of all rows, the one with the longest contexts at the smallest batch first; of repeated rows the last counts."""
    rows = results.last("decode", "model", "gpu", "batch", "backend", "context", "settings", "page_size")
    grouped: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.model, row.machine, row.get("batch")), []).append(row)
    found = []
    for (model, gpu, _), members in grouped.items():
        series: dict[str, list[Row]] = {}
        for row in sorted(members, key=lambda row: (row.get("backend") != LOCKS, row.get("context"))):
            series.setdefault(_series_name(row, members), []).append(row)
        found.append(Case(model, gpu, members[0].figure("batch"), series))

    def order(case: Case) -> tuple[float, float]:
        points = case.longest()
        return (-points[-1].context.value if points else 0, case.batch.value)

    return sorted(found, key=order)


def _series_name(row: Row, members: Sequence[Row]) -> str:
    """Name of a row's backend, with the settings in which rows of this backend differ."""
    name = str(row.get("backend"))
    settings = [_settings(other) for other in members if other.get("backend") == name]
    own = _settings(row)
    varying = [key for key in own if len({json.dumps(each.get(key)) for each in settings}) > 1]
    return ", ".join([name, *(f"{key.replace('_', ' ')} {own[key]}" for key in varying)])


def _settings(row: Row) -> Mapping[str, Any]:
    """What a backend ran with: of a dense one there is only SGLang's page size."""
    return row.get("settings") or {"page_size": row.get("page_size")}


def mass_at(row: Row, method: str, budget: int) -> tuple[Figure, Figure] | None:
    """Mass that a method captures at a budget, and the budget; at the largest budget where this one was not measured."""
    budgets = row.get("budgets")
    at = budgets.index(budget) if budget in budgets else len(budgets) - 1
    for index, entry in enumerate(row.get("methods")):
        if entry["name"] == method:
            return row.figure(f"methods.{index}.mass.{at}"), row.figure(f"budgets.{at}")
    return None


def summary_bytes(dim: int, rank: int, value_mean: bool) -> Figure:
    """Bytes of one page's summary of one KV head, from the code that lays it out."""
    layout = RecordLayout(dim, dim, rank, value_mean)
    return Figure(layout.summary_bytes, f"RecordLayout({dim}, {dim}, {rank}, {value_mean}).summary_bytes")


def cache_share(dim: int, rank: int, value_mean: bool) -> Figure:
    """The same as a share of the page's keys and values in bf16."""
    page = 2 * PAGE_SIZE * dim * BF16_BYTES
    return summary_bytes(dim, rank, value_mean) / Figure(page, str(page))


@dataclass(frozen=True)
class MapTotals:
    """What an attention map adds up to.

    Args:
        pages: of the request. ever: pages read by any KV head in any step. by_head: median over KV heads of the pages that one
            reads at least once. budget: pages that it reads in one step.
        beyond: share of all reads that went to pages older than the budget reaches from the end of the prompt, but for the
            first pages that are always kept: what a sliding window with these would miss, at least.
        share: by page, mean over layers and KV heads of reads over the steps in which the page was there.
    """

    pages: Figure
    ever: Figure
    by_head: Figure
    budget: Figure
    beyond: Figure
    share: list[float]


def _reads(row: Row) -> str:
    """Where the counts of a map stand."""
    return f"{row.file}:{row.line}:reads" if row.line else f"{row.file}:reads"


def _beyond_window(row: Row) -> range:
    """Pages of a map that a window of the same budget, the first pages kept, would not hold in any step."""
    budget = row.get("settings.budget_tokens") // row.get("page_tokens")
    prompt = -(-row.get("prompt_tokens") // row.get("page_tokens"))
    sink = int(row.get("settings.sink_pages") or 0)
    return range(sink, max(prompt - (budget - sink), sink))


def totals(row: Row) -> MapTotals:
    """Of one map."""
    counts = [head for layer in row.get("reads") for head in layer]
    pages = len(row.get("pages"))
    sums = [sum(head[page] for head in counts) for page in range(pages)]
    where = _reads(row)
    all_pages = Figure(pages, f"{where} (pages)")
    budget = row.figure("settings.budget_tokens") / row.figure("page_tokens")
    return MapTotals(
        all_pages,
        Figure(sum(total > 0 for total in sums), f"{where} (pages read at least once)"),
        Figure(int(median(sum(count > 0 for count in head) for head in counts)), f"{where} (median KV head's pages)"),
        budget if budget.value < pages else all_pages,
        Figure(sum(sums[page] for page in _beyond_window(row)) / sum(sums), f"{where} (share beyond a window)"),
        [total / (len(counts) * held) for total, held in zip(sums, row.get("held"), strict=True)],
    )


def most_read(row: Row, number: int) -> list[tuple[int, Figure]]:
    """Pages that were read most of those that a window would miss, with the mean share of steps."""
    shares = totals(row).share
    best = sorted(_beyond_window(row), key=lambda page: -shares[page])[:number]
    return [(page, Figure(shares[page], f"{_reads(row)} (mean share of page {page})")) for page in best]
