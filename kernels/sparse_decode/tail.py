"""Triton sum of the tail: what the pages that were not read add to an output, by their estimated weights and value means."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..build_page_summaries import PageSummaries
from ..common.device import load_section
from ..page_lse.kernel import batch_block, item_layout, item_place, most_items

TARGET = 264
"""Items: two for every multiprocessor of an H200; each leaves a part that the merge reads."""
N_BLOCK = 128
"""Pages that a program takes in one step."""


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
    batch,
    weight_row,
    weight_head,
    scale_head,
    table_row,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    G_BLOCK: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BF16: tl.constexpr,
    B_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
):
    pages, length, count, ends = item_layout(held_ptr, batch, TARGET, NUM_HEADS, B_BLOCK, N_BLOCK)
    row = tl.arange(0, B_BLOCK)
    group = tl.arange(0, G_BLOCK)
    mine = group < GROUP
    dim = tl.arange(0, DV_BLOCK)
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        request, head, number, _ = item_place(item, count, ends, B_BLOCK)
        end = tl.minimum(number * length + length, tl.sum(tl.where(row == request, pages, 0), 0))
        table = table_ptr + request.to(tl.int64) * table_row
        scales = scale_ptr + (request * NUM_HEADS + head).to(tl.int64) * scale_head
        weights = weight_ptr + request.to(tl.int64) * weight_row + (head * GROUP + group)[:, None].to(tl.int64) * weight_head
        peak = tl.full([G_BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([G_BLOCK], tl.float32)
        value = tl.zeros([DV_BLOCK, G_BLOCK], tl.float32)
        for begin in tl.range(number * length, end, N_BLOCK, num_stages=1):
            logical = begin + tl.arange(0, N_BLOCK)
            live = logical < end
            weight = tl.load(weights + logical[None, :], mask=mine[:, None] & live[None, :], other=float("-inf"))
            # Page 0, which stands for no page, has a value mean to be read; nothing of it counts.
            mean = mean_ptr + (tl.load(table + logical, mask=live, other=0).to(tl.int64) * NUM_HEADS + head) * DV
            scale = tl.load(scales + logical, mask=live, other=0.0)
            scale = tl.where(tl.abs(scale) < float("inf"), scale, 0.0)
            levels = load_section(mean[:, None] + dim[None, :], (dim < DV)[None, :], DV_BLOCK == DV)

            new = tl.maximum(peak, tl.max(weight, 1))
            base = tl.where(new == float("-inf"), 0.0, new)
            rescale = tl.exp(peak - base)
            weight = tl.exp(weight - base[:, None])
            total = total * rescale + tl.sum(weight, 1)
            peak = new
            weight = tl.trans(weight * scale[None, :])
            value *= rescale[None, :]
            if BF16:
                # In two parts, which keep sixteen bits of the weight; the levels are exact.
                upper = weight.to(tl.bfloat16)
                lower = (weight - upper.to(tl.float32)).to(tl.bfloat16)
                columns = tl.trans(levels.to(tl.bfloat16))
                value = tl.dot(columns, lower, tl.dot(columns, upper, value))
            else:
                # Weights span more than the exponents of fp16.
                value = tl.dot(tl.trans(levels.to(tl.float32)), weight, value, input_precision="ieee")
        slot = item * GROUP + group
        tl.store(peak_ptr + slot, peak, mask=mine)
        tl.store(sum_ptr + slot, total, mask=mine)
        tl.store(value_ptr + slot[None, :] * DV + dim[:, None], value, mask=mine[None, :] & (dim < DV)[:, None])


@dataclass(frozen=True)
class TailParts:
    """Sums over the tail of every item, fp32.

    peak, total [items, G]: largest log weight, and sum of exp(weight - peak). value [items, G, Dv]: sum of the value means so
    weighed. num_pages int32 [B]: what the items were cut from.
    """

    peak: torch.Tensor
    total: torch.Tensor
    value: torch.Tensor
    num_pages: torch.Tensor


def sum_tail(
    weight: torch.Tensor,
    value_scale: torch.Tensor,
    s: PageSummaries,
    page_table: torch.Tensor,
    num_pages: torch.Tensor,
    dtype: torch.dtype,
) -> TailParts:
    """Sum the tail.

    Args:
        weight: fp32 [B, Hq, Nmax], natural log of every page's weight, innermost dimension contiguous; -inf where a page has
            none or was read.
        value_scale: fp32 [B, H, Nmax], contiguous: scale of every page's value mean, as the scan found it.
        s: packed summaries with value means.
        page_table: int32 [B, Nmax], innermost dimension contiguous. num_pages: int32 [B], at most Nmax.
        dtype: of the model; bf16 sums on tensor cores.
    """
    assert s.values is not None
    batch, query_heads, _ = weight.shape
    heads, layout = s.num_kv_heads, s.layout
    group, items = query_heads // heads, most_items(TARGET, batch, heads)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(items, group, *shape, dtype=torch.float32, device=weight.device)

    made = TailParts(floats(), floats(), floats(layout.v_head_dim), num_pages)
    _sum_tail[(TARGET,)](
        weight,
        value_scale,
        s.values.contiguous(),
        page_table,
        num_pages,
        made.peak,
        made.total,
        made.value,
        batch,
        weight.stride(0),
        weight.stride(1),
        value_scale.stride(1),
        page_table.stride(0),
        NUM_HEADS=heads,
        GROUP=group,
        G_BLOCK=max(8, triton.next_power_of_2(group)),
        DV=layout.v_head_dim,
        DV_BLOCK=triton.next_power_of_2(layout.v_head_dim),
        BF16=dtype == torch.bfloat16,
        B_BLOCK=batch_block(batch),
        N_BLOCK=N_BLOCK,
        TARGET=TARGET,
        num_warps=4,
        maxnreg=255,  # two programs a multiprocessor have room for it; left alone, the assembler spills a few bytes
    )
    return made
