"""Exact decode attention over the selected pages, and over all of them."""

import torch

from ..common import PAGE_SIZE, check_attention_args, check_one_device, require
from ..common.capability import runs_kernels, takes_cache
from .flashinfer import FlashInferDecode
from .kernel import attend_parts
from .merge import merge_parts
from .reference import attend
from .tail import TailParts, sum_tail

__all__ = [
    "FlashInferDecode",
    "TailParts",
    "attend",
    "attend_parts",
    "dense_decode",
    "merge_parts",
    "sparse_decode",
    "sum_tail",
]


def sparse_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    pages: torch.Tensor,
    counts: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    *,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend exactly to the listed pages of each (request, KV head).

    Args:
        q: float [B, Hq, D].
        k_cache, v_cache: float or fp8 [slots, H, D] and [slots, H, Dv]; only slots of listed pages are read.
        page_table: int32 [B, Nmax], logical to physical 16-token page.
        pages: int32 [B, H, S], logical pages, ascending, -1 padded, as `select_pages` returns them.
        counts: int32 [B], listed pages.
        seq_lens: int [B], tokens; later positions of the last page are masked.
        sm_scale: factor on q.k before the soft cap.
        logit_cap: cap * tanh(logit / cap); 0 is off.
        k_scale, v_scale: what stored keys and values are multiplied by (fp8 caches).
        return_lse: also return the natural log-sum-exp of the logits read.

    Returns:
        [B, Hq, Dv] in q's dtype; with return_lse also fp32 [B, Hq]. A request without pages gives 0 and -inf.

    Raises:
        ArgumentError: a shape, dtype or device outside the above.
    """
    check_attention_args(q, k_cache, v_cache, page_table, seq_lens, logit_cap)
    batch, kv_heads = q.shape[0], k_cache.shape[1]
    require(
        pages.dim() == 3 and pages.shape[:2] == (batch, kv_heads) and pages.dtype == torch.int32,
        f"pages must be int32 [B={batch}, H={kv_heads}, S], got {pages.dtype} {list(pages.shape)}",
    )
    require(
        counts.shape == (batch,) and counts.dtype in (torch.int32, torch.int64),
        f"counts must be int32 or int64 [B={batch}], got {counts.dtype} {list(counts.shape)}",
    )
    check_one_device({"q": q, "pages": pages, "counts": counts})
    if runs_kernels(q, q.shape[2], v_cache.shape[2], q.shape[1] // kv_heads) and takes_cache(q, k_cache, v_cache):
        parts = attend_parts(q, k_cache, v_cache, page_table, pages, counts, seq_lens, sm_scale * k_scale, logit_cap=logit_cap)
        out = torch.empty(batch, q.shape[1], v_cache.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.empty(batch, q.shape[1], dtype=torch.float32, device=q.device)
        merge_parts(parts, out, v_scale, lse=lse)
    else:
        wide, lse = attend(
            q,
            k_cache,
            v_cache,
            page_table,
            pages,
            counts,
            seq_lens,
            sm_scale,
            logit_cap=logit_cap,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        out = wide.to(q.dtype)
    return (out, lse) if return_lse else out


def dense_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    *,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """The truth: attention to every token, computed in fp32 and returned as fp32 [B, Hq, Dv] (fp64 where q is fp64).

    Arguments as `sparse_decode`.
    """
    check_attention_args(q, k_cache, v_cache, page_table, seq_lens, logit_cap)
    n_max = page_table.shape[1]
    counts = (seq_lens + PAGE_SIZE - 1) // PAGE_SIZE
    pages = torch.arange(n_max, device=q.device, dtype=torch.int32).expand(q.shape[0], k_cache.shape[1], n_max)
    return attend(
        q,
        k_cache,
        v_cache,
        page_table,
        pages,
        counts,
        seq_lens,
        sm_scale,
        logit_cap=logit_cap,
        k_scale=1.0,
        v_scale=1.0,
    )[0]
