"""Triton scan: every record is read once for all query heads of its KV head.

Work is cut into items, each a run of pages of one (request, KV head), so that one long request among short ones is spread
over the whole device. How long an item is follows from the live lengths alone; a fixed number of programs takes the items
in turn.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..build_page_summaries import PageSummaries
from ..common.device import soft_cap

TARGET = 528
"""Items of a scan: four for every multiprocessor of an H200, so that the last ones to finish are short."""
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
    tail_peak_ptr,
    tail_sum_ptr,
    tail_value_ptr,
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
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BASIS: tl.constexpr,
    BASIS_SCALE: tl.constexpr,
    COEF: tl.constexpr,
    COEF_SCALE: tl.constexpr,
    MEAN: tl.constexpr,
    MEAN_SCALE: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    TAIL: tl.constexpr,
    CAPPED: tl.constexpr,
    PARTIAL: tl.constexpr,
    B_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
):
    pages, length, count, ends = item_layout(held_ptr, batch, TARGET, NUM_HEADS, B_BLOCK, N_BLOCK)
    row = tl.arange(0, B_BLOCK)
    group = tl.arange(0, G_BLOCK)
    half = tl.arange(0, HALF_BLOCK)
    inside = half < D // 2
    token = tl.arange(0, 16)
    dim = tl.arange(0, DV_BLOCK)
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        request, head, number, _ = item_place(item, count, ends, B_BLOCK)
        held = tl.sum(tl.where(row == request, pages, 0), 0)
        row64 = request.to(tl.int64)
        query = q_ptr + row64 * q_row + (head * GROUP + group)[None, :] * q_head + half[:, None]
        q_mask = inside[:, None] & (group < GROUP)[None, :]
        q_low = tl.load(query, mask=q_mask, other=0.0)
        q_high = tl.load(query + D // 2, mask=q_mask, other=0.0)
        center = center_ptr + head * D + half
        center_low = tl.load(center, mask=inside, other=0.0)
        center_high = tl.load(center + D // 2, mask=inside, other=0.0)
        q_center = tl.sum(center_low[:, None] * q_low.to(tl.float32), 0)
        q_center += tl.sum(center_high[:, None] * q_high.to(tl.float32), 0)

        peak = tl.full([G_BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([G_BLOCK], tl.float32)
        tail_peak = tl.full([G_BLOCK], float("-inf"), tl.float32)
        tail_total = tl.zeros([G_BLOCK], tl.float32)
        tail_value = tl.zeros([G_BLOCK, DV_BLOCK], tl.float32)
        first = number * length
        for begin in range(first, tl.minimum(first + length, held), N_BLOCK):
            logical = begin + tl.arange(0, N_BLOCK)
            live = logical < held
            physical = tl.load(table_ptr + row64 * table_row + logical, mask=live, other=0).to(tl.int64)
            scored = live & (tl.load(valid_ptr + physical, mask=live, other=0) != 0)
            if PARTIAL:
                scored = scored & ((logical + 1) * 16 <= tl.load(lens_ptr + request).to(tl.int32))
            record = record_ptr + (physical * NUM_HEADS + head) * RECORD
            scales = record.to(tl.pointer_type(tl.bfloat16))
            levels = record.to(tl.pointer_type(tl.int8))

            at = levels[:, None] + (MEAN + half)[None, :]
            mask = scored[:, None] & inside[None, :]
            mean_low = tl.load(at, mask=mask, other=0).to(q_low.dtype)
            mean_high = tl.load(at + D // 2, mask=mask, other=0).to(q_low.dtype)
            offset = tl.dot(mean_high, q_high, tl.dot(mean_low, q_low, input_precision="ieee"), input_precision="ieee")
            mean_scale = tl.load(scales + MEAN_SCALE // 2, mask=scored, other=0.0).to(tl.float32)
            offset = offset * mean_scale[:, None] + q_center[None, :]

            spread = tl.zeros([N_BLOCK, 16, G_BLOCK], tl.float32)
            for r in range(R):
                packed = tl.load(record[:, None] + (BASIS + r * (D // 2) + half)[None, :], mask=mask, other=0x88).to(tl.int32)
                low = ((packed & 15) - 8).to(q_low.dtype)
                high = ((packed >> 4) - 8).to(q_low.dtype)
                projected = tl.dot(high, q_high, tl.dot(low, q_low, input_precision="ieee"), input_precision="ieee")
                basis_scale = tl.load(scales + BASIS_SCALE // 2 + r, mask=scored, other=0.0).to(tl.float32)
                projected *= basis_scale[:, None]
                coef = tl.load(levels[:, None] + (COEF + r * 16 + token)[None, :], mask=scored[:, None], other=0)
                spread += coef.to(tl.float32)[:, :, None] * projected[:, None, :]
            coef_scale = tl.load(scales[:, None] + (COEF_SCALE // 2 + token)[None, :], mask=scored[:, None], other=0.0)
            logits = (spread * coef_scale.to(tl.float32)[:, :, None] + offset[:, None, :]) * sm_scale
            if CAPPED:
                logits = soft_cap(logits, logit_cap)
            top = tl.max(logits, 1)
            lse = top + tl.log(tl.sum(tl.exp(logits - top[:, None, :]), 1))
            # A record with a NaN scale gives NaN: no estimate for that page alone, and no part in any sum.
            counted = scored[:, None] & (tl.abs(lse) < float("inf"))
            written = tl.where(scored[:, None], lse, float("inf"))
            plane = row64 * lse_row + (head * GROUP + group)[None, :] * lse_head + logical[:, None]
            shown = live[:, None] & (group < GROUP)[None, :]
            tl.store(lse_ptr + plane, written, mask=shown)

            new = tl.maximum(peak, tl.max(tl.where(counted, lse, float("-inf")), 0))
            base = tl.where(new == float("-inf"), 0.0, new)
            mass = tl.where(counted, tl.exp(lse - base[None, :]), 0.0)
            total = total * tl.exp(peak - base) + tl.sum(mass, 0)
            peak = new

            if TAIL > 0:
                if TAIL == 1:
                    flat = offset * sm_scale
                    if CAPPED:
                        flat = soft_cap(flat, logit_cap)
                    weight = flat + 2.772588722239781
                else:
                    weight = lse + 0.5 * (lse - 2.772588722239781 - top)
                weight = tl.where(counted, weight, float("-inf"))
                tl.store(weight_ptr + plane, weight, mask=shown)
                new = tl.maximum(tail_peak, tl.max(weight, 0))
                base = tl.where(new == float("-inf"), 0.0, new)
                rescale = tl.exp(tail_peak - base)
                weight = tl.exp(weight - base[None, :])
                tail_total = tail_total * rescale + tl.sum(weight, 0)
                tail_peak = new
                value_scale = tl.load(scales + VALUE_SCALE // 2, mask=scored, other=0.0).to(tl.float32)
                value_scale = tl.where(value_scale < float("inf"), value_scale, 0.0)
                value = tl.load(levels[:, None] + (VALUE + dim)[None, :], mask=scored[:, None] & (dim < DV)[None, :], other=0)
                weight = tl.trans(weight * value_scale[:, None])
                tail_value *= rescale[:, None]
                if q_low.dtype == tl.bfloat16:
                    # In two parts, which keep sixteen bits of the weight; the levels are exact.
                    upper = weight.to(tl.bfloat16)
                    lower = (weight - upper.to(tl.float32)).to(tl.bfloat16)
                    tail_value = tl.dot(lower, value.to(tl.bfloat16), tl.dot(upper, value.to(tl.bfloat16), tail_value))
                else:
                    # Weights span more than the exponents of fp16.
                    tail_value = tl.dot(weight, value.to(tl.float32), tail_value, input_precision="ieee")

        slot = item * GROUP + group
        mine = group < GROUP
        tl.store(peak_ptr + slot, peak, mask=mine)
        tl.store(sum_ptr + slot, total, mask=mine)
        if TAIL > 0:
            tl.store(tail_peak_ptr + slot, tail_peak, mask=mine)
            tl.store(tail_sum_ptr + slot, tail_total, mask=mine)
            tl.store(tail_value_ptr + slot[:, None] * DV + dim[None, :], tail_value, mask=mine[:, None] & (dim < DV)[None, :])


@dataclass(frozen=True)
class Scan:
    """What one scan leaves on the device, all fp32.

    lse [B, Hq, Nmax]: as `page_lse`, written where a page is listed and nowhere else. weight [B, Hq, Nmax]: natural log of its
    tail weight, likewise.
    peak, total [items, G]: largest page log-sum-exp of an item, and sum of exp(lse - peak). tail_peak, tail_total [items, G]
    and tail_value [items, G, Dv]: the same of the tail weights, and of the value means that they weigh.
    """

    lse: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor
    weight: torch.Tensor
    tail_peak: torch.Tensor
    tail_total: torch.Tensor
    tail_value: torch.Tensor


def most_items(batch: int, heads: int) -> int:
    """Most items that `batch` requests of H KV heads are cut into."""
    return TARGET + batch * heads


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

    items, tailed = most_items(batch, heads), tail != "off"
    # Not filled: past the pages of a request, up to Nmax, lies most of what the longest context allows.
    lse = floats(batch, query_heads, n_max)
    weight = torch.empty_like(lse) if tailed else lse
    parts = [floats(items, group) for _ in range(4 if tailed else 2)]
    made = Scan(lse, parts[0], parts[1], weight, parts[-2], parts[-1], floats(items if tailed else 0, group, layout.v_head_dim))
    _scan_pages[(TARGET,)](
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
        made.tail_peak,
        made.tail_total,
        made.tail_value,
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
        G_BLOCK=16,
        HALF_BLOCK=max(16, triton.next_power_of_2(layout.head_dim // 2)),
        DV_BLOCK=max(16, triton.next_power_of_2(layout.v_head_dim)),
        TAIL=TAILS.index(tail),
        CAPPED=logit_cap > 0.0,
        PARTIAL=seq_lens is not None,
        B_BLOCK=triton.next_power_of_2(batch),
        N_BLOCK=N_BLOCK,
        TARGET=TARGET,
        **layout.constants,
        num_warps=4 if layout.head_dim <= 128 else 8,
    )
    return made
