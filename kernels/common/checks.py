"""Argument checks of the public operations: every refusal says what was given and what is allowed."""

from collections.abc import Mapping

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHE_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64)


class ArgumentError(ValueError):
    """A tensor or setting that an operation cannot take."""


def require(condition: bool, message: str) -> None:
    """Raise `ArgumentError(message)` unless `condition` holds."""
    if not condition:
        raise ArgumentError(message)


def check_one_device(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that tensors, given by what a message calls them, lie on one device."""
    devices = [tensor.device for tensor in tensors.values()]
    *first, last = tensors
    require(
        all(device == devices[0] for device in devices),
        f"{', '.join(first)} and {last} must share a device, got {', '.join(map(str, devices))}",
    )


def check_page_table(page_table: torch.Tensor, lengths: torch.Tensor, batch: int, lengths_name: str) -> None:
    """Check an int32 `page_table` [B, Nmax] and an integer per-request vector [B] on the same device."""
    require(
        page_table.dim() == 2 and page_table.shape[0] == batch and page_table.dtype == torch.int32,
        f"page_table must be int32 [B={batch}, Nmax], got {page_table.dtype} {list(page_table.shape)}",
    )
    require(
        lengths.shape == (batch,) and lengths.dtype in (torch.int32, torch.int64),
        f"{lengths_name} must be int32 or int64 [B={batch}], got {lengths.dtype} {list(lengths.shape)}",
    )
    require(
        page_table.device == lengths.device,
        f"page_table is on {page_table.device} but {lengths_name} on {lengths.device}; move them to one device",
    )


def check_attention_args(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    logit_cap: float,
) -> None:
    """Check queries [B, Hq, D] against token caches [slots, H, D] / [slots, H, Dv] and the page table."""
    require(q.dim() == 3 and q.dtype in CACHE_DTYPES, f"q must be a float [B, Hq, D], got {q.dtype} {list(q.shape)}")
    require(
        k_cache.dim() == 3 and k_cache.dtype in CACHE_DTYPES and k_cache.shape[2] == q.shape[2],
        f"k_cache must be a float [slots, H, D={q.shape[2]}], got {k_cache.dtype} {list(k_cache.shape)}",
    )
    require(
        q.shape[1] % k_cache.shape[1] == 0,
        f"{q.shape[1]} query heads cannot be grouped over {k_cache.shape[1]} KV heads",
    )
    if v_cache is not None:
        require(
            v_cache.dim() == 3 and v_cache.dtype in CACHE_DTYPES and v_cache.shape[:2] == k_cache.shape[:2],
            f"v_cache must be a float [slots, H, Dv] like k_cache {list(k_cache.shape)}, "
            f"got {v_cache.dtype} {list(v_cache.shape)}",
        )
    require(logit_cap >= 0.0, f"logit_cap must be 0 (off) or positive, got {logit_cap}")
    check_page_table(page_table, seq_lens, q.shape[0], "seq_lens")
    values = {} if v_cache is None else {"v_cache": v_cache}
    check_one_device({"q": q, "k_cache": k_cache, **values, "page_table": page_table})
