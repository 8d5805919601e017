"""Keys, values and late queries of a real served run, layer by layer, and what another text tells of the same layers."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..config import LocksConfig
from ..inprocess import InProcessServer, Request
from ..kernels.build_page_summaries import PageSummaries
from ..kernels.common import PAGE_SIZE, token_slots
from ..ops import dense_decode, exact_page_lse
from ..summary_pool import SummaryPool
from .calibration import Calibration

CALIBRATION_QUERIES = 64
"""Last positions of the calibration text whose queries are kept."""

DECODE_STEPS = 4
"""Decode steps after the prefill and before the page table is read, which is then that of a decoding request."""

NEW_TOKENS = DECODE_STEPS + 2 + PAGE_SIZE
"""Tokens that the request asks for: the prefill yields one, and steps are left when the page table is read. They fill the
prompt's last page, since the radix cache keeps whole pages alone."""

SPARE_TOKENS = 256
"""Room in the KV pool beyond each prompt: the decode steps, and what SGLang's admission holds back."""

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
        calibration: what was learnt of this layer from another text.
    """

    outputs: torch.Tensor
    values: torch.Tensor
    summaries: PageSummaries
    calibration: Calibration

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


class Run(Protocol):
    """A captured run, wherever its layers lie."""

    @property
    def config(self) -> LocksConfig:
        """Settings that the server ran with."""

    @property
    def layer_ids(self) -> list[int]:
        """Layers of the model."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's activations and of the KV pool."""

    def layer(self, layer_id: int) -> LayerCapture:
        """One layer."""


@dataclass
class _LateRows:
    """Rows of the last positions of one layer, as prefill steps bring them: q [b, Hq * D] and output [b, Hq * Dv]."""

    layer: Any
    queries: list[torch.Tensor] = dataclasses.field(default_factory=list)
    outputs: list[torch.Tensor] = dataclasses.field(default_factory=list)


@dataclass
class _Prompt:
    """A prompt that was prefilled: its length, the queries kept, their rows by layer, and its physical pages int64 [N]."""

    tokens: int
    late: int
    rows: dict[int, _LateRows] = dataclasses.field(default_factory=dict)
    pages: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


class CapturedRun:
    """A prompt that a server of this process prefilled and decoded from, with the late queries of every layer; and another
    text that it prefilled afterwards, from which methods are calibrated.

    One a process, as `InProcessServer`. Keys, values and summaries stay in the server's pools until `layer` reads them.

    Args:
        model_path: folder of the model.
        device: "cuda" or "cpu".
        prompt_ids: token ids of the prompt.
        calibration_ids: token ids of the other text.
        late: last positions of the prompt whose queries are kept (B).
        progress: called after each layer of each prefill step with the work done and that of both prefills, in tokens
            times layers.

    Raises:
        CaptureError: a text does not fit the model's context, or the run lacks a query or a summary.
    """

    def __init__(
        self,
        model_path: str,
        device: str,
        prompt_ids: Sequence[int],
        calibration_ids: Sequence[int],
        late: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        texts = (prompt_ids, calibration_ids)
        longest = max(map(len, texts))
        self.server = InProcessServer(
            model_path,
            device=device,
            attention_backend="locks",
            max_running_requests=1,
            max_total_tokens=sum(len(text) + SPARE_TOKENS for text in texts),
            page_size=PAGE_SIZE,
            log_level="warning",
            **(cpu_arguments(longest) if device == "cpu" else {}),
        )
        context = self.server.scheduler.model_config.context_len
        if longest + NEW_TOKENS > context:
            raise CaptureError(
                f"{longest} tokens do not fit the model's context of {context}: {context - NEW_TOKENS} or fewer do"
            )
        self._request_row = torch.empty(0)
        self._done, self._work = 0, sum(map(len, texts)) * len(self.layer_ids)
        # The prompt comes first, as on a server that starts with it: the centre of the summaries is its own. The pool has room
        # for both, so that what it left in the radix cache stays.
        self._prompt = self._prefill(prompt_ids, late, progress)
        other = self._prefill(calibration_ids, CALIBRATION_QUERIES, progress)
        self._calibration = {layer_id: self._calibrate(other, layer_id) for layer_id in self.layer_ids}

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

    def _prefill(self, ids: Sequence[int], late: int, progress: Callable[[int, int], None]) -> _Prompt:
        """Serve a prompt, and keep its late rows and its pages."""
        prompt = _Prompt(len(ids), late)
        request = self.server.submit(ids, max_new_tokens=NEW_TOKENS)
        with self._late_rows(prompt, progress):
            self.server.run(self._until_decoding(request, prompt), timeout_s=TIMEOUT_S)
        return prompt

    def _until_decoding(self, request: Request, prompt: _Prompt) -> Iterator[None]:
        """Script of the run: note the request's pages while it owns them. The radix cache keeps them afterwards."""
        while len(request.output_ids) <= DECODE_STEPS:
            if request.finished:
                raise CaptureError(f"the server ended the request after {len(request.output_ids)} of {NEW_TOKENS} tokens")
            yield
        (slots,) = self.server.runner.req_to_token_pool.req_to_token[self._request_row.long()]
        prompt.pages = slots[: prompt.tokens : PAGE_SIZE].long() // PAGE_SIZE

    @contextmanager
    def _late_rows(self, prompt: _Prompt, progress: Callable[[int, int], None]) -> Iterator[None]:
        backend = self.server.backend
        forward_extend = backend.forward_extend
        first = prompt.tokens - prompt.late

        def keep_late_rows(q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._request_row = forward_batch.req_pool_indices
            late = forward_batch.positions >= first
            queries = q[late].float()
            out = forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)
            rows = prompt.rows.setdefault(layer.layer_id, _LateRows(layer))
            rows.queries.append(queries)
            rows.outputs.append(out[late].float())
            self._done += late.numel()
            progress(self._done, self._work)
            return out

        backend.forward_extend = keep_late_rows
        try:
            yield
        finally:
            del backend.forward_extend

    def _queries(self, prompt: _Prompt, layer_id: int) -> torch.Tensor:
        """fp32 [B, Hq, D]: the late queries of a layer.

        Raises:
            CaptureError: some are missing.
        """
        rows = prompt.rows.get(layer_id)
        queries = torch.cat(rows.queries) if rows else torch.empty(0)
        if rows is None or queries.shape[0] != prompt.late:
            raise CaptureError(f"layer {layer_id}: {queries.shape[0]} of the last {prompt.late} queries were captured")
        return queries.view(prompt.late, rows.layer.tp_q_head_num, rows.layer.qk_head_dim)

    def _calibrate(self, other: _Prompt, layer_id: int) -> Calibration:
        keys = self._rows_of(other, self.server.kv_pool.get_key_buffer(layer_id))
        return Calibration.of(keys.flatten(0, 1)[: other.tokens], self._queries(other, layer_id))

    def layer(self, layer_id: int) -> LayerCapture:
        """Read one layer out of the server's pools.

        Raises:
            CaptureError: queries are missing, or a complete page has no valid summary.
        """
        prompt = self._prompt
        queries = self._queries(prompt, layer_id)
        layer = prompt.rows[layer_id].layer
        pool = self.server.kv_pool
        served = self._summary_pool.layer(layer_id)
        assert served.record is not None
        complete = torch.arange(prompt.pages.numel(), device=prompt.pages.device) < prompt.tokens // PAGE_SIZE
        valid = served.valid[prompt.pages] & complete
        if not torch.equal(valid, complete):
            raise CaptureError(f"layer {layer_id}: {int((complete & ~valid).sum())} pages of the prompt have no summary")
        return LayerCapture(
            layer_id=layer_id,
            queries=queries,
            outputs=torch.cat(prompt.rows[layer_id].outputs).view(prompt.late, layer.tp_q_head_num, layer.v_head_dim),
            keys=self._rows_of(prompt, pool.get_key_buffer(layer_id)),
            values=self._rows_of(prompt, pool.get_value_buffer(layer_id)),
            seq_lens=prompt.tokens - prompt.late + 1 + torch.arange(prompt.late, device=queries.device),
            sm_scale=float(layer.scaling),
            logit_cap=float(layer.logit_cap or 0.0),
            summaries=PageSummaries(
                served.layout,
                valid,
                served.center,
                served.record[prompt.pages],
                None if served.values is None else served.values[prompt.pages],
            ),
            calibration=self._calibration[layer_id],
        )

    def _rows_of(self, prompt: _Prompt, buffer: torch.Tensor) -> torch.Tensor:
        """fp32 [N, P, H, *] of a pool's buffer [slots, H, *]: the prompt's rows, 0 where other tokens follow it."""
        rows = buffer[token_slots(prompt.pages, PAGE_SIZE)].float()
        rows.flatten(0, 1)[prompt.tokens :] = 0.0
        return rows
