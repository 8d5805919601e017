"""Other ways to choose what a decode step reads, for a server that is being evaluated (`--locks-evaluation on`).

Between requests the server changes from one to the other, so that all of them answer the same prompts from the same cache.
Everything here is torch and reads every key: for comparison, not for speed.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..admin import SWITCH
from ..config import COMBINES, TAIL_CORRECTIONS, ConfigError, nearest
from ..kernels.common import PAGE_SIZE, gqa_queries, soft_cap, token_slots
from ..kernels.decode_plan import DecodeBuffers
from ..kernels.locks_decode import merge_tail
from ..kernels.page_lse import page_scores
from ..ops import select_pages, sparse_decode
from ..plan import DecodePlan
from . import SELECTORS, WITHOUT_TAIL
from .capture import LayerKeys
from .selectors import Selector, min_max_bound, oracle, page_mean, random_pages

ESTIMATES: dict[str, Callable[[int], Selector]] = {
    "oracle": oracle,
    "page-mean": page_mean,
    "min-max": min_max_bound,
    "random": lambda head_dim: random_pages(0),
}
"""Selectors of `locks-sglang eval mass` that need nothing but a request's keys, by name; made for a head dimension."""
WINDOW = "window"
"""The first pages and the last ones: what lies between is never read again, as in StreamingLLM."""
HEAVY_HITTER = "heavy-hitter"
"""See `HeavyHitters`."""
SWITCHED: dict[str, tuple[str, ...]] = {
    "budget_tokens": (),
    "sink_pages": (),
    "recent_pages": (),
    "combine": COMBINES,
    "tail_correction": TAIL_CORRECTIONS,
}
"""Settings that may change with the selector, and the names among which some of them choose."""
SETTING_PREFIX = "locks_"
"""Before the name of a setting where it is sent to a server."""
ALL_SHORT = 2**62
"""`min_context_tokens` with which every request is short, and decode dense."""


def to_numbers(selector: str, settings: Mapping[str, Any]) -> dict[str, int]:
    """A switch as `/set_internal_state` takes it, which is numbers alone: names by their place.

    Raises:
        ConfigError: an unknown name.
    """
    numbers = {SWITCH: _place(selector, SELECTORS)}
    for name, value in settings.items():
        _place(name, tuple(SWITCHED))
        numbers[SETTING_PREFIX + name] = _place(value, SWITCHED[name]) if SWITCHED[name] else value
    return numbers


def from_numbers(numbers: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What `to_numbers` wrote: selector and settings.

    Raises:
        ConfigError: numbers that it never writes.
    """
    try:
        given = {name.removeprefix(SETTING_PREFIX): value for name, value in numbers.items() if name != SWITCH}
        settings = {name: SWITCHED[name][int(value)] if SWITCHED[name] else int(value) for name, value in given.items()}
        return SELECTORS[int(numbers[SWITCH])], settings
    except LookupError:
        raise ConfigError(f"{dict(numbers)} is no switch of this release") from None


def _place(name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise ConfigError(f"{name!r} is unknown here{nearest(name, names)}; known: {', '.join(names)}")
    return names.index(name)


class Evaluation:
    """What attends in the decode steps of a backend that is being evaluated.

    Args:
        backend: `LocksAttnBackend`.

    Attributes:
        selector: one of `SELECTORS`; "locks" is the product, "dense" its inner backend.
    """

    def __init__(self, backend: Any) -> None:
        self.selector = "locks"
        self._backend = backend
        self._started_with = backend.config
        self._requests: Sequence[str] = ()
        self._heavy_hitters = HeavyHitters()

    def switch(self, selector: str = "locks", **settings: Any) -> None:
        """Choose pages otherwise from the next step on. What is not named is as the server was started, but for the tail
        correction, which belongs to the product: with any other selector it is off unless named.

        Args:
            selector: one of `SELECTORS`. settings: of `SWITCHED`, as in `LocksConfig`.

        Raises:
            ConfigError: an unknown name, a bad value, or a tail correction that the selector or the server cannot have.
        """
        to_numbers(selector, settings)  # refuses unknown names
        started = self._started_with
        if selector != "locks":
            settings = {"tail_correction": "off", "min_context_tokens": ALL_SHORT * (selector == "dense"), **settings}
        config = dataclasses.replace(started, **settings)
        if config.value_mean and selector in WITHOUT_TAIL:
            raise ConfigError(f"{selector} has no tail to correct: leave tail_correction = {config.tail_correction!r} out")
        if config.value_mean and not started.value_mean:
            raise ConfigError(
                f"tail_correction = {config.tail_correction!r} needs value means, which this server does not keep: "
                "start it with --locks-tail-correction qmu or flat"
            )
        self.selector = selector
        self._heavy_hitters = HeavyHitters()
        self._backend._change_config(config)

    def begin(self, requests: Sequence[str]) -> None:
        """A decode step of these requests is planned."""
        self._requests = list(requests)
        self._heavy_hitters.keep(self._requests)

    def attend(self, q: torch.Tensor, layer: Any, plan: DecodePlan) -> torch.Tensor:
        """Attention of one layer of the planned step, whose keys and values are stored: q [B, Hq, D] to [B, Hq, Dv]."""
        if self.selector == "locks":
            return self._backend._step(q, layer, plan).out
        if self.selector == HEAVY_HITTER:
            return self._remembered(q, layer, plan.buffers)
        return self._chosen(q, layer, plan.buffers)

    def _chosen(self, q: torch.Tensor, layer: Any, buffers: DecodeBuffers) -> torch.Tensor:
        """Attention to the pages that the selector scores highest, corrected for the others where that is on."""
        backend, config = self._backend, self._backend.config
        keys, values = (get(layer.layer_id) for get in (backend.kv_pool.get_key_buffer, backend.kv_pool.get_value_buffer))
        table, lengths, held = buffers.page_table, buffers.seq_lens, buffers.num_pages
        cap = float(layer.logit_cap or 0.0)
        # Of a window one page is left to the scores, and the latest one has the highest.
        recent = config.budget_pages - config.sink_pages - 1 if self.selector == WINDOW else config.recent_pages
        pages, counts = select_pages(
            self._scores(q, layer, buffers),
            held,
            config.budget_pages,
            config.sink_pages,
            recent,
            num_kv_heads=keys.shape[1],
            combine=config.combine,
        )
        read = pages[..., : table.shape[1]]  # counts never exceed the pages there are
        out, lse = sparse_decode(q, keys, values, table, read, counts, lengths, layer.scaling, logit_cap=cap, return_lse=True)
        if config.tail_correction == "off":
            return out
        # As in the product, the newest page is not scored, full or not.
        rest = page_scores(
            q,
            backend.summaries.layer(layer.layer_id),
            table,
            held,
            layer.scaling,
            seq_lens=lengths - 1,
            logit_cap=cap,
            tail=config.tail_correction,
        )
        assert rest.tail is not None
        assert rest.value_mean is not None
        return merge_tail(out.float(), lse, pages, rest.tail, rest.value_mean)

    def _scores(self, q: torch.Tensor, layer: Any, buffers: DecodeBuffers) -> torch.Tensor:
        """fp32 [B, Hq, N] by which pages are chosen: what the selector estimates of each row."""
        columns = buffers.page_table.shape[1]
        if self.selector == WINDOW:
            return torch.arange(columns, dtype=torch.float32, device=q.device).expand(*q.shape[:2], columns)
        selector = ESTIMATES[self.selector](q.shape[2])
        scores = torch.full((*q.shape[:2], columns), -torch.inf, device=q.device)
        for row, length in enumerate(buffers.seq_lens.tolist()):
            slots = row_slots(buffers, row, length)
            keys = self._backend.kv_pool.get_key_buffer(layer.layer_id)[slots].float()
            keys.flatten(0, 1)[length:] = 0.0
            found = selector.page_lse(
                LayerKeys(
                    layer.layer_id,
                    q[row : row + 1].float(),
                    keys,
                    torch.tensor([length], device=q.device),
                    float(layer.scaling),
                    float(layer.logit_cap or 0.0),
                )
            )
            scores[row, :, : found.shape[2]] = found[0]
        return scores

    def _remembered(self, q: torch.Tensor, layer: Any, buffers: DecodeBuffers) -> torch.Tensor:
        """Attention of every row to the tokens that heavy-hitter eviction has left it."""
        pool = self._backend.kv_pool
        caches = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        out = []
        for row, length in enumerate(buffers.seq_lens.tolist()):
            slots = row_slots(buffers, row, length).flatten()[:length]
            keys, values = (cache[slots].float() for cache in caches)
            place = self._requests[row], layer.layer_id
            budget, cap = self._backend.config.budget_tokens, float(layer.logit_cap or 0.0)
            out.append(self._heavy_hitters.attend(place, q[row].float(), keys, values, layer.scaling, cap, budget))
        return torch.stack(out)


def row_slots(buffers: DecodeBuffers, row: int, length: int) -> torch.Tensor:
    """Token slots int64 [N, P] of the pages of a row with `length` tokens."""
    return token_slots(buffers.page_table[row, : -(-length // PAGE_SIZE)], PAGE_SIZE)


class HeavyHitters:
    """Heavy-hitter eviction (H2O): a KV head keeps the latest tokens, half of its budget, and of the others those that have
    had the most attention since decode began. What is evicted is never read again.

    The published method also counts the attention of the prompt's own queries, which a dense prefill does not yield: here a
    prompt that is longer than the budget is cut by its first decode step alone.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, requests: Sequence[str]) -> None:
        """Drop what is known of all other requests."""
        self._states = {place: state for place, state in self._states.items() if place[0] in requests}

    def attend(
        self,
        place: tuple[str, int],
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sm_scale: float,
        logit_cap: float,
        budget_tokens: int,
    ) -> torch.Tensor:
        """Attention of the next token of a request in one layer, then eviction down to the budget.

        Args:
            place: id of the request, and the layer.
            q: fp32 [Hq, D]. keys, values: fp32 [n, H, D] and [n, H, Dv], all tokens of the request, the new one included.

        Returns:
            fp32 [Hq, Dv].
        """
        tokens, heads, _ = keys.shape
        kept, mass = self._states.get(place) or (
            torch.empty(heads, 0, dtype=torch.bool, device=q.device),
            torch.empty(heads, 0, device=q.device),
        )
        new = tokens - kept.shape[1]
        kept, mass = torch.nn.functional.pad(kept, (0, new), value=True), torch.nn.functional.pad(mass, (0, new))
        queries = gqa_queries(q.unsqueeze(0), heads, torch.float32)[0]
        logits = soft_cap(sm_scale * torch.einsum("hgd,nhd->hgn", queries, keys), logit_cap)
        share = torch.softmax(logits.masked_fill(~kept.unsqueeze(1), -torch.inf), -1)
        mass = mass + share.sum(1)
        if tokens > budget_tokens:
            worth = mass.masked_fill(~kept, -torch.inf)
            worth[:, tokens - budget_tokens // 2 :] = torch.inf
            kept = torch.zeros_like(kept).scatter(1, worth.topk(budget_tokens, 1).indices, True)
        self._states[place] = kept, mass
        return torch.einsum("hgn,nhv->hgv", share, values).reshape(q.shape[0], values.shape[2])
