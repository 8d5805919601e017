"""Estimated log-sum-exp of the attention logits of every page, from summaries alone."""

import torch

from ..build_page_summaries import PageSummaries
from ..common import CACHE_DTYPES, check_one_device, check_page_table, require
from ..common.capability import runs_kernels
from .exact import exact_page_lse
from .kernel import Scan, scan
from .reference import PageScores, page_scores

__all__ = ["PageScores", "Scan", "exact_page_lse", "page_lse", "page_scores", "scan"]


def page_lse(
    q: torch.Tensor,
    s: PageSummaries,
    page_table: torch.Tensor,
    num_pages: torch.Tensor,
    sm_scale: float,
    *,
    seq_lens: torch.Tensor | None = None,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """Estimate the attention mass of every page of every request; no key is read.

    Args:
        q: float [B, Hq, D].
        s: summaries of the physical pages, H KV heads; Hq is a multiple of H.
        page_table: int32 [B, Nmax], logical to physical 16-token page. Entries at or past num_pages are never read.
        num_pages: int32 [B], pages of each request, the partial tail page included.
        sm_scale: factor on q.k before the soft cap.
        seq_lens: int [B]; names the partial page. Without it every listed page is taken as full.
        logit_cap: cap * tanh(logit / cap); 0 is off.

    Returns:
        fp32 [B, Hq, Nmax], natural log. -inf past num_pages; +inf where there is no estimate and the page must be
        attended: every listed page from seq_len // P on, which is the partial one, and pages that are not valid.

    Raises:
        ArgumentError: a shape, dtype or device outside the above.
    """
    _check(q, s, page_table, num_pages, logit_cap)
    if seq_lens is not None:
        check_page_table(page_table, seq_lens, q.shape[0], "seq_lens")
    if s.record is not None and runs_kernels(q, s.layout.head_dim, s.layout.v_head_dim, q.shape[1] // s.num_kv_heads):
        held = num_pages.clamp(0, page_table.shape[1])
        lse = scan(q, s, page_table, held, sm_scale, seq_lens=seq_lens, logit_cap=logit_cap, tail="off").lse
        unlisted = torch.arange(lse.shape[2], device=lse.device) >= num_pages[:, None, None]
        return lse.masked_fill_(unlisted, -torch.inf)
    return page_scores(q, s, page_table, num_pages, sm_scale, seq_lens=seq_lens, logit_cap=logit_cap).lse


def _check(q: torch.Tensor, s: PageSummaries, page_table: torch.Tensor, num_pages: torch.Tensor, logit_cap: float) -> None:
    require(
        q.dim() == 3 and q.dtype in CACHE_DTYPES and q.shape[2] == s.layout.head_dim,
        f"q must be a float [B, Hq, D={s.layout.head_dim}], got {q.dtype} {list(q.shape)}",
    )
    require(
        q.shape[1] % s.num_kv_heads == 0,
        f"{q.shape[1]} query heads cannot be grouped over the summaries' {s.num_kv_heads} KV heads",
    )
    require(logit_cap >= 0.0, f"logit_cap must be 0 (off) or positive, got {logit_cap}")
    check_page_table(page_table, num_pages, q.shape[0], "num_pages")
    check_one_device({"q": q, "page_table": page_table, "the summaries": s.valid})
