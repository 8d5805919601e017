"""Keys, values and late queries of a real served run, layer by layer."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..config import LocksConfig
from ..inprocess import InProcessServer, Request
from ..kernels.build_page_summaries import PageSummaries
from ..kernels.common import PAGE_SIZE, token_slots
from ..ops import dense_decode, exact_page_lse
from ..summary_pool import SummaryPool

LATE_QUERIES = 8
"""Last positions of the prompt whose queries are kept (B)."""

DECODE_STEPS = 4
"""Decode steps after the prefill and before the page table is read, which is then that of a decoding request."""

NEW_TOKENS = DECODE_STEPS + 2
"""Tokens that the request asks for: the prefill yields one, and one step is left when the page table is read."""

SPARE_TOKENS = 256
"""Room in the KV pool beyond the prompt: the decode steps, and what SGLang's admission holds back."""

TIMEOUT_S = 3600.0


def cpu_arguments(num_tokens: int) -> dict[str, Any]:
    """Server arguments for a CPU: float32, which every processor computes well, and the prompt in one prefill step, since
    SGLang's dense CPU attention recomputes the prefix for every chunk. The default memory fraction sets aside 1.5 MB for
    each token of such a step, which a CPU does not need and a small machine does not have."""
    return {
        "dtype": "float32",
        "chunked_prefill_size": -(-num_tokens // PAGE_SIZE) * PAGE_SIZE,
        "mem_fraction_static": 0.8,
    }


class CaptureError(RuntimeError):
    """A run that did not yield what an evaluation needs."""


@dataclass(frozen=True)
class LayerKeys:
    """One attention layer as B queries meet it: what a method may look at to choose pages.

    The queries stand as B requests that share a prompt and may differ in length. Pages are in logical order, page n of the
    prompt at index n; N pages, the partial tail page included.

    Args:
        layer_id: index of the layer in the model.
        queries: fp32 [B, Hq, D], after RoPE, as they arrive at the attention backend.
        keys: fp32 [N, P, H, D], after RoPE, as they lie in the KV pool; 0 past the prompt.
        seq_lens: int64 [B], tokens that each query sees, its own included.
        sm_scale: factor on q.k before the soft cap.
        logit_cap: cap * tanh(logit / cap); 0 is off.
    """

    layer_id: int
    queries: torch.Tensor
    keys: torch.Tensor
    seq_lens: torch.Tensor
    sm_scale: float
    logit_cap: float

    @property
    def num_kv_heads(self) -> int:
        """H."""
        return self.keys.shape[2]

    @property
    def num_pages(self) -> torch.Tensor:
        """int32 [B]: pages that each query sees, its partial page included."""
        return ((self.seq_lens + PAGE_SIZE - 1) // PAGE_SIZE).to(torch.int32)

    @property
    def page_table(self) -> torch.Tensor:
        """int32 [B, N]: the identity, since pages are in logical order."""
        pages = torch.arange(self.keys.shape[0], dtype=torch.int32, device=self.keys.device)
        return pages.repeat(self.seq_lens.shape[0], 1)

    def exact_lse(self) -> torch.Tensor:
        """fp32 [B, Hq, N]: exact natural log-sum-exp of every page."""
        return exact_page_lse(
            self.queries,
            self.keys.flatten(0, 1),
            self.page_table,
            self.seq_lens,
            self.sm_scale,
            logit_cap=self.logit_cap,
        )


@dataclass(frozen=True)
class LayerCapture(LayerKeys):
    """One attention layer as the late queries of a prompt meet it, with what else the server had of it.

    Args:
        outputs: fp32 [B, Hq, Dv], what the server's attention returned for the queries.
        values: fp32 [N, P, H, Dv], as the keys.
        summaries: the records of these pages that the server built; only complete pages are valid.
    """

    outputs: torch.Tensor
    values: torch.Tensor
    summaries: PageSummaries

    def replay_error(self) -> float:
        """Largest difference between dense attention over what was captured and what the server returned, relative to
        the largest output. Rounding alone, unless queries, keys, values and positions do not belong together."""
        replayed = dense_decode(
            self.queries,
            self.keys.flatten(0, 1),
            self.values.flatten(0, 1),
            self.page_table,
            self.seq_lens,
            self.sm_scale,
            logit_cap=self.logit_cap,
        )
        return float((replayed - self.outputs).abs().max() / self.outputs.abs().max())


@dataclass
class _LateRows:
    """Rows of the last positions of one layer, as prefill steps bring them: q [b, Hq * D] and output [b, Hq * Dv]."""

    layer: Any
    queries: list[torch.Tensor] = dataclasses.field(default_factory=list)
    outputs: list[torch.Tensor] = dataclasses.field(default_factory=list)


class CapturedRun:
    """A prompt that a server of this process prefilled and is decoding, with the late queries of every layer.

    One a process, as `InProcessServer`. Keys, values and summaries stay in the server's pools until `layer` reads them.

    Args:
        model_path: folder of the model.
        device: "cuda" or "cpu".
        prompt_ids: token ids of the prompt.
        progress: called after each layer of each prefill step with the work done and that of the whole prefill, in
            tokens times layers.

    Raises:
        CaptureError: the prompt does not fit the model's context, or the run lacks a query or a summary.
    """

    def __init__(
        self,
        model_path: str,
        device: str,
        prompt_ids: Sequence[int],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.num_tokens = len(prompt_ids)
        self.server = InProcessServer(
            model_path,
            device=device,
            attention_backend="locks",
            max_running_requests=1,
            max_total_tokens=self.num_tokens + SPARE_TOKENS,
            log_level="warning",
            **(cpu_arguments(self.num_tokens) if device == "cpu" else {}),
        )
        context = self.server.scheduler.model_config.context_len
        if self.num_tokens + NEW_TOKENS > context:
            raise CaptureError(
                f"{self.num_tokens} tokens do not fit the model's context of {context}: {context - NEW_TOKENS} or fewer do"
            )
        self._rows: dict[int, _LateRows] = {}
        self._request_row = torch.empty(0)
        request = self.server.submit(prompt_ids, max_new_tokens=NEW_TOKENS)
        with self._late_rows(progress):
            self.server.run(self._until_decoding(request), timeout_s=TIMEOUT_S)

    def _until_decoding(self, request: Request) -> Iterator[None]:
        """Script of the run: note the request's pages while it owns them. Nothing overwrites them afterwards."""
        while len(request.output_ids) <= DECODE_STEPS:
            if request.finished:
                raise CaptureError(f"the server ended the request after {len(request.output_ids)} of {NEW_TOKENS} tokens")
            yield
        self._pages = self._page_table()

    @property
    def config(self) -> LocksConfig:
        """Settings that the server ran with."""
        return self.server.backend.config

    @property
    def layer_ids(self) -> list[int]:
        """Layers of the model."""
        return list(self._summary_pool.layer_ids)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's activations and of the KV pool."""
        return self.server.runner.dtype

    @property
    def _summary_pool(self) -> SummaryPool:
        return self.server.backend.summaries

    @contextmanager
    def _late_rows(self, progress: Callable[[int, int], None]) -> Iterator[None]:
        backend = self.server.backend
        forward_extend = backend.forward_extend
        first = self.num_tokens - LATE_QUERIES
        done, total = 0, self.num_tokens * len(self.layer_ids)

        def keep_late_rows(q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal done
            self._request_row = forward_batch.req_pool_indices
            late = forward_batch.positions >= first
            queries = q[late].float()
            out = forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)
            rows = self._rows.setdefault(layer.layer_id, _LateRows(layer))
            rows.queries.append(queries)
            rows.outputs.append(out[late].float())
            done += late.numel()
            progress(done, total)
            return out

        backend.forward_extend = keep_late_rows
        try:
            yield
        finally:
            del backend.forward_extend

    def _page_table(self) -> torch.Tensor:
        """int64 [N]: physical pages of the prompt, from the running request's row of the token table."""
        (slots,) = self.server.runner.req_to_token_pool.req_to_token[self._request_row.long()]
        return slots[: self.num_tokens : PAGE_SIZE].long() // PAGE_SIZE

    def layer(self, layer_id: int) -> LayerCapture:
        """Read one layer out of the server's pools.

        Raises:
            CaptureError: queries are missing, or a complete page has no valid summary.
        """
        rows = self._rows.get(layer_id)
        queries = torch.cat(rows.queries) if rows else torch.empty(0)
        if rows is None or queries.shape[0] != LATE_QUERIES:
            raise CaptureError(f"layer {layer_id}: {queries.shape[0]} of the last {LATE_QUERIES} queries were captured")
        layer = rows.layer
        pool = self.server.kv_pool
        served = self._summary_pool.layer(layer_id)
        assert served.record is not None
        complete = torch.arange(self._pages.numel(), device=self._pages.device) < self.num_tokens // PAGE_SIZE
        valid = served.valid[self._pages] & complete
        if not torch.equal(valid, complete):
            raise CaptureError(f"layer {layer_id}: {int((complete & ~valid).sum())} pages of the prompt have no summary")
        return LayerCapture(
            layer_id=layer_id,
            queries=queries.view(LATE_QUERIES, layer.tp_q_head_num, layer.qk_head_dim),
            outputs=torch.cat(rows.outputs).view(LATE_QUERIES, layer.tp_q_head_num, layer.v_head_dim),
            keys=self._prompt_rows(pool.get_key_buffer(layer_id)),
            values=self._prompt_rows(pool.get_value_buffer(layer_id)),
            seq_lens=self.num_tokens - LATE_QUERIES + 1 + torch.arange(LATE_QUERIES, device=queries.device),
            sm_scale=float(layer.scaling),
            logit_cap=float(layer.logit_cap or 0.0),
            summaries=PageSummaries(
                served.layout,
                valid,
                served.center,
                served.record[self._pages],
                None if served.values is None else served.values[self._pages],
            ),
        )

    def _prompt_rows(self, buffer: torch.Tensor) -> torch.Tensor:
        """fp32 [N, P, H, *] of a pool's buffer [slots, H, *]: the prompt's rows, 0 where other tokens follow it."""
        rows = buffer[token_slots(self._pages, PAGE_SIZE)].float()
        rows.flatten(0, 1)[self.num_tokens :] = 0.0
        return rows
