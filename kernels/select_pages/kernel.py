"""Triton selection in two steps: a sortable key for every page, then the exact top pages of each (request, KV head).

A key is an unsigned integer that orders as `select_pages` prefers: recent, sink, no estimate, score; ties go to the lower
page. The k-th largest key is found digit by digit from histograms, and the chosen pages are written by a running count:
they come out in ascending order without a sort.
"""

import torch
import triton
import triton.language as tl

from ..page_lse.kernel import N_BLOCK, TARGET, item_layout, item_place

COMBINES = ("mass", "peak", "max")
WIDTH = 8192
"""Keys of one (request, KV head) that are looked at together."""


@triton.jit
def _sortable(x):
    """fp32 as uint32 of the same order; -inf becomes 0x007FFFFF."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit(do_not_specialize=["batch", "lse_row", "lse_head", "key_row", "sink_pages", "recent_pages"])
def _page_keys(
    lse_ptr,
    peak_ptr,
    sum_ptr,
    held_ptr,
    key_ptr,
    batch,
    lse_row,
    lse_head,
    key_row,
    sink_pages,
    recent_pages,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    G_BLOCK: tl.constexpr,
    COMBINE: tl.constexpr,
    PARTS: tl.constexpr,
    B_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
    WIDTH: tl.constexpr,
    ITEM_BLOCK: tl.constexpr,
):
    pages, length, count, ends = item_layout(held_ptr, batch, TARGET, NUM_HEADS, B_BLOCK, N_BLOCK)
    row = tl.arange(0, B_BLOCK)
    group = tl.arange(0, G_BLOCK)
    mine = group < GROUP
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        request, head, number, items = item_place(item, count, ends, B_BLOCK)
        held = tl.sum(tl.where(row == request, pages, 0), 0)
        # Normaliser of each query head over all its pages: the log-sum-exp, or for "peak" the largest value.
        norm = tl.full([G_BLOCK], float("-inf"), tl.float32)
        if not PARTS:
            at = (request * NUM_HEADS + head) * GROUP + group
            norm = tl.load(peak_ptr + at, mask=mine, other=0.0)
        elif COMBINE != 2:
            total = tl.zeros([G_BLOCK], tl.float32)
            for begin in range(0, items, ITEM_BLOCK):
                part = begin + tl.arange(0, ITEM_BLOCK)
                slot = (item - number + part)[:, None] * GROUP + group[None, :]
                mask = (part < items)[:, None] & mine[None, :]
                peak = tl.load(peak_ptr + slot, mask=mask, other=float("-inf"))
                new = tl.maximum(norm, tl.max(peak, 0))
                base = tl.where(new == float("-inf"), 0.0, new)
                if COMBINE == 0:
                    mass = tl.load(sum_ptr + slot, mask=mask, other=0.0) * tl.exp(peak - base[None, :])
                    total = total * tl.exp(norm - base) + tl.sum(mass, 0)
                norm = new
            norm = tl.where(norm == float("-inf"), 0.0, norm)
            if COMBINE == 0:
                norm += tl.log(tl.maximum(total, 1e-37))

        plane = request.to(tl.int64) * lse_row + (head * GROUP + group)[:, None] * lse_head
        keys = key_ptr + (request * NUM_HEADS + head).to(tl.int64) * key_row
        first = number * length
        for begin in range(first, tl.minimum(first + length, held), WIDTH):
            logical = begin + tl.arange(0, WIDTH)
            live = logical < tl.minimum(first + length, held)
            lse = tl.load(lse_ptr + plane + logical[None, :], mask=mine[:, None] & live[None, :], other=float("-inf"))
            unknown = tl.max((lse == float("inf")).to(tl.int32), 0) > 0
            lse = tl.where(tl.abs(lse) < float("inf"), lse, float("-inf"))
            score = tl.max(lse, 0) if COMBINE == 2 else tl.sum(tl.exp(lse - norm[:, None]), 0)
            key = _sortable(score)
            key = tl.where(unknown, tl.full([WIDTH], 0xFFFFFFFD, tl.uint32), key)
            key = tl.where(logical < sink_pages, tl.full([WIDTH], 0xFFFFFFFE, tl.uint32), key)
            key = tl.where(logical >= held - recent_pages, tl.full([WIDTH], 0xFFFFFFFF, tl.uint32), key)
            tl.store(keys + logical, key, mask=live)


@triton.jit
def _narrow(keys_ptr, held, prefix, budget, SHIFT: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Next `BITS` bits of the `budget`-th largest among the keys that begin with `prefix`.

    Returns the longer prefix, and how many of the budget the keys that begin with it have to fill.
    """
    counted = tl.zeros([1 << BITS], tl.int32)
    for begin in range(0, held, WIDTH):
        logical = begin + tl.arange(0, WIDTH)
        inside = logical < held
        keys = tl.load(keys_ptr + logical, mask=inside, other=0)
        digit = (keys >> SHIFT) & ((1 << BITS) - 1)
        if SHIFT + BITS < 32:
            inside = inside & ((keys >> (SHIFT + BITS)) == prefix)
        counted += tl.histogram(digit.to(tl.int32), 1 << BITS, mask=inside)
    # Of the digits that enough keys reach, the largest; the keys above it are all taken.
    reached = tl.cumsum(counted, 0, reverse=True)
    digit = tl.sum((reached >= budget).to(tl.int32), 0) - 1
    above = tl.sum(tl.where(tl.arange(0, 1 << BITS) == digit, reached - counted, 0), 0)
    return (prefix << BITS) | digit.to(tl.uint32), budget - above


@triton.jit(do_not_specialize=["key_row", "budget"])
def _top_pages(
    key_ptr,
    held_ptr,
    pages_ptr,
    count_ptr,
    key_row,
    budget,
    NUM_HEADS: tl.constexpr,
    BUDGET_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program a (request, KV head). Pages int32 [B, H, budget], ascending, -1 behind the last."""
    request, head = tl.program_id(0), tl.program_id(1)
    held = tl.load(held_ptr + request).to(tl.int32)
    pages = pages_ptr + (request * NUM_HEADS + head).to(tl.int64) * budget
    keys_at = key_ptr + (request * NUM_HEADS + head).to(tl.int64) * key_row
    if held <= budget:
        slot = tl.arange(0, BUDGET_BLOCK)
        tl.store(pages + slot, tl.where(slot < held, slot, -1), mask=slot < budget)
    else:
        # Bytes, because a warp keeps a whole histogram in its registers.
        threshold, tied = _narrow(keys_at, held, tl.full([], 0, tl.uint32), budget, 24, 8, WIDTH)
        threshold, tied = _narrow(keys_at, held, threshold, tied, 16, 8, WIDTH)
        threshold, tied = _narrow(keys_at, held, threshold, tied, 8, 8, WIDTH)
        threshold, tied = _narrow(keys_at, held, threshold, tied, 0, 8, WIDTH)
        taken, equal = 0, 0
        for begin in range(0, held, WIDTH):
            logical = begin + tl.arange(0, WIDTH)
            inside = logical < held
            keys = tl.load(keys_at + logical, mask=inside, other=0)
            at = (inside & (keys == threshold)).to(tl.int32)
            chosen = (inside & (keys > threshold)).to(tl.int32) + at * ((equal + tl.cumsum(at, 0)) <= tied).to(tl.int32)
            tl.store(pages + taken + tl.cumsum(chosen, 0) - 1, logical, mask=chosen > 0)
            taken += tl.sum(chosen, 0)
            equal += tl.sum(at, 0)
    if head == 0:
        tl.store(count_ptr + request, tl.minimum(held, budget))


def normaliser(lse: torch.Tensor, combine: str) -> torch.Tensor:
    """What each query head's scores are relative to, fp32 [B, Hq], from its page log-sum-exp alone; 0 where it has none."""
    finite = torch.where(torch.isfinite(lse), lse, -torch.inf)
    norm = torch.logsumexp(finite, -1) if combine == "mass" else finite.amax(-1)
    return torch.where(torch.isfinite(norm), norm, 0.0)


def top_pages(
    lse: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor] | None,
    num_pages: torch.Tensor,
    budget_pages: int,
    sink_pages: int,
    recent_pages: int,
    num_kv_heads: int,
    combine: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `select_pages`.

    Args:
        lse: fp32 [B, Hq, Nmax], Nmax at least 1, innermost dimension contiguous; past num_pages anything.
        parts: `Scan.peak` and `Scan.total` of the scan that wrote `lse`; None to normalise from `lse` itself.
    """
    num_pages = num_pages.contiguous()
    batch, query_heads, n_max = lse.shape
    group, device = query_heads // num_kv_heads, lse.device
    peak, total = (normaliser(lse, combine),) * 2 if parts is None else parts
    keys = torch.empty(batch, num_kv_heads, n_max, dtype=torch.uint32, device=device)
    pages = torch.empty(batch, num_kv_heads, budget_pages, dtype=torch.int32, device=device)
    counts = torch.empty(batch, dtype=torch.int32, device=device)
    _page_keys[(TARGET,)](
        lse,
        peak,
        total,
        num_pages,
        keys,
        batch,
        lse.stride(0),
        lse.stride(1),
        n_max,
        sink_pages,
        recent_pages,
        NUM_HEADS=num_kv_heads,
        GROUP=group,
        G_BLOCK=triton.next_power_of_2(group),
        COMBINE=COMBINES.index(combine),
        PARTS=parts is not None,
        B_BLOCK=triton.next_power_of_2(batch),
        N_BLOCK=N_BLOCK,
        TARGET=TARGET,
        WIDTH=128,
        ITEM_BLOCK=64,
        num_warps=4,
    )
    _top_pages[(batch, num_kv_heads)](
        keys,
        num_pages,
        pages,
        counts,
        n_max,
        budget_pages,
        NUM_HEADS=num_kv_heads,
        BUDGET_BLOCK=triton.next_power_of_2(budget_pages),
        WIDTH=WIDTH,
        num_warps=16,
    )
    return pages, counts
