"""The audit at idle: what it looks at in which order, and that nothing in it can end a server. On real summaries:
`tests/test_inprocess.py::test_idle_audit_finds_what_does_not_fit`."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from locks_sglang import idle_audit
from locks_sglang.audit import Mismatch
from locks_sglang.counters import Counters
from locks_sglang.idle_audit import SLICE, IdleAudit

LAYERS = range(4, 7)
PAGES = {page: ("node 0", 16 * page) for page in range(1, 200)}


class Bench:
    """An idle scheduler whose clock the test moves: comparing a page takes a millisecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, milliseconds: int = 20) -> None:
        self.now = 0.0
        self.seen: list[tuple[int, int]] = []
        self.fails: Callable[[list[int]], None] = lambda pages: None
        self.wrong: set[tuple[int, int]] = set()
        self.dirty: set[int] = set()
        self.summaries = SimpleNamespace(layer_ids=LAYERS, counters=Counters(), pending=lambda: self.dirty)
        self.scheduler = SimpleNamespace(forward_ct=1)
        self.audit = IdleAudit(self.summaries, milliseconds)
        monkeypatch.setattr(idle_audit, "page_owners", lambda scheduler, summaries: dict(PAGES))
        monkeypatch.setattr(idle_audit, "rank_group", lambda scheduler: (None, 0))
        monkeypatch.setattr(idle_audit, "compared", self._compared)
        monkeypatch.setattr(idle_audit.time, "monotonic", lambda: self.now)

    def _compared(
        self, summaries: Any, pages: list[int], owners: Any, rank: int, layer_ids: list[int]
    ) -> tuple[int, list[Mismatch]]:
        self.fails(pages)
        (layer_id,) = layer_ids
        self.now += 0.001 * len(pages)
        self.seen += [(layer_id, page) for page in pages]
        found = [page for page in pages if (layer_id, page) in self.wrong]
        self.dirty |= set(found)
        return 0, [Mismatch(rank, layer_id, page, *owners[page]) for page in found]

    def idle(self, turns: int) -> None:
        """A step, the time after which it settles, and so many turns."""
        self.scheduler.forward_ct += 1
        self.audit.turn(self.scheduler)
        self.now += idle_audit.SETTLED_S
        for _ in range(turns):
            self.audit.turn(self.scheduler)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


ALL = [(layer, page) for layer in LAYERS for page in PAGES]


def test_all_pages_of_all_layers_once(bench: Bench) -> None:
    bench.idle(1000)
    assert sorted(bench.seen) == ALL
    assert bench.summaries.counters.idle_audits == 1
    bench.idle(1000)
    assert len(bench.seen) == 2 * len(ALL)
    assert bench.summaries.counters.idle_audits == 2


def test_nothing_before_it_has_settled(bench: Bench) -> None:
    for _ in range(100):
        bench.scheduler.forward_ct += 1
        bench.audit.turn(bench.scheduler)
        bench.now += 0.9 * idle_audit.SETTLED_S
        bench.audit.turn(bench.scheduler)
    assert bench.seen == []


def test_slices_are_as_long_as_asked(bench: Bench) -> None:
    bench.idle(10)
    for _ in range(20):
        began = bench.now
        bench.audit.turn(bench.scheduler)
        assert bench.now - began <= 0.04


def test_short_windows_come_round(bench: Bench) -> None:
    """Where a step always comes before a sweep is through."""
    for _ in range(3 * len(ALL) // 20):
        bench.idle(1)
        if set(ALL) <= set(bench.seen):
            break
    assert set(bench.seen) == set(ALL)
    assert len(bench.seen) < 1.5 * len(ALL)


def test_a_mismatch_is_told_at_once_and_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.wrong = {(LAYERS[0], 3), (LAYERS[1], 3)}
    with caplog.at_level(logging.ERROR):
        bench.idle(1)
    assert bench.summaries.counters.mismatched == 1
    assert "rank 0, layer 4, page 3 (node 0, tokens from 48 on)" in caplog.text
    bench.idle(1000)
    assert bench.summaries.counters.mismatched == 1  # its other layer is rebuilt with it


def test_out_of_memory_takes_less(bench: Bench) -> None:
    def fails(pages: list[int]) -> None:
        if len(pages) > SLICE // 8:
            raise torch.OutOfMemoryError

    bench.fails = fails
    for _ in range(4):
        bench.idle(1000)
    bench.idle(1000)
    assert set(bench.seen) == set(ALL)


@pytest.mark.parametrize(
    "error", [OSError("disk full"), AssertionError(), RuntimeError("the device is lost"), AttributeError("new SGLang")]
)
def test_any_other_fault_switches_it_off(bench: Bench, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def fails(pages: list[int]) -> None:
        raise error

    bench.fails = fails
    for _ in range(3):
        bench.idle(10)
    assert caplog.text.count("the audit at idle failed and is switched off") == 1
    assert bench.summaries.counters.idle_audits == 0


def test_nothing_owned_is_no_audit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_audit, "page_owners", lambda scheduler, summaries: {})
    bench.idle(10)
    assert bench.summaries.counters.idle_audits == 0


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, milliseconds=0)
    bench.idle(100)
    assert bench.seen == []
