"""What the backend did: counted on the host, but for what only the device knows. One object a process, shared by the backend's
instances."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

DENSE_REASONS = ("short", "mixed")
"""Why a decode row ran dense: below `min_context_tokens`, or part of a mixed batch."""

TOLD = {
    "decode_steps": "decode steps of any kind",
    "sparse_rows": "decode rows, a request in a step each, that read selected pages",
    "dense_rows": "decode rows that ran dense, by reason: `short` (below `min_context_tokens`), `mixed` (beside a prefill)",
    "pages_held": "pages that the requests of sparse rows had, summed over rows",
    "pages_read": "pages of those that each KV head read; as many as `pages_held` where every context fits the budget",
    "summaries_built": "pages summarised because a step filled them, by layer",
    "summaries_reused": "cached prefix pages that requests started with",
    "summaries_rebuilt": "pages summarised again: their KV had arrived without a forward pass, or an audit found them wrong",
    "audits": "audits on request (`locks-sglang audit`)",
    "idle_audits": "whole audits by a server that had nothing else to do",
    "summaries_mismatched": "must stay 0: summaries that audits found not to fit their page",
    "invalid_pages": "must stay 0: how often a layer met a complete page without a summary; such pages are read, not guessed",
}
"""What `/server_info` tells, and what it is."""


class LateCount:
    """A counter on the device, read without waiting: what one call asks for, a later one finds copied to the host.

    Args:
        count: int64 [1], which only grows; the copy needs no order against the steps that add to it.
    """

    def __init__(self, count: torch.Tensor) -> None:
        self._count = count
        self._host = torch.zeros(1, dtype=torch.int64, pin_memory=count.is_cuda)
        self._copied = torch.cuda.Event() if count.is_cuda else None
        self._copying = False
        self._asked = False
        self._value = 0

    def ask(self) -> None:
        """Start a copy, or where one is under way have `value` start another after it."""
        self._asked = True
        self._start()

    def value(self) -> int:
        """The last value that has arrived; 0 before the first."""
        if self._copying and (self._copied is None or self._copied.query()):
            self._value, self._copying = int(self._host), False
            self._start()
        return self._value

    def _start(self) -> None:
        if not self._asked or self._copying:
            return
        self._host.copy_(self._count, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._count.device))
        self._copying, self._asked = True, False


@dataclass
class Counters:
    """Totals since the start; `TOLD` says what users see of them.

    Attributes:
        decode_steps: decode steps of any kind.
        sparse_rows, dense_rows: decode rows by path; dense ones by reason, of `DENSE_REASONS`.
        pages_held, pages_read: over sparse rows, 16-token pages that the request has and that each KV head reads.
        built: per layer, pages summarised because a step filled them. reused: cached prefix pages that requests started
            with. rebuilt: pages whose KV had arrived without a forward pass.
        mixed_decode_requests: ids of the decoding requests that SGLang appended to the prefill batch that is planned next.
        audits, idle_audits: times that the stored summaries were compared with fresh ones, on request and all of them at idle.
        mismatched: summaries that did not fit, on request over all ranks, at idle of this one; must stay 0.
        invalid_pages: int64 [1] on the device, (layer, complete page) pairs that a decode step met without a valid summary;
            must stay 0.
    """

    decode_steps: int = 0
    sparse_rows: int = 0
    dense_rows: Counter[str] = field(default_factory=Counter)
    pages_held: int = 0
    pages_read: int = 0
    built: Counter[int] = field(default_factory=Counter)
    reused: int = 0
    rebuilt: int = 0
    audits: int = 0
    idle_audits: int = 0
    mismatched: int = 0
    mixed_decode_requests: frozenset[str] = frozenset()
    invalid_pages: torch.Tensor | None = None

    @property
    def pages_built(self) -> int:
        """Pages summarised because a step filled them: every layer summarises the same ones."""
        return max(self.built.values(), default=0)

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers, for `/server_info`: those of `TOLD`. Waits for the device."""
        return {
            "decode_steps": self.decode_steps,
            "sparse_rows": self.sparse_rows,
            "dense_rows": dict(self.dense_rows),
            "pages_held": self.pages_held,
            "pages_read": self.pages_read,
            "summaries_built": {str(layer): count for layer, count in sorted(self.built.items())},
            "summaries_reused": self.reused,
            "summaries_rebuilt": self.rebuilt,
            "audits": self.audits,
            "idle_audits": self.idle_audits,
            "summaries_mismatched": self.mismatched,
            "invalid_pages": 0 if self.invalid_pages is None else int(self.invalid_pages.item()),
        }
