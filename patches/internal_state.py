"""Configuration, counters and the last audit in `/server_info`, under `internal_states[i].locks`; and the request for an audit,
which comes in by `/set_internal_state` and so needs the admin key where the server has one."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from ..audit import REQUEST, audit
from ..seams import Seam

logger = logging.getLogger(__name__)


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
        "summary_bytes": summaries.nbytes,
        "layers": summaries.num_layers,
        "counters": summaries.counters.snapshot(),
        "audit": None if summaries.last_audit is None else dataclasses.asdict(summaries.last_audit),
    }


def audit_on_request(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Around a change of a scheduler's state."""
    from ..summary_pool import SummaryPool

    kvcache = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if REQUEST not in recv_req.server_args or SummaryPool.attached(kvcache) is None:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    try:
        found = audit(scheduler, int(recv_req.server_args[REQUEST]))
    except RuntimeError as error:
        logger.error("locks: the summaries could not be audited: %s", error)
        return SetInternalStateReqOutput(updated=False)
    level = logging.ERROR if found.mismatched else logging.INFO
    logger.log(
        level,
        "locks: audit of %d of %d pages in %.1f s: %d summaries do not fit (rebuilt before they are used), %d are missing",
        found.looked_at,
        found.pages,
        found.seconds,
        found.mismatched,
        found.unsummarised,
    )
    return SetInternalStateReqOutput(updated=True)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "after",
        add_state,
        "adds configuration, counters and the last audit to /server_info",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.set_internal_state",
        "around",
        audit_on_request,
        "lets /set_internal_state ask for an audit of the summaries",
    ),
)
