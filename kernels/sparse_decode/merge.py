"""Triton merge of the parts of an exact attention, and of the estimate of the pages that were not read."""

import torch
import triton
import triton.language as tl

from ..page_lse.kernel import batch_block, item_layout
from . import tail as tail_kernel
from .kernel import Parts
from .tail import TailParts

MOST_PARTS = 128
"""Parts of each kind that a program takes together: at batch 1 all that there are."""
LEAST_PARTS = 32
"""The same where many requests share the items of the tail, of which a long one may have most."""
DIMS = 64
"""Dimensions of an output that one program merges."""


@triton.jit
def _load_parts(
    peak_ptr, sum_ptr, part_ptr, first, begin, end, dim, within, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr
):
    """Peaks, totals [BLOCK] and outputs [BLOCK, dims] of the parts from `begin` on, nothing from `end` on."""
    number = begin + tl.arange(0, BLOCK)
    there = number < end
    slot = (first + number) * GROUP
    peaks = tl.load(peak_ptr + slot, mask=there, other=float("-inf"))
    totals = tl.load(sum_ptr + slot, mask=there, other=0.0)
    parts = tl.load(part_ptr + slot[:, None] * DV + dim[None, :], mask=there[:, None] & within[None, :], other=0.0)
    return peaks, totals, parts.to(tl.float32)


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
    LSE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
):
    """One program a (request, KV head, query head of its group and DV_BLOCK dimensions)."""
    request, head, member = tl.program_id(0), tl.program_id(1), tl.program_id(2) % GROUP
    piece = tl.program_id(2) // GROUP
    row = request.to(tl.int64)
    dim = piece * DV_BLOCK + tl.arange(0, DV_BLOCK)
    within = dim < DV
    # Parts of both kinds are loaded before any of them is worked on, those whose place is known first.
    split = (row * NUM_HEADS + head) * SPLITS
    peak_ptr += member
    sum_ptr += member
    part_ptr += member * DV
    peaks, totals, parts = _load_parts(peak_ptr, sum_ptr, part_ptr, split, 0, SPLITS, dim, within, GROUP, DV, BLOCK)
    if TAIL:
        _, _, count, ends = item_layout(held_ptr, batch, TARGET, NUM_HEADS, B_BLOCK, N_BLOCK)
        index = tl.arange(0, B_BLOCK)
        items = tl.sum(tl.where(index == request, count, 0), 0)
        first = tl.sum(tl.where(index == request - 1, ends, 0), 0) + head * items
        tail_peak_ptr += member
        tail_sum_ptr += member
        tail_value_ptr += member * DV
        most = tl.maximum(items, SPLITS)
    else:
        most = SPLITS
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    out = tl.zeros([DV_BLOCK], tl.float32)
    for begin in range(0, most, BLOCK):
        if begin > 0:
            peaks, totals, parts = _load_parts(peak_ptr, sum_ptr, part_ptr, split, begin, SPLITS, dim, within, GROUP, DV, BLOCK)
        if WHOLE:
            peaks *= 0.6931471805599453
            totals = tl.where(peaks > float("-inf"), 1.0, 0.0)
        if TAIL:
            tops, sums, values = _load_parts(
                tail_peak_ptr, tail_sum_ptr, tail_value_ptr, first, begin, items, dim, within, GROUP, DV, BLOCK
            )
            new = tl.maximum(peak, tl.max(tl.maximum(peaks, tops), 0))
        else:
            new = tl.maximum(peak, tl.max(peaks, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        factor = tl.exp(peaks - base)
        weight = totals * factor
        value = parts * factor[:, None]
        if TAIL:
            share = tl.exp(tops - base)
            weight += sums * share
            value += values * share[:, None]
        rescale = tl.exp(peak - base)
        total = total * rescale + tl.sum(weight, 0)
        out = out * rescale + tl.sum(value, 0)
        peak = new
    query_head = head * GROUP + member
    if LSE:
        tl.store(lse_ptr + row * NUM_HEADS * GROUP + query_head, peak + tl.log(total), mask=piece == 0)
    out = out / tl.maximum(total, 1e-37) * v_scale
    tl.store(out_ptr + row * out_row + query_head * out_head + dim, out, mask=within)


def merge_parts(
    parts: Parts, out: torch.Tensor, v_scale: float, tail: TailParts | None = None, lse: torch.Tensor | None = None
) -> None:
    """Write the output [B, Hq, Dv] of a step into `out`.

    Args:
        parts: of the exact attention. v_scale: of the values. tail: the estimate of the pages that were not read.
        lse: fp32 [B, Hq], contiguous: takes the natural log-sum-exp of all parts, those of the tail included.
    """
    batch, query_heads, v_dim = out.shape
    heads = parts.peak.shape[1]
    # Stand-ins of the right kind, which the kernel never reads.
    sums = (parts.peak,) * 4 if tail is None else (tail.num_pages, tail.peak, tail.total, tail.value)
    each = 1 if tail is None else 2 * tail_kernel.TARGET // (batch * heads)
    block = min(MOST_PARTS, triton.next_power_of_2(max(parts.splits, each, LEAST_PARTS)))
    dims = min(DIMS, triton.next_power_of_2(v_dim))
    group = query_heads // heads
    _merge_parts[(batch, heads, group * triton.cdiv(v_dim, dims))](
        parts.peak,
        parts.peak if parts.total is None else parts.total,
        parts.out,
        out,
        parts.peak if lse is None else lse,
        *sums,
        batch,
        v_scale,
        out.stride(0),
        out.stride(1),
        NUM_HEADS=heads,
        GROUP=group,
        DV=v_dim,
        DV_BLOCK=dims,
        TAIL=tail is not None,
        WHOLE=parts.total is None,
        LSE=lse is not None,
        SPLITS=parts.splits,
        BLOCK=block,
        B_BLOCK=batch_block(batch),
        N_BLOCK=16 if tail is None else tail.unit,
        TARGET=tail_kernel.TARGET,
        num_warps=4,
        maxnreg=255,  # left alone, the assembler aims for fewer and spills a few bytes
    )
