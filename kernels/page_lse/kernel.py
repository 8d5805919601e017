"""Triton scan: every record is read once for all query heads of its KV head, up to eight.

Work is cut into items, each a run of pages of one (request, KV head), so that one long request among short ones is spread
over the whole device. How long an item is follows from the live lengths alone; a fixed number of programs takes the items
in turn.

A warp takes eight pages at a time, in two products on tensor cores a page, the second fed from the registers that the first
one filled. First the levels of the basis meet the queries as they are stored: a query is taken as 16-bit fixed point relative
to its largest entry, in two bytes that stand in two rows, so these products are exact. Lane r * 4 + c then holds what query
head r makes of columns 2c and 2c + 1, which is where the second product wants it, in two bf16 parts, to meet the
coefficients of the tokens. Sums over the 16 tokens of a page cross four lanes. Everything is in base 2 until it is stored.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..build_page_summaries import PageSummaries
from ..common.device import soft_cap
from ..common.lanes import (
    aligned,
    columns,
    dot_bf16_k8,
    dot_bf16_k16,
    dot_s8,
    fixed_point,
    helper,
    high_bf16,
    load_words,
    low_bf16,
    pack_bf16,
    pick,
    row_max,
    row_sum,
    split_bf16,
)
from ..common.launch import chained, join_chain

MULTIPROCESSORS = 132
"""Of an H200. A scan has as many items as its programs fit there at once."""
WARPS = 4
STAGES = 2
N_BLOCK = 8 * WARPS
"""Pages that a program takes in one step: eight a warp."""
REGISTERS = {64: 168, 96: 168, 128: 168, 256: 255}
"""That a thread is given at each head dimension: twelve warps then fit a multiprocessor, or eight."""
ITEMS_A_ROW = tl.constexpr(8)
"""Into how many items a (request, KV head) may be cut at least, on average: a short last one then costs an eighth at most."""
HIGH_NIBBLES = tl.constexpr(-0x0F0F0F10)
"""0xF0F0F0F0 as an int32."""
TAILS = ("off", "qmu", "flat")


@triton.jit
def item_layout(held_ptr, batch, TARGET: tl.constexpr, NUM_HEADS: tl.constexpr, B_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr):
    """Cut all pages into items: at most TARGET, or a multiple of it that so many programs take in as many rounds.

    Every (request, KV head) ends with an item that may be short. So it is counted as one in full, lest a few items are left for
    a round of their own; where there are many of these, items are cut finer instead.

    Returns pages a request [B_BLOCK], pages an item, items a (request, head) [B_BLOCK], and the first item behind each
    request [B_BLOCK].
    """
    row = tl.arange(0, B_BLOCK)
    pages = tl.load(held_ptr + row, mask=row < batch, other=0).to(tl.int32)
    rows = tl.sum((pages > 0).to(tl.int32), 0) * NUM_HEADS
    wanted = TARGET * tl.maximum((rows * ITEMS_A_ROW + TARGET - 1) // TARGET, 1) - rows
    share = (tl.sum(pages, 0) * NUM_HEADS + wanted - 1) // wanted
    length = tl.maximum((share + N_BLOCK - 1) // N_BLOCK, 1) * N_BLOCK
    count = (pages + length - 1) // length
    return pages, length, count, tl.cumsum(count * NUM_HEADS, 0)


@triton.jit
def item_place(item, count, ends, B_BLOCK: tl.constexpr):
    """Request, KV head and number within them of one item, and how many items that (request, head) has."""
    row = tl.arange(0, B_BLOCK)
    request = tl.sum((ends <= item).to(tl.int32), 0)
    start = tl.sum(tl.where(row == request - 1, ends, 0), 0)
    items = tl.sum(tl.where(row == request, count, 0), 0)
    within = item - start
    return request, within // items, within % items, items


@helper
def _meet(upper, lower, words, TILES: tl.constexpr, NATIVE: tl.constexpr):
    """Products of all queries with what lies in `words`, 2 TILES of them: int32 [T] of columns 2c and 2c + 1."""
    none = tl.zeros_like(words[0])
    c0, c1, c2, c3 = none, none, none, none
    for i in tl.static_range(TILES):
        c0, c1, c2, c3 = dot_s8(
            upper[2 * i],
            lower[2 * i],
            upper[2 * i + 1],
            lower[2 * i + 1],
            words[2 * i],
            words[2 * i + 1],
            c0,
            c1,
            c2,
            c3,
            NATIVE,
        )
    return 256 * c0 + c2, 256 * c1 + c3


@helper
def _nibbles(packed, COUNT: tl.constexpr):
    """Words of levels in the upper nibble of a byte, sixteen times too large: those of low dims, then those of high ones."""
    low, high = (), ()
    for i in tl.static_range(COUNT):
        low = low + ((packed[i] << 4) & HIGH_NIBBLES,)
        high = high + (packed[i] & HIGH_NIBBLES,)
    return low + high


@helper
def _coefficients(word, NATIVE: tl.constexpr):
    """Coefficients of two columns as bf16 pairs: of token r and of token r + 8."""
    first = pack_bf16(((word << 24) >> 24).to(tl.float32), ((word << 16) >> 24).to(tl.float32), NATIVE)
    return first, pack_bf16(((word << 8) >> 24).to(tl.float32), (word >> 24).to(tl.float32), NATIVE)


@helper
def _logits_of_page(
    at,
    other,
    scales,
    source,
    shift,
    upper,
    lower,
    unit,
    cap,
    r,
    c,
    D: tl.constexpr,
    R: tl.constexpr,
    BASIS: tl.constexpr,
    COEF: tl.constexpr,
    PAIRED: tl.constexpr,
    CAPPED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Four of the 16 logits, in base 2, that each query head has in one page: fp32 [T] each, those of tokens 2c and 2c + 1, and
    8 on.

    Args:
        at, other: the record; where PAIRED, `other` is that of a second page, which rows 4 to 7 are for.
        scales, source: scales of eight pages, and the lanes that hold those of this one.
        shift: where CAPPED, the logit of the page's mean, which comes on top of each.
    """
    # Words that a lane takes of half a column; pairs of columns.
    WORDS: tl.constexpr = D // 32
    PAIRS: tl.constexpr = (R + 1) // 2
    second = r >= 4
    none = tl.zeros_like(unit)
    x0, x1, x2, x3 = none, none, none, none
    y0, y1, y2, y3 = none, none, none, none
    for part in tl.static_range((R + 7) // 8):
        column = BASIS + tl.minimum(8 * part + r, R - 1) * (D // 2) + c * (D // 8)
        packed = load_words((at + column).to(tl.pointer_type(tl.int32)), WORDS)
        s0, s1 = _meet(upper, lower, _nibbles(packed, WORDS), WORDS, NATIVE)
        if PAIRED:
            packed = load_words((other + column).to(tl.pointer_type(tl.int32)), WORDS)
            t0, t1 = _meet(upper, lower, _nibbles(packed, WORDS), WORDS, NATIVE)
            s0, s1 = tl.where(second, t0, s0), tl.where(second, t1, s1)
        scale = pick(scales[2 + 2 * part], source, NATIVE)
        near, rest = split_bf16(
            s0.to(tl.float32) * (low_bf16(scale) * (unit * 0.0625)),
            s1.to(tl.float32) * (high_bf16(scale) * (unit * 0.0625)),
            NATIVE,
        )
        # Behind the last column stands nothing: what the queries make of the repeated one counts for 0.
        within = 4 * part + c < PAIRS
        pair = COEF // 4 + r * PAIRS + 4 * part + c
        front, back = _coefficients(tl.load(at.to(tl.pointer_type(tl.int32)) + pair, mask=within, other=0), NATIVE)
        if PAIRED:
            word = tl.load(other.to(tl.pointer_type(tl.int32)) + pair, mask=within, other=0)
            front_other, back_other = _coefficients(word, NATIVE)
            a0, a1 = tl.where(second, 0, near), tl.where(second, 0, rest)
            a2, a3 = tl.where(second, near, 0), tl.where(second, rest, 0)
            x0, x1, x2, x3 = dot_bf16_k16(a0, a1, a2, a3, front, front_other, x0, x1, x2, x3, NATIVE)
            y0, y1, y2, y3 = dot_bf16_k16(a0, a1, a2, a3, back, back_other, y0, y1, y2, y3, NATIVE)
        else:
            x0, x1, x2, x3 = dot_bf16_k8(near, rest, front, x0, x1, x2, x3, NATIVE)
            y0, y1, y2, y3 = dot_bf16_k8(near, rest, back, y0, y1, y2, y3, NATIVE)
    front, back = pick(scales[0], source, NATIVE), pick(scales[1], source, NATIVE)
    l0, l1 = (x0 + x2) * low_bf16(front), (x1 + x3) * high_bf16(front)
    l2, l3 = (y0 + y2) * low_bf16(back), (y1 + y3) * high_bf16(back)
    if CAPPED:
        l0, l1 = soft_cap(l0 + shift, cap), soft_cap(l1 + shift, cap)
        l2, l3 = soft_cap(l2 + shift, cap), soft_cap(l3 + shift, cap)
    return l0, l1, l2, l3


@helper
def _masses_of_lane(
    j,
    tops,
    masses,
    at_hand,
    scales,
    offset,
    upper,
    lower,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BASIS: tl.constexpr,
    COEF: tl.constexpr,
    PAIRED: tl.constexpr,
    CAPPED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Largest logit and sum of exp2(logit - largest) of the pages that the lanes with c = j own, which alone take them over."""
    page, records, unit, cap, lane = at_hand
    r, c = lane >> 2, lane & 3
    OWN: tl.constexpr = 1 if PAIRED else 2
    new_tops, new_masses = (), ()
    for i in tl.static_range(OWN):
        first = 2 * j + i
        at = records + pick(page, 4 * first + tl.zeros_like(lane), NATIVE).to(tl.int64) * STRIDE
        other = at
        if PAIRED:
            other = records + pick(page, 4 * first + 4 + tl.zeros_like(lane), NATIVE).to(tl.int64) * STRIDE
        source = 4 * (first + (r >> 2 if PAIRED else 0)) + c
        shift = pick(offset[i], (lane & 28) | j, NATIVE) if CAPPED else unit
        l0, l1, l2, l3 = _logits_of_page(
            at, other, scales, source, shift, upper, lower, unit, cap, r, c, D, R, BASIS, COEF, PAIRED, CAPPED, NATIVE
        )
        top = row_max(tl.maximum(tl.maximum(l0, l1), tl.maximum(l2, l3)), NATIVE)
        mass = row_sum((tl.exp2(l0 - top) + tl.exp2(l1 - top)) + (tl.exp2(l2 - top) + tl.exp2(l3 - top)), NATIVE)
        new_tops = new_tops + (tl.where(c == j, top, tops[i]),)
        new_masses = new_masses + (tl.where(c == j, mass, masses[i]),)
    return new_tops, new_masses


@triton.jit(do_not_specialize=["batch", "table_row", "lse_row", "lse_head", "scale_head"])
def _scan_pages(
    q_ptr,
    record_ptr,
    valid_ptr,
    center_ptr,
    table_ptr,
    held_ptr,
    lens_ptr,
    lse_ptr,
    weight_ptr,
    scale_ptr,
    peak_ptr,
    sum_ptr,
    batch,
    sm_scale,
    logit_cap,
    q_row,
    q_head,
    table_row,
    lse_row,
    lse_head,
    scale_head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RECORD: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BASIS: tl.constexpr,
    COEF: tl.constexpr,
    MEAN: tl.constexpr,
    SCALES: tl.constexpr,
    EACH: tl.constexpr,
    TAIL: tl.constexpr,
    CAPPED: tl.constexpr,
    PARTIAL: tl.constexpr,
    NEWEST: tl.constexpr,
    B_BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    TARGET: tl.constexpr,
    STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    join_chain(NATIVE)
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    STEP: tl.constexpr = 8 * WARPS
    STRIDE: tl.constexpr = NUM_HEADS * RECORD
    # Words that a lane takes of half a column or of half a mean.
    WORDS: tl.constexpr = D // 32
    # Unrolled, all loads of a step are on their way before it begins; at larger sizes that would take minutes to compile.
    UNROLL: tl.constexpr = 4 if D <= 128 and R <= 8 else 1
    # Up to four query heads leave room for a second page in the rows of a product: rows 4 to 7 hold the same heads again.
    PAIRED: tl.constexpr = GROUP <= 4
    OWN: tl.constexpr = 1 if PAIRED else 2
    HALVES: tl.constexpr = 2 if PAIRED else 1
    cap = logit_cap * LOG2E
    pages, length, count, ends = item_layout(held_ptr, batch, TARGET, NUM_HEADS, B_BLOCK, STEP)
    row = tl.arange(0, B_BLOCK)
    thread = tl.arange(0, 32 * WARPS)
    lane = thread & 31
    r, c = lane >> 2, lane & 3
    second = r >= 4
    # Pages of a step: where those of this warp begin, and the one that this lane looks up.
    eight = 8 * (thread >> 5)
    place = eight + r
    member = r & 3 if PAIRED else r
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        request, head, number, _ = item_place(item, count, ends, B_BLOCK)
        held = tl.sum(tl.where(row == request, pages, 0), 0)
        row64 = request.to(tl.int64)
        first = number * length
        end = tl.minimum(first + length, held)
        complete = end
        if PARTIAL:
            complete = tl.minimum(end, ((tl.load(lens_ptr + request) - NEWEST) // 16).to(tl.int32))
        # Pages are looked up one step ahead, so that it is known where their records lie when a step begins. Behind the last
        # one stands page 0, whose record is there to be read and never counts.
        table = table_ptr + row64 * table_row
        for tile in range((GROUP + 7) // 8):
            following = tl.load(table + first + place, mask=first + place < end, other=0)
            query_head = tl.minimum(8 * tile + member, GROUP - 1)
            shown = 8 * tile + member < GROUP
            query = q_ptr + row64 * q_row + (head * GROUP + query_head) * q_head
            largest = tl.zeros([32 * WARPS], tl.float32)
            q_center = tl.zeros([32 * WARPS], tl.float32)
            entries = ()
            for i in tl.static_range(2 * WORDS):
                dim = (i // WORDS) * (D // 2) + 4 * (i % WORDS) + c[:, None] * (D // 8) + tl.arange(0, 4)[None, :]
                x = tl.load(query[:, None] + dim).to(tl.float32)
                largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
                q_center += tl.sum(x * tl.load(center_ptr + head * D + dim), 1)
                entries = entries + (x,)
            unit = tl.maximum(row_max(largest, NATIVE) / 32512.0, 1e-30)
            inverse = 1.0 / unit
            upper, lower = (), ()
            for i in tl.static_range(2 * WORDS):
                word, rest = fixed_point(columns(entries[i]), inverse)
                upper, lower = upper + (word,), lower + (rest,)
            q_center = row_sum(q_center, NATIVE) * (sm_scale * LOG2E)
            unit *= sm_scale * LOG2E

            peak = tl.full([32 * WARPS], float("-inf"), tl.float32)
            total = tl.zeros([32 * WARPS], tl.float32)
            for begin in tl.range(first, end, STEP, num_stages=STAGES):
                page = following
                following = tl.load(table + begin + STEP + place, mask=begin + STEP + place < end, other=0)
                records = record_ptr + head * RECORD
                record = records + page.to(tl.int64) * STRIDE
                mean = load_words((record + MEAN + c * (D // 8)).to(tl.pointer_type(tl.int32)), WORDS)
                mean = mean + load_words((record + MEAN + D // 2 + c * (D // 8)).to(tl.pointer_type(tl.int32)), WORDS)
                # Row c of the scales of page r, to be picked for the page at hand.
                scales = load_words((record + SCALES + c * (2 * EACH)).to(tl.pointer_type(tl.int32)), EACH // 2)
                valid = tl.load(valid_ptr + page).to(tl.int32)
                product = _meet(upper, lower, mean, WORDS, NATIVE)
                offset, known = (), ()
                for i in tl.static_range(OWN):
                    # This lane's own pages: 2c and 2c + 1, or the one of its half.
                    own = 2 * c + (r >> 2 if PAIRED else i)
                    logical = begin + eight + own
                    known = known + ((logical < complete) & (pick(valid, 4 * own, NATIVE) != 0),)
                    scale = low_bf16(pick(scales[3], 4 * own, NATIVE)) * unit
                    whole = tl.where(second, product[1], product[0]) if PAIRED else product[i]
                    offset = offset + (whole.to(tl.float32) * scale + q_center,)

                at_hand = page, records, unit, cap, lane
                tops, masses = offset, offset
                for owner in range(0, 4, UNROLL):
                    for j in tl.static_range(UNROLL):
                        tops, masses = _masses_of_lane(
                            owner + j,
                            tops,
                            masses,
                            at_hand,
                            scales,
                            offset,
                            upper,
                            lower,
                            STRIDE,
                            D,
                            R,
                            BASIS,
                            COEF,
                            PAIRED,
                            CAPPED,
                            NATIVE,
                        )
                for i in tl.static_range(OWN):
                    logical = begin + eight + 2 * c + (r >> 2 if PAIRED else i)
                    top = tops[i] if CAPPED else tops[i] + offset[i]
                    lse = top + tl.log2(masses[i])
                    # A record with a NaN scale gives NaN: no estimate for that page alone, and no part in any sum.
                    counted = known[i] & (tl.abs(lse) < float("inf"))
                    plane = row64 * lse_row + (head * GROUP + query_head) * lse_head + logical
                    mask = shown & (logical < end)
                    tl.store(lse_ptr + plane, tl.where(known[i], lse * LN2, float("inf")), mask=mask)
                    mass = tl.where(counted, lse, float("-inf"))
                    new = tl.maximum(peak, mass)
                    base = tl.where(new == float("-inf"), 0.0, new)
                    total = total * tl.exp2(peak - base) + tl.exp2(mass - base)
                    peak = new
                    if TAIL > 0:
                        if TAIL == 1:
                            weight = (soft_cap(offset[i], cap) if CAPPED else offset[i]) + 4.0
                        else:
                            weight = lse + 0.5 * (lse - 4.0 - top)
                        weight = tl.where(counted, weight, float("-inf"))
                        tl.store(weight_ptr + plane, weight * LN2, mask=mask)

                if TAIL > 0:
                    # That of the value mean of page r, for the sum of the tail, which then needs no record. Stored last: a
                    # store waits for what it stores, and the loads behind it wait with it.
                    scaled = scale_ptr + (row64 * NUM_HEADS + head) * scale_head + begin + place
                    tl.store(scaled, high_bf16(scales[3]), mask=(c == 0) & (begin + place < end))

            peak = tl.reshape(peak, [WARPS * HALVES, 8 // HALVES, 4])
            best = tl.max(tl.max(peak, 2), 0)
            above = tl.where(best == float("-inf"), 0.0, best)[None, :, None]
            total = tl.reshape(total, [WARPS * HALVES, 8 // HALVES, 4]) * tl.exp2(peak - above)
            group = 8 * tile + tl.arange(0, 8 // HALVES)
            tl.store(peak_ptr + item * GROUP + group, best * LN2, mask=group < GROUP)
            tl.store(sum_ptr + item * GROUP + group, tl.sum(tl.sum(total, 2), 0), mask=group < GROUP)


@dataclass(frozen=True)
class Scan:
    """What one scan leaves on the device, all fp32.

    lse [B, Hq, Nmax]: as `page_lse`, written where a page is listed and nowhere else. weight [B, Hq, Nmax]: natural log of its
    tail weight, likewise, and value_scale [B, H, Nmax] the scale of its value mean; `lse` itself without a tail.
    peak, total [items, G]: largest page log-sum-exp of an item, and sum of exp(lse - peak). target: into about how many items
    `item_layout` cut the pages.
    """

    lse: torch.Tensor
    weight: torch.Tensor
    value_scale: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor
    target: int


def batch_block(batch: int) -> int:
    """Requests that a kernel takes in at once, at least `batch`: of few sizes, since a kernel is compiled for each."""
    block = 16
    while block < batch:
        block *= 4
    return block


def most_items(target: int, batch: int, heads: int) -> int:
    """Most items that `batch` requests of H KV heads are cut into."""
    return target * max(1, -(-ITEMS_A_ROW.value * batch * heads // target))


def scan(
    q: torch.Tensor,
    s: PageSummaries,
    page_table: torch.Tensor,
    num_pages: torch.Tensor,
    sm_scale: float,
    *,
    seq_lens: torch.Tensor | None,
    logit_cap: float,
    tail: str,
    newest_unbuilt: bool = False,
) -> Scan:
    """Scan the packed summaries of every listed page; arguments as `page_scores`, B at least 1,
    num_pages at most Nmax. newest_unbuilt: the page of the last token has no estimate even if it is full."""
    assert s.record is not None
    batch, query_heads, _ = q.shape
    heads, layout = s.num_kv_heads, s.layout
    group, n_max, device = query_heads // heads, page_table.shape[1], q.device
    page_table, num_pages = page_table.contiguous(), num_pages.contiguous()
    q, record, center = (aligned(x) for x in (q, s.record, s.center))
    seq_lens = None if seq_lens is None else seq_lens.contiguous()

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    b_block = batch_block(batch)
    registers = REGISTERS[layout.head_dim]
    target = MULTIPROCESSORS * (65536 // (32 * WARPS * registers))
    items = most_items(target, batch, heads)
    # Not filled: past the pages of a request, up to Nmax, lies most of what the longest context allows.
    lse = floats(batch, query_heads, n_max)
    weight, value_scale = (lse, lse) if tail == "off" else (torch.empty_like(lse), floats(batch, heads, n_max))
    made = Scan(lse, weight, value_scale, floats(items, group), floats(items, group), target)
    _scan_pages[(target,)](
        q,
        record,
        s.valid.contiguous().view(torch.uint8),
        center,
        page_table,
        num_pages,
        num_pages if seq_lens is None else seq_lens,
        made.lse,
        made.weight,
        made.value_scale,
        made.peak,
        made.total,
        batch,
        sm_scale,
        logit_cap,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        lse.stride(0),
        lse.stride(1),
        n_max,
        NUM_HEADS=heads,
        GROUP=group,
        TAIL=TAILS.index(tail),
        CAPPED=logit_cap > 0.0,
        PARTIAL=seq_lens is not None,
        NEWEST=int(newest_unbuilt),
        B_BLOCK=b_block,
        WARPS=WARPS,
        TARGET=target,
        STAGES=STAGES,
        **layout.constants,
        **chained(),
        num_warps=WARPS,
        maxnreg=registers,
    )
    return made
