"""Triton selection in two steps: a sortable key for every page, then the exact top pages of each (request, KV head).

A key is an unsigned integer that orders as `select_pages` prefers: recent, sink, no estimate, score; ties go to the lower
page. The first kernel also keeps the largest key of every block of pages. The k best pages lie in the k blocks with the best
largest keys, the lower block winning ties: a page of any other block is beaten by a page of each of those k. So the second
kernel looks at the blocks, then only at the keys of k of them, or of some more, which spares the last bits of a threshold; of
these it keeps the ones that are no worse than the worst of the blocks, hardly more than k, and chooses among them. Where there
are many blocks it does not look for the k best of them: any threshold that k blocks reach will do, if not many more do.

Thresholds are found two bits a round by counting, and what is chosen is written by a running count: it comes out in ascending
order without a sort. One program does all of that for a row, so that its time is how often its warps meet: few keys are counted
by every warp alone, and what a thread loads it lists itself.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.launch import chained, join_chain
from ..page_lse.kernel import N_BLOCK, Scan, batch_block, item_layout, item_place

COMBINES = ("mass", "peak", "max")
TARGET = 528
"""Items of the first kernel: four for every multiprocessor of an H200."""
BLOCK = 16
"""Pages of one block. At 65,536 pages and a budget of 128 that leaves 4,096 blocks, then 2,048 to 2,560 keys to look at."""
KEY_WIDTH = 256
"""Pages that a program of the first kernel takes in one step, a multiple of BLOCK."""
WIDTH = 2048
"""Keys that a program of the second kernel takes together."""
THREADS = 256
"""Of that program."""
RUN = 8
"""Neighbouring blocks of which one of its threads lists the chosen ones: 2,048 of them are taken together."""
FEW = 512
"""Keys that one warp takes together, a multiple of 32: all that are left of the chosen blocks, most often, and the blocks
themselves up to 131,072 tokens."""
PART_BLOCK = 128
"""Parts of a normaliser that a program of the first kernel takes together: those of one KV head, if there are four."""


@triton.jit
def _sortable(x):
    """fp32 as uint32 of the same order; -inf becomes 0x007FFFFF, the least but for NaN: 0 is left for "no key"."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit(do_not_specialize=["batch", "lse_row", "lse_head", "blocks_each", "sink_pages", "recent_pages"])
def _page_keys(
    lse_ptr,
    peak_ptr,
    sum_ptr,
    held_ptr,
    key_ptr,
    best_ptr,
    batch,
    lse_row,
    lse_head,
    blocks_each,
    sink_pages,
    recent_pages,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    G_BLOCK: tl.constexpr,
    COMBINE: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_TARGET: tl.constexpr,
    B_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Keys uint32 [B, H, blocks_each, BLOCK] of all pages, 0 behind the last one of a block that has one, and the largest of
    each block [B, H, blocks_each]."""
    join_chain(NATIVE)
    # Items of whole blocks here; those of the scan, by which the parts are numbered, may end inside one.
    pages, length, count, ends = item_layout(held_ptr, batch, TARGET, NUM_HEADS, B_BLOCK, BLOCK)
    _, _, part_count, part_ends = item_layout(held_ptr, batch, PARTS_TARGET, NUM_HEADS, B_BLOCK, N_BLOCK)
    row = tl.arange(0, B_BLOCK)
    group = tl.arange(0, G_BLOCK)
    mine = group < GROUP
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        request, head, number, _ = item_place(item, count, ends, B_BLOCK)
        held = tl.sum(tl.where(row == request, pages, 0), 0)
        begin = number * length
        end = tl.minimum(begin + length, held)
        plane = lse_ptr + request.to(tl.int64) * lse_row + (head * GROUP + group)[:, None] * lse_head
        # Every step's values are loaded before the one before it is worked on, the first ones before the normaliser.
        following = begin + tl.arange(0, WIDTH)
        coming = tl.load(plane + following[None, :], mask=mine[:, None] & (following < end)[None, :], other=float("-inf"))
        # Normaliser of each query head over all its pages: the log-sum-exp, or for "peak" the largest value.
        norm = tl.full([G_BLOCK], float("-inf"), tl.float32)
        if not PARTS:
            at = (request * NUM_HEADS + head) * GROUP + group
            norm = tl.load(peak_ptr + at, mask=mine, other=0.0)
        elif COMBINE != 2:
            parts = tl.sum(tl.where(row == request, part_count, 0), 0)
            first = tl.sum(tl.where(row == request - 1, part_ends, 0), 0) + head * parts
            total = tl.zeros([G_BLOCK], tl.float32)
            for base_part in range(0, parts, PART_BLOCK):
                part = base_part + tl.arange(0, PART_BLOCK)
                slot = (first + part)[:, None] * GROUP + group[None, :]
                mask = (part < parts)[:, None] & mine[None, :]
                peak = tl.load(peak_ptr + slot, mask=mask, other=float("-inf"))
                if COMBINE == 0:
                    mass = tl.load(sum_ptr + slot, mask=mask, other=0.0)
                new = tl.maximum(norm, tl.max(peak, 0))
                base = tl.where(new == float("-inf"), 0.0, new)
                if COMBINE == 0:
                    total = total * tl.exp(norm - base) + tl.sum(mass * tl.exp(peak - base[None, :]), 0)
                norm = new
            norm = tl.where(norm == float("-inf"), 0.0, norm)
            if COMBINE == 0:
                norm += tl.log(tl.maximum(total, 1e-37))

        first_block = (request * NUM_HEADS + head).to(tl.int64) * blocks_each
        for start in range(begin, end, WIDTH):
            logical, lse = following, coming
            live = logical < end
            following += WIDTH
            coming = tl.load(plane + following[None, :], mask=mine[:, None] & (following < end)[None, :], other=float("-inf"))
            unknown = tl.max((lse == float("inf")).to(tl.int32), 0) > 0
            lse = tl.where(tl.abs(lse) < float("inf"), lse, float("-inf"))
            score = tl.max(lse, 0) if COMBINE == 2 else tl.sum(tl.exp(lse - norm[:, None]), 0)
            key = _sortable(score)
            key = tl.where(unknown, tl.full([WIDTH], 0xFFFFFFFD, tl.uint32), key)
            key = tl.where(logical < sink_pages, tl.full([WIDTH], 0xFFFFFFFE, tl.uint32), key)
            key = tl.where(logical >= held - recent_pages, tl.full([WIDTH], 0xFFFFFFFF, tl.uint32), key)
            key = tl.where(live, key, tl.zeros([WIDTH], tl.uint32))
            tl.store(key_ptr + first_block * BLOCK + logical, key, mask=logical // BLOCK * BLOCK < end)
            best = tl.max(tl.reshape(key, [WIDTH // BLOCK, BLOCK]), 1)
            block = start // BLOCK + tl.arange(0, WIDTH // BLOCK)
            tl.store(best_ptr + first_block + block, best, mask=block * BLOCK < end)


@triton.jit
def _reach(keys, first, second, third, one, two, three):
    """Counts of the keys of every place that reach three thresholds, with these added."""
    one += (keys >= first).to(tl.int32)
    two += (keys >= second).to(tl.int32)
    three += (keys >= third).to(tl.int32)
    return one, two, three


@triton.jit
def _count_few(keys, first, second, third, COUNT: tl.constexpr):
    """How many of a warp's keys reach three thresholds."""
    one = tl.zeros([32], tl.int32)
    two, three = one, one
    for i in tl.static_range(COUNT):
        one, two, three = _reach(keys[i], first, second, third, one, two, three)
    # Ten bits each, so that a warp adds up all three in one instruction.
    sums = tl.sum(one + (two << 10) + (three << 20), 0)
    return sums & 1023, (sums >> 10) & 1023, sums >> 20


@triton.jit
def _narrow(low, middle, high, threshold, above, tied, shift, count, rank, slack):
    """The next threshold from how many keys are one, two and three steps on, how many keys are above it and its digit, and how
    many equal to it belong to the chosen ones; and the shift of the next digit."""
    steps = (low >= rank).to(tl.int32) + (middle >= rank).to(tl.int32) + (high >= rank).to(tl.int32)
    threshold += (tl.full([], 1, tl.uint32) << shift.to(tl.uint32)) * steps.to(tl.uint32)
    reached = tl.where(steps == 3, high, tl.where(steps == 2, middle, low))
    above = tl.where(steps == 3, above, tl.where(steps == 2, high, tl.where(steps == 1, middle, low)))
    done = (steps > 0) & (reached <= rank + slack)
    return threshold, above, tl.where(done, count, rank - above), tl.where(done, -2, shift - 2)


@triton.jit
def _few_threshold(keys_ptr, count, rank, slack, floor, FEW: tl.constexpr):
    """As `_threshold`, of at most FEW keys, less than 1,024. Every warp takes all of them, one a lane in each of these vectors:
    no warp waits for another."""
    threshold = tl.full([], 0, tl.uint32)
    above = tl.full([], 0, tl.int32)
    tied = count
    shift = tl.where(count > rank, 30, -2)
    lane = tl.arange(0, 32)
    keys = ()
    for i in tl.static_range(FEW // 32):
        keys = keys + (tl.load(keys_ptr + 32 * i + lane, mask=32 * i + lane < count, other=0),)
    far = floor + (1 << 24)
    if (count > rank) & (floor > 0) & (far > floor):
        # Most often not far above: some digits need no search.
        near, middle, most = _count_few(keys, floor + (1 << 16), floor + (1 << 20), far, FEW // 32)
        if most < rank:
            threshold = floor
            above = tl.where(middle >= rank, most, tl.where(near >= rank, middle, near))
            shift = tl.where(middle >= rank, 22, tl.where(near >= rank, 18, 14))
    while shift >= 0:
        step = tl.full([], 1, tl.uint32) << shift.to(tl.uint32)
        low, middle, high = _count_few(
            keys, threshold + step, threshold + step + step, threshold + step + step + step, FEW // 32
        )
        threshold, above, tied, shift = _narrow(low, middle, high, threshold, above, tied, shift, count, rank, slack)
    return threshold, tied


@triton.jit
def _threshold(keys_ptr, count, rank, slack, floor, WIDTH: tl.constexpr, FEW: tl.constexpr):
    """Which of `count` keys, none of them 0 or less than `floor`, are the `rank` largest, or up to `slack` more.

    Returns a threshold, never 0, above which all keys belong to them, and how many of the keys equal to it do, at most. It is
    found two bits a round.
    """
    if count <= FEW // 2:
        threshold, tied = _few_threshold(keys_ptr, count, rank, slack, floor, FEW // 2)
    elif count <= FEW:
        threshold, tied = _few_threshold(keys_ptr, count, rank, slack, floor, FEW)
    else:
        threshold = tl.full([], 0, tl.uint32)
        above = tl.full([], 0, tl.int32)
        tied = count
        shift = tl.where(count > rank, 30, -2)
        # The first ones stay in registers: most often all.
        index = tl.arange(0, WIDTH)
        first = tl.load(keys_ptr + index, mask=index < count, other=0)
        second = tl.load(keys_ptr + WIDTH + index, mask=WIDTH + index < count, other=0)
        while shift >= 0:
            step = tl.full([], 1, tl.uint32) << shift.to(tl.uint32)
            next_one, next_two, next_three = threshold + step, threshold + step + step, threshold + step + step + step
            one = tl.zeros([WIDTH], tl.int32)
            one, two, three = _reach(first, next_one, next_two, next_three, one, one, one)
            if count > WIDTH:
                one, two, three = _reach(second, next_one, next_two, next_three, one, two, three)
                for begin in range(2 * WIDTH, count, WIDTH):
                    more = tl.load(keys_ptr + begin + index, mask=begin + index < count, other=0)
                    one, two, three = _reach(more, next_one, next_two, next_three, one, two, three)
            # Together, so that the warps meet once; in 32 bits, which a warp sums in one instruction.
            sums = tl.sum(tl.reshape(tl.join(tl.join(one, two), tl.join(three, three)), [WIDTH, 4]), 0)
            lower, upper = tl.split(tl.reshape(sums, [2, 2]))
            low, middle = tl.split(lower)
            high, _ = tl.split(upper)
            threshold, above, tied, shift = _narrow(low, middle, high, threshold, above, tied, shift, count, rank, slack)
    return tl.maximum(threshold, tl.full([], 1, tl.uint32)), tied


@triton.jit
def _runs(ptr, at, within, COUNT: tl.constexpr, THREADS: tl.constexpr):
    """COUNT neighbouring values from each place [THREADS] on, a multiple of four, as are the places: as many tensors [THREADS],
    0 where not within. What is worked out from them stays with the thread."""
    found = ()
    for i in tl.static_range(COUNT // 4):
        four = tl.load(ptr + (at[:, None] + 4 * i + tl.arange(0, 4)[None, :]), mask=within[:, None], other=0)
        even, odd = tl.split(tl.reshape(four, [THREADS, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        found = found + (first, second, third, fourth)
    return found


@triton.jit
def _near_blocks(best, near, blocks, most, threshold, tied, RUN: tl.constexpr, THREADS: tl.constexpr):
    """List the blocks that a threshold chooses, ascending, as far as there is room for `most`; returns how many there are."""
    more, equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for begin in range(0, blocks, RUN * THREADS):
        first = begin + RUN * tl.arange(0, THREADS)
        keys = _runs(best, first, first < blocks, RUN, THREADS)
        marks = tl.zeros([THREADS], tl.int32)
        for j in tl.static_range(RUN):
            within = first + j < blocks
            marks += ((keys[j] > threshold) & within).to(tl.int32) + (((keys[j] == threshold) & within).to(tl.int32) << 16)
        run = tl.cumsum(marks, 0) - marks
        above, ties = more + (run & 0xFFFF), equal + (run >> 16)
        for j in tl.static_range(RUN):
            within = first + j < blocks
            is_above = (keys[j] > threshold) & within
            is_tied = (keys[j] == threshold) & within & (ties < tied)
            place = above + tl.minimum(ties, tied)
            tl.store(near + place, first + j, mask=(is_above | is_tied) & (place < most))
            above += is_above.to(tl.int32)
            ties += ((keys[j] == threshold) & within).to(tl.int32)
        added = tl.sum(marks, 0)
        more, equal = more + (added & 0xFFFF), equal + (added >> 16)
    return more + tl.minimum(equal, tied)


@triton.jit
def _places(keys, threshold, tied, more, equal):
    """Which keys a threshold chooses, and their places among all chosen ones in ascending order; no key is 0.

    `more` and `equal` count the keys above and at the threshold so far, and are returned with these added.
    """
    at = keys == threshold
    marks = (keys > threshold).to(tl.int32) + (at.to(tl.int32) << 16)
    run = tl.cumsum(marks, 0)
    ties = equal + (run >> 16)
    place = more + (run & 0xFFFF) + tl.minimum(ties, tied) - 1
    added = tl.sum(marks, 0)
    return (keys > threshold) | (at & (ties <= tied)), place, more + (added & 0xFFFF), equal + (added >> 16)


@triton.jit
def _write_pages(
    pages,
    place,
    logical,
    chosen,
    index_ptr,
    table_ptr,
    weight_ptr,
    weight_head,
    head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    INDEXED: tl.constexpr,
    MARKED: tl.constexpr,
):
    """Store logical pages at their places, what FlashInfer reads for them, and that they are no part of the tail."""
    tl.store(pages + place, logical, mask=chosen)
    if INDEXED:
        physical = tl.load(table_ptr + logical, mask=chosen, other=0)
        tl.store(index_ptr + place, physical * (16 * NUM_HEADS) + head, mask=chosen)
    if MARKED:
        for member in tl.static_range(GROUP):
            tl.store(weight_ptr + member * weight_head + logical, float("-inf"), mask=chosen)


@triton.jit(do_not_specialize=["runs_each", "blocks_most", "left_most", "budget", "table_row", "weight_row", "weight_head"])
def _top_pages(
    key_ptr,
    best_ptr,
    near_ptr,
    near_key_ptr,
    near_page_ptr,
    held_ptr,
    pages_ptr,
    count_ptr,
    table_ptr,
    index_ptr,
    weight_ptr,
    runs_each,
    blocks_most,
    left_most,
    budget,
    table_row,
    weight_row,
    weight_head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    INDEXED: tl.constexpr,
    MARKED: tl.constexpr,
    B_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    FEW: tl.constexpr,
    THREADS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One program a (request, KV head). Pages int32 [B, H, budget], ascending, -1 behind the last.

    Workspaces: the blocks looked at, int32 [B, H, blocks_most]; keys and pages that are left of them, uint32 and int32
    [B, H, blocks_most, BLOCK].
    """
    join_chain(NATIVE)
    request, head = tl.program_id(0), tl.program_id(1)
    row = (request * NUM_HEADS + head).to(tl.int64)
    blocks_each = runs_each * RUN
    held = tl.load(held_ptr + request).to(tl.int32)
    count = tl.minimum(held, budget)
    if head == 0:
        tl.store(count_ptr + request, count)
    pages = pages_ptr + row * budget
    table = table_ptr + request.to(tl.int64) * table_row
    weights = weight_ptr + request.to(tl.int64) * weight_row + head.to(tl.int64) * GROUP * weight_head
    indices = index_ptr
    if INDEXED:
        before = tl.arange(0, B_BLOCK)
        counts = tl.minimum(tl.load(held_ptr + before, mask=before < request, other=0).to(tl.int32), budget)
        indices += tl.sum(counts, 0).to(tl.int64) * NUM_HEADS + head * count
    if held <= budget:
        for begin in range(0, budget, THREADS):
            slot = begin + tl.arange(0, THREADS)
            _write_pages(
                pages, slot, slot, slot < held, indices, table, weights, weight_head, head, NUM_HEADS, GROUP, INDEXED, MARKED
            )
            tl.store(pages + slot, -1 + tl.zeros_like(slot), mask=(slot >= held) & (slot < budget))
    else:
        best = best_ptr + row * blocks_each
        near = near_ptr + row * blocks_most
        near_key = near_key_ptr + row * left_most
        near_page = near_page_ptr + row * left_most
        blocks = (held + BLOCK - 1) // BLOCK
        kept = tl.minimum(blocks, budget)
        reach = blocks_most + 1
        threshold, tied = tl.full([], 0, tl.uint32), blocks
        if (blocks > FEW) & (4 * kept <= FEW):
            # Blocks are dealt out into FEW heaps. A threshold that `kept` of the heaps reach with their best block is reached
            # by as many blocks at least, and by hardly more while the best ones lie apart.
            for part in tl.static_range(FEW // THREADS):
                heap = part * THREADS + tl.arange(0, THREADS)
                tops = tl.zeros([THREADS], tl.uint32)
                for begin in range(0, blocks, FEW):
                    tops = tl.maximum(tops, tl.load(best + begin + heap, mask=begin + heap < blocks, other=0))
                tl.store(near_key + heap, tops)
            tl.debug_barrier()
            threshold, _ = _few_threshold(near_key, FEW, kept, kept // 4, threshold, FEW)
            reach = _near_blocks(best, near, blocks, blocks_most, threshold, tied, RUN, THREADS)
        if reach > blocks_most:
            threshold, tied = _threshold(best, blocks, kept, kept // 4, tl.full([], 0, tl.uint32), WIDTH, FEW)
            tl.debug_barrier()
            reach = _near_blocks(best, near, blocks, blocks_most, threshold, tied, RUN, THREADS)
        # What one thread stored others load.
        tl.debug_barrier()

        keys_at = key_ptr + row * blocks_each * BLOCK
        left = tl.full([], 0, tl.int32)
        for begin in range(0, reach, THREADS):
            number = begin + tl.arange(0, THREADS)
            within = number < reach
            first = tl.load(near + number, mask=within, other=0) * BLOCK
            keys = _runs(keys_at, first, within, BLOCK, THREADS)
            each = tl.zeros([THREADS], tl.int32)
            for j in tl.static_range(BLOCK):
                each += (keys[j] >= threshold).to(tl.int32)
            place = left + tl.cumsum(each, 0) - each
            for j in tl.static_range(BLOCK):
                chosen = keys[j] >= threshold
                tl.store(near_key + place, keys[j], mask=chosen)
                tl.store(near_page + place, first + j, mask=chosen)
                place += chosen.to(tl.int32)
            left += tl.sum(each, 0)
        tl.debug_barrier()

        threshold, tied = _threshold(near_key, left, budget, 0, threshold, WIDTH, FEW)
        more, equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for begin in range(0, left, THREADS):
            last = begin + tl.arange(0, THREADS)
            keys = tl.load(near_key + last, mask=last < left, other=0)
            logical = tl.load(near_page + last, mask=last < left, other=0)
            taken, to, more, equal = _places(keys, threshold, tied, more, equal)
            _write_pages(
                pages, to, logical, taken, indices, table, weights, weight_head, head, NUM_HEADS, GROUP, INDEXED, MARKED
            )


def normaliser(lse: torch.Tensor, combine: str) -> torch.Tensor:
    """What each query head's scores are relative to, fp32 [B, Hq], from its page log-sum-exp alone; 0 where it has none."""
    finite = torch.where(torch.isfinite(lse), lse, -torch.inf)
    norm = torch.logsumexp(finite, -1) if combine == "mass" else finite.amax(-1)
    return torch.where(torch.isfinite(norm), norm, 0.0)


@dataclass(frozen=True)
class PageKeys:
    """How pages rank: a key for each, uint32 [B, H, blocks, BLOCK], and the largest of each block [B, H, blocks].

    num_pages int32 [B]: pages of each request; keys behind the last block that has one are anything. group: query heads a KV
    head.
    """

    keys: torch.Tensor
    best: torch.Tensor
    num_pages: torch.Tensor
    group: int


def page_keys(
    lse: torch.Tensor,
    scanned: Scan | None,
    num_pages: torch.Tensor,
    sink_pages: int,
    recent_pages: int,
    num_kv_heads: int,
    combine: str,
) -> PageKeys:
    """Rank all pages; arguments as `select_pages`.

    Args:
        lse: fp32 [B, Hq, Nmax], Nmax at least 1, innermost dimension contiguous; past num_pages anything.
        scanned: the scan that wrote `lse`; None to normalise from `lse` itself.
    """
    batch, query_heads, n_max = lse.shape
    group, blocks = query_heads // num_kv_heads, triton.cdiv(n_max, RUN * BLOCK) * RUN
    peak, total = (normaliser(lse, combine),) * 2 if scanned is None else (scanned.peak, scanned.total)
    keys = torch.empty(batch, num_kv_heads, blocks, BLOCK, dtype=torch.uint32, device=lse.device)
    best = torch.empty(keys.shape[:3], dtype=torch.uint32, device=lse.device)
    made = PageKeys(keys, best, num_pages.contiguous(), group)
    _page_keys[(TARGET,)](
        lse,
        peak,
        total,
        made.num_pages,
        made.keys,
        made.best,
        batch,
        lse.stride(0),
        lse.stride(1),
        blocks,
        sink_pages,
        recent_pages,
        NUM_HEADS=num_kv_heads,
        GROUP=group,
        G_BLOCK=triton.next_power_of_2(group),
        COMBINE=COMBINES.index(combine),
        PARTS=scanned is not None,
        PARTS_TARGET=1 if scanned is None else scanned.target,
        B_BLOCK=batch_block(batch),
        N_BLOCK=N_BLOCK,
        TARGET=TARGET,
        BLOCK=BLOCK,
        WIDTH=KEY_WIDTH,
        PART_BLOCK=PART_BLOCK,
        **chained(),
        num_warps=4,
        maxnreg=128 if group <= 8 else 168,
    )
    return made


def top_pages(
    ranked: PageKeys,
    budget_pages: int,
    *,
    page_table: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best pages, as `select_pages` returns them.

    Args:
        page_table: int32 [B, Nmax], logical to physical page, innermost dimension contiguous; only with `indices`.
        indices: int32, contiguous, at least H * sum(counts) long. What FlashInfer reads, written without gaps: the row of
            request b and KV head h begins at H * sum(counts[:b]) + h * counts[b] and holds, for its pages in ascending
            logical order, the row of the cache seen as [slots * H, D] that a page's first token has there:
            page_table[b, page] * 16 * H + h. Nothing is written behind the last row.
        weight: fp32 [B, Hq, Nmax], innermost dimension contiguous; set to -inf where a page is selected, so that weights of the
            tail are left.
    """
    batch, heads, blocks, _ = ranked.keys.shape
    most = min(blocks, 2 * budget_pages)
    left = max(most * BLOCK, FEW)

    def rows(*tail: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(batch, heads, *tail, dtype=dtype, device=ranked.keys.device)

    near, near_page = rows(most, dtype=torch.int32), rows(left, dtype=torch.int32)
    near_key = rows(left, dtype=torch.uint32)
    pages, counts = rows(budget_pages, dtype=torch.int32), torch.empty(batch, dtype=torch.int32, device=near.device)
    indexed = indices is not None and page_table is not None
    _top_pages[(batch, heads)](
        ranked.keys,
        ranked.best,
        near,
        near_key,
        near_page,
        ranked.num_pages,
        pages,
        counts,
        page_table if indexed else pages,
        indices if indexed else pages,
        pages if weight is None else weight,
        blocks // RUN,
        most,
        left,
        budget_pages,
        page_table.stride(0) if page_table is not None else 0,
        0 if weight is None else weight.stride(0),
        0 if weight is None else weight.stride(1),
        NUM_HEADS=heads,
        GROUP=ranked.group,
        INDEXED=indexed,
        MARKED=weight is not None,
        B_BLOCK=batch_block(batch),
        BLOCK=BLOCK,
        WIDTH=WIDTH,
        RUN=RUN,
        FEW=FEW,
        THREADS=THREADS,
        **chained(),
        num_warps=THREADS // 32,
        maxnreg=min(255, 65536 // THREADS),  # one program a (request, KV head) leaves room for it
    )
    return pages, counts
