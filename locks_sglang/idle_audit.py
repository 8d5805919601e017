"""The canary at idle: a scheduler without work compares its summaries with fresh ones, a slice at a time, until all have been
looked at once since its last step."""

import logging
import time
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import torch

from .audit import SHOWN, Mismatch, compared, page_owners, rank_group

logger = logging.getLogger(__name__)

SETTLED_S = 1.0
"""Seconds without a step before it begins: between the requests of a busy server it does nothing."""
SLICE = 64
LARGEST_SLICE = 4096
"""Pages of one layer that are compared together, at first and at most."""


class IdleAudit:
    """That of one scheduler, on every rank by itself: what does not fit is told in the log of its process and rebuilt there.

    Args:
        summaries: the scheduler's `SummaryPool`.
        milliseconds: how long a slice may take; 0 switches it off. A request that comes meanwhile waits as long.
    """

    def __init__(self, summaries: Any, milliseconds: int) -> None:
        self._summaries = summaries
        self._seconds = milliseconds / 1000
        self._steps = -1
        self._idle_since = 0.0
        self._sweep: Iterator[None] | None = None
        self._swept = milliseconds == 0
        self._last_page = -1
        self._size = SLICE

    def turn(self, scheduler: Any) -> None:
        """Called whenever SGLang's `Scheduler` finds nothing to do; waits for the device during a slice."""
        if self._seconds == 0:
            return
        now = time.monotonic()
        if scheduler.forward_ct != self._steps:
            self._steps, self._idle_since, self._sweep, self._swept = scheduler.forward_ct, now, None, False
        if self._swept or now - self._idle_since < SETTLED_S:
            return
        self._sweep = self._sweep or self._slices(scheduler)
        try:
            for _ in self._sweep:
                if time.monotonic() - now >= self._seconds:
                    return
            self._summaries.counters.idle_audits += 1
        except RuntimeError as error:  # out of memory, above all: serving goes on without
            logger.warning("locks: the audit at idle stopped: %s", error)
        self._swept = True

    def _slices(self, scheduler: Any) -> Iterator[None]:
        """Compare all pages, one layer of some of them between two turns, from the page after the last one on: so those of a
        server that is never idle for long all have their turn."""
        owners = page_owners(scheduler, self._summaries)
        pages = sorted(owners)
        first = bisect_right(pages, self._last_page)
        pages = pages[first:] + pages[:first]
        group = rank_group(scheduler)
        rank = 0 if group is None else torch.distributed.get_rank(group)
        while pages:
            chunk, pages = pages[: self._size], pages[self._size :]
            slowest = 0.0
            found: list[Mismatch] = []
            for layer_id in self._summaries.layer_ids:
                began = time.monotonic()
                found += compared(self._summaries, chunk, owners, rank, [layer_id])[1]
                slowest = max(slowest, time.monotonic() - began)
                yield
            self._tell(found)
            self._last_page = chunk[-1]
            if slowest > self._seconds:
                self._size = max(self._size // 2, 1)
            elif slowest < self._seconds / 4:
                self._size = min(2 * self._size, LARGEST_SLICE)

    def _tell(self, found: list[Mismatch]) -> None:
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
