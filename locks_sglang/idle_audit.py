"""The canary at idle: a scheduler without work compares its summaries with fresh ones, a slice at a time, until all have been
looked at once since its last step."""

import logging
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .audit import CHUNK, SHOWN, Mismatch, compared, page_owners, rank_group

logger = logging.getLogger(__name__)

SETTLED_S = 1.0
"""Seconds without a step before it begins: between the requests of a busy server it does nothing."""
SLICE = 64
"""Pages of one layer that are compared together, at first; `CHUNK` at most."""


class IdleAudit:
    """That of one scheduler, on every rank by itself: what does not fit is told in the log of its process and rebuilt there.

    Args:
        summaries: the scheduler's `SummaryPool`.
        milliseconds: how long a slice should take; 0 switches it off. A request that comes meanwhile waits as long, or for the
            walk of the radix tree with which it begins.
    """

    def __init__(self, summaries: Any, milliseconds: int) -> None:
        self._summaries = summaries
        self._seconds = milliseconds / 1000
        self._steps = -1
        self._idle_since = 0.0
        self._sweep: Iterator[None] | None = None
        self._swept = False
        self._size = SLICE
        # The layer, by its place, and page that were looked at last.
        self._at = 0, -1

    def turn(self, scheduler: Any) -> None:
        """Called whenever SGLang's `Scheduler` finds nothing to do; waits for the device during a slice.

        Raises nothing: a fault here must not end a server that has none otherwise.
        """
        if self._seconds == 0:
            return
        now = time.monotonic()
        if scheduler.forward_ct != self._steps:
            self._steps, self._idle_since, self._sweep, self._swept = scheduler.forward_ct, now, None, False
        if self._swept or now - self._idle_since < SETTLED_S:
            return
        try:
            self._sweep = self._sweep or self._slices(scheduler)
            self._swept = all(time.monotonic() < now + self._seconds for _ in self._sweep)
        except torch.OutOfMemoryError:
            # Again after the next step, with less.
            self._swept = True
            self._fit(float("inf"))
        except Exception:
            self._seconds = 0
            logger.exception("locks: the audit at idle failed and is switched off; serving goes on")

    def _slices(self, scheduler: Any) -> Iterator[None]:
        """Compare all pages layer by layer, some between two turns, from where the last sweep ended or was broken off: so all
        have their turn on a server that is never idle for long."""
        owners = page_owners(scheduler, self._summaries)
        pages = sorted(owners)
        if not pages:
            return
        _, rank = rank_group(scheduler)
        layers = self._summaries.layer_ids
        begin, page = self._at
        first = bisect_right(pages, page)
        runs = [(begin, pages[first:]), *((begin + i, pages) for i in range(1, len(layers))), (begin, pages[:first])]
        for layer, rest in runs:
            while rest:
                chunk, rest = rest[: self._size], rest[self._size :]
                began = time.monotonic()
                self._compare(chunk, owners, rank, layers[layer % len(layers)])
                self._at = layer % len(layers), chunk[-1]
                self._fit(time.monotonic() - began)
                yield
        self._summaries.counters.idle_audits += 1

    def _compare(self, pages: Sequence[int], owners: Mapping[int, tuple[str, int]], rank: int, layer_id: int) -> None:
        """Compare these pages of one layer, and tell at once what does not fit."""
        pending = self._summaries.pending()
        settled = [page for page in pages if page not in pending]
        found: list[Mismatch] = compared(self._summaries, settled, owners, rank, [layer_id])[1] if settled else []
        self._summaries.counters.mismatched += len(found)
        for mismatch in found[:SHOWN]:
            logger.error(
                "locks: a summary does not fit: rank %d, layer %d, page %d (%s, tokens from %d on); it is rebuilt before use",
                mismatch.rank,
                mismatch.layer,
                mismatch.page,
                mismatch.owner,
                mismatch.position,
            )
        if len(found) > SHOWN:
            logger.error("locks: and %d more", len(found) - SHOWN)

    def _fit(self, seconds: float) -> None:
        """Take more or fewer pages at a time, by how long these took."""
        if seconds > self._seconds:
            self._size = max(self._size // 2, 1)
        elif seconds < self._seconds / 4:
            self._size = min(2 * self._size, CHUNK)
