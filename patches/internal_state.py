"""Configuration and counters in `/server_info`, under `internal_states[i].locks`."""

import dataclasses
from typing import Any

from ..seams import Seam


def add_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After a scheduler gathered its state."""
    from ..summary_pool import SummaryPool

    summaries = SummaryPool.attached(scheduler.token_to_kv_pool_allocator.get_kvcache())
    if summaries is None:
        return
    result.internal_state["locks"] = {
        "config": dataclasses.asdict(summaries.config),
        "config_digest": summaries.config.digest,
        "summary_bytes_per_page": summaries.bytes_per_page,
        "summary_bytes": summaries.record.numel(),
        "layers": summaries.num_layers,
        "counters": summaries.counters.snapshot(),
    }


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "after",
        add_state,
        "adds configuration and counters to /server_info",
    ),
)
