"""Per-step plan: which pages a step writes, fills and reads.

SGLang may rewrite `req_to_token` while the forward pass of a step still runs (overlap scheduling), so everything that the
layers need of it is copied before the first layer: for an extend step here, for a decode step by `kernels.decode_plan`.
"""

from dataclasses import dataclass

import numpy as np
import torch

from .kernels.common import PAGE_SIZE
from .kernels.decode_plan import DecodeBuffers
from .kernels.sparse_decode import FlashInferDecode


@dataclass(frozen=True)
class ExtendPlan:
    """Pages that an extend or mixed step touches: physical page ids, int64.

    first_written [n]: pages whose first token the step writes. filled [m]: pages complete after the step that were not
    before. reused [k]: pages of cached prefixes with which requests start, repeated if several do.
    """

    first_written: torch.Tensor
    filled: torch.Tensor
    reused: torch.Tensor


@dataclass(frozen=True)
class DecodePlan:
    """What the layers of one decode step need.

    buffers: page table, lengths and filled pages of the step's rows. dense: run the inner dense backend. attend: FlashInfer,
    planned for the step, where it attends.
    """

    buffers: DecodeBuffers
    dense: bool
    attend: FlashInferDecode | None


def plan_extend(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: list[int],
    extend_lens: list[int],
    reuse_rows: list[int],
) -> ExtendPlan:
    """Plan an extend step.

    Args:
        req_to_token: int [requests, context], token slots.
        req_pool_indices: int [B], rows of it.
        prefix_lens, extend_lens: per row, tokens in the cache before the step and tokens that it adds.
        reuse_rows: rows of the batch whose prefix is a cached one, not an earlier chunk of the same request.
    """
    prefix = np.asarray(prefix_lens, dtype=np.int64)
    total = prefix + np.asarray(extend_lens, dtype=np.int64)

    def pages(first: np.ndarray, last: np.ndarray) -> torch.Tensor:
        """Physical pages of logical pages [first, last) of every row."""
        count = np.maximum(last - first, 0)
        rows = np.repeat(np.arange(len(count)), count)
        offset = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        logical = np.repeat(first, count) + offset
        device = req_to_token.device
        requests = req_pool_indices.long()[torch.from_numpy(rows).to(device, non_blocking=True)]
        columns = torch.from_numpy(logical * PAGE_SIZE).to(device, non_blocking=True)
        return req_to_token[requests, columns].long() // PAGE_SIZE

    starts = np.zeros_like(prefix)
    cached = np.zeros_like(prefix)
    cached[reuse_rows] = prefix[reuse_rows] // PAGE_SIZE
    return ExtendPlan(
        first_written=pages(-(-prefix // PAGE_SIZE), -(-total // PAGE_SIZE)),
        filled=pages(prefix // PAGE_SIZE, total // PAGE_SIZE),
        reused=pages(starts, cached),
    )
