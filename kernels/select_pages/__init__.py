"""Exact top pages by estimated attention mass, per (request, KV head)."""

import torch

from ..common import ArgumentError, check_one_device, require
from ..common.capability import LARGEST_GROUP, on_kernels
from .kernel import COMBINES, page_keys, top_pages
from .reference import select

__all__ = ["COMBINES", "page_keys", "select_pages", "top_pages"]


def select_pages(
    lse: torch.Tensor,
    num_pages: torch.Tensor,
    budget_pages: int,
    sink_pages: int = 1,
    recent_pages: int = 1,
    num_kv_heads: int | None = None,
    combine: str = "mass",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the pages that one decode step reads.

    Args:
        lse: fp32 [B, Hq, Nmax] as `page_lse` returns it; NaN counts as -inf.
        num_pages: int32 [B], pages of each request, the partial tail page included; taken as Nmax where it is more.
        budget_pages: most pages of one (request, KV head), sink and recent pages included.
        sink_pages, recent_pages: first and last pages that are always kept.
        num_kv_heads: H, required; the G = Hq / H query heads of a group vote together.
        combine: how they vote: "mass" (default), "peak" or "max", see `reference.combined_score`.

    Returns:
        pages int32 [B, H, budget_pages]: logical pages, ascending, padded with -1;
        counts int32 [B]: min(budget_pages, num_pages), always, so that a host can plan from lengths alone.
        Order of preference: recent, sink, +inf, score, lower index.

    Raises:
        ArgumentError: budget_pages < sink + recent + 1, recent < 1, sink < 0, or a bad shape, device or name.
    """
    require(lse.dim() == 3 and lse.is_floating_point(), f"lse must be a float [B, Hq, Nmax], got {lse.dtype} {list(lse.shape)}")
    require(
        num_pages.shape == lse.shape[:1] and num_pages.dtype in (torch.int32, torch.int64),
        f"num_pages must be int32 or int64 [B={lse.shape[0]}], got {num_pages.dtype} {list(num_pages.shape)}",
    )
    check_one_device({"lse": lse, "num_pages": num_pages})
    if num_kv_heads is None:
        raise ArgumentError("num_kv_heads is required: the query heads of one KV head choose their pages together")
    require(
        num_kv_heads >= 1 and lse.shape[1] % num_kv_heads == 0,
        f"{lse.shape[1]} query heads cannot be grouped over {num_kv_heads} KV heads",
    )
    require(recent_pages >= 1, f"recent_pages must be at least 1 (the page being written), got {recent_pages}")
    require(sink_pages >= 0, f"sink_pages must be 0 or more, got {sink_pages}")
    least = sink_pages + recent_pages + 1
    require(
        budget_pages >= least,
        f"budget_pages must be at least sink + recent + 1 = {least}, got {budget_pages}; raise the budget or keep fewer pages",
    )
    require(combine in COMBINES, f"combine must be one of {', '.join(COMBINES)}, got {combine!r}")
    if lse.dtype == torch.float32 and lse.shape[2] > 0 and on_kernels(lse) and lse.shape[1] // num_kv_heads <= LARGEST_GROUP:
        held = num_pages.clamp(0, lse.shape[2])
        listed = torch.arange(lse.shape[2], device=lse.device) < held[:, None, None]
        masked = torch.where(listed, lse, -torch.inf).contiguous()
        return top_pages(page_keys(masked, None, held, sink_pages, recent_pages, num_kv_heads, combine), budget_pages)
    return select(lse, num_pages, budget_pages, sink_pages, recent_pages, num_kv_heads, combine)
