"""One whole decode step on Triton kernels: scan, select, attend, merge. Nothing waits for the device."""

import torch

from ..build_page_summaries import PageSummaries
from ..common import PAGE_SIZE
from ..page_lse import PageScores, scan
from ..select_pages import top_pages
from ..sparse_decode import FlashInferDecode, attend_parts, merge_parts, sum_tail
from .reference import DecodeStep


def step_on_kernels(
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
    num_pages: torch.Tensor | None,
    attend: FlashInferDecode | None,
) -> DecodeStep:
    """As `reference.step`, on packed summaries; the output is in q's dtype. Scores past a request's pages hold anything, and
    tail weights of the selected pages are -inf.

    num_pages int32 [B] is worked out where it is not given. `attend`, planned for these rows, attends instead of the Triton
    kernel.
    """
    if num_pages is None:
        num_pages = ((seq_lens + PAGE_SIZE - 1) // PAGE_SIZE).clamp(max=page_table.shape[1]).to(torch.int32)
    q, page_table = q.contiguous(), page_table.contiguous()
    scores = scan(q, s, page_table, num_pages, sm_scale * k_scale, seq_lens=seq_lens, logit_cap=logit_cap, tail=tail_correction)
    tailed = tail_correction != "off"
    settings = num_pages, budget_pages, sink_pages, recent_pages, s.num_kv_heads, combine
    if attend is None:
        pages, counts = top_pages(scores.lse, scores, *settings, mark=tailed)
        attended = attend_parts(
            q, k_cache, v_cache, page_table, pages, counts, seq_lens, sm_scale * k_scale, logit_cap=logit_cap
        )
    else:
        pages, counts = top_pages(scores.lse, scores, *settings, page_table=page_table, indices=attend.indices, mark=tailed)
        attended = attend.run(q, k_cache, v_cache, sm_scale * k_scale)
    out = torch.empty(*q.shape[:2], v_cache.shape[2], dtype=q.dtype, device=q.device)
    tail = sum_tail(scores.weight, s, page_table, num_pages, q.dtype) if tailed else None
    merge_parts(attended, out, v_scale, tail)
    return DecodeStep(out, pages, counts, PageScores(scores.lse, scores.weight if tailed else None, None))
