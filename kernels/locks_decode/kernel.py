"""One whole decode step on Triton kernels: scan, select, attend, merge. Nothing waits for the device."""

from functools import cache

import torch

from ..build_page_summaries import PageSummaries
from ..common import PAGE_SIZE
from ..common.side_stream import SideStream
from ..page_lse import PageScores, scan
from ..select_pages import page_keys, top_pages
from ..sparse_decode import FlashInferDecode, attend_parts, merge_parts, sum_tail
from .reference import DecodeStep


@cache
def _side_stream(device: torch.device, beside: int) -> SideStream:
    """For the sums of the tail; one for every stream that it runs beside, since memory is given back in the order of that."""
    return SideStream(device)


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
    newest_unbuilt: bool,
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
    scores = scan(
        q,
        s,
        page_table,
        num_pages,
        sm_scale * k_scale,
        seq_lens=seq_lens,
        logit_cap=logit_cap,
        tail=tail_correction,
        newest_unbuilt=newest_unbuilt,
    )
    ranked = page_keys(scores.lse, scores, num_pages, sink_pages, recent_pages, s.num_kv_heads, combine)
    tailed = tail_correction != "off"
    indexed = {} if attend is None else {"page_table": page_table, "indices": attend.indices}
    pages, counts = top_pages(ranked, budget_pages, weight=scores.weight if tailed else None, **indexed)
    side = _side_stream(q.device, torch.cuda.current_stream(q.device).stream_id if q.is_cuda else 0)
    tail = None
    if tailed:
        with side.beside():
            tail = sum_tail(scores.weight, scores.value_scale, s, page_table, num_pages)
    try:
        if attend is None:
            read = (q, k_cache, v_cache, page_table, pages, counts, seq_lens, sm_scale * k_scale)
            attended = attend_parts(*read, logit_cap=logit_cap)
        else:
            attended = attend.run(q, k_cache, v_cache, sm_scale * k_scale)
        out = torch.empty(*q.shape[:2], v_cache.shape[2], dtype=q.dtype, device=q.device)
    finally:
        if tailed:
            side.join()
    merge_parts(attended, out, v_scale, tail)
    return DecodeStep(out, pages, counts, PageScores(scores.lse, scores.weight if tailed else None, None))
