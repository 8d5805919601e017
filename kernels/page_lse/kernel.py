"""Triton scan: every record is read once for all query heads of its KV head.

Work is cut into items, each a run of pages of one (request, KV head), so that one long request among short ones is spread
over the whole device. How long an item is follows from the live lengths alone; a fixed number of programs takes the items
in turn.

The levels of a record meet the queries on integer tensor cores, as they are stored: a query is taken as 16-bit fixed point
relative to its largest entry, in two bytes that stand in two columns. Products are then exact, and a level costs a fraction of
an instruction to unpack. Pages lie along the lanes and the tokens of a page within one, so that its log-sum-exp needs no
exchange. Everything is in base 2 until it is stored.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..build_page_summaries import PageSummaries
from ..common.device import load_section, round_half_even, soft_cap

MULTIPROCESSORS = 132
"""Of an H200. A scan has as many items as its programs fit there at once."""
ONE_WARP = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
"""Whether a program of one warp holds 16 pages without spilling. Newer compilers need more registers for the same kernel."""
N_BLOCK = 16
"""Pages that a program takes in one step."""
TAILS = ("off", "qmu", "flat")


@triton.jit
def item_layout(held_ptr, batch, TARGET: tl.constexpr, NUM_HEADS: tl.constexpr, B_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr):
    """Cut all pages into about TARGET items.

    Returns pages a request [B_BLOCK], pages an item, items a (request, head) [B_BLOCK], and the first item behind each
    request [B_BLOCK].
    """
    row = tl.arange(0, B_BLOCK)
    pages = tl.load(held_ptr + row, mask=row < batch, other=0).to(tl.int32)
    share = (tl.sum(pages, 0) * NUM_HEADS + TARGET - 1) // TARGET
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


@triton.jit
def _fixed_point(x, unit, part):
    """x / unit, a whole number below 2^15 in size once rounded, as int8: its upper byte where part is 0, else its lower one."""
    whole = round_half_even(tl.div_rn(x, unit + tl.zeros_like(x)))
    # Ties go up, so that the lower byte is never 128.
    upper = round_half_even((whole + 0.25) * 0.00390625)
    return tl.where(part == 0, upper, whole - 256.0 * upper).to(tl.int8)


@triton.jit
def _joined(x, ROWS: tl.constexpr, G_BLOCK: tl.constexpr):
    """Products with both bytes of every query, int32 [ROWS, 2 G], as fp32 [ROWS, G]."""
    upper, lower = tl.split(tl.reshape(x, [ROWS, G_BLOCK, 2]))
    return (upper * 256 + lower).to(tl.float32)


@triton.jit
def _token_logits(coef, BYTE: tl.constexpr, spread, scales, offset, cap, CAPPED: tl.constexpr):
    """Logits fp32 [words, G, N] of one token of every word.

    Its coefficients are a byte of `coef`, int32 [R, words, N]; its bf16 scale is the lower half of `scales` where that byte is
    even, else the upper one. `spread` fp32 [R, 1, G, N] are the queries along the basis.
    """
    levels = ((coef << (24 - 8 * BYTE)) >> 24).to(tl.float32)
    scale = (scales & -65536 if BYTE % 2 == 1 else scales << 16).to(tl.float32, bitcast=True)
    logits = tl.sum(levels[:, :, None, :] * spread, 0) * scale[:, None, :] + offset
    if CAPPED:
        logits = soft_cap(logits, cap)
    return logits


@triton.jit(do_not_specialize=["batch", "table_row", "lse_row", "lse_head"])
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
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    G_BLOCK: tl.constexpr,
    RECORD: tl.constexpr,
    D: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    R: tl.constexpr,
    R_BLOCK: tl.constexpr,
    BASIS: tl.constexpr,
    BASIS_SCALE: tl.constexpr,
    COEF: tl.constexpr,
    COEF_SCALE: tl.constexpr,
    MEAN: tl.constexpr,
    MEAN_SCALE: tl.constexpr,
    TAIL: tl.constexpr,
    CAPPED: tl.constexpr,
    PARTIAL: tl.constexpr,
    B_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    cap = logit_cap * LOG2E
    pages, length, count, ends = item_layout(held_ptr, batch, TARGET, NUM_HEADS, B_BLOCK, N_BLOCK)
    row = tl.arange(0, B_BLOCK)
    group = tl.arange(0, G_BLOCK)
    half = tl.arange(0, HALF_BLOCK)
    inside = half < D // 2
    column = tl.arange(0, R_BLOCK)
    kept = column < R
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        request, head, number, _ = item_place(item, count, ends, B_BLOCK)
        held = tl.sum(tl.where(row == request, pages, 0), 0)
        row64 = request.to(tl.int64)
        byte = tl.arange(0, 2 * G_BLOCK)
        query = q_ptr + row64 * q_row + (head * GROUP + byte // 2)[None, :] * q_head + half[:, None]
        q_mask = inside[:, None] & (byte // 2 < GROUP)[None, :]
        low = tl.load(query, mask=q_mask, other=0.0).to(tl.float32)
        high = tl.load(query + D // 2, mask=q_mask, other=0.0).to(tl.float32)
        unit = tl.maximum(tl.maximum(tl.max(tl.abs(low), 0), tl.max(tl.abs(high), 0)) / 32512.0, 1e-30)
        q_low = _fixed_point(low, unit[None, :], (byte % 2)[None, :])
        q_high = _fixed_point(high, unit[None, :], (byte % 2)[None, :])
        center = center_ptr + head * D + half
        q_center = tl.sum(tl.load(center, mask=inside, other=0.0)[:, None] * low, 0)
        q_center += tl.sum(tl.load(center + D // 2, mask=inside, other=0.0)[:, None] * high, 0)
        q_center, _ = tl.split(tl.reshape(q_center * (sm_scale * LOG2E), [G_BLOCK, 2]))
        unit, _ = tl.split(tl.reshape(unit * (sm_scale * LOG2E), [G_BLOCK, 2]))
        # Levels of the low dims are stored with 8 added.
        excess = 8 * tl.sum(q_low.to(tl.int32), 0)

        end = tl.minimum(number * length + length, held)
        complete = end
        if PARTIAL:
            complete = tl.minimum(end, (tl.load(lens_ptr + request) // 16).to(tl.int32))
        peak = tl.full([G_BLOCK, N_BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([G_BLOCK, N_BLOCK], tl.float32)
        first = number * length
        table = table_ptr + row64 * table_row
        # Pages are looked up one step ahead, so that it is known where their records lie when a step begins. Behind the last
        # one stands page 0, whose record is there to be read and never counts.
        logical = first + tl.arange(0, N_BLOCK)
        following = tl.load(table + logical, mask=logical < end, other=0)
        for begin in tl.range(first, end, N_BLOCK, num_stages=1):
            logical = begin + tl.arange(0, N_BLOCK)
            physical = following.to(tl.int64)
            following = tl.load(table + logical + N_BLOCK, mask=logical + N_BLOCK < end, other=0)
            scored = (logical < complete) & (tl.load(valid_ptr + physical) != 0)
            record = record_ptr + (physical * NUM_HEADS + head) * RECORD
            levels = record.to(tl.pointer_type(tl.int8))
            words = record.to(tl.pointer_type(tl.int32))

            at = (record[:, None] + (BASIS + column * (D // 2))[None, :])[:, :, None] + half[None, None, :]
            within = kept[None, :, None] & inside[None, None, :]
            packed = load_section(at, within, R_BLOCK == R and HALF_BLOCK == D // 2)
            packed = tl.reshape(packed, [N_BLOCK * R_BLOCK, HALF_BLOCK])
            # Upper nibbles stay where they are, sixteen times too large; flipping their top bit takes off the 8 added to them.
            spread = tl.dot(((packed & 0xF0) ^ 0x80).to(tl.int8, bitcast=True), q_high, out_dtype=tl.int32)
            spread = (spread >> 4) - excess[None, :]
            spread = tl.dot((packed & 15).to(tl.int8, bitcast=True), q_low, spread, out_dtype=tl.int32)
            at = record.to(tl.pointer_type(tl.bfloat16))[:, None] + (BASIS_SCALE // 2 + column)[None, :]
            basis_scale = load_section(at, kept[None, :], R_BLOCK == R).to(tl.float32)
            spread = tl.reshape(_joined(spread, N_BLOCK * R_BLOCK, G_BLOCK), [N_BLOCK, R_BLOCK, G_BLOCK])
            spread = tl.permute(spread * (basis_scale[:, :, None] * unit[None, None, :]), [1, 2, 0])[:, None, :, :]

            at = levels[:, None] + (MEAN + half)[None, :]
            offset = tl.dot(load_section(at, inside[None, :], HALF_BLOCK == D // 2), q_low, out_dtype=tl.int32)
            mean_high = load_section(at + D // 2, inside[None, :], HALF_BLOCK == D // 2)
            offset = tl.dot(mean_high, q_high, offset, out_dtype=tl.int32)
            mean_scale = (tl.load(words + MEAN_SCALE // 4) << 16).to(tl.float32, bitcast=True)
            offset = _joined(offset, N_BLOCK, G_BLOCK) * (mean_scale[:, None] * unit[None, :]) + q_center[None, :]
            offset = tl.trans(offset)

            # Coefficients of four tokens are a word. Half of the words at a time: all logits at once would fill the registers.
            shift = offset[None, :, :]
            top = tl.full([G_BLOCK, N_BLOCK], float("-inf"), tl.float32)
            mass = tl.zeros([G_BLOCK, N_BLOCK], tl.float32)
            for part in tl.static_range(2):
                word = 2 * part + tl.arange(0, 2)
                at = (words[:, None] + (COEF // 4 + column * 4)[None, :])[:, :, None] + word[None, None, :]
                coef = tl.permute(load_section(at, kept[None, :, None], R_BLOCK == R), [1, 2, 0])
                at = words[:, None] + (COEF_SCALE // 4 + 2 * word)[None, :]
                front, back = tl.trans(tl.load(at)), tl.trans(tl.load(at + 1))
                l0 = _token_logits(coef, 0, spread, front, shift, cap, CAPPED)
                l1 = _token_logits(coef, 1, spread, front, shift, cap, CAPPED)
                l2 = _token_logits(coef, 2, spread, back, shift, cap, CAPPED)
                l3 = _token_logits(coef, 3, spread, back, shift, cap, CAPPED)
                new = tl.maximum(top, tl.max(tl.maximum(tl.maximum(l0, l1), tl.maximum(l2, l3)), 0))
                base = new[None, :, :]
                more = (tl.exp2(l0 - base) + tl.exp2(l1 - base)) + (tl.exp2(l2 - base) + tl.exp2(l3 - base))
                mass = mass * tl.exp2(top - new) + tl.sum(more, 0)
                top = new
            lse = top + tl.log2(mass)
            # A record with a NaN scale gives NaN: no estimate for that page alone, and no part in any sum.
            counted = scored[None, :] & (tl.abs(lse) < float("inf"))
            plane = row64 * lse_row + (head * GROUP + group)[:, None] * lse_head + logical[None, :]
            shown = (logical < end)[None, :] & (group < GROUP)[:, None]
            tl.store(lse_ptr + plane, tl.where(scored[None, :], lse * LN2, float("inf")), mask=shown)

            known = tl.where(counted, lse, float("-inf"))
            new = tl.maximum(peak, known)
            base = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp2(peak - base) + tl.exp2(known - base)
            peak = new

            if TAIL > 0:
                if TAIL == 1:
                    weight = offset
                    if CAPPED:
                        weight = soft_cap(weight, cap)
                    weight += 4.0
                else:
                    weight = lse + 0.5 * (lse - 4.0 - top)
                weight = tl.where(counted, weight, float("-inf"))
                tl.store(weight_ptr + plane, weight * LN2, mask=shown)

        slot = item * GROUP + group
        mine = group < GROUP
        best = tl.max(peak, 1)
        base = tl.where(best == float("-inf"), 0.0, best)
        tl.store(peak_ptr + slot, best * LN2, mask=mine)
        tl.store(sum_ptr + slot, tl.sum(total * tl.exp2(peak - base[:, None]), 1), mask=mine)


@dataclass(frozen=True)
class Scan:
    """What one scan leaves on the device, all fp32.

    lse [B, Hq, Nmax]: as `page_lse`, written where a page is listed and nowhere else. weight [B, Hq, Nmax]: natural log of its
    tail weight, likewise; `lse` itself without a tail.
    peak, total [items, G]: largest page log-sum-exp of an item, and sum of exp(lse - peak). target: into about how many items
    `item_layout` cut the pages.
    """

    lse: torch.Tensor
    weight: torch.Tensor
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
    return target + batch * heads


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
) -> Scan:
    """Scan the packed summaries of every listed page; arguments as `page_scores`, B at least 1,
    num_pages at most Nmax."""
    assert s.record is not None
    batch, query_heads, _ = q.shape
    heads, layout = s.num_kv_heads, s.layout
    group, n_max, device = query_heads // heads, page_table.shape[1], q.device
    q, page_table, num_pages = q.contiguous(), page_table.contiguous(), num_pages.contiguous()
    seq_lens = None if seq_lens is None else seq_lens.contiguous()

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    groups, columns = max(4, triton.next_power_of_2(group)), triton.next_power_of_2(layout.rank)
    half = triton.next_power_of_2(layout.head_dim // 2)
    b_block = batch_block(batch)
    # The layout of a large batch takes registers too.
    warps, registers = _warps(half, columns, groups, spare=half == layout.head_dim // 2 and b_block <= 256)
    target = MULTIPROCESSORS * (65536 // (32 * warps * registers))
    items = most_items(target, batch, heads)
    # Not filled: past the pages of a request, up to Nmax, lies most of what the longest context allows.
    lse = floats(batch, query_heads, n_max)
    weight = lse if tail == "off" else torch.empty_like(lse)
    made = Scan(lse, weight, floats(items, group), floats(items, group), target)
    _scan_pages[(target,)](
        q,
        s.record.contiguous(),
        s.valid.contiguous().view(torch.uint8),
        s.center.contiguous(),
        page_table,
        num_pages,
        num_pages if seq_lens is None else seq_lens,
        made.lse,
        made.weight,
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
        NUM_HEADS=heads,
        GROUP=group,
        G_BLOCK=groups,
        HALF_BLOCK=half,
        R_BLOCK=columns,
        TAIL=TAILS.index(tail),
        CAPPED=logit_cap > 0.0,
        PARTIAL=seq_lens is not None,
        B_BLOCK=b_block,
        N_BLOCK=N_BLOCK,
        TARGET=target,
        **layout.key_constants,
        num_warps=warps,
        maxnreg=min(registers, 255),
    )
    return made


def _warps(half: int, columns: int, groups: int, *, spare: bool) -> tuple[int, int]:
    """Warps of a program, and registers that a thread of them is given: as few as hold the levels of 16 pages and the logits of
    all groups.

    Args:
        half, columns, groups: block sizes of half a head, the rank and the group.
        spare: whether neither masks, where half a head does not fill its block, nor a large batch take registers of their own.
    """
    rows = half * columns // 512
    if rows > 2 or (columns > 8 and groups > 8):
        return 8, 256
    if rows > 1 or groups > 8:
        return 4, 256
    if not ONE_WARP or columns > 8 or not spare:
        return 2, 256
    return 1, 168 if groups <= 4 else 256
