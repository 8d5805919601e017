"""Triton merge of the parts of an exact attention, and of the estimate of the pages that were not read."""

import torch
import triton
import triton.language as tl

from ..page_lse.kernel import batch_block, item_layout
from . import tail as tail_kernel
from .kernel import Parts
from .tail import TailParts


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
):
    """One program a (request, KV head, query head of its group)."""
    request, head, member = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = request.to(tl.int64)
    dim = tl.arange(0, DV_BLOCK)
    within = dim < DV
    if TAIL:
        _, _, count, ends = item_layout(held_ptr, batch, TARGET, NUM_HEADS, B_BLOCK, N_BLOCK)
        index = tl.arange(0, B_BLOCK)
        items = tl.sum(tl.where(index == request, count, 0), 0)
        start = tl.sum(tl.where(index == request - 1, ends, 0), 0) + head * items
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
        tail_peak = tl.full([], float("-inf"), tl.float32)
        tail_total = tl.full([], 0.0, tl.float32)
        tail_value = tl.zeros([DV_BLOCK], tl.float32)
        for begin in range(0, items, ITEM_BLOCK):
            part = begin + tl.arange(0, ITEM_BLOCK)
            known = part < items
            item = (start + part) * GROUP + member
            tops = tl.load(tail_peak_ptr + item, mask=known, other=float("-inf"))
            sums = tl.load(tail_sum_ptr + item, mask=known, other=0.0)
            values = tl.load(
                tail_value_ptr + item[:, None] * DV + dim[None, :], mask=known[:, None] & within[None, :], other=0.0
            )
            new = tl.maximum(tail_peak, tl.max(tops, 0))
            shift = tl.where(new == float("-inf"), 0.0, new)
            share = tl.exp(tops - shift)
            rescale = tl.exp(tail_peak - shift)
            tail_total = tail_total * rescale + tl.sum(sums * share, 0)
            tail_value = tail_value * rescale + tl.sum(values * share[:, None], 0)
            tail_peak = new
        top = tl.maximum(peak, tail_peak)
        top = tl.where(top == float("-inf"), 0.0, top)
        near, far = tl.exp(peak - top), tl.exp(tail_peak - top)
        out = out * near + tail_value * far
        total = total * near + tail_total * far
    out = out / tl.maximum(total, 1e-37) * v_scale
    tl.store(out_ptr + row * out_row + query_head * out_head + dim, out, mask=within)


def merge_parts(parts: Parts, out: torch.Tensor, v_scale: float, tail: TailParts | None = None) -> torch.Tensor:
    """Write the output [B, Hq, Dv] of a step into `out`, with the tail estimate if there is one.

    Returns:
        fp32 [B, Hq], natural log-sum-exp of the exact part.
    """
    batch, query_heads, v_dim = out.shape
    heads = parts.peak.shape[1]
    lse = torch.empty(batch, query_heads, dtype=torch.float32, device=out.device)
    # Without a tail: stand-ins of the right kind, which the kernel never reads.
    sums = (lse,) * 4 if tail is None else (tail.num_pages, tail.peak, tail.total, tail.value)
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
        TAIL=tail is not None,
        WHOLE=parts.total is None,
        SPLITS=parts.splits,
        SPLIT_BLOCK=min(64, parts.splits),
        B_BLOCK=batch_block(batch),
        N_BLOCK=16 if tail is None else tail.unit,
        TARGET=tail_kernel.TARGET,
        ITEM_BLOCK=128,
        num_warps=8,
        maxnreg=255,  # left alone, the assembler aims for 128 registers and spills a few bytes
    )
    return lse
