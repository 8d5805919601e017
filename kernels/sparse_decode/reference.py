"""Reference of exact attention over listed pages, in torch on any device."""

import torch

from ..common import PAGE_SIZE, gather_pages, gqa_queries, soft_cap, token_slots


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    pages: torch.Tensor,
    counts: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    *,
    logit_cap: float,
    k_scale: float,
    v_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sparse_decode`: output [B, Hq, Dv] and natural log-sum-exp [B, Hq], both in fp32 (fp64 where q is fp64)."""
    batch, heads, _ = q.shape
    kv_heads = k_cache.shape[1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    selected = pages.shape[-1]
    listed = torch.arange(selected, device=q.device).view(1, 1, -1) < counts.view(-1, 1, 1)
    slots = token_slots(gather_pages(page_table, pages, listed), PAGE_SIZE)
    position = token_slots(pages, PAGE_SIZE)
    live = (listed.unsqueeze(-1) & (position < seq_lens.view(-1, 1, 1, 1))).flatten(2)

    head = torch.arange(kv_heads, device=q.device).view(1, -1, 1)
    slots = slots.flatten(2)
    k = k_cache[slots, head].to(dtype)
    # Rows past a request's end lie in its own last page and may hold anything, NaN included: values are zeroed before
    # they meet a zero probability, since 0 * NaN is NaN; keys only reach logits that are masked.
    v = torch.where(live.unsqueeze(-1), v_cache[slots, head].to(dtype), 0.0)
    logits = gqa_queries(q, kv_heads, dtype) @ k.transpose(-1, -2)
    logits = soft_cap(sm_scale * k_scale * logits, logit_cap)
    logits = torch.where(live.unsqueeze(2), logits, -torch.inf)
    lse = torch.logsumexp(logits, -1)
    probability = torch.exp(logits - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1))
    out = (v_scale * (probability @ v)).reshape(batch, heads, v_cache.shape[2])
    return out, lse.reshape(batch, heads)
