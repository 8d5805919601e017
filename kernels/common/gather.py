"""Index arithmetic between logical pages, physical pages and token slots, in torch."""

import torch


def soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """`cap * tanh(logits / cap)`, or `logits` itself where `cap` is 0."""
    return cap * torch.tanh(logits / cap) if cap > 0.0 else logits


def gqa_queries(q: torch.Tensor, num_kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """View q [B, Hq, D] as [B, H, G, D] in `dtype`: query heads of one KV head lie together."""
    batch, heads, dim = q.shape
    return q.to(dtype).view(batch, num_kv_heads, heads // num_kv_heads, dim)


def gather_pages(page_table: torch.Tensor, pages: torch.Tensor, listed: torch.Tensor) -> torch.Tensor:
    """Physical page of each logical page.

    Args:
        page_table: int32 [B, Nmax], logical to physical.
        pages: int [B, ...], logical pages; entries that are not listed may hold anything.
        listed: bool, broadcastable to `pages`: which of them are real.

    Returns:
        int64 like `pages`. An entry that is not listed repeats the first one of its row (physical page 0 where that is
        not listed either), so that nothing outside the request's own pages is ever read for it.
    """
    batch = page_table.shape[0]
    if pages.numel() == 0:
        return torch.zeros(pages.shape, dtype=torch.int64, device=pages.device)
    flat_listed = listed.expand(pages.shape).reshape(batch, -1)
    flat = torch.where(flat_listed, pages.reshape(batch, -1).long(), 0)
    physical = torch.where(flat_listed, page_table.long().gather(1, flat), 0)
    return torch.where(flat_listed, physical, physical[:, :1]).view(pages.shape)


def token_slots(physical: torch.Tensor, page_size: int) -> torch.Tensor:
    """Token slots [..., P] of physical pages [...] (int64)."""
    return physical.long().unsqueeze(-1) * page_size + torch.arange(page_size, device=physical.device)
