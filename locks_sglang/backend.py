"""`LocksAttnBackend`: dense prefill by an inner backend, sparse decode by page summaries."""

import logging
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from .config import LoadedConfig, LocksConfig, load_config
from .kernels.common import PAGE_SIZE
from .kernels.common.capability import runs_kernels
from .kernels.common.side_stream import SideStream
from .kernels.decode_plan import DecodeBuffers, plan_decode
from .kernels.locks_decode import DecodeStep, locks_decode_step
from .kernels.sparse_decode import FlashInferDecode
from .plan import DecodePlan, ExtendPlan, plan_extend
from .summary_pool import SummaryPool
from .support import (
    DENSE_BACKENDS,
    EVALUATION_IN_GRAPHS,
    FLASHINFER_ROWS,
    GPU_VERIFIED,
    GRAPHS_WITHOUT_KERNELS,
    SHORT_WITHOUT_GRAPHS,
    AttendPath,
    UnsupportedError,
    attend_path,
    attention_layers,
    check_arguments,
    check_layer,
    check_model,
    check_version,
    verification_level,
)

if TYPE_CHECKING:
    from .evaluation.served import Evaluation

logger = logging.getLogger(__name__)

EAGER_BATCH = 64
"""Most decode rows that FlashInfer attends for where no CUDA graph is captured; its buffers grow with it."""


def create_backend(runner: Any) -> "LocksAttnBackend":
    """Check the configuration, the version, the arguments and the model, and build the backend.

    Args:
        runner: SGLang's `ModelRunner`, its KV pool allocated.

    Raises:
        ConfigError: a bad setting. UnsupportedError: a version, flag or model that `locks` refuses.
    """
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    loaded = load_config()
    check_version(version("sglang"))
    check_arguments(resolved_view(runner.server_args))
    check_model(runner)
    name = dense_backend_name(runner, loaded.config)
    dense = ATTENTION_BACKENDS[name](runner)
    backend = LocksAttnBackend(runner, loaded.config, dense)
    _log_start(loaded, name, backend)
    if runner.device != "cpu" and verification_level(version("sglang")) != "GPU-verified":
        logger.warning(
            "locks: SGLang %s has not been verified on a GPU with this release (verified: %s)",
            version("sglang"),
            ", ".join(GPU_VERIFIED) or "none",
        )
    return backend


def dense_backend_name(runner: Any, config: LocksConfig) -> str:
    """Name of the inner backend: the configured one, or what SGLang picks for this model when none is named.

    Raises:
        UnsupportedError: a GPU backend on CPU.
    """
    if runner.device == "cpu" and config.dense_backend not in ("auto", "torch_native"):
        raise UnsupportedError(
            f"locks: --locks-dense-backend {config.dense_backend} needs a GPU; on CPU leave it out or use torch_native"
        )
    if config.dense_backend != "auto":
        return config.dense_backend
    if runner.device == "cpu":
        return "torch_native"
    args = runner.server_args
    if hasattr(args, "_get_default_attn_backend"):
        name = args._get_default_attn_backend(False, runner.model_config)
    else:
        from sglang.srt.arg_groups.model_override_base import get_default_attn_backend
        from sglang.srt.arg_groups.overrides import resolved_view

        name = get_default_attn_backend(resolved_view(args), False, runner.model_config)
    if name in DENSE_BACKENDS:
        return str(name)
    logger.warning("locks: SGLang's default backend %s cannot be composed; prefill runs on flashinfer", name)
    return "flashinfer"


def _log_start(loaded: LoadedConfig, dense: str, backend: "LocksAttnBackend") -> None:
    summaries = backend.summaries
    size = summaries.nbytes / 2**30
    logger.info(loaded.describe())
    logger.info("locks: decode attends with %s: %s", *backend.attend_path)
    logger.info(
        "locks: prefill on %s; summaries of %d pages x %d layers, %.3f GiB (%d bytes a page)",
        dense,
        summaries.num_pages,
        summaries.num_layers,
        size,
        summaries.bytes_per_page,
    )


class LocksAttnBackend(AttentionBackend):
    """SGLang attention backend.

    Prefill, extend and mixed batches run on `dense`, and every page that such a step fills is summarised after each
    layer's attention. Decode batches store the new token and run `locks_decode_step`, and with the last layer summarise the
    pages that the step completes, eagerly or as part of a CUDA graph: all that changes between two steps lies in buffers that
    the plan fills before. Decode batches that `min_context_tokens` calls short run on `dense` too, in graphs of their own where
    there are graphs.

    Args:
        runner: SGLang's `ModelRunner`.
        config: settings.
        dense: the inner backend, built on the same runner.
    """

    def __init__(self, runner: Any, config: LocksConfig, dense: AttentionBackend) -> None:
        super().__init__()
        self.config = config
        self.dense = dense
        self.kv_pool = runner.token_to_kv_pool
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.summaries = SummaryPool.attach(self.kv_pool, config)
        self.counters = self.summaries.counters
        self.needs_cpu_seq_lens = True
        self._keys = self.kv_pool.get_key_buffer(self.summaries.first_layer)
        layer = attention_layers(runner)[0]
        self._group = layer.tp_q_head_num // layer.tp_k_head_num
        self._kernels = runner.dtype == self._keys.dtype and runs_kernels(
            self._keys, layer.qk_head_dim, layer.v_head_dim, self._group
        )
        self.attend_path: AttendPath = attend_path(
            self._kernels,
            str(self._keys.dtype).removeprefix("torch."),
            (layer.qk_head_dim, layer.v_head_dim),
            layer.logit_cap or 0.0,
            find_spec("flashinfer") is not None,
        )
        self._flashinfer: FlashInferDecode | None = None
        if self.attend_path.name == "flashinfer":
            # Compiled now, not in the first step of a request.
            self._make_flashinfer(EAGER_BATCH)
        # Summaries that a decode step builds are not needed before the next one, and only every sixteenth step of a request
        # builds any: built for all layers together, beside the last one, that step takes hardly longer than others.
        self._building = SideStream(self._keys.device)
        self._graph_buffers: DecodeBuffers | None = None
        # Whether decode graphs come in a dense kind too, and whether the one that is being captured is of it.
        self.dense_graphs = self.captures_dense = False
        self._decode: DecodePlan | None = None
        self._extend: ExtendPlan | None = None
        self.evaluation = _evaluation(self) if config.evaluation == "on" else None
        # Requests of the last extend step and the tokens they had after it: a request that comes back with exactly that
        # prefix continues its own prefill, any other starts from the radix cache.
        self._extending: dict[str, int] = {}
        self._checked_layers: set[int] = set()

    # --- planning -----------------------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan one step that runs eagerly. Runs on the forward stream before the first layer."""
        mode = forward_batch.forward_mode
        self._decode = self._extend = None
        if mode.is_idle():
            return
        if forward_batch.rids is None:
            self._plan_synthetic(forward_batch)
            return
        self.summaries.catch_up()
        if mode.is_decode():
            lengths = forward_batch.seq_lens_cpu.tolist()
            columns = -(-max(lengths) // PAGE_SIZE)
            buffers = DecodeBuffers.allocate(len(lengths), columns, self._keys.shape[1], self._keys.device)
            dense = self.config.runs_dense(lengths)
            if dense:
                self.dense.init_forward_metadata(forward_batch)
            self._plan_decode(forward_batch, lengths, buffers, dense=dense)
            if self.evaluation is not None:
                self.evaluation.begin(forward_batch.rids)
        else:
            self.dense.init_forward_metadata(forward_batch)
            self._plan_extend(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan a decode step that a CUDA graph replays or, with rows of padding alone, captures.

        Runs on the forward stream, outside the graph. The graph reads nothing of SGLang's tables but what is copied here, or by
        the inner backend where that attends: `patches/graph_capture.py` replays the graph that the lengths ask for.
        """
        assert forward_batch.forward_mode.is_decode()  # graphs of whole prefills are refused
        assert self._graph_buffers is not None
        size = forward_batch.batch_size
        buffers = self._graph_buffers.rows(size)
        lengths = [] if in_capture else forward_batch.seq_lens_cpu.tolist()[: size - forward_batch.num_padding]
        dense = self.captures_dense if in_capture else self.dense_graphs and self.config.runs_dense(lengths)
        if dense:
            self.dense.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        if in_capture:
            self._plan_rows(forward_batch, lengths, buffers, dense=dense)
            return
        self.summaries.catch_up()
        self._plan_decode(forward_batch, lengths, buffers, dense=dense)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Part of a graph: what the inner backend prepares there, where it attends."""
        if self._decode is not None and self._decode.dense:
            self.dense.init_forward_metadata_in_graph(forward_batch)

    def on_after_cuda_graph_warmup(self) -> None:
        """Between a warm-up of a graph and its capture: the inner backend's, where it attends."""
        if self._decode is not None and self._decode.dense:
            self.dense.on_after_cuda_graph_warmup()

    def _plan_synthetic(self, batch: Any) -> None:
        """A batch of no request, with which SGLang warms up or captures a prefill graph: it runs dense, builds and counts
        nothing.

        Its keys must above all not become the centre of a layer.
        """
        self.dense.init_forward_metadata(batch)
        device = self._keys.device
        if batch.forward_mode.is_decode():
            self._decode = DecodePlan(DecodeBuffers.allocate(batch.batch_size, 0, self._keys.shape[1], device), True, None)
        else:
            none = torch.empty(0, dtype=torch.int64, device=device)
            self._extend = ExtendPlan(none, none, none)

    def _plan_decode(self, batch: Any, lengths: list[int], buffers: DecodeBuffers, *, dense: bool) -> None:
        """Plan and count a decode step of requests with these lengths; if dense, the inner backend has planned it too."""
        self._plan_rows(batch, lengths, buffers, dense=dense)
        self.counters.decode_steps += 1
        if dense:
            self.counters.dense_rows["short"] += len(lengths)
        else:
            held = [-(-length // PAGE_SIZE) for length in lengths]
            self.counters.sparse_rows += len(lengths)
            self.counters.pages_held += sum(held)
            self.counters.pages_read += sum(min(pages, self.config.budget_pages) for pages in held)
        fills = sum(length % PAGE_SIZE == 0 for length in lengths)
        self._count_built(fills)
        if fills and not self.summaries.centred:
            self.summaries.build_late(buffers.filled)

    def _plan_rows(self, batch: Any, lengths: list[int], buffers: DecodeBuffers, *, dense: bool) -> None:
        """Plan the rows of `buffers`: requests with these lengths, then padding."""
        size = buffers.seq_lens.shape[0]
        attend = None if dense else self._planned_flashinfer(lengths, size)
        if attend is not None:
            buffers = replace(buffers, last_page_lens=attend.last_page_lens[:size])
        plan_decode(self.req_to_token, batch.req_pool_indices, batch.seq_lens, len(lengths), buffers, self.summaries.flags)
        self._decode = DecodePlan(buffers, dense, attend)

    def _planned_flashinfer(self, lengths: list[int], size: int) -> FlashInferDecode | None:
        """FlashInfer, planned for these requests and padding up to `size` rows; None where the Triton kernel attends."""
        if self._flashinfer is None or attends_with(self, size) != "flashinfer":
            return None
        counts = [min(self.config.budget_pages, -(-length // PAGE_SIZE)) for length in lengths]
        self._flashinfer.plan((*counts, *[1] * (size - len(counts))))
        return self._flashinfer

    def _make_flashinfer(self, batch: int) -> None:
        """Build FlashInfer's side for up to `batch` rows; where that fails the Triton kernel attends from then on."""
        keys = self._keys
        try:
            self._flashinfer = FlashInferDecode(
                batch, keys.shape[1], self._group, keys.shape[2], self.config.budget_pages, keys.dtype, keys.device
            )
        except torch.OutOfMemoryError:
            raise
        except (ImportError, OSError, RuntimeError) as error:
            self.attend_path, self._flashinfer = AttendPath("triton", "FlashInfer could not build its kernel"), None
            logger.warning("locks: decode attends with the Triton kernel, FlashInfer could not build its own: %s", error)

    def _change_config(self, config: LocksConfig) -> None:
        """Decode with other settings from the next step on: for evaluation, between requests."""
        self.config = config
        if self._flashinfer is not None:
            self._make_flashinfer(self._flashinfer.batch)

    def _count_built(self, pages: int) -> None:
        for layer_id in self.summaries.layer_ids if pages else ():
            self.counters.built[layer_id] += pages

    def _plan_extend(self, batch: Any) -> None:
        extends = list(batch.extend_seq_lens_cpu)
        # Not the batch's own prefix lengths: for the decode rows of a mixed batch those are SGLang's guess.
        prefixes = [total - new for total, new in zip(batch.seq_lens_cpu.tolist(), extends, strict=True)]
        requests = batch.rids
        # SGLang's eager runner hands a mixed batch over as a plain extend, so its own word (patches/mixed_batch.py) counts.
        decoding, self.counters.mixed_decode_requests = self.counters.mixed_decode_requests, frozenset()
        prefilling = [i for i, request in enumerate(requests) if request not in decoding]
        fresh = [i for i in prefilling if self._extending.get(requests[i]) != prefixes[i]]
        plan = plan_extend(self.req_to_token, batch.req_pool_indices, prefixes, extends, fresh)
        self.summaries.first_write(plan.first_written)
        self.summaries.count_builds(plan.filled)
        self.summaries.count_reuse(plan.reused)
        self._count_built(plan.filled.numel())
        self.counters.reused += plan.reused.numel()
        if len(prefilling) < len(requests):
            self.counters.dense_rows["mixed"] += len(requests) - len(prefilling)
        self._extending = {requests[i]: prefixes[i] + extends[i] for i in prefilling}
        self._extend = plan

    # --- layers -------------------------------------------------------------------------------------------------------

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Dense attention of one layer, then the summaries of the pages that the step fills."""
        self._check(layer, kwargs.get("sinks"))
        out = self.dense.forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        assert self._extend is not None  # SGLang plans every step before its layers run
        self.summaries.build_centred(layer.layer_id, self._extend.filled)
        return out

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One layer of a decode step.

        Args:
            q: [B, Hq * D]; k, v: [B, H * D] and [B, H * Dv], or [B, H, D]; None where already stored.

        Returns:
            [B, Hq * Dv] in q's dtype.
        """
        self._check(layer, kwargs.get("sinks"))
        plan = self._decode
        assert plan is not None
        filled = plan.buffers.filled
        last = layer.layer_id == self.summaries.layer_ids[-1]
        if plan.dense:
            out = self.dense.forward_decode(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
            if last:
                self.summaries.build_all(filled)
            return out
        if save_kv_cache and k is not None:
            self.kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        if last:
            with self._building.beside():
                self.summaries.build_all(filled)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = self._step(queries, layer, plan).out if self.evaluation is None else self.evaluation.attend(queries, layer, plan)
        if last:
            self._building.join()
        return out.to(q.dtype).reshape(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)

    def _step(self, q: torch.Tensor, layer: Any, plan: DecodePlan) -> DecodeStep:
        """Sparse attention of one layer for queries [B, Hq, D]; `locks-sglang eval map` looks at what it chose."""
        buffers = plan.buffers
        return locks_decode_step(
            q,
            self.kv_pool.get_key_buffer(layer.layer_id),
            self.kv_pool.get_value_buffer(layer.layer_id),
            self.summaries.layer(layer.layer_id),
            buffers.page_table,
            buffers.seq_lens,
            layer.scaling,
            self.config,
            newest_unbuilt=True,
            num_pages=buffers.num_pages,
            attend=plan.attend,
        )

    def _check(self, layer: Any, sinks: Any) -> None:
        """Refuse what the method does not cover: a layer once, sinks, which come with the call, always."""
        if sinks is not None or layer.layer_id not in self._checked_layers:
            check_layer(layer, sinks)
            self._checked_layers.add(layer.layer_id)

    # --- CUDA graphs --------------------------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what decode graphs of up to `max_bs` rows read, once.

        Raises:
            UnsupportedError: a device, dtype or shape that only the torch reference takes, or an inner backend without graphs
                that is to attend in one.
        """
        if self.evaluation is not None:
            raise UnsupportedError(EVALUATION_IN_GRAPHS.message("--locks-evaluation on"))
        if not self._kernels:
            raise UnsupportedError(GRAPHS_WITHOUT_KERNELS.message(f"{self._keys.device}, {self._keys.dtype} cache"))
        self.dense_graphs = self.config.min_context_tokens > 0
        if self.dense_graphs:
            self._init_dense_graphs(max_bs, max_num_tokens)
        heads, device = self._keys.shape[1], self._keys.device
        # No request holds more pages than there are, whatever context the model allows.
        columns = -(-min(self.req_to_token.shape[1], self._keys.shape[0]) // PAGE_SIZE)
        self._graph_buffers = DecodeBuffers.allocate(max_bs, columns, heads, device)
        # Log-sum-exp and weight a query head, a key a KV head: what the largest graph keeps of every page of every row.
        scratch = 4 * max_bs * columns * heads * (2 * self._group + 1) / 2**30
        logger.info(
            "locks: decode graphs of up to %d requests keep %.2f GiB of page scores; --cuda-graph-max-bs-decode makes it less",
            max_bs,
            scratch,
        )
        if self._flashinfer is not None and self._flashinfer.batch < max_bs:
            self._make_flashinfer(max_bs)

    def _init_dense_graphs(self, max_bs: int, max_num_tokens: int) -> None:
        """Let the inner backend allocate what its graphs read, once for all sizes.

        Per row and token of the model's context that is 5 bytes with FlashInfer and 8 with Triton; with FA3 4 bytes a page.
        """
        try:
            self.dense.init_cuda_graph_state(max_bs, max_num_tokens)
        except NotImplementedError:
            raise UnsupportedError(SHORT_WITHOUT_GRAPHS.message(type(self.dense).__name__)) from None
        # Padded rows of both kinds of graph get the length that SGLang asks this backend for.
        assert self.dense.get_cuda_graph_seq_len_fill_value() == self.get_cuda_graph_seq_len_fill_value()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of padded rows: that of every inner backend, and one token of page 0 is what the plan makes of them."""
        return 1

    def support_triton(self) -> bool:
        """Whether SGLang may use its Triton helpers around this backend: as its inner backend says."""
        return self.dense.support_triton()


def _evaluation(backend: LocksAttnBackend) -> "Evaluation":
    """What lets this backend choose pages otherwise; a server that is not in evaluation never loads it."""
    from .evaluation.served import Evaluation

    logger.warning("locks: this server is for evaluation: what decode reads can be changed while it runs")
    return Evaluation(backend)


def attends_with(backend: LocksAttnBackend, size: int) -> str:
    """What attends in a sparse step of `size` requests, padding included: "flashinfer", "triton" or "reference"."""
    name = backend.attend_path.name
    few = size * backend._keys.shape[1] < FLASHINFER_ROWS
    too_many = backend._flashinfer is not None and size > backend._flashinfer.batch
    return "triton" if name == "flashinfer" and (few or too_many) else name
