"""The metrics without a server: counting into prometheus_client, late reading of the device, the log line, the dashboard.

What a live server tells is compared with ground truth in `test_server.py`.
"""

import functools
import json
import logging
import re
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import dashboard
import prometheus_client
import pytest
import torch
from promql import PromqlError, Selector, selectors
from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from locks_sglang import LocksConfig, __version__, counters
from locks_sglang.counters import Counters, LateCount
from locks_sglang.metrics import METRICS, PREFIX, Exporter, ReadShare
from locks_sglang.patches import metrics as patch
from locks_sglang.summary_pool import SummaryPool

LABELS = {"model_name": "m", "tp_rank": 1}
SLOTS, HEADS, DIM, LAYERS = 160, 2, 64, 3
KV_PAGE = 16 * HEADS * LAYERS * 2 * DIM * 2  # bf16 keys and values
SUMMARY_PAGE = 576 * HEADS * LAYERS  # a record of rank 8 and head dimension 64: 14.1 % of 4,096 bytes


class Site:
    """A summary pool, and SGLang's collector with a registry of its own."""

    def __init__(self, **settings: Any) -> None:
        kv_pool = MHATokenToKVPool(
            SLOTS,
            page_size=16,
            dtype=torch.bfloat16,
            head_num=HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.summaries = SummaryPool.attach(kv_pool, LocksConfig(**settings))
        self.counters = self.summaries.counters
        self.registry = prometheus_client.CollectorRegistry()
        self.collector = SimpleNamespace(
            labels=LABELS,
            _counter_cls=functools.partial(prometheus_client.Counter, registry=self.registry),
            _gauge_cls=functools.partial(prometheus_client.Gauge, registry=self.registry),
        )
        self.allocator = SimpleNamespace(get_kvcache=lambda: kv_pool)

    def reporter(self, **changes: Any) -> Any:
        """As much of SGLang's reporter as the hooks read."""
        known = {
            "scheduler": SimpleNamespace(token_to_kv_pool_allocator=self.allocator),
            "current_scheduler_metrics_enabled": True,
            "metrics_collector": self.collector,
            "forward_ct_decode": 40,
            "decode_log_interval": 40,
        }
        return SimpleNamespace(**known | changes)

    def told(self, name: str, **labels: str) -> float | None:
        """Value of a series, None where there is none."""
        return self.registry.get_sample_value(PREFIX + name, {"model_name": "m", "tp_rank": "1"} | labels)

    def count(self, held: int, read: int, rows: int = 1) -> None:
        """One more sparse step."""
        self.counters.decode_steps += 1
        self.counters.sparse_rows += rows
        self.counters.pages_held += held
        self.counters.pages_read += read


def test_every_metric_is_told_from_the_start() -> None:
    """Rates need a first value, and a dashboard shows no hole where nothing has happened yet."""
    site = Site()
    Exporter(site.summaries, site.collector)
    samples = [sample for family in site.registry.collect() for sample in family.samples]
    names = {sample.name for sample in samples if not sample.name.endswith("_created")}
    assert names == {PREFIX + metric.name for metric in METRICS}
    assert {site.told("dense_rows_total", reason=reason) for reason in ("short", "mixed")} == {0}
    assert site.told("summary_bytes") == (SLOTS // 16 + 1) * SUMMARY_PAGE


def test_counters_are_published_as_they_stand() -> None:
    site = Site()
    site.count(3, 3)
    exporter = Exporter(site.summaries, site.collector)
    assert site.told("pages_held_total") == 3
    site.count(100, 32)
    site.count(130, 64, rows=2)
    site.counters.dense_rows.update(short=4, mixed=1)
    for layer in range(LAYERS):
        site.counters.built[layer] += 7
    site.counters.reused, site.counters.rebuilt, site.counters.mismatched = 11, 2, 1
    site.counters.audits, site.counters.idle_audits = 3, 5
    assert site.told("pages_held_total") == 3  # SGLang's logging interval is when they are told
    exporter.publish()
    exporter.publish()
    expected = {
        **{"decode_steps_total": 3, "sparse_rows_total": 4, "pages_held_total": 233, "pages_read_total": 99},
        **{"kv_bytes_saved_total": (233 - 99) * KV_PAGE, "summary_bytes_read_total": (2 + 99 + 128) * SUMMARY_PAGE},
        **{"summaries_built_total": 7, "summaries_reused_total": 11, "summaries_rebuilt_total": 2},
        **{"summaries_invalid_total": 0, "audits_total": 3, "idle_audits_total": 5, "summaries_mismatched_total": 1},
    }
    assert {name: site.told(name) for name in expected} == expected
    assert site.told("dense_rows_total", reason="short") == 4
    assert site.told("dense_rows_total", reason="mixed") == 1
    told = {*expected, "dense_rows_total", "summary_bytes", "build_info"}
    assert told == {metric.name for metric in METRICS}


@pytest.mark.parametrize("rank", [7, 8])
def test_build_info_holds_versions_and_settings(rank: int) -> None:
    site = Site(rank=rank, budget_tokens=512, tail_correction="off")
    Exporter(site.summaries, site.collector)
    (sample,) = [s for family in site.registry.collect() for s in family.samples if s.name == "locks:build_info"]
    assert sample.value == 1
    expected = {"version": __version__, "rank": str(rank), "budget_tokens": "512", "tail_correction": "off"}
    expected |= {"basis_bits": "4", "coefficient_bits": "8", "config_digest": site.summaries.config.digest}
    assert sample.labels.items() >= expected.items()


def test_a_label_of_the_users_does_not_stop_the_server() -> None:
    """`--extra-metric-labels` may hold one that we have too."""
    site = Site()
    site.collector.labels = LABELS | {"version": "mine", "reason": "mine"}
    Exporter(site.summaries, site.collector)
    assert site.told("dense_rows_total", reason="short", version="mine") == 0
    assert site.told("decode_steps_total", reason="mine", version="mine") == 0


# --- the device ---------------------------------------------------------------------------------------------------------


class Device:
    """Stands for a GPU in `LateCount`: copies arrive when the test says so, and asking the device for a number is an error."""

    is_cuda, device = True, "cuda"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.copies, self.under_way = 0, 0, False
        device = self

        class Host:
            value = 0

            def copy_(self, source: Device, non_blocking: bool) -> None:
                assert source is device
                assert non_blocking
                assert not device.under_way
                device.copies += 1
                device.under_way = True
                self.value = device.now

            def __int__(self) -> int:
                assert not device.under_way
                return self.value

        class Event:
            def record(self, stream: str) -> None:
                assert stream == "stream of cuda"

            def query(self) -> bool:
                return not device.under_way

        def zeros(*shape: int, dtype: torch.dtype, pin_memory: bool) -> Host:
            assert pin_memory
            return Host()

        cuda = SimpleNamespace(Event=Event, current_stream="stream of {}".format)
        monkeypatch.setattr(counters, "torch", SimpleNamespace(zeros=zeros, cuda=cuda, int64=torch.int64))

    def __int__(self) -> int:
        raise AssertionError("this waits for the device")

    item = __int__


def test_a_device_counter_is_read_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    late = LateCount(device)  # type: ignore[arg-type]
    assert (late.value(), device.copies) == (0, 0)
    device.now = 5
    late.ask()
    assert (late.value(), device.copies) == (0, 1)
    device.now = 6
    late.ask()  # while a copy is under way: there is one buffer
    assert (late.value(), device.copies) == (0, 1)
    device.under_way = False
    assert (late.value(), device.copies) == (5, 2)
    device.under_way = False
    assert (late.value(), device.copies) == (6, 2)
    assert (late.value(), device.copies) == (6, 2)


def test_invalid_summaries_are_told_one_interval_late_and_without_steps_at_once() -> None:
    site = Site()
    exporter = Exporter(site.summaries, site.collector)
    assert site.counters.invalid_pages is not None
    exporter.publish()
    for _ in range(2):
        site.count(10, 10)
        site.counters.invalid_pages += 3
        exporter.publish()
    assert site.told("summaries_invalid_total") == 3
    exporter.publish()
    assert site.told("summaries_invalid_total") == 6


# --- SGLang's reports ---------------------------------------------------------------------------------------------------


def report(reporter: Any, caplog: pytest.LogCaptureFixture, *lines: str) -> list[str]:
    """What is logged when SGLang reports a decode step with these lines."""
    caplog.clear()

    def original(given: Any, can_run_cuda_graph: bool, **kwargs: Any) -> None:
        assert (given, can_run_cuda_graph, kwargs) == (reporter, False, {"running_batch": "batch"})
        for line in lines:
            logging.getLogger(SchedulerMetricsReporter.__module__).info(line)

    with caplog.at_level(logging.INFO):
        patch.report_decode(original, reporter, False, running_batch="batch")
    return [record.getMessage() for record in caplog.records]


def test_the_decode_line_tells_the_share_since_the_last(caplog: pytest.LogCaptureFixture) -> None:
    site = Site()
    reporter = site.reporter(current_scheduler_metrics_enabled=False, metrics_collector=None)
    site.count(100, 32)
    site.count(60, 32)
    assert report(reporter, caplog, "Decode batch, 100% full") == ["Decode batch, 100% full, locks pages read: 40.0%"]
    site.count(30, 30)
    assert report(reporter, caplog, "another", "Decode batch") == ["another", "Decode batch, locks pages read: 100.0%"]
    assert report(reporter, caplog, "Decode batch") == ["Decode batch, locks pages read: all (dense)"]
    # A rank that logs nothing keeps its share for the line that comes.
    site.count(100, 25)
    assert report(reporter, caplog) == []
    assert ReadShare(Counters(pages_held=4, pages_read=1)).since_last() == "locks pages read: 25.0%"
    site.count(100, 25)
    assert report(reporter, caplog, "Decode batch") == ["Decode batch, locks pages read: 25.0%"]
    # Between two intervals SGLang logs nothing of its own, and nothing of ours is added to what others log.
    reporter.forward_ct_decode = 41
    assert report(reporter, caplog, "Decode batch") == ["Decode batch"]
    assert not logging.getLogger(SchedulerMetricsReporter.__module__).filters


def test_reports_publish(caplog: pytest.LogCaptureFixture) -> None:
    """A decode step at the interval, a prefill batch and idle time; no other step."""
    site = Site()
    reporter = site.reporter()
    patch.publish(None, reporter)
    assert site.told("decode_steps_total") == 0
    site.count(3, 3)
    reporter.forward_ct_decode = 41
    report(reporter, caplog)
    assert site.told("decode_steps_total") == 0
    reporter.forward_ct_decode = 80
    report(reporter, caplog)
    assert site.told("decode_steps_total") == 1
    site.count(3, 3)
    patch.publish(None, reporter, "batch")
    assert site.told("decode_steps_total") == 2


def test_without_metrics_nothing_is_exported() -> None:
    """`--enable-metrics` was not given, or this rank has no series in SGLang's metrics either."""
    site = Site()
    patch.publish(None, site.reporter(current_scheduler_metrics_enabled=False))
    assert list(site.registry.collect()) == []


def test_metrics_take_less_than_half_a_percent_of_a_step() -> None:
    """Of the shortest decode step in the results, which is one without attention: the host's time from one report to the next,
    with what counting takes, over the steps between. That of this thread alone, so that a busy machine is no excuse."""
    site, steps = Site(), 40
    reporter = site.reporter(decode_log_interval=steps)

    def interval() -> float:
        begun = time.thread_time()
        for step in range(steps):
            site.count(8192, 128)
            reporter.forward_ct_decode = step
            patch.report_decode(lambda *args, **kwargs: None, reporter, False)
        return time.thread_time() - begun

    interval()  # makes the series
    took = min(interval() for _ in range(50)) / steps
    results = dashboard.FILE.parents[1] / "benchmarks" / "results" / "decode.jsonl"
    shortest = min(json.loads(line)["token_ms"]["p50"] for line in results.read_text().splitlines()) / 1000
    print(f"{1e6 * took:.1f} us a step, {took / shortest:.3%} of {1000 * shortest:.2f} ms")
    assert site.told("decode_steps_total") > steps
    assert took < 0.005 * shortest


# --- the dashboard ------------------------------------------------------------------------------------------------------


def test_the_dashboard_asks_for_what_is_there() -> None:
    """Our metrics by name, with labels that they have; rates are of counters. SGLang's are looked for on a live server."""
    ours = {PREFIX + metric.name: metric for metric in METRICS}
    wanted = [one for one in dashboard.wanted() if one.metric.startswith(PREFIX)]
    assert {one.metric for one in wanted} == set(ours)
    for one in wanted:
        metric = ours[one.metric]
        assert one.labels <= {"model_name", *metric.labels}, one
        assert one.ranged <= (metric.kind == "counter"), one


def test_panels_of_the_dashboard_lie_beside_each_other() -> None:
    cells: dict[tuple[int, int], list[str]] = defaultdict(list)
    for panel in dashboard.dashboard()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                cells[x, y].append(panel["title"])
    assert [titles for titles in cells.values() if len(titles) > 1] == []


def test_documents_name_metrics_that_exist() -> None:
    root = dashboard.FILE.parents[1]
    text = "".join(page.read_text() for page in (root / "README.md", *(root / "docs").glob("*.md")))
    assert set(re.findall(r"\blocks:(\w+)", text)) == {metric.name for metric in METRICS}


def test_expressions_are_parsed() -> None:
    found = selectors('sum by (a, b) (rate(x:y_total{c=~"$c", d="e"}[$__rate_interval])) / (max(z:w) - q:r)')
    assert found == [
        Selector("x:y_total", frozenset("abcd"), True),
        Selector("z:w", frozenset(), False),
        Selector("q:r", frozenset(), False),
    ]


@pytest.mark.parametrize(
    "expression",
    [
        *("", "sum(", "sum(x:y))", "rate(x:y)", "x:y[5m]", "sum(rate(x:y[5m]) by (a)", "x:y{a}", 'x:y{a="b"', "nosuch(x:y)"),
        *("x:y +", "sum by a (x:y)", "x:y z:w", "x:y{a=b}", "rate(x:y[5m)", "x:y; z:w"),
    ],
)
def test_expressions_that_are_wrong_are_refused(expression: str) -> None:
    with pytest.raises(PromqlError):
        selectors(expression)
