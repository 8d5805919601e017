"""Reference of one whole decode step: scan, select, attend, tail correction."""

from typing import NamedTuple

import torch

from ..build_page_summaries import PageSummaries
from ..common import PAGE_SIZE
from ..page_lse import PageScores, page_scores
from ..select_pages import select_pages
from ..sparse_decode import attend


class DecodeStep(NamedTuple):
    """Output [B, Hq, Dv] of a step (fp32 from the reference), and what it chose: pages int32 [B, H, S], counts int32 [B],
    scores."""

    out: torch.Tensor
    pages: torch.Tensor
    counts: torch.Tensor
    scores: PageScores


def step(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    s: PageSummaries,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    *,
    budget_pages: int,
    sink_pages: int,
    recent_pages: int,
    combine: str,
    tail_correction: str,
    logit_cap: float,
    k_scale: float,
    v_scale: float,
    newest_unbuilt: bool = False,
) -> DecodeStep:
    """As `locks_decode`, with the settings one by one."""
    num_pages = ((seq_lens + PAGE_SIZE - 1) // PAGE_SIZE).to(torch.int32)
    # Summaries describe keys and values as they are stored, like the caches.
    scored = seq_lens - 1 if newest_unbuilt else seq_lens
    scores = page_scores(
        q, s, page_table, num_pages, sm_scale * k_scale, seq_lens=scored, logit_cap=logit_cap, tail=tail_correction
    )
    # A budget beyond what there is would only be padding.
    budget_pages = min(budget_pages, max(page_table.shape[1], sink_pages + recent_pages + 1))
    pages, counts = select_pages(
        scores.lse, num_pages, budget_pages, sink_pages, recent_pages, num_kv_heads=s.num_kv_heads, combine=combine
    )
    out, lse = attend(
        q,
        k_cache,
        v_cache,
        page_table,
        pages[..., : page_table.shape[1]],  # counts never exceed the pages there are
        counts,
        seq_lens,
        sm_scale,
        logit_cap=logit_cap,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if scores.tail is not None and scores.value_mean is not None:
        out = merge_tail(out, lse, pages, scores.tail, v_scale * scores.value_mean)
    return DecodeStep(out, pages, counts, scores)


def merge_tail(
    out: torch.Tensor, lse: torch.Tensor, pages: torch.Tensor, tail: torch.Tensor, value_mean: torch.Tensor
) -> torch.Tensor:
    """Merge the estimated contribution of the pages that were not read.

    Args:
        out: fp32 [B, Hq, Dv], exact attention over the selected pages.
        lse: fp32 [B, Hq], its natural log-sum-exp.
        pages: int32 [B, H, S], the selected logical pages, -1 padded.
        tail: fp32 [B, Hq, N], natural log of each page's tail weight; -inf where it has none.
        value_mean: fp32 [B, H, N, Dv].

    Returns:
        fp32 [B, Hq, Dv]: (A out + sum_unselected w vbar) / (A + sum_unselected w) with A = exp(lse).
    """
    batch, heads, n = tail.shape
    if n == 0:
        return out
    kv_heads = pages.shape[1]
    hit = torch.zeros(batch, kv_heads, n + 1, dtype=torch.bool, device=tail.device)
    hit.scatter_(2, torch.where(pages < 0, n, pages).long(), True)
    grouped = tail.view(batch, kv_heads, heads // kv_heads, n)
    grouped = grouped.masked_fill(hit[:, :, None, :n], -torch.inf)
    exact = lse.view(batch, kv_heads, heads // kv_heads, 1)
    # Everything is taken relative to the larger of the two parts, so that neither overflows.
    peak = torch.maximum(grouped.amax(-1, keepdim=True), exact)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weight = torch.exp(grouped - peak)
    share = torch.exp(exact - peak)
    # A page without weight may have no usable value mean (NaN values): keep it out of the sum.
    values = torch.where(torch.isfinite(value_mean), value_mean, 0.0).to(weight.dtype)
    total = (share + weight.sum(-1, keepdim=True)).clamp_min(torch.finfo(torch.float32).tiny)
    merged = (share * out.view(batch, kv_heads, heads // kv_heads, out.shape[-1]) + weight @ values) / total
    return merged.reshape(out.shape)
