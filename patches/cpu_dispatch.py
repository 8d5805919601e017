"""On CPU: SGLang's torch helpers instead of its Triton ones, which it chooses by backend name."""

from collections.abc import Callable
from typing import Any

import torch

from ..seams import BACKEND, Seam, serving


def without_triton(result: bool, backend: str) -> bool | None:
    """After `support_triton(name)`: no Triton around `locks` on a machine without a GPU."""
    return False if backend == BACKEND and not torch.cuda.is_available() else None


def torch_last_loc(
    original: Callable[..., Any],
    req_to_token: torch.Tensor,
    req_pool_indices_tensor: torch.Tensor,
    prefix_lens_tensor: torch.Tensor,
) -> Any:
    """Around `get_last_loc`, the slot of every request's last cached token."""
    if req_to_token.device.type != "cpu" or not serving():
        return original(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.utils.common.support_triton",
        "after",
        without_triton,
        "keeps Triton helpers off the CPU",
        device="cpu",
    ),
    Seam(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        "around",
        torch_last_loc,
        "keeps Triton helpers off the CPU",
        device="cpu",
    ),
)
