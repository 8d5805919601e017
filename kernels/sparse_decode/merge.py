"""Triton merge of the parts of an exact attention, and of the estimate of the pages that were not read: what all weigh, less
what those weigh that were read."""

import torch
import triton
import triton.language as tl

from ..page_lse.kernel import batch_block, item_layout
from . import tail as tail_kernel
from .kernel import Parts
from .tail import TailParts


@triton.jit
def _tail_of(
    held_ptr,
    peak_ptr,
    sum_ptr,
    value_ptr,
    batch,
    request,
    head,
    member,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
    ITEM_BLOCK: tl.constexpr,
):
    """Peak, sum and weighed values of one query head over all items of `sum_tail`."""
    dim = tl.arange(0, DV_BLOCK)
    _, _, count, ends = item_layout(held_ptr, batch, TARGET, NUM_HEADS, B_BLOCK, N_BLOCK)
    index = tl.arange(0, B_BLOCK)
    items = tl.sum(tl.where(index == request, count, 0), 0)
    start = tl.sum(tl.where(index == request - 1, ends, 0), 0) + head * items
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    value = tl.zeros([DV_BLOCK], tl.float32)
    for begin in range(0, items, ITEM_BLOCK):
        part = begin + tl.arange(0, ITEM_BLOCK)
        known = part < items
        item = (start + part) * GROUP + member
        tops = tl.load(peak_ptr + item, mask=known, other=float("-inf"))
        sums = tl.load(sum_ptr + item, mask=known, other=0.0)
        at = value_ptr + item[:, None] * DV + dim[None, :]
        values = tl.load(at, mask=known[:, None] & (dim < DV)[None, :], other=0.0)
        new = tl.maximum(peak, tl.max(tops, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        share = tl.exp(tops - base)
        rescale = tl.exp(peak - base)
        total = total * rescale + tl.sum(sums * share, 0)
        value = value * rescale + tl.sum(values * share[:, None], 0)
        peak = new
    return peak, total, value


@triton.jit(do_not_specialize=["batch"])
def _merge_parts(
    peak_ptr,
    sum_ptr,
    part_ptr,
    out_ptr,
    lse_ptr,
    held_ptr,
    tail_peak_ptr,
    tail_sum_ptr,
    tail_value_ptr,
    count_ptr,
    read_peak_ptr,
    read_sum_ptr,
    read_value_ptr,
    batch,
    v_scale,
    out_row,
    out_head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
    ITEM_BLOCK: tl.constexpr,
    READ_BLOCK: tl.constexpr,
):
    """One program a (request, KV head, query head of its group)."""
    request, head, member = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = request.to(tl.int64)
    dim = tl.arange(0, DV_BLOCK)
    within = dim < DV
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    out = tl.zeros([DV_BLOCK], tl.float32)
    for begin in range(0, SPLITS, SPLIT_BLOCK):
        slot = ((row * NUM_HEADS + head) * SPLITS + begin + tl.arange(0, SPLIT_BLOCK)) * GROUP + member
        peaks = tl.load(peak_ptr + slot)
        parts = tl.load(part_ptr + slot[:, None] * DV + dim[None, :], mask=within[None, :], other=0.0).to(tl.float32)
        if WHOLE:
            peaks *= 0.6931471805599453
            totals = tl.where(peaks > float("-inf"), 1.0, 0.0)
        else:
            totals = tl.load(sum_ptr + slot)
        new = tl.maximum(peak, tl.max(peaks, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        factor = tl.exp(peaks - base)
        rescale = tl.exp(peak - base)
        total = total * rescale + tl.sum(totals * factor, 0)
        out = out * rescale + tl.sum(parts * factor[:, None], 0)
        peak = new
    query_head = head * GROUP + member
    tl.store(lse_ptr + row * NUM_HEADS * GROUP + query_head, peak + tl.log(total))

    if TAIL:
        tail_peak, tail_total, tail_value = _tail_of(
            held_ptr,
            tail_peak_ptr,
            tail_sum_ptr,
            tail_value_ptr,
            batch,
            request,
            head,
            member,
            NUM_HEADS,
            GROUP,
            DV,
            DV_BLOCK,
            B_BLOCK,
            N_BLOCK,
            TARGET,
            ITEM_BLOCK,
        )
        # Pages that were read are some of all: their peak is no higher.
        read_peak, read_total, read_value = _tail_of(
            count_ptr,
            read_peak_ptr,
            read_sum_ptr,
            read_value_ptr,
            batch,
            request,
            head,
            member,
            NUM_HEADS,
            GROUP,
            DV,
            DV_BLOCK,
            B_BLOCK,
            N_BLOCK,
            TARGET,
            READ_BLOCK,
        )
        top = tl.maximum(peak, tail_peak)
        top = tl.where(top == float("-inf"), 0.0, top)
        near, far, taken = tl.exp(peak - top), tl.exp(tail_peak - top), tl.exp(read_peak - top)
        out = out * near + (tail_value * far - read_value * taken)
        total = total * near + tl.maximum(tail_total * far - read_total * taken, 0.0)
    out = out / tl.maximum(total, 1e-37) * v_scale
    tl.store(out_ptr + row * out_row + query_head * out_head + dim, out, mask=within)


def merge_parts(
    parts: Parts, out: torch.Tensor, v_scale: float, tails: tuple[TailParts, TailParts] | None = None
) -> torch.Tensor:
    """Write the output [B, Hq, Dv] of a step into `out`, with the tail estimate if there is one: sums over all pages, and over
    those that were read.

    Returns:
        fp32 [B, Hq], natural log-sum-exp of the exact part.
    """
    batch, query_heads, v_dim = out.shape
    heads = parts.peak.shape[1]
    lse = torch.empty(batch, query_heads, dtype=torch.float32, device=out.device)
    # Without a tail: stand-ins of the right kind, which the kernel never reads.
    sums = (lse,) * 8
    if tails is not None:
        sums = tuple(x for tail in tails for x in (tail.num_pages, tail.peak, tail.total, tail.value))
    _merge_parts[(batch, heads, query_heads // heads)](
        parts.peak,
        parts.peak if parts.total is None else parts.total,
        parts.out,
        out,
        lse,
        *sums,
        batch,
        v_scale,
        out.stride(0),
        out.stride(1),
        NUM_HEADS=heads,
        GROUP=query_heads // heads,
        DV=v_dim,
        DV_BLOCK=triton.next_power_of_2(v_dim),
        TAIL=tails is not None,
        WHOLE=parts.total is None,
        SPLITS=parts.splits,
        SPLIT_BLOCK=min(64, parts.splits),
        B_BLOCK=batch_block(batch),
        N_BLOCK=tail_kernel.N_BLOCK,
        TARGET=tail_kernel.TARGET,
        ITEM_BLOCK=128,
        READ_BLOCK=16,
        num_warps=8,
        maxnreg=255,  # left alone, the assembler aims for 128 registers and spills a few bytes
    )
    return lse
