"""Triton sum of the tail: what the pages that were not read add to an output, by their estimated weights and value means.

Work is cut into items as the scan's is. A warp takes 16 pages at a time: their weights, in two bf16 parts for each of up to
eight query heads, meet their value means on tensor cores. A lane takes four of the pages and an eighth of the dimensions, as
they lie in memory: in which order a product takes pages and dimensions is free, if both of its sides agree. What the next step
needs is loaded before this one is summed.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..build_page_summaries import PageSummaries
from ..common.capability import interpreted
from ..common.lanes import aligned, bytes_bf16, dot_bf16_k16, helper, load_words, row_max, split_bf16
from ..page_lse.kernel import batch_block, item_layout, item_place, most_items

TARGET = 264
"""Items: two for every multiprocessor of an H200; each leaves a part that the merge reads."""
WARPS = 4
SLICES = 2
"""Times 16 pages that a warp takes in one step."""
LEAST_STEPS = 2
"""That an item has: what an item costs once is as much as one or two of them."""
CHUNK = 128
"""Most dimensions that are summed at a time: more sums would not fit into registers."""
SIGNS = tl.constexpr(-0x7F7F7F80)
"""0x80808080 as an int32."""


@helper
def _look_up(table, logical, end, SLICES: tl.constexpr):
    """Pages that a lane takes from `logical` on, int32 [T] each: four of each slice. Page 0 stands for no page: its value mean
    is there to be read, and nothing of it counts."""
    found = ()
    for i in tl.static_range(4 * SLICES):
        place = logical + 16 * (i // 4) + i % 4
        found = found + (tl.load(table + place, mask=place < end, other=0),)
    return found


@helper
def _fetch(found, means, weights, scales, logical, end, shown, STRIDE: tl.constexpr, WORDS: tl.constexpr, SLICES: tl.constexpr):
    """Of the pages that `_look_up` found: WORDS words of the value mean, the weight for this lane's query head, the scale."""
    words, weight, scale = (), (), ()
    for i in tl.static_range(4 * SLICES):
        place = logical + 16 * (i // 4) + i % 4
        weight = weight + (tl.load(weights + place, mask=shown & (place < end), other=float("-inf")),)
        scale = scale + (tl.load(scales + place, mask=place < end, other=0.0),)
    for i in tl.static_range(4 * SLICES):
        words = words + load_words((means + found[i].to(tl.int64) * STRIDE).to(tl.pointer_type(tl.int32)), WORDS)
    return words, weight, scale


@triton.jit(do_not_specialize=["batch", "weight_row", "weight_head", "scale_head", "table_row"])
def _sum_tail(
    weight_ptr,
    scale_ptr,
    mean_ptr,
    table_ptr,
    held_ptr,
    peak_ptr,
    sum_ptr,
    value_ptr,
    work_ptr,
    batch,
    weight_row,
    weight_head,
    scale_head,
    table_row,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    SLICES: tl.constexpr,
    WARPS: tl.constexpr,
    TARGET: tl.constexpr,
    NATIVE: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    STEP: tl.constexpr = 16 * SLICES * WARPS
    # Words of a page's value mean that a lane takes, and products that its bytes take part in.
    WORDS: tl.constexpr = CHUNK // 32
    TILES: tl.constexpr = CHUNK // 8
    CHUNKS: tl.constexpr = DV // CHUNK
    pages, length, count, ends = item_layout(held_ptr, batch, TARGET, NUM_HEADS, B_BLOCK, UNIT)
    row = tl.arange(0, B_BLOCK)
    thread = tl.arange(0, 32 * WARPS)
    r, c = (thread & 31) >> 2, thread & 3
    mine = 16 * SLICES * (thread >> 5) + 4 * c
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        request, head, number, _ = item_place(item, count, ends, B_BLOCK)
        row64 = request.to(tl.int64)
        first = number * length
        end = tl.minimum(first + length, tl.sum(tl.where(row == request, pages, 0), 0))
        table = table_ptr + row64 * table_row
        scales = scale_ptr + (row64 * NUM_HEADS + head) * scale_head
        for turn in range((GROUP + 7) // 8 * CHUNKS):
            tile, start = turn // CHUNKS, turn % CHUNKS * CHUNK
            means = mean_ptr + head * DV + start + r * TILES
            shown = 8 * tile + r < GROUP
            member = head * GROUP + tl.minimum(8 * tile + r, GROUP - 1)
            weights = weight_ptr + row64 * weight_row + member.to(tl.int64) * weight_head
            peak = tl.full([32 * WARPS], float("-inf"), tl.float32)
            total = tl.zeros([32 * WARPS], tl.float32)
            # Four of every product: two columns for the upper parts of the weights, and the same two for the lower ones.
            sums = ()
            for _number in tl.static_range(4 * TILES):
                sums = sums + (tl.zeros([32 * WARPS], tl.float32),)
            found = _look_up(table, first + mine, end, SLICES)
            words, weight, scale = _fetch(
                found, means, weights, scales, first + mine, end, shown, NUM_HEADS * DV, WORDS, SLICES
            )
            found = _look_up(table, first + STEP + mine, end, SLICES)
            for begin in range(first, end, STEP):
                held_words, held_weight, held_scale = words, weight, scale
                coming = begin + STEP + mine
                words, weight, scale = _fetch(found, means, weights, scales, coming, end, shown, NUM_HEADS * DV, WORDS, SLICES)
                found = _look_up(table, coming + STEP, end, SLICES)

                top = held_weight[0]
                for i in tl.static_range(1, 4 * SLICES):
                    top = tl.maximum(top, held_weight[i])
                new = tl.maximum(peak, row_max(top, NATIVE))
                base = tl.where(new == float("-inf"), 0.0, new)
                rescale = tl.exp2((peak - base) * LOG2E)
                peak = new
                total *= rescale
                next_sums = ()
                for i in tl.static_range(4 * TILES):
                    next_sums = next_sums + (sums[i] * rescale,)
                sums = next_sums
                scaled = ()
                for i in tl.static_range(4 * SLICES):
                    share = tl.exp2((held_weight[i] - base) * LOG2E)
                    total += share
                    scaled = scaled + (share * tl.where(tl.abs(held_scale[i]) < float("inf"), held_scale[i], 0.0),)
                for part in tl.static_range(SLICES):
                    a0, a1 = split_bf16(scaled[4 * part], scaled[4 * part + 1], NATIVE)
                    a2, a3 = split_bf16(scaled[4 * part + 2], scaled[4 * part + 3], NATIVE)
                    next_sums = ()
                    for word in tl.static_range(WORDS):
                        w0 = held_words[(4 * part) * WORDS + word] ^ SIGNS
                        w1 = held_words[(4 * part + 1) * WORDS + word] ^ SIGNS
                        w2 = held_words[(4 * part + 2) * WORDS + word] ^ SIGNS
                        w3 = held_words[(4 * part + 3) * WORDS + word] ^ SIGNS
                        for byte in tl.static_range(4):
                            next_sums = next_sums + dot_bf16_k16(
                                a0,
                                a1,
                                a2,
                                a3,
                                bytes_bf16(w0, w1, byte, NATIVE),
                                bytes_bf16(w2, w3, byte, NATIVE),
                                sums[16 * word + 4 * byte],
                                sums[16 * word + 4 * byte + 1],
                                sums[16 * word + 4 * byte + 2],
                                sums[16 * word + 4 * byte + 3],
                                NATIVE,
                            )
                    sums = next_sums

            # The warps meet. A lane holds the same dimension of each product in columns 2c and 2c + 1, so that all it holds are
            # DV / 4 dimensions in a row.
            best = tl.max(tl.max(tl.reshape(peak, [WARPS, 8, 4]), 2), 0)
            above = tl.where(best == float("-inf"), 0.0, best)[None, :, None]
            factor = tl.exp2((tl.reshape(peak, [WARPS, 8, 4]) - above) * LOG2E)
            total = tl.sum(tl.sum(tl.reshape(total, [WARPS, 8, 4]) * factor, 2), 0)
            factor = tl.reshape(factor, [32 * WARPS])
            group = 8 * tile + tl.arange(0, 8)
            tl.store(peak_ptr + item * GROUP + group, best, mask=group < GROUP)
            tl.store(sum_ptr + item * GROUP + group, total, mask=group < GROUP)
            # Their sums through memory, in one exchange. All of it depends on `best`, for which all warps met: so every one has
            # read by then what the last item left there.
            part = (tl.program_id(0) * WARPS + (thread >> 5)) * (8 * CHUNK) + r * CHUNK + c * (CHUNK // 4)
            for column in tl.static_range(2):
                for i in tl.static_range(0, TILES, 4):
                    even = tl.join(
                        (sums[4 * i + column] + sums[4 * i + column + 2]) * factor,
                        (sums[4 * i + column + 8] + sums[4 * i + column + 10]) * factor,
                    )
                    odd = tl.join(
                        (sums[4 * i + column + 4] + sums[4 * i + column + 6]) * factor,
                        (sums[4 * i + column + 12] + sums[4 * i + column + 14]) * factor,
                    )
                    at = work_ptr + part[:, None] + (column * TILES + i + tl.arange(0, 4))[None, :]
                    tl.store(at, tl.reshape(tl.join(even, odd), [32 * WARPS, 4]))
            tl.debug_barrier()
            dim = tl.arange(0, CHUNK_BLOCK)
            shared = work_ptr + tl.program_id(0) * (WARPS * 8 * CHUNK) + tl.arange(0, 8)[:, None] * CHUNK + dim[None, :]
            value = tl.zeros([8, CHUNK_BLOCK], tl.float32)
            for warp in tl.static_range(WARPS):
                value += tl.load(shared + warp * (8 * CHUNK), mask=(dim < CHUNK)[None, :], other=0.0)
            at = value_ptr + (item * GROUP + group)[:, None] * DV + start + dim[None, :]
            tl.store(at, value, mask=(group < GROUP)[:, None] & (dim < CHUNK)[None, :])


@dataclass(frozen=True)
class TailParts:
    """Sums over the tail of every item, fp32.

    peak, total [items, G]: largest log weight, and sum of exp(weight - peak). value [items, G, Dv]: sum of the value means so
    weighed. num_pages int32 [B]: what the items were cut from, each a multiple of `unit` pages.
    """

    peak: torch.Tensor
    total: torch.Tensor
    value: torch.Tensor
    num_pages: torch.Tensor
    unit: int


def sum_tail(
    weight: torch.Tensor, value_scale: torch.Tensor, s: PageSummaries, page_table: torch.Tensor, num_pages: torch.Tensor
) -> TailParts:
    """Sum the tail. Weights times scales are taken in two bf16 parts: 16 bits of each.

    Args:
        weight: fp32 [B, Hq, Nmax], natural log of every page's weight, innermost dimension contiguous; -inf where a page has
            none or was read.
        value_scale: fp32 [B, H, Nmax], contiguous: scale of every page's value mean, as the scan found it.
        s: packed summaries with value means.
        page_table: int32 [B, Nmax], innermost dimension contiguous. num_pages: int32 [B], at most Nmax.
    """
    assert s.values is not None
    batch, query_heads, _ = weight.shape
    heads, dim = s.num_kv_heads, s.layout.v_head_dim
    group, items = query_heads // heads, most_items(TARGET, batch, heads)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=weight.device)

    made = TailParts(
        floats(items, group), floats(items, group), floats(items, group, dim), num_pages, LEAST_STEPS * 16 * SLICES * WARPS
    )
    _sum_tail[(TARGET,)](
        weight,
        value_scale,
        aligned(s.values),
        page_table,
        num_pages,
        made.peak,
        made.total,
        made.value,
        floats(TARGET, WARPS, 8, min(dim, CHUNK)),
        batch,
        weight.stride(0),
        weight.stride(1),
        value_scale.stride(1),
        page_table.stride(0),
        NUM_HEADS=heads,
        GROUP=group,
        DV=dim,
        CHUNK=min(dim, CHUNK),
        CHUNK_BLOCK=triton.next_power_of_2(min(dim, CHUNK)),
        B_BLOCK=batch_block(batch),
        UNIT=made.unit,
        SLICES=SLICES,
        WARPS=WARPS,
        TARGET=TARGET,
        NATIVE=not interpreted(),
        num_warps=WARPS,
        maxnreg=255,  # two programs a multiprocessor have room for it
    )
    return made
