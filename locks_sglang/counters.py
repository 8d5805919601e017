"""What the backend did, counted on the host. One object a process, shared by the backend's instances."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Counters:
    """Totals since the start.

    Attributes:
        decode_steps: decode steps of any kind.
        sparse_rows, dense_rows: decode rows by path; dense ones by reason ("short", "mixed").
        pages_held, pages_read: over sparse rows, 16-token pages that the request has and that each KV head reads.
        built: per layer, pages summarised because a step filled them. reused: cached prefix pages that requests started
            with. rebuilt: pages whose KV had arrived without a forward pass.
        mixed_decode_requests: ids of the decoding requests that SGLang appended to the prefill batch that is planned next.
        audits: times that the stored summaries were compared with fresh ones. mismatched: summaries that did not fit, over all
            ranks; must stay 0.
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
    mismatched: int = 0
    mixed_decode_requests: frozenset[str] = frozenset()
    invalid_pages: torch.Tensor | None = None

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers, for `/server_info`. Waits for the device."""
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
            "summaries_mismatched": self.mismatched,
            "invalid_pages": 0 if self.invalid_pages is None else int(self.invalid_pages.item()),
        }
