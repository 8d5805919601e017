"""Per-step plan: which pages a step writes, fills and reads. Host work only; the page table is copied, never referenced.

SGLang may rewrite `req_to_token` while the forward pass of a step still runs (overlap scheduling), so everything that the
layers need of it is copied here, before the first layer.
"""

from dataclasses import dataclass

import numpy as np
import torch

from .kernels.common import PAGE_SIZE


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

    page_table: int32 [B, Nmax] private copy, logical to physical page; columns past a row's pages repeat its own slots
        of `req_to_token` and are never read. seq_lens: int64 [B], the current token included. filled: int64 [m],
        physical pages that the current token completes. dense: run the inner dense backend.
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    first_written: torch.Tensor
    filled: torch.Tensor
    dense: bool


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


def plan_decode(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    host_seq_lens: list[int],
    min_context_tokens: int,
) -> DecodePlan:
    """Plan a decode step.

    Args:
        req_to_token, req_pool_indices: as in `plan_extend`.
        seq_lens: int [B], on the device, the current token included.
        host_seq_lens: the same on the host.
        min_context_tokens: run dense while every row is shorter.
    """
    lengths = np.asarray(host_seq_lens, dtype=np.int64)
    columns = -(-int(lengths.max(initial=1)) // PAGE_SIZE)
    first_slots = req_to_token[:, : columns * PAGE_SIZE : PAGE_SIZE][req_pool_indices.long()]
    page_table = (first_slots // PAGE_SIZE).to(torch.int32)
    device = req_to_token.device

    def current_page(chosen: np.ndarray) -> torch.Tensor:
        picked = torch.from_numpy(np.flatnonzero(chosen)).to(device, non_blocking=True)
        column = torch.from_numpy((lengths[chosen] - 1) // PAGE_SIZE).to(device, non_blocking=True)
        return page_table[picked, column].long()

    return DecodePlan(
        page_table=page_table,
        seq_lens=seq_lens.to(torch.int64, copy=True),
        first_written=current_page(lengths % PAGE_SIZE == 1),
        filled=current_page(lengths % PAGE_SIZE == 0),
        dense=bool((lengths < min_context_tokens).all()),
    )
