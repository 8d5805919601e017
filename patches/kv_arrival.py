"""KV that arrives without a forward pass marks its pages, so that they are rebuilt before they are scored.

The features that bring it (HiCache, the PD decode role) are still refused at start: the support matrix says which, and why.
"""

from typing import Any

from ..seams import Seam


def _mark(kv_pool: Any, slots: Any) -> None:
    from ..summary_pool import SummaryPool

    summaries = SummaryPool.attached(kv_pool)
    if summaries is not None and slots is not None:
        summaries.mark_dirty(slots)


def after_load(slots: Any, controller: Any, *args: Any, **kwargs: Any) -> None:
    """After HiCache queued a load from the host: `slots` are the device slots it will fill, or None if there was no room."""
    _mark(controller.mem_pool_device, slots)


def after_load_cpu_copy(result: None, kv_pool: Any, kv_cache_cpu: Any, indices: Any, *args: Any, **kwargs: Any) -> None:
    """After a retracted request's KV was copied back to `indices`."""
    _mark(kv_pool, indices)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.managers.cache_controller.HiCacheController.load",
        "after",
        after_load,
        "marks pages that HiCache loads",
    ),
    Seam(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.load",
        "after",
        after_load,
        "marks pages that HiCache loads",
    ),
    Seam(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.load_cpu_copy",
        "after",
        after_load_cpu_copy,
        "marks pages that are copied back from host memory",
    ),
)
