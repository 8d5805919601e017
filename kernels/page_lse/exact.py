"""The truth that summaries estimate: exact page log-sum-exp from the keys themselves."""

import torch

from ..common import PAGE_SIZE, check_attention_args, gather_pages, gqa_queries, soft_cap, token_slots


def exact_page_lse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    *,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """Exact natural log-sum-exp of every page, the partial page included.

    Args:
        q: float [B, Hq, D].
        k_cache: float [slots, H, D].
        page_table: int32 [B, Nmax]; entries past a request's pages are never read.
        seq_lens: int [B], tokens.
        sm_scale, logit_cap: as in `page_lse`.

    Returns:
        fp32 [B, Hq, Nmax] (fp64 where q is fp64); -inf past the request.

    Raises:
        ArgumentError: a shape, dtype or device outside the above.
    """
    check_attention_args(q, k_cache, None, page_table, seq_lens, logit_cap)
    batch, heads, _ = q.shape
    n_max = page_table.shape[1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    logical = torch.arange(n_max, device=q.device).expand(batch, n_max)
    listed = logical * PAGE_SIZE < seq_lens.unsqueeze(1)
    slots = token_slots(gather_pages(page_table, logical, listed), PAGE_SIZE)
    keys = k_cache[slots].to(dtype)
    logits = torch.einsum("bhgd,bnphd->bhgnp", gqa_queries(q, k_cache.shape[1], dtype), keys)
    logits = soft_cap(sm_scale * logits, logit_cap)
    position = logical.unsqueeze(-1) * PAGE_SIZE + torch.arange(PAGE_SIZE, device=q.device)
    live = (position < seq_lens[:, None, None])[:, None, None]
    return torch.logsumexp(torch.where(live, logits, -torch.inf), -1).reshape(batch, heads, n_max)
