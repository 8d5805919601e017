"""Triton attention over listed pages, split over several programs a (request, KV head)."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.device import soft_cap
from ..common.launch import chained, join_chain

T_BLOCK = 32
"""Tokens that a program takes in one step."""
PROGRAMS = 264
"""Programs wanted: two for every multiprocessor of an H200."""


@triton.jit(do_not_specialize=["table_row", "budget"])
def _attend_pages(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    pages_ptr,
    count_ptr,
    lens_ptr,
    peak_ptr,
    sum_ptr,
    out_ptr,
    sm_scale,
    logit_cap,
    q_row,
    q_head,
    k_slot,
    k_head,
    v_slot,
    v_head,
    table_row,
    budget,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    G_BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    T_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One program a (request, KV head, split): log-sum-exp peak and sum, and the unnormalised output of its pages."""
    join_chain(NATIVE)
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = request.to(tl.int64)
    group = tl.arange(0, G_BLOCK)
    dim, value_dim = tl.arange(0, D_BLOCK), tl.arange(0, DV_BLOCK)
    mine = group < GROUP
    count = tl.load(count_ptr + request)
    length = tl.load(lens_ptr + request).to(tl.int32)
    query = q_ptr + row * q_row + (head * GROUP + group)[:, None] * q_head + dim[None, :]
    q = tl.load(query, mask=mine[:, None] & (dim < D)[None, :], other=0.0)
    listed = pages_ptr + (row * NUM_HEADS + head) * budget

    peak = tl.full([G_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([G_BLOCK], tl.float32)
    out = tl.zeros([G_BLOCK, DV_BLOCK], tl.float32)
    share = (count + SPLITS - 1) // SPLITS
    first, last = split * share, tl.minimum(split * share + share, count)
    for begin in range(first * 16, last * 16, T_BLOCK):
        token = begin + tl.arange(0, T_BLOCK)
        logical = tl.load(listed + token // 16, mask=token < last * 16, other=0)
        live = (token < last * 16) & (logical * 16 + token % 16 < length)
        physical = tl.load(table_ptr + row * table_row + logical, mask=live, other=0).to(tl.int64)
        slot = physical * 16 + token % 16
        keys = tl.load(
            k_ptr + slot[None, :] * k_slot + head * k_head + dim[:, None], mask=live[None, :] & (dim < D)[:, None], other=0.0
        )
        logits = tl.dot(q, keys.to(q.dtype), input_precision="ieee") * sm_scale
        if CAPPED:
            logits = soft_cap(logits, logit_cap)
        logits = tl.where(live[None, :], logits, float("-inf"))
        new = tl.maximum(peak, tl.max(logits, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        rescale = tl.exp(peak - base)
        weight = tl.exp(logits - base[:, None])
        total = total * rescale + tl.sum(weight, 1)
        values = tl.load(
            v_ptr + slot[:, None] * v_slot + head * v_head + value_dim[None, :],
            mask=live[:, None] & (value_dim < DV)[None, :],
            other=0.0,
        )
        out = out * rescale[:, None] + tl.dot(weight.to(q.dtype), values.to(q.dtype), input_precision="ieee")
        peak = new

    slot = ((row * NUM_HEADS + head) * SPLITS + split) * GROUP + group
    tl.store(peak_ptr + slot, peak, mask=mine)
    tl.store(sum_ptr + slot, total, mask=mine)
    at = out_ptr + slot[:, None] * DV + value_dim[None, :]
    tl.store(at, out, mask=mine[:, None] & (value_dim < DV)[None, :])


@dataclass(frozen=True)
class Parts:
    """Attention of every split, fp32: peak, total [B, H, splits, G] and unnormalised output [B, H, splits, G, Dv].

    Without a total it is one split, as FlashInfer leaves it: `peak` is the log-sum-exp in base 2, the output is normalised and
    in the cache's dtype.
    """

    peak: torch.Tensor
    total: torch.Tensor | None
    out: torch.Tensor
    splits: int


def splits_for(batch: int, heads: int, budget_pages: int) -> int:
    """Splits of one (request, KV head): enough programs for the device, none with less than one step's tokens."""
    wanted = max(1, PROGRAMS // (batch * heads))
    most = max(1, budget_pages * 16 // T_BLOCK)
    return 1 << (min(wanted, most).bit_length() - 1)


def attend_parts(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    pages: torch.Tensor,
    counts: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    *,
    logit_cap: float,
) -> Parts:
    """Exact attention over the selected pages, in parts; arguments as `sparse_decode`, B at least 1, cache rows
    without gaps."""
    q, page_table, pages = q.contiguous(), page_table.contiguous(), pages.contiguous()
    counts, seq_lens = counts.contiguous(), seq_lens.contiguous()
    batch, query_heads, dim = q.shape
    heads, v_dim, budget = k_cache.shape[1], v_cache.shape[2], pages.shape[2]
    group, splits = query_heads // heads, splits_for(batch, heads, budget)

    def floats(*tail: int) -> torch.Tensor:
        return torch.empty((batch, heads, splits, group, *tail), dtype=torch.float32, device=q.device)

    made = Parts(floats(), floats(), floats(v_dim), splits)
    _attend_pages[(batch, heads, splits)](
        q,
        k_cache,
        v_cache,
        page_table,
        pages,
        counts,
        seq_lens,
        made.peak,
        made.total,
        made.out,
        sm_scale,
        logit_cap,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        page_table.stride(0),
        budget,
        NUM_HEADS=heads,
        GROUP=group,
        G_BLOCK=16,
        D=dim,
        D_BLOCK=triton.next_power_of_2(dim),
        DV=v_dim,
        DV_BLOCK=triton.next_power_of_2(v_dim),
        CAPPED=logit_cap > 0.0,
        T_BLOCK=T_BLOCK,
        SPLITS=splits,
        **chained(),
        num_warps=4,
        num_stages=2,
    )
    return made
