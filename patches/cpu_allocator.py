"""On CPU: a torch form of the paged allocator's two Triton kernels. SGLang has one of its own from 0.5.22 on."""

from collections.abc import Callable
from typing import Any

import torch

from ..seams import Seam, serving


def extend_slots(
    prefix_lens: torch.Tensor, seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Token slots that an extend step writes.

    Args:
        prefix_lens, seq_lens: int [B], tokens before and after the step.
        last_loc: int [B], slot of the last cached token of each request, -1 without one.
        free_pages: int [n], pages in the order in which they are handed out.
        page_size: tokens of a page.

    Returns:
        int64 [sum(seq_lens - prefix_lens)], request by request. A request first fills the rest of its last page, then
        takes new ones.
    """
    count = seq_lens - prefix_lens
    rows = torch.repeat_interleave(torch.arange(len(count)), count)
    position = torch.arange(len(rows)) - (count.cumsum(0) - count)[rows] + prefix_lens[rows]
    held = (prefix_lens + page_size - 1) // page_size
    new = (seq_lens + page_size - 1) // page_size - held
    first_new = new.cumsum(0) - new
    in_last = position < held[rows] * page_size
    new_page = torch.where(in_last, 0, first_new[rows] + position // page_size - held[rows])
    fresh = free_pages[new_page] * page_size + position % page_size if len(free_pages) else torch.zeros_like(position)
    return torch.where(in_last, last_loc[rows] + 1 + position - prefix_lens[rows], fresh)


def _needs_torch(allocator: Any) -> bool:
    return str(allocator.device) == "cpu" and serving()


def _take(allocator: Any, prefix_lens: torch.Tensor, seq_lens: torch.Tensor, last_loc: torch.Tensor) -> torch.Tensor | None:
    size = allocator.page_size
    pages = int(((seq_lens + size - 1) // size - (prefix_lens + size - 1) // size).sum())
    if pages > len(allocator.free_pages):
        allocator.merge_and_sort_free()
    if pages > len(allocator.free_pages):
        return None
    slots = extend_slots(prefix_lens, seq_lens, last_loc, allocator.free_pages, size)
    allocator.free_pages = allocator.free_pages[pages:]
    return slots


def alloc_extend(
    original: Callable[..., Any],
    allocator: Any,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Around `PagedTokenToKVPoolAllocator.alloc_extend`: slots int64 of the new tokens, or None without room."""
    if not _needs_torch(allocator):
        return original(
            allocator, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, *args, **kwargs
        )  # fmt: skip
    return _take(allocator, prefix_lens, seq_lens, last_loc)


def alloc_decode(
    original: Callable[..., Any],
    allocator: Any,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
) -> torch.Tensor | None:
    """Around `PagedTokenToKVPoolAllocator.alloc_decode`: one slot a request, or None without room."""
    if not _needs_torch(allocator):
        return original(allocator, seq_lens, seq_lens_cpu, last_loc)
    return _take(allocator, seq_lens - 1, seq_lens, last_loc)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_extend",
        "around",
        alloc_extend,
        "allocates pages without Triton on CPU",
        versions=(None, "0.5.22"),
        device="cpu",
    ),
    Seam(
        "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_decode",
        "around",
        alloc_decode,
        "allocates pages without Triton on CPU",
        versions=(None, "0.5.22"),
        device="cpu",
    ),
)
