"""Triton plan of a decode step: one launch, nothing allocated, cost by the live lengths."""

import torch
import triton
import triton.language as tl

from .reference import DecodeBuffers, PageFlags

PROGRAMS = 264
"""Programs of a plan, shared out among its rows: two for every multiprocessor of an H200."""
BLOCK = 128
"""Pages that a program takes in one step."""


@triton.jit(do_not_specialize=["requests", "columns", "table_row"])
def _plan_rows(
    source_ptr,
    request_ptr,
    length_ptr,
    table_ptr,
    seq_lens_ptr,
    held_ptr,
    filled_ptr,
    last_ptr,
    valid_ptr,
    builds_ptr,
    reuses_ptr,
    invalid_ptr,
    requests,
    columns,
    source_row,
    table_row,
    valid_row,
    LAYERS: tl.constexpr,
    LAYER_BLOCK: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a (row, split): splits take the pages of their row in turn, the first one also the row's numbers."""
    row, split = tl.program_id(0), tl.program_id(1)
    row64 = row.to(tl.int64)
    real = row < requests
    length = tl.load(length_ptr + row, mask=real, other=1).to(tl.int32)
    held = tl.minimum((length + 15) // 16, columns)
    source = source_ptr + tl.load(request_ptr + row, mask=real, other=0).to(tl.int64) * source_row
    fills = real & (length % 16 == 0) & (length > 0)
    # The layers of this very step summarise the page that it fills.
    complete = length // 16 - fills.to(tl.int32)
    missing = tl.zeros([BLOCK], tl.int32)
    for begin in range(split * BLOCK, held, tl.num_programs(1) * BLOCK):
        logical = begin + tl.arange(0, BLOCK)
        live = logical < held
        page = tl.load(source + logical * 16, mask=live & real, other=0) >> 4
        tl.store(table_ptr + row64 * table_row + logical, page, mask=live)
        scored = live & real & (logical < complete)
        for layer in range(LAYERS):
            valid = tl.load(valid_ptr + layer * valid_row.to(tl.int64) + page, mask=scored, other=1)
            missing += (valid == 0).to(tl.int32)
    total = tl.sum(missing, 0)
    if total > 0:
        tl.atomic_add(invalid_ptr, total.to(tl.int64))

    if split == 0:
        current = tl.load(source + (held - 1) * 16, mask=real & (held > 0), other=0) >> 4
        tl.store(seq_lens_ptr + row, length.to(tl.int64))
        tl.store(held_ptr + row, held)
        tl.store(filled_ptr + row, tl.where(fills, current, -1).to(tl.int64))
        head = tl.arange(0, HEAD_BLOCK)
        tl.store(last_ptr + row * NUM_HEADS + head, (length - 1) % 16 + 1 + 0 * head, mask=head < NUM_HEADS)
        if real & (length % 16 == 1):
            layer = tl.arange(0, LAYER_BLOCK)
            at = valid_ptr + layer * valid_row.to(tl.int64) + current
            tl.store(at, tl.zeros([LAYER_BLOCK], tl.uint8), mask=layer < LAYERS)
            tl.store(builds_ptr + current, 0)
            tl.store(reuses_ptr + current, 0)
        if fills:
            tl.store(builds_ptr + current, tl.load(builds_ptr + current) + 1)


def plan_on_kernels(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    requests: int,
    out: DecodeBuffers,
    flags: PageFlags,
) -> None:
    """As `plan_decode`, without the checks."""
    batch, columns = out.page_table.shape
    layers, heads = flags.valid.shape[0], out.last_page_lens.shape[1]
    _plan_rows[(batch, max(1, PROGRAMS // batch))](
        req_to_token,
        req_pool_indices,
        seq_lens,
        out.page_table,
        out.seq_lens,
        out.num_pages,
        out.filled,
        out.last_page_lens,
        flags.valid.view(torch.uint8),
        flags.builds,
        flags.reuses,
        flags.invalid,
        requests,
        columns,
        req_to_token.stride(0),
        out.page_table.stride(0),
        flags.valid.stride(0),
        LAYERS=layers,
        LAYER_BLOCK=triton.next_power_of_2(layers),
        NUM_HEADS=heads,
        HEAD_BLOCK=triton.next_power_of_2(heads),
        BLOCK=BLOCK,
        num_warps=4,
    )
