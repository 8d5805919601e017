"""Configuration, counters and the last audit in `/server_info`, under `internal_states[i].locks`; and requests for an audit or,
in evaluation, for another way to choose pages: they come in by `/set_internal_state` and so need the admin key where the server
has one."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from ..admin import AUDIT, SWITCH
from ..audit import audit, backend_of, running_requests
from ..config import ConfigError
from ..seams import Seam

logger = logging.getLogger(__name__)


def add_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After a scheduler gathered its state."""
    from ..summary_pool import SummaryPool

    summaries = SummaryPool.attached(scheduler.token_to_kv_pool_allocator.get_kvcache())
    if summaries is None:
        return
    backend = backend_of(scheduler)
    result.internal_state["locks"] = {
        "config": dataclasses.asdict(backend.config),
        "config_digest": backend.config.digest,
        "selector": "locks" if backend.evaluation is None else backend.evaluation.selector,
        "summary_bytes_per_page": summaries.bytes_per_page,
        "summary_bytes": summaries.nbytes,
        "layers": summaries.num_layers,
        "counters": summaries.counters.snapshot(),
        "audit": None if summaries.last_audit is None else dataclasses.asdict(summaries.last_audit),
    }


def change_on_request(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Around a change of a scheduler's state: what asks for an audit, or for another way to choose pages, is ours."""
    from ..summary_pool import SummaryPool

    asked = recv_req.server_args
    kvcache = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if not asked.keys() & OURS.keys() or SummaryPool.attached(kvcache) is None:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    return SetInternalStateReqOutput(updated=all(OURS[name](scheduler, asked) for name in asked if name in OURS))


def _audited(scheduler: Any, asked: Any) -> bool:
    try:
        found = audit(scheduler, int(asked[AUDIT]))
    except RuntimeError as error:
        logger.error("locks: the summaries could not be audited: %s", error)
        return False
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
    return True


def _switched(scheduler: Any, asked: Any) -> bool:
    from ..evaluation.served import from_numbers

    evaluation = backend_of(scheduler).evaluation
    if evaluation is None:
        logger.error("locks: this server does not change what decode reads; start it with --locks-evaluation on")
        return False
    if scheduler.waiting_queue or running_requests(scheduler):
        logger.error("locks: what decode reads changes only while no request is under way")
        return False
    try:
        selector, settings = from_numbers(asked)
        evaluation.switch(selector, **settings)
    except ConfigError as error:
        logger.error("locks: what decode reads stays as it is: %s", error)
        return False
    return True


OURS: dict[str, Callable[[Any, Any], bool]] = {AUDIT: _audited, SWITCH: _switched}
"""Requests that come in by `/set_internal_state`, and what each does with what is asked; False where it could not be done."""

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
        change_on_request,
        "lets /set_internal_state ask for an audit of the summaries, and in evaluation for another way to choose pages",
    ),
)
