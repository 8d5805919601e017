"""What SGLang's `/metrics` tells of `locks`: one table, from which come the series, their help and `docs/metrics.md`.

All of it is made of the counters that `/server_info` shows; nothing is counted a second time.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from . import __version__
from .config import PAGE_SIZE, LocksConfig
from .counters import DENSE_REASONS, Counters, LateCount

if TYPE_CHECKING:
    from .summary_pool import SummaryPool

PREFIX = "locks:"


@dataclass(frozen=True)
class Reading:
    """What metrics are worked out from, at one moment.

    Attributes:
        summaries: the pool, with its counters.
        invalid: the last value of `Counters.invalid_pages` that has arrived on the host.
    """

    summaries: "SummaryPool"
    invalid: int

    @property
    def counters(self) -> Counters:
        """Counters of the pool."""
        return self.summaries.counters


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: without prefix; one that ends in "_total" is a counter, any other a gauge.
        text: what it is, with its unit.
        value: the number to tell; with labels, one for each tuple of their values.
        labels: names beside the labels of SGLang's own metrics.
        constant: never changes while a server runs.
    """

    name: str
    text: str
    value: Callable[[Reading], int | Mapping[tuple[str, ...], int]]
    labels: tuple[str, ...] = ()
    constant: bool = False

    @property
    def kind(self) -> str:
        """ "counter" or "gauge"."""
        return "counter" if self.name.endswith("_total") else "gauge"

    def read(self, reading: Reading) -> Mapping[tuple[str, ...], int]:
        """The value for each tuple of label values, () without labels."""
        value = self.value(reading)
        return value if isinstance(value, Mapping) else {(): value}


BUILD_LABELS = (
    *("version", "sglang_version", "config_digest", "basis_bits", "coefficient_bits"),
    *(spec.name for spec in dataclasses.fields(LocksConfig)),
)


def _build(reading: Reading) -> dict[tuple[str, ...], int]:
    """1 for the build and settings of this server."""
    config, layout = reading.summaries.config, reading.summaries.layout
    basis, coefficients = (8 * layout.sections[name][1] for name in ("basis", "coef"))
    values = (
        *(__version__, version("sglang"), config.digest),
        basis // (layout.rank * layout.head_dim),
        coefficients // (PAGE_SIZE * (layout.rank + layout.rank % 2)),  # an odd rank is stored as the next even one
        *dataclasses.astuple(config),
    )
    return {tuple(map(str, values)): 1}


METRICS: tuple[Metric, ...] = (
    Metric("decode_steps_total", "Decode steps of any kind.", lambda r: r.counters.decode_steps),
    Metric(
        "sparse_rows_total", "Decode rows (a request in a step) that read selected pages.", lambda r: r.counters.sparse_rows
    ),
    Metric(
        "dense_rows_total",
        "Decode rows that ran dense: in a batch below min_context_tokens (short) or beside a prefill (mixed).",
        lambda r: {(reason,): r.counters.dense_rows[reason] for reason in DENSE_REASONS},
        ("reason",),
    ),
    Metric(
        "pages_held_total",
        "16-token pages that the requests of sparse rows held, summed over rows: what dense decode would have read.",
        lambda r: r.counters.pages_held,
    ),
    Metric(
        "pages_read_total",
        "16-token pages of those that every layer and KV head read, summed over rows.",
        lambda r: r.counters.pages_read,
    ),
    Metric(
        "kv_bytes_saved_total",
        "Bytes of keys and values on this rank that sparse rows did not read; what their selection read instead is "
        "summary_bytes_read_total and not subtracted.",
        lambda r: (r.counters.pages_held - r.counters.pages_read) * r.summaries.kv_bytes_per_page,
    ),
    Metric(
        "summary_bytes_read_total",
        "Bytes of summaries on this rank that sparse rows scanned: of every page that a request held but its newest, which is "
        "read and not scored.",
        lambda r: (r.counters.pages_held - r.counters.sparse_rows) * r.summaries.bytes_per_page,
    ),
    Metric(
        "summary_bytes",
        "Bytes of memory for summaries on this rank, of all pages that the KV cache has.",
        lambda r: r.summaries.nbytes,
        constant=True,
    ),
    Metric(
        "summaries_built_total",
        "16-token pages summarised because a step filled them, each in every layer.",
        lambda r: r.counters.pages_built,
    ),
    Metric(
        "summaries_reused_total",
        "16-token pages of cached prefixes that requests started with: nothing was built for them.",
        lambda r: r.counters.reused,
    ),
    Metric(
        "summaries_rebuilt_total",
        "16-token pages summarised again, in every layer: their KV had arrived without a forward pass, or an audit found that "
        "their summary did not fit.",
        lambda r: r.counters.rebuilt,
    ),
    Metric(
        "summaries_invalid_total",
        "Pairs of a layer and a complete page that decode steps met without a valid summary, and read; must stay 0. Counted on "
        "the device, told one logging interval late.",
        lambda r: r.invalid,
    ),
    Metric(
        "audits_total",
        "Audits by the canary (locks-sglang audit): times that stored summaries were compared with fresh ones on request.",
        lambda r: r.counters.audits,
    ),
    Metric(
        "idle_audits_total",
        "Audits at idle (idle_audit_ms) of this rank that came to their end: times that all stored summaries were compared "
        "with fresh ones without a request.",
        lambda r: r.counters.idle_audits,
    ),
    Metric(
        "summaries_mismatched_total",
        "Summaries (a layer and a page) that audits found not to fit their page, over all tensor-parallel ranks; must stay 0.",
        lambda r: r.counters.mismatched,
    ),
    Metric("build_info", "Versions and settings, as labels; always 1.", _build, BUILD_LABELS, constant=True),
)


class Exporter:
    """Publishes `METRICS` through `prometheus_client`, as SGLang has set it up in this process.

    Args:
        summaries: the pool whose metrics these are.
        collector: SGLang's `SchedulerMetricsCollector`: its labels are ours, and where its classes of metrics are others than
            prometheus_client's, so are ours. A label of its that a metric here also has is left out there.
    """

    def __init__(self, summaries: "SummaryPool", collector: Any) -> None:
        # Not before SGLang has set PROMETHEUS_MULTIPROC_DIR, which is read on import.
        from prometheus_client import Counter, Gauge

        self._summaries = summaries
        assert summaries.counters.invalid_pages is not None
        self._invalid = LateCount(summaries.counters.invalid_pages)
        self._labels = dict(collector.labels)
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, tuple[str, ...]], Any] = {}
        for metric in METRICS:
            names = [*(name for name in self._labels if name not in metric.labels), *metric.labels]
            kind, how = collector._counter_cls or Counter, {}
            if metric.kind == "gauge":
                kind, how = collector._gauge_cls or Gauge, {"multiprocess_mode": "mostrecent"}
            name = PREFIX + metric.name
            self._families[metric.name] = kind(name=name, documentation=metric.text, labelnames=names, **how)
        self._told: dict[str, Mapping[tuple[str, ...], int]] = {}
        self._tell({metric.name: metric.read(Reading(summaries, 0)) for metric in METRICS})
        self._invalid.ask()

    def publish(self) -> None:
        """Tell what has changed. Never waits for the device; on the scheduler's thread, between two steps."""
        reading = Reading(self._summaries, self._invalid.value())
        values = {metric.name: metric.read(reading) for metric in METRICS if not metric.constant}
        if any(self._told[name] != value for name, value in values.items()):
            self._tell(values)
            self._invalid.ask()

    def _tell(self, values: Mapping[str, Mapping[tuple[str, ...], int]]) -> None:
        for metric in METRICS:
            before = self._told.get(metric.name, {})
            for own, value in values.get(metric.name, {}).items():
                series = self._series.get((metric.name, own))
                if series is None:
                    labels = self._labels | dict(zip(metric.labels, own, strict=True))
                    series = self._series[metric.name, own] = self._families[metric.name].labels(**labels)
                if metric.kind == "counter":
                    series.inc(value - before.get(own, 0))
                else:
                    series.set(value)
        self._told.update(values)


class ReadShare:
    """The share of pages read, from one decode line of the log to the next."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._held = self._read = 0

    def since_last(self) -> str:
        """The end of a line, for the sparse rows since the last call."""
        held, read = self._counters.pages_held - self._held, self._counters.pages_read - self._read
        self._held, self._read = self._counters.pages_held, self._counters.pages_read
        return f"locks pages read: {100 * read / held:.1f}%" if held else "locks pages read: all (dense)"


def markdown_table() -> str:
    """The metrics as a Markdown table, for the docs."""
    rows = ["| metric | type | own labels | |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{name}`" for name in metric.labels)
        rows.append(f"| `{PREFIX}{metric.name}` | {metric.kind} | {labels} | {metric.text} |")
    return "\n".join(rows)
