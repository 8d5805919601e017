"""Reference of the scan: page log-sum-exp and tail weights from summaries, in fp32 torch on any device."""

import math
from typing import NamedTuple

import torch

from ..build_page_summaries import PageFactors, PageSummaries
from ..common import PAGE_SIZE, gather_pages, gqa_queries, soft_cap


class PageScores(NamedTuple):
    """What one scan yields, all fp32.

    lse [B, Hq, Nmax]: natural log-sum-exp of each page; -inf past the request, +inf where there is no estimate.
    tail [B, Hq, Nmax]: natural log of the page's tail weight w; -inf where the page is not scored. None with gate "off".
    value_mean [B, H, Nmax, Dv]: mean values of the pages; None with gate "off".
    """

    lse: torch.Tensor
    tail: torch.Tensor | None
    value_mean: torch.Tensor | None


def page_scores(
    q: torch.Tensor,
    s: PageSummaries,
    page_table: torch.Tensor,
    num_pages: torch.Tensor,
    sm_scale: float,
    *,
    seq_lens: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    tail: str = "off",
) -> PageScores:
    """Scan the summaries of every listed page; arguments as `page_lse`, `tail` one of "off", "qmu", "flat".

    "qmu":  w = P exp(scale q.mu), the mass if every key of the page were its mean; without a soft cap a lower
            bound, by Jensen.
    "flat": w = exp(lse) flat^0.5 with flat = mean_t e^logit / max_t e^logit: pages whose mass sits on few tokens, for
            which the value mean says little, count less.
    """
    batch, heads, _ = q.shape
    n_max = page_table.shape[1]
    logical = torch.arange(n_max, device=q.device).expand(batch, n_max)
    listed = logical < num_pages.unsqueeze(1)
    physical = gather_pages(page_table, logical, listed)
    f = s.gather(physical)
    queries = gqa_queries(q, s.num_kv_heads, torch.float32)
    offset, intra = _logits(queries, f, s.center)

    logits = soft_cap(sm_scale * (offset.unsqueeze(-2) + intra), logit_cap)
    lse = torch.logsumexp(logits, -2)
    unscored = ~s.valid[physical]
    if seq_lens is not None:
        unscored = unscored | (logical >= (seq_lens // PAGE_SIZE).unsqueeze(1))
    unscored = (unscored & listed)[:, None, :, None]
    listed = listed[:, None, :, None]

    def per_head(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2).reshape(batch, heads, n_max)

    log_weight = None
    if tail == "qmu":
        log_weight = soft_cap(sm_scale * offset, logit_cap) + math.log(PAGE_SIZE)
    elif tail == "flat":
        log_flat = lse - math.log(PAGE_SIZE) - logits.amax(-2)
        log_weight = lse + 0.5 * log_flat
    if log_weight is not None:
        scored = listed & ~unscored & torch.isfinite(lse)
        log_weight = per_head(torch.where(scored, log_weight, -torch.inf))
    lse = torch.where(unscored, torch.inf, lse)
    lse = torch.where(listed, lse, -torch.inf)
    return PageScores(per_head(lse), log_weight, f.value_mean if log_weight is not None else None)


def _logits(q: torch.Tensor, f: PageFactors, center: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q.mu [B, H, N, G] and the deviation of every token from it [B, H, N, P, G], both unscaled.

    q [B, H, G, D]; the factors lead with [B, H, N]; center [H, D].
    """
    batch, heads, group, dim = q.shape
    pages = f.mean.shape[2]
    columns = q.transpose(-1, -2)
    offset = f.mean @ columns + (center.unsqueeze(1) @ columns)
    basis = f.basis.transpose(-1, -2).reshape(batch, heads, pages * f.basis.shape[-1], dim)
    projected = (basis @ columns).view(batch, heads, pages, f.basis.shape[-1], group)
    return offset, f.coef @ projected
