"""Which inputs the Triton kernels take; everything else runs the torch reference, on whatever device it lies."""

import torch
import triton

COMPUTE_CAPABILITY = (9, 0)
"""Least compute capability that the kernels are compiled and tested for."""
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
HEAD_DIMS = (64, 96, 128, 256)
LARGEST_GROUP = 16


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors: tests switch it on for a whole process."""
    return bool(triton.knobs.runtime.interpret)


def on_kernels(x: torch.Tensor) -> bool:
    """Whether `x` is not empty and lies on a device that the kernels run on: the current one, on which Triton launches."""
    if x.numel() == 0:
        return False
    if x.is_cuda and torch.version.hip is None:
        current = x.device.index == torch.cuda.current_device()
        return current and torch.cuda.get_device_capability(x.device) >= COMPUTE_CAPABILITY
    return interpreted()


def takes_cache(q: torch.Tensor, *caches: torch.Tensor) -> bool:
    """Whether the kernels read these caches without narrowing them: of q's dtype or fp8, rows without gaps."""
    return all(cache.dtype in (q.dtype, *FP8_DTYPES) and cache.stride(-1) == 1 for cache in caches)


def runs_kernels(q: torch.Tensor, head_dim: int, v_head_dim: int, group: int) -> bool:
    """Whether the kernels take queries (or, for a build, keys) like `q` at these sizes."""
    fits = q.dtype in QUERY_DTYPES and group <= LARGEST_GROUP and {head_dim, v_head_dim} <= set(HEAD_DIMS)
    return fits and on_kernels(q)
