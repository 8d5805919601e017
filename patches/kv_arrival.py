"""KV that arrives without a forward pass marks its pages, so that they are rebuilt before they are scored.

HiCache queues a load when it takes a request up, and starts it with the next prefill batch. Where that request was not let in
after all, decode steps are planned in between, and a mark from the queueing is used up before the KV is there; so the start
marks too. The mark from the queueing keeps the pages out of an audit until then.

The features that bring it (HiCache, the PD decode role) are still refused at start: the support matrix says which, and why.
"""

from collections.abc import Callable
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


def start_loading(original: Callable[..., int], controller: Any) -> int:
    """Around the start of the loads that HiCache has queued: the transfer is in flight when the next step is planned."""
    for operation in controller.load_queue:
        _mark(controller.mem_pool_device, operation.device_indices)
    return original(controller)


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
        "sglang.srt.managers.cache_controller.HiCacheController.start_loading",
        "around",
        start_loading,
        "marks pages that HiCache loads, when it starts",
    ),
    Seam(
        # Later releases inherit the one above.
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.start_loading",
        "around",
        start_loading,
        "marks pages that HiCache loads, when it starts",
        versions=(None, "0.5.18"),
    ),
    Seam(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.load_cpu_copy",
        "after",
        after_load_cpu_copy,
        "marks pages that are copied back from host memory",
    ),
)
