"""Mistakes in what serves that the stateful test must find out, each made at the place in production where it would be."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import locks_sglang.backend as backend_module
from locks_sglang.backend import LocksAttnBackend
from locks_sglang.kernels.common import PAGE_SIZE
from locks_sglang.summary_pool import SummaryPool


def _plan_extend_as(change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`change(plan, *arguments)` of every extend step's plan; `plan` is the real one."""
    plan = backend_module.plan_extend
    return patch.object(backend_module, "plan_extend", lambda *arguments: change(plan, *arguments))


def _fill_as(other: Callable[[int, int], tuple[int, int]]) -> AbstractContextManager[Any]:
    """The pages that an extend step fills are those between other tokens (prefix, total) than the step's."""

    def change(plan: Callable[..., Any], table: Any, rows: Any, prefixes: list[int], extends: list[int], reuse: Any) -> Any:
        spans = [other(prefix, prefix + new) for prefix, new in zip(prefixes, extends, strict=True)]
        begins, news = [begin for begin, _ in spans], [max(0, end - begin) for begin, end in spans]
        filled = plan(table, rows, begins, news, reuse).filled
        return replace(plan(table, rows, prefixes, extends, reuse), filled=filled)

    return _plan_extend_as(change)


def _plan_decode_as(change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`change(plan, *arguments)` as the plan of every decode step; `plan` is the real one."""
    plan = backend_module.plan_decode
    return patch.object(backend_module, "plan_decode", lambda *arguments: change(plan, *arguments))


def _decode_fills_nothing(plan: Callable[..., Any], *arguments: Any) -> None:
    plan(*arguments)
    arguments[4].filled.fill_(-1)


def _decode_clears_nothing(plan: Callable[..., Any], *arguments: Any) -> None:
    valid = arguments[5].valid
    before = valid.clone()
    plan(*arguments)
    valid.copy_(before)


def _one_step_old() -> Callable[..., Any]:
    tables: list[torch.Tensor] = []

    def change(plan: Callable[..., Any], table: torch.Tensor, *arguments: Any) -> Any:
        tables.append(table.clone())
        return plan(tables.pop(0) if len(tables) > 1 else tables[0], *arguments)

    return change


@contextmanager
def _build_first(name: str) -> Iterator[None]:
    """Summaries of a layer before its forward `name` stores the keys and values."""
    forward = getattr(LocksAttnBackend, name)

    def early(self: LocksAttnBackend, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "forward_extend":
            self.summaries.build_centred(layer.layer_id, self._extend.filled)  # type: ignore[union-attr]
        else:
            self.summaries.build(layer.layer_id, self._decode.buffers.filled)  # type: ignore[union-attr]
        with patch.object(SummaryPool, "build", lambda *_: None):  # `build_all` on CPU too
            return forward(self, q, k, v, layer, *args, **kwargs)

    with patch.object(LocksAttnBackend, name, early):
        yield


@contextmanager
def _build_from_next_layer() -> Iterator[None]:
    build, buffers = SummaryPool.build, SummaryPool._buffers

    def shifted(self: SummaryPool, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return buffers(self, self.first_layer + (layer_id - self.first_layer + 1) % self.num_layers)

    def build_shifted(self: SummaryPool, layer_id: int, pages: torch.Tensor) -> None:
        with patch.object(SummaryPool, "_buffers", shifted):
            build(self, layer_id, pages)

    with patch.object(SummaryPool, "build", build_shifted):
        yield


MUTATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "skip the last full page of a chunk": lambda: _fill_as(lambda prefix, total: (prefix, total - PAGE_SIZE)),
    "skip the page that a decode step fills": lambda: _plan_decode_as(_decode_fills_nothing),
    "skip the mark of KV that arrives": lambda: patch.object(SummaryPool, "mark_dirty", lambda *_: None),
    "skip clearing on first write, prefill": lambda: patch.object(SummaryPool, "first_write", lambda *_: None),
    "skip clearing on first write, decode": lambda: _plan_decode_as(_decode_clears_nothing),
    "build before the KV is stored, prefill": lambda: _build_first("forward_extend"),
    "build before the KV is stored, decode": lambda: _build_first("forward_decode"),
    "off by one at a chunk's begin": lambda: _fill_as(lambda prefix, total: (-(-prefix // PAGE_SIZE) * PAGE_SIZE, total)),
    "off by one at a chunk's end": lambda: _fill_as(lambda prefix, total: (prefix, total - 1)),
    "wrong layer offset": _build_from_next_layer,
    "stale page table, prefill": lambda: _plan_extend_as(_one_step_old()),
    "stale page table, decode": lambda: _plan_decode_as(_one_step_old()),
}
