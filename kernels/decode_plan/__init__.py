"""Plan of a decode step: what its layers need of SGLang's tables, copied on the device before the first layer."""

import torch

from ..common import PAGE_SIZE, check_page_table, require
from ..common.capability import on_kernels
from .kernel import plan_on_kernels
from .reference import DecodeBuffers, PageFlags, plan

__all__ = ["DecodeBuffers", "PageFlags", "plan_decode"]


def plan_decode(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    requests: int,
    out: DecodeBuffers,
    flags: PageFlags,
) -> None:
    """Copy page tables and lengths into `out`, and note which pages the step begins and fills.

    A page whose first token the step writes loses its summary and starts to count again; one that it fills counts as built.
    Complete pages without a summary are added to `flags.invalid`, except the one that this step fills. Nothing is allocated
    and nothing waits for the device.

    Args:
        req_to_token: int32 [requests, tokens], token slots, innermost dimension contiguous. The 16 tokens of a page lie
            together.
        req_pool_indices: int [B], row of `req_to_token`.
        seq_lens: int [B], tokens, the current one included.
        requests: rows that are requests; the others pad a CUDA graph and are planned as one token of page 0, whatever they
            hold, without a mark on any page.
        out: buffers of B rows. Only columns of `page_table` that a row has are written; it is taken to have no more.
        flags: flags and counters of all pages, changed in place.

    Raises:
        ArgumentError: a shape, dtype, stride or device outside the above.
    """
    batch = out.page_table.shape[0]
    check_page_table(out.page_table, seq_lens, batch, "seq_lens")
    require(0 <= requests <= batch, f"requests must be 0 to B={batch}, got {requests}")
    require(
        req_to_token.dim() == 2 and req_to_token.dtype == torch.int32 and req_to_token.stride(1) == 1,
        f"req_to_token must be int32 [requests, tokens] without gaps in a row, got {req_to_token.dtype} "
        f"{list(req_to_token.shape)} with strides {list(req_to_token.stride())}",
    )
    require(
        out.page_table.shape[1] <= -(-req_to_token.shape[1] // PAGE_SIZE),
        f"page_table has {out.page_table.shape[1]} columns but req_to_token only {req_to_token.shape[1]} tokens",
    )
    require(
        req_pool_indices.shape == (batch,) and req_pool_indices.dtype in (torch.int32, torch.int64),
        f"req_pool_indices must be int32 or int64 [B={batch}], got {req_pool_indices.dtype} {list(req_pool_indices.shape)}",
    )
    wanted = (
        ("seq_lens", out.seq_lens, torch.int64, (batch,)),
        ("num_pages", out.num_pages, torch.int32, (batch,)),
        ("filled", out.filled, torch.int64, (batch,)),
        ("last_page_lens", out.last_page_lens, torch.int32, (batch, out.last_page_lens.shape[-1])),
        ("valid", flags.valid, torch.bool, (flags.valid.shape[0], flags.builds.shape[0])),
        ("builds", flags.builds, torch.int32, flags.builds.shape[:1]),
        ("reuses", flags.reuses, torch.int32, flags.builds.shape[:1]),
        ("invalid", flags.invalid, torch.int64, (1,)),
    )
    for name, tensor, dtype, shape in wanted:
        require(
            tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous() and tensor.device == req_to_token.device,
            f"{name} must be contiguous {dtype} {list(shape)} on {req_to_token.device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}",
        )
    require(
        req_pool_indices.is_contiguous() and seq_lens.is_contiguous() and out.page_table.stride(1) == 1,
        "req_pool_indices, seq_lens and the rows of page_table must be contiguous",
    )
    if batch == 0:
        return
    step = plan_on_kernels if on_kernels(out.page_table) else plan
    step(req_to_token, req_pool_indices, seq_lens, requests, out, flags)
