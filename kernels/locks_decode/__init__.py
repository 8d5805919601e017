"""The whole decode step."""

from typing import Any, Protocol

import torch

from ..build_page_summaries import PageSummaries
from ..common import check_attention_args, check_one_device, check_page_table, require
from ..common.capability import runs_kernels, takes_cache
from ..sparse_decode import FlashInferDecode
from .kernel import step_on_kernels
from .reference import DecodeStep, merge_tail, step

TAIL_CORRECTIONS = ("qmu", "flat", "off")

__all__ = ["TAIL_CORRECTIONS", "DecodeSettings", "DecodeStep", "locks_decode", "locks_decode_step", "merge_tail"]


class DecodeSettings(Protocol):
    """What the step reads of a configuration; `locks_sglang.config.LocksConfig` fits."""

    @property
    def budget_pages(self) -> int: ...
    @property
    def sink_pages(self) -> int: ...
    @property
    def recent_pages(self) -> int: ...
    @property
    def combine(self) -> str: ...
    @property
    def tail_correction(self) -> str: ...


def locks_decode_step(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    s: PageSummaries,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    config: DecodeSettings,
    *,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    newest_unbuilt: bool = False,
    num_pages: torch.Tensor | None = None,
    attend: FlashInferDecode | None = None,
) -> DecodeStep:
    """`locks_decode` that also returns which pages were read and the scores; arguments as there, and for a planned step:

    newest_unbuilt: the summary of the page that holds the last token is not there yet, or is being built meanwhile, even if the
        page is full: it is not scored, and read.
    num_pages: int32 [B], pages of each request, where they are known: fewer launches a layer.
    attend: FlashInfer, planned for min(budget, pages) of each row, to attend in the Triton kernel's place.
    """
    check_attention_args(q, k_cache, v_cache, page_table, seq_lens, logit_cap)
    require(
        s.num_kv_heads == k_cache.shape[1] and s.layout.head_dim == q.shape[2],
        f"the summaries hold H={s.num_kv_heads}, D={s.layout.head_dim} but the cache H={k_cache.shape[1]}, D={q.shape[2]}",
    )
    check_one_device({"q": q, "the summaries": s.valid})
    require(
        config.tail_correction in TAIL_CORRECTIONS,
        f"tail_correction must be one of {', '.join(TAIL_CORRECTIONS)}, got {config.tail_correction!r}",
    )
    require(
        config.tail_correction == "off" or s.layout.value_mean,
        f"tail_correction {config.tail_correction!r} needs summaries built with value_mean=True",
    )
    require(
        config.tail_correction == "off" or s.layout.v_head_dim == v_cache.shape[2],
        f"the summaries hold value means of Dv={s.layout.v_head_dim} but v_cache has Dv={v_cache.shape[2]}",
    )
    if num_pages is not None:
        check_page_table(page_table, num_pages, q.shape[0], "num_pages")
    group = q.shape[1] // k_cache.shape[1]
    fits = s.record is not None and page_table.shape[1] > 0 and takes_cache(q, k_cache, v_cache)
    fits = fits and runs_kernels(q, q.shape[2], v_cache.shape[2], group)
    require(
        attend is None or (fits and logit_cap == 0.0 and k_cache.is_contiguous() and v_cache.is_contiguous()),
        "FlashInfer attends to contiguous caches without a soft cap, where the other steps run on Triton kernels",
    )
    arguments = (q, k_cache, v_cache, s, page_table, seq_lens, sm_scale)
    settings: dict[str, Any] = {
        "budget_pages": config.budget_pages,
        "sink_pages": config.sink_pages,
        "recent_pages": config.recent_pages,
        "combine": config.combine,
        "tail_correction": config.tail_correction,
        "logit_cap": logit_cap,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "newest_unbuilt": newest_unbuilt,
    }
    if fits:
        return step_on_kernels(*arguments, **settings, num_pages=num_pages, attend=attend)
    return step(*arguments, **settings)


def locks_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    s: PageSummaries,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    config: DecodeSettings,
    *,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """One decode step of one layer: score every page from its summary, read the best ones, correct for the rest.

    Args:
        q: float [B, Hq, D].
        k_cache, v_cache: float or fp8 [slots, H, D] and [slots, H, Dv], the current token already stored.
        s: summaries of the physical pages; pages that are not valid are attended.
        page_table: int32 [B, Nmax], logical to physical 16-token page.
        seq_lens: int [B], tokens, the current one included.
        sm_scale: factor on q.k before the soft cap.
        config: budget_pages, sink_pages, recent_pages, combine, tail_correction.
        logit_cap: cap * tanh(logit / cap); 0 is off.
        k_scale, v_scale: what stored keys and values are multiplied by (fp8 caches).

    Returns:
        [B, Hq, Dv] in q's dtype. A request whose pages fit the budget gets exact attention over all of them.

    Raises:
        ArgumentError: a shape, dtype, device or setting outside the above.
    """
    return locks_decode_step(
        q,
        k_cache,
        v_cache,
        s,
        page_table,
        seq_lens,
        sm_scale,
        config,
        logit_cap=logit_cap,
        k_scale=k_scale,
        v_scale=v_scale,
    ).out.to(q.dtype)
