"""Reference of the selection, in torch on any device."""

import torch


def combined_score(lse: torch.Tensor, num_kv_heads: int, combine: str) -> torch.Tensor:
    """One score per (request, KV head, page) from the page log-sum-exp of its G query heads.

    Args:
        lse: fp32 [B, Hq, N]; -inf for pages that do not take part. No +inf, no NaN.
        combine: "mass" sums each head's softmax over pages, "peak" the softmax normalised by its peak instead, "max"
            takes the largest log-sum-exp of the group.

    Returns:
        fp32 [B, H, N], larger is better.
    """
    batch, heads, n = lse.shape
    grouped = lse.view(batch, num_kv_heads, heads // num_kv_heads, n)
    if combine == "max":
        return grouped.amax(2)
    peak = grouped.amax(-1, keepdim=True)
    weight = torch.exp(grouped - torch.where(torch.isfinite(peak), peak, 0.0))
    if combine == "mass":
        weight = weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(lse.dtype).tiny)
    return weight.sum(2)


def select(
    lse: torch.Tensor,
    num_pages: torch.Tensor,
    budget_pages: int,
    sink_pages: int,
    recent_pages: int,
    num_kv_heads: int,
    combine: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `select_pages`, without the checks."""
    batch, heads, n = lse.shape
    if n == 0:
        none = torch.full((batch, num_kv_heads, budget_pages), -1, dtype=torch.int32, device=lse.device)
        return none, torch.zeros(batch, dtype=torch.int32, device=lse.device)
    num_pages = num_pages.clamp(0, n)
    index = torch.arange(n, device=lse.device)
    live = index < num_pages.unsqueeze(1)
    lse = torch.where(live.unsqueeze(1), lse, -torch.inf)
    must = (lse == torch.inf).view(batch, num_kv_heads, heads // num_kv_heads, n).any(2)
    lse = torch.where(torch.isfinite(lse), lse, -torch.inf)
    score = combined_score(lse, num_kv_heads, combine)

    # The class decides before the score: 3 recent, 2 sink, 1 no estimate, 0 scored, -1 not a page of this request.
    recent = index >= (num_pages - recent_pages).unsqueeze(1)
    rank_class = torch.where(must, 1, 0)
    rank_class = torch.where((index < sink_pages).view(1, 1, n), 2, rank_class)
    rank_class = torch.where(recent.unsqueeze(1), 3, rank_class)
    rank_class = torch.where(live.unsqueeze(1), rank_class, -1)

    # Two stable sorts, least significant key first; stability leaves ties to the lower index.
    order = torch.argsort(score, dim=-1, descending=True, stable=True)
    by_class = torch.argsort(rank_class.gather(-1, order), dim=-1, descending=True, stable=True)
    order = order.gather(-1, by_class)

    counts = num_pages.clamp(max=budget_pages).to(torch.int32)
    kept = order[..., :budget_pages]
    if n < budget_pages:
        kept = torch.nn.functional.pad(kept, (0, budget_pages - n), value=n)
    slot = torch.arange(budget_pages, device=lse.device)
    chosen = slot < counts[:, None, None]
    kept = torch.where(chosen, kept, n).sort(-1).values
    return torch.where(chosen, kept, -1).to(torch.int32), counts
