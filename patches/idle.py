"""At idle, summaries are compared with fresh ones (`locks_sglang.idle_audit`)."""

from typing import Any

from ..seams import Seam

ATTRIBUTE = "_locks_idle_audit"


def audit_at_idle(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Before a scheduler without work sleeps, or looks for work again."""
    found = getattr(scheduler, ATTRIBUTE, None)
    if found is None:
        from ..summary_pool import SummaryPool

        summaries = SummaryPool.attached(scheduler.token_to_kv_pool_allocator.get_kvcache())
        if summaries is None:
            return
        from ..idle_audit import IdleAudit

        found = IdleAudit(summaries, summaries.config.idle_audit_ms)
        setattr(scheduler, ATTRIBUTE, found)
    found.turn(scheduler)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle",
        "before",
        audit_at_idle,
        "compares summaries with fresh ones at idle, a slice at a time",
    ),
)
