"""Metrics of `locks` beside SGLang's own, and the share of pages read in its decode lines.

SGLang reports after every prefill batch, every `--decode-log-interval` decode steps and at idle, and so does `locks`. It never
waits for the device. An idle server tells all that it did at once, while SGLang's own gauges may wait for half a minute.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..seams import Seam

ATTRIBUTE = "_locks_reporting"
REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter"
DECODE_LINE = "Decode batch"
"""How the line begins that SGLang logs of decode."""


@dataclass(frozen=True)
class _Reporting:
    """What a reporter of SGLang tells of `locks`: the share in its log, and metrics where they are enabled."""

    share: Any
    exporter: Any


def _reporting(reporter: Any) -> _Reporting | None:
    """Of this `SchedulerMetricsReporter`; None where its scheduler serves another backend."""
    found: _Reporting | None = getattr(reporter, ATTRIBUTE, None)
    if found is not None:
        return found
    from ..summary_pool import SummaryPool

    summaries = SummaryPool.attached(reporter.scheduler.token_to_kv_pool_allocator.get_kvcache())
    if summaries is None:
        return None
    from ..metrics import Exporter, ReadShare

    # A rank without series in SGLang's metrics has none here either.
    told = reporter.current_scheduler_metrics_enabled
    found = _Reporting(ReadShare(summaries.counters), Exporter(summaries, reporter.metrics_collector) if told else None)
    setattr(reporter, ATTRIBUTE, found)
    return found


def publish(result: None, reporter: Any, *args: Any, **kwargs: Any) -> None:
    """After SGLang reported a prefill batch, and whenever it looks at its metrics at idle."""
    reporting = _reporting(reporter)
    if reporting is not None and reporting.exporter is not None:
        reporting.exporter.publish()


def report_decode(original: Callable[..., Any], reporter: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's report of a decode step, which does little but every `--decode-log-interval` steps."""
    reporting = _reporting(reporter)
    if reporting is None or reporter.forward_ct_decode % reporter.decode_log_interval:
        return original(reporter, *args, **kwargs)
    with _line_ends_with(reporting.share.since_last):
        result = original(reporter, *args, **kwargs)
    publish(None, reporter)
    return result


@contextmanager
def _line_ends_with(text: Callable[[], str]) -> Iterator[None]:
    """Meanwhile, SGLang's decode line gets one more part."""

    def extend(record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str) and record.msg.startswith(DECODE_LINE):
            record.msg = f"{record.msg}, {text()}"
        return True

    logger = logging.getLogger(REPORTER)
    logger.addFilter(extend)
    try:
        yield
    finally:
        logger.removeFilter(extend)


SEAMS: tuple[Seam, ...] = (
    Seam(
        f"{REPORTER}.SchedulerMetricsReporter.report_prefill_stats",
        "after",
        publish,
        "publishes the locks: metrics after prefill batches",
    ),
    Seam(
        f"{REPORTER}.SchedulerMetricsReporter.report_decode_stats",
        "around",
        report_decode,
        "publishes the locks: metrics of decode and adds the share of pages read to its log line",
    ),
    Seam(
        f"{REPORTER}.SchedulerMetricsReporter._maybe_log_idle_metrics",
        "after",
        publish,
        "publishes the locks: metrics at idle",
    ),
)
