"""Summaries as seen from SGLang's radix tree: which pages of a node hold one, how many were built, how many reused.

A node owns token slots, and a page is `slot // 16`, so nothing is stored on nodes: these are views of the summary pool.
Reading waits for the device; meant for tests, metrics and audits, not for the serving path.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .kernels.common import PAGE_SIZE
from .summary_pool import SummaryPool


class RadixViewError(RuntimeError):
    """The tree has no summaries, or is of a kind that this module cannot read."""


@dataclass(frozen=True)
class NodeSummaries:
    """Pages of one node, all tensors on the CPU, one entry a page in order of position.

    Attributes:
        start: position of the node's first token in the sequences that pass through it.
        pages: int64 [n], physical 16-token pages.
        valid: bool [n], whether every layer holds a valid summary.
        builds: int32 [n], times the page was summarised since its first token was written.
        reuses: int32 [n], requests that started with the page in their cached prefix since then.
    """

    start: int
    pages: torch.Tensor
    valid: torch.Tensor
    builds: torch.Tensor
    reuses: torch.Tensor

    @property
    def held(self) -> int:
        """Pages with a valid summary."""
        return int(self.valid.sum())

    @property
    def stale(self) -> int:
        """Pages without one."""
        return len(self.pages) - self.held

    @property
    def built(self) -> int:
        """Builds of the node's pages."""
        return int(self.builds.sum())

    @property
    def reused(self) -> int:
        """Reuses of the node's pages."""
        return int(self.reuses.sum())

    @property
    def shared(self) -> int:
        """Pages that at least one request found in the cache."""
        return int((self.reuses > 0).sum())


def path(tree: Any, token_ids: Sequence[int], extra_key: str | None = None) -> list[NodeSummaries]:
    """Nodes that hold the cached prefix of `token_ids`, from the root down.

    Args:
        tree: the scheduler's `tree_cache` (`RadixCache` or `UnifiedRadixCache`).
        token_ids: tokens of a prompt; only whole pages are ever cached.
        extra_key: namespace of the request, where SGLang gave it one.

    It looks the prefix up as a request would: a node may be split at its end, and its age is refreshed.

    Raises:
        RadixViewError: no `locks` backend runs on the tree's KV pool.
    """
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    pool = _pool(tree)
    match = tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", token_ids), extra_key)))
    if len(token_ids) < PAGE_SIZE:
        return []
    core = getattr(tree, "tree_core", None)
    if core is None:
        return [_summaries(pool, start, node.value) for start, node in _ancestors(match.last_device_node)]
    (infos,) = core.collect_path_info([match.last_device_node])
    return [
        _summaries(pool, info.path_start, core.get_component_device_value(info.node_id, _full_component()))
        for info in infos
        if info.full_value_len
    ]


def walk(tree: Any) -> Iterator[NodeSummaries]:
    """Every node of the tree that holds device slots, parents before children.

    On SGLang's Rust tree core, which lists slots and not nodes, a node and its only child appear as one.

    Raises:
        RadixViewError: no `locks` backend runs on the tree's KV pool, or the tree is of an unknown kind.
    """
    pool = _pool(tree)
    for start, slots in nodes(tree):
        yield _summaries(pool, start, slots)


def nodes(tree: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Start position and slots int [n] of the nodes that `walk` visits, without waiting for the device; raises likewise."""
    _pool(tree)
    core = getattr(tree, "tree_core", None)
    if core is not None:
        rows = core.walk_for_kv_canary(False, False)
        yield from _segments(rows.slot_indices, rows.positions, rows.prev_slot_indices)
        return
    pending = [(0, node) for node in tree.root_node.children.values()]
    while pending:
        start, node = pending.pop()
        if node.value is not None:
            yield start, node.value
        pending += [(start + len(node.key), child) for child in node.children.values()]


def owned_pages(tree: Any) -> torch.Tensor:
    """Physical pages int64 [n] that the tree owns, sorted, on the CPU."""
    found = [slots[::PAGE_SIZE] for _, slots in nodes(tree)]
    return (torch.cat(found).cpu().long() // PAGE_SIZE).sort().values if found else torch.empty(0, dtype=torch.int64)


def _pool(tree: Any) -> SummaryPool:
    # Without a radix cache 0.5.17 has a tree of another class, 0.5.23 one that is switched off.
    if getattr(tree, "disable", False) or not (hasattr(tree, "tree_core") or hasattr(tree, "root_node")):
        raise RadixViewError(f"this {type(tree).__name__} caches nothing; start the server without --disable-radix-cache")
    pool = SummaryPool.attached(tree.token_to_kv_pool_allocator.get_kvcache())
    if pool is None:
        raise RadixViewError("no summaries on this tree's KV pool; start the server with --attention-backend locks")
    return pool


def _full_component() -> Any:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    return ComponentType.FULL


def _ancestors(node: Any) -> list[tuple[int, Any]]:
    """Start position and node, from below the root to `node`."""
    chain = []
    while node.parent is not None:
        chain.append(node)
        node = node.parent
    starts, at = [], 0
    for member in reversed(chain):
        starts.append((at, member))
        at += len(member.key)
    return starts


def _segments(slots: torch.Tensor, positions: torch.Tensor, previous: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut the rows of a depth-first walk where a chain breaks or branches: start position and slots of each piece."""
    if len(slots) == 0:
        return
    parents, children = previous.unique(return_counts=True)
    branching = parents[children > 1]
    cut = torch.ones(len(slots), dtype=torch.bool)
    cut[1:] = (previous[1:] != slots[:-1]) | torch.isin(previous[1:], branching)
    first = cut.nonzero().flatten().tolist()
    for begin, end in zip(first, [*first[1:], len(slots)], strict=True):
        yield int(positions[begin]), slots[begin:end]


def _summaries(pool: SummaryPool, start: int, slots: torch.Tensor) -> NodeSummaries:
    pages = slots[::PAGE_SIZE].long().to(pool.valid.device) // PAGE_SIZE
    return NodeSummaries(
        start=start,
        pages=pages.cpu(),
        valid=pool.valid[:, pages].all(0).cpu(),
        builds=pool.builds[pages].cpu(),
        reuses=pool.reuses[pages].cpu(),
    )
