"""Rank-r spectral summaries of KV pages: build, packed record, `PageSummaries`."""

from dataclasses import replace

import torch

from ..common import FLOAT_DTYPES, PAGE_SIZE, require
from ..common.capability import runs_kernels
from .kernel import build, layer_offsets
from .record import PageFactors, RecordLayout, pack, unpack
from .reference import page_factors
from .summaries import PageSummaries

__all__ = [
    "PageFactors",
    "PageSummaries",
    "RecordLayout",
    "build",
    "build_page_summaries",
    "layer_offsets",
    "pack",
    "page_factors",
    "unpack",
]


def build_page_summaries(
    k: torch.Tensor,
    v: torch.Tensor,
    rank: int = 8,
    *,
    quantize: bool = True,
    center: torch.Tensor | None = None,
    value_mean: bool = True,
) -> PageSummaries:
    """Summarise N complete pages.

    Args:
        k: fp32, bf16 or fp16 [N, P, H, D], keys after RoPE as they lie in the cache, P = 16 tokens.
        v: like k, [N, P, H, Dv].
        rank: R, 1 to min(P - 1, D).
        quantize: pack to int4 / int8 records; otherwise keep fp32 factors (for measurement).
        center: fp32 [H, D] subtracted from the stored means; None for zero.
        value_mean: store the value mean that the tail correction needs.

    Returns:
        `PageSummaries`, every page valid, on the device of `k`.

    Raises:
        ArgumentError: a shape, dtype or rank outside the above.
    """
    require(
        k.dim() == 4 and k.shape[1] == PAGE_SIZE and k.dtype in FLOAT_DTYPES,
        f"k must be fp32, bf16 or fp16 [N, P={PAGE_SIZE}, H, D], got {k.dtype} {list(k.shape)}",
    )
    require(
        v.dim() == 4 and v.shape[:3] == k.shape[:3] and v.dtype in FLOAT_DTYPES and v.device == k.device,
        f"v must be a float [N, P, H, Dv] like k {list(k.shape)} on {k.device}, got {v.dtype} {list(v.shape)} on {v.device}",
    )
    heads, dim = k.shape[2:]
    if center is None:
        center = torch.zeros(heads, dim, device=k.device)
    require(
        center.shape == (heads, dim) and center.dtype == torch.float32 and center.device == k.device,
        f"center must be fp32 [H={heads}, D={dim}] on {k.device}, got {center.dtype} {list(center.shape)} on {center.device}",
    )
    layout = RecordLayout(dim, v.shape[3], rank, value_mean)
    pages = k.shape[0]
    if quantize and runs_kernels(k, dim, v.shape[3], 1):
        record, values = layout.empty(pages, heads, device=k.device)
        valid = torch.zeros(pages, dtype=torch.bool, device=k.device)
        slots = k.reshape(-1, heads, dim).contiguous(), v.reshape(-1, heads, v.shape[3]).contiguous()
        build(*slots, torch.arange(pages, device=k.device), center.contiguous(), record, values, valid, layout)
        return PageSummaries(layout, valid, center, record, values)
    factors = page_factors(k, v, rank, center)
    valid = torch.ones(pages, dtype=torch.bool, device=k.device)
    if quantize:
        return PageSummaries(layout, valid, center, *pack(factors, layout))
    return PageSummaries(layout, valid, center, factors=factors if value_mean else replace(factors, value_mean=None))
