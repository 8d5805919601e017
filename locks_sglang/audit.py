"""The canary: do stored summaries still describe their pages?

`audit` runs in a scheduler, between two steps; `main` is `locks-sglang audit URL`, which asks a running server for it.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .admin import AUDIT, KEY_VARIABLE, AdminError, change, states

CHUNK = 1024
"""Pages that are rebuilt together: their keys and values are copied in fp32."""
SHOWN = 20
"""Mismatches that a report lists."""


@dataclass(frozen=True)
class Mismatch:
    """A stored summary that does not describe its page.

    Attributes:
        rank: tensor-parallel rank. layer: of the model. page: physical 16-token page.
        owner: "node" of the radix tree, by its place in a walk, or "request", by its id.
        position: of the page's first token.
    """

    rank: int
    layer: int
    page: int
    owner: str
    position: int


@dataclass(frozen=True)
class Audit:
    """What one audit found, over all ranks of a tensor-parallel group.

    Attributes:
        pages: complete pages that somebody owns, of this rank. looked_at: of these, compared with fresh rebuilds.
        unsummarised: (layer, page) pairs among them without a valid summary: such pages are read, not estimated.
        mismatched: (rank, layer, page) of summaries that are called valid and do not describe their page.
        mismatches: the first of them.
        seconds: how long serving stood still.
    """

    pages: int
    looked_at: int
    unsummarised: int
    mismatched: int
    mismatches: tuple[Mismatch, ...]
    seconds: float


def audit(scheduler: Any, most_pages: int = 0) -> Audit:
    """Compare the stored summaries of every complete page that the radix tree or a running request owns with fresh rebuilds.

    A page whose summary does not fit is marked dirty: before the next step is planned it is rebuilt, so it is never scored
    again as it is. Waits for the device; runs between two steps, on the scheduler's thread, on all ranks alike.

    Args:
        scheduler: SGLang's `Scheduler`.
        most_pages: look at this many, evenly spread over all; 0 for all.

    Raises:
        RuntimeError: no summaries on the scheduler's KV pool, or a rank could not compare, for want of memory above all.
    """
    import torch

    from .summary_pool import SummaryPool

    began = time.monotonic()
    summaries = SummaryPool.attached(scheduler.token_to_kv_pool_allocator.get_kvcache())
    if summaries is None:
        raise RuntimeError("no summaries on this KV pool; start the server with --attention-backend locks")
    if summaries.valid.is_cuda:
        torch.cuda.synchronize(summaries.valid.device)
    owners = page_owners(scheduler, summaries)
    looked_at = sorted(owners)
    if 0 < most_pages < len(looked_at):
        looked_at = [looked_at[i * len(looked_at) // most_pages] for i in range(most_pages)]

    group, rank = rank_group(scheduler)
    told: tuple[int, list[Mismatch], str]
    try:
        told = (*_all_compared(summaries, looked_at, owners, rank), "")
    except RuntimeError as error:  # out of memory, above all: the other ranks must not wait for this one
        told = (0, [], f"rank {rank}: {error}")
    gathered = [told]
    if group is not None:
        gathered = [told] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, told, group=group)
    failures = [failure for *_, failure in gathered if failure]
    if failures:
        raise RuntimeError("; ".join(failures))
    unsummarised = sum(count for count, *_ in gathered)
    found = [mismatch for _, mismatches, _ in gathered for mismatch in mismatches]
    result = Audit(
        pages=len(owners),
        looked_at=len(looked_at),
        unsummarised=unsummarised,
        mismatched=len(found),
        mismatches=tuple(found[:SHOWN]),
        seconds=round(time.monotonic() - began, 3),
    )
    summaries.counters.audits += 1
    summaries.counters.mismatched += len(found)
    summaries.last_audit = result
    return result


def rank_group(scheduler: Any) -> tuple[Any, int]:
    """Group of the tensor-parallel ranks, None where there is one rank, and this rank in it."""
    import torch

    group = getattr(scheduler, "tp_cpu_group", None)
    shared = group is not None and torch.distributed.is_initialized() and torch.distributed.get_world_size(group) > 1
    return (group, torch.distributed.get_rank(group)) if shared else (None, 0)


def backend_of(scheduler: Any) -> Any:
    """The attention backend of one of SGLang's schedulers."""
    return scheduler.tp_worker.model_runner.attn_backend


def page_owners(scheduler: Any, summaries: Any) -> dict[int, tuple[str, int]]:
    """Complete physical pages that the radix tree or a running request owns: by whom, and the position of the first token.

    Without those that are going to be built before the next plan anyway: their KV arrived without a forward pass, or they wait
    for a centre.
    """
    import torch

    from .kernels.common import PAGE_SIZE

    owners: dict[int, tuple[str, int]] = {}
    for owned in (_nodes(scheduler), running_requests(scheduler)):
        # One transfer for all of them.
        pages = torch.cat([slots[::PAGE_SIZE] for *_, slots in owned]).cpu() // PAGE_SIZE if owned else torch.empty(0)
        for (owner, start, _), part in zip(
            owned, pages.split([-(-len(slots) // PAGE_SIZE) for *_, slots in owned]), strict=True
        ):
            for i, page in enumerate(part.tolist()):
                owners.setdefault(page, (owner, start + PAGE_SIZE * i))
    for page in summaries.pending():
        owners.pop(page, None)
    return owners


def _all_compared(
    summaries: Any, pages: Sequence[int], owners: Mapping[int, tuple[str, int]], rank: int
) -> tuple[int, list[Mismatch]]:
    """`compared` in all layers, some pages at a time."""
    missing, found = 0, []
    for at in range(0, len(pages), CHUNK):
        lacking, unlike = compared(summaries, pages[at : at + CHUNK], owners, rank, summaries.layer_ids)
        missing += lacking
        found += unlike
    return missing, found


def compared(
    summaries: Any, pages: Sequence[int], owners: Mapping[int, tuple[str, int]], rank: int, layer_ids: Sequence[int]
) -> tuple[int, list[Mismatch]]:
    """How many summaries these pages lack in these layers, and those that do not fit: such pages are marked to be rebuilt."""
    import torch

    from .kernels.common import PAGE_SIZE, token_slots

    chunk = torch.tensor(pages, dtype=torch.int64)
    at, where = chunk.to(summaries.valid.device), {layer_id: layer_id - summaries.first_layer for layer_id in layer_ids}
    lacking = {
        (layer_id, pages[j]) for layer_id, i in where.items() for j in (~summaries.valid[i, at]).nonzero().flatten().tolist()
    }
    unlike = [pair for pair in summaries.verify(chunk, layer_ids=layer_ids) if pair not in lacking]
    found = [Mismatch(rank, layer, page, *owners[page]) for layer, page in unlike]
    if found:
        bad = torch.tensor(sorted({mismatch.page for mismatch in found}), dtype=torch.int64)
        summaries.mark_dirty(token_slots(bad, PAGE_SIZE))
    return len(lacking), found


def _nodes(scheduler: Any) -> list[tuple[str, int, Any]]:
    """Nodes of the radix tree: name, position of the first token, slots."""
    from . import radix

    try:
        return [(f"node {number}", start, slots) for number, (start, slots) in enumerate(radix.nodes(scheduler.tree_cache))]
    except radix.RadixViewError:
        return []  # without a radix cache requests own all there is


def running_requests(scheduler: Any) -> list[tuple[str, int, Any]]:
    """Running requests: name, position of the first token, slots of complete pages."""
    from .kernels.common import PAGE_SIZE

    table = scheduler.req_to_token_pool.req_to_token
    batches = (scheduler.running_batch, scheduler.last_batch)
    requests = {id(request): request for batch in batches if batch is not None for request in batch.reqs}
    found = []
    for request in requests.values():
        row = table_row(request)
        if row is not None and not request.finished():
            found.append((f"request {request.rid}", 0, table[row, : stored_tokens(request) // PAGE_SIZE * PAGE_SIZE]))
    return found


def table_row(request: Any) -> int | None:
    """Row of one of SGLang's requests in `req_to_token`, if it has one; newer releases keep it beside what else there is of its
    KV."""
    holder = request if hasattr(request, "req_pool_idx") else request.kv
    return None if holder is None else holder.req_pool_idx


def stored_tokens(request: Any) -> int:
    """Tokens of one of SGLang's requests that are in the cache once the last launched step is through.

    Not its tokens less the one that was sampled last: a retracted request that is prefilled again, in chunks, has an answer.
    """
    holder = request if hasattr(request, "kv_committed_len") else request.kv
    return 0 if holder is None else int(holder.kv_committed_len)


def main(argv: Sequence[str]) -> int:
    """`locks-sglang audit`.

    Returns:
        0 where every summary fits, 1 where some did not, 2 where the server could not be asked.
    """
    parser = argparse.ArgumentParser(
        prog="locks-sglang audit",
        description="Ask a running server to compare its summaries with fresh rebuilds. Serving stands still meanwhile; what "
        f"does not fit is rebuilt before it is used again. A server with an admin key wants it in {KEY_VARIABLE}.",
    )
    parser.add_argument("url", metavar="URL", help="address of the server, e.g. http://127.0.0.1:30000")
    parser.add_argument(
        "--pages", type=int, default=0, metavar="N", help="look at N pages, evenly spread (0, the default: all)"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    given = parser.parse_args(argv)
    if given.pages < 0:
        parser.error(f"--pages must be 0 (all) or more, got {given.pages}")
    try:
        ranks = _ask(given.url.rstrip("/"), given.pages, given.timeout)
    except AdminError as error:
        print(f"locks-sglang audit: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(ranks))
    else:
        for number, told in enumerate(ranks):
            print(_report(told, number, len(ranks)))
    return 1 if any(told["mismatched"] for told in ranks) else 0


def _ask(url: str, pages: int, timeout: float) -> list[dict[str, Any]]:
    """Have every scheduler audit, and what each then tells."""
    if not change(url, timeout, {AUDIT: pages}):
        raise AdminError(f"{url} did not audit; its log says why")
    return [state["audit"] for state in states(url, timeout)]


def _report(told: dict[str, Any], number: int, of: int) -> str:
    head = f"scheduler {number}: " if of > 1 else ""
    lines = [
        f"{head}{told['looked_at']} of {told['pages']} pages looked at in {told['seconds']:.1f} s, "
        f"{told['mismatched']} summaries do not fit, {told['unsummarised']} are missing"
    ]
    for mismatch in told["mismatches"]:
        lines.append("  rank {rank}, layer {layer}, page {page}: {owner}, tokens from {position} on".format(**mismatch))
    if told["mismatched"] > len(told["mismatches"]):
        lines.append(f"  and {told['mismatched'] - len(told['mismatches'])} more")
    return "\n".join(lines)
