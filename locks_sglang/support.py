"""The support matrix: one table from which the start-up checks, the tests and the docs come.

A feature is "works" with the test that shows it, "dense" (runs, decoded by the dense backend and counted), or "refused" at
start with the reason and the way out. What has no test yet is refused, not tried.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .seams import version_key

FIRST_VERSION, END_VERSION = "0.5.17", "0.5.24"
GPU_VERIFIED: tuple[str, ...] = ("0.5.17",)
CPU_VERIFIED = ("0.5.17", "0.5.23")
PAGE_SIZES = (16, 32, 64, 128, 256)
HEAD_DIMS = (64, 96, 128, 256)
LARGEST_GROUP = 16
DENSE_BACKENDS = ("flashinfer", "fa3", "triton", "torch_native")
FLASHINFER_DTYPES = ("bfloat16", "float16")
FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASHINFER_ROWS = 16
"""Rows (request, KV head) of a step from which FlashInfer attends: with fewer, the Triton kernel takes 5 to 8 us a layer in the
graph and FlashInfer 9 to 12, measured with 4 and 8 rows (benchmarks/NOTES.md)."""

Probe = Callable[[Any], str]
"""Looks at arguments, a model runner or an attention layer; returns what it found there, "" for nothing."""


class UnsupportedError(ValueError):
    """`locks` cannot serve this: says what was asked, why it is refused, and what to do instead."""


@dataclass(frozen=True)
class Feature:
    """One row of the matrix.

    Args:
        name: what a user would call it.
        status: "works", "dense" or "refused".
        test: id of the test that shows "works" or "dense", or asserts the refusal's message.
        reason, way_out: for "refused": why, and what to do instead.
        arguments: for "refused": finds it in resolved server arguments, before a model is loaded.
        model: finds it in SGLang's `ModelRunner`, once the KV pool exists.
        layer: finds it in one `RadixAttention` layer. A refused feature without a probe is refused by the backend when it makes
            ready for CUDA graphs.
    """

    name: str
    status: str
    test: str
    reason: str = ""
    way_out: str = ""
    arguments: Probe | None = None
    model: Probe | None = None
    layer: Probe | None = None

    def message(self, found: str) -> str:
        """What a refused start says; `found` is what a probe returned."""
        return f"locks does not support {self.name} ({found}): {self.reason}. {self.way_out}."


# Arguments that only some of the supported versions have; every other one must exist, so that a renamed one is noticed.
NOT_IN_EVERY_VERSION = ("enable_pd_role_switch", "enable_unified_cache_external_linker")


def _argument(view: Any, name: str) -> Any:
    return getattr(view, name, None) if name in NOT_IN_EVERY_VERSION else getattr(view, name)


def _given(*names: str) -> Probe:
    """Finds arguments that are set."""

    def probe(view: Any) -> str:
        return ", ".join(f"{name}={_argument(view, name)}" for name in names if _argument(view, name))

    return probe


def _above_one(*names: str) -> Probe:
    """Finds sizes above 1."""

    def probe(view: Any) -> str:
        return ", ".join(f"{name}={getattr(view, name)}" for name in names if (getattr(view, name) or 1) > 1)

    return probe


def _either(*probes: Probe) -> Probe:
    return lambda facts: ", ".join(filter(None, (probe(facts) for probe in probes)))


def _backends_differ(view: Any) -> str:
    prefill = view.prefill_attention_backend or view.attention_backend
    decode = view.decode_attention_backend or view.attention_backend
    return f"prefill {prefill}, decode {decode}" if prefill != decode else ""


def _page_size(view: Any) -> str:
    good = view.page_size is None or view.page_size in PAGE_SIZES
    return "" if good else f"page_size={view.page_size}"


def _disaggregation(view: Any) -> str:
    mode = view.disaggregation_mode
    return "" if mode in (None, "null") else f"disaggregation_mode={mode}"


def _full_prefill_graph(view: Any) -> str:
    config = view.cuda_graph_config
    return "prefill graph: full" if config is not None and config.prefill.backend == "full" else ""


def _transformers_asked(view: Any) -> str:
    implementation = str(getattr(view.model_impl, "value", view.model_impl))
    return f"model_impl={implementation}" if implementation == "transformers" else ""


def _quantized_kv(view: Any) -> str:
    dtype = view.kv_cache_dtype
    return "" if dtype in ("auto", "bfloat16", "bf16") else f"kv_cache_dtype={dtype}"


def _quantized_pool(runner: Any) -> str:
    # "auto" follows the checkpoint, which may ask for fp8.
    dtype = str(runner.token_to_kv_pool.dtype).removeprefix("torch.")
    return "" if dtype in ("bfloat16", "float16", "float32") else f"pool of {dtype}"


def _other_pool(runner: Any) -> str:
    pool = runner.token_to_kv_pool
    if type(pool).__name__ != "MHATokenToKVPool":
        return type(pool).__name__
    if pool.kv_cache_layout != "nhd":
        return f"layout {pool.kv_cache_layout}"
    return "sized after graph capture" if pool.post_capture_active else ""


def _mla(runner: Any) -> str:
    return "MLA attention" if runner.use_mla_backend else ""


def _hybrid_linear(runner: Any) -> str:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    config = mambaish_config(runner.model_config)
    return "" if config is None else type(config).__name__


def _window(runner: Any) -> str:
    size = runner.sliding_window_size
    if size is not None and size > -1:
        return f"window of {size}"
    return "hybrid window pool" if runner.model_config.is_hybrid_swa else ""


def _layer_window(layer: Any) -> str:
    size = layer.sliding_window_size
    return f"window of {size}" if size is not None and size > -1 else ""


def _not_a_decoder(runner: Any) -> str:
    if runner.model_config.is_encoder_decoder:
        return "encoder-decoder"
    return "" if runner.model_config.is_generation else "embedding or encoder"


def _multimodal(runner: Any) -> str:
    return "multimodal" if runner.model_config.is_multimodal else ""


def _layer_not_causal(layer: Any) -> str:
    if layer.is_cross_attention:
        return "cross-attention"
    kind = str(getattr(layer.attn_type, "value", layer.attn_type))
    return "" if kind == "decoder" else kind


def _layer_variant(layer: Any) -> str:
    if (layer.xai_temperature_len or -1) > 0:
        return f"temperature length {layer.xai_temperature_len}"
    if layer.pos_encoding_mode != "NONE":
        return f"position encoding {layer.pos_encoding_mode}"
    return ""


def _layer_cap(layer: Any) -> str:
    return f"cap of {layer.logit_cap}" if (layer.logit_cap or 0) > 0 else ""


def _layer_head_dim(layer: Any) -> str:
    sizes = {layer.qk_head_dim, layer.v_head_dim}
    return "" if sizes <= set(HEAD_DIMS) else f"head dimension {', '.join(map(str, sorted(sizes)))}"


def _layer_group(layer: Any) -> str:
    group, rest = divmod(layer.tp_q_head_num, layer.tp_k_head_num)
    good = rest == 0 and group <= LARGEST_GROUP
    return "" if good else f"{layer.tp_q_head_num} query heads, {layer.tp_k_head_num} KV heads"


def attention_layers(runner: Any) -> list[Any]:
    """Every `RadixAttention` of the runner's model."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return [module for module in runner.model.modules() if isinstance(module, RadixAttention)]


def _transformers_form(runner: Any) -> str:
    """SGLang's form of a model of transformers: its attention layers are entries of a dict, not modules of the model."""
    held = getattr(runner.model, "attention_instances", None)
    return type(runner.model).__name__ if isinstance(held, dict) else ""


def _without_attention(runner: Any) -> str:
    """Layers of this rank's KV pool that no attention uses, as DeciLM has."""
    pool = runner.token_to_kv_pool
    used = {layer.layer_id for layer in attention_layers(runner)}
    missing = [layer for layer in range(pool.start_layer, pool.start_layer + pool.layer_num) if layer not in used]
    return f"layers {', '.join(map(str, missing))}" if missing else ""


def _shapes_differ(runner: Any) -> str:
    shapes = {
        f"{layer.tp_q_head_num}/{layer.tp_k_head_num} heads of {layer.qk_head_dim}/{layer.v_head_dim}"
        for layer in attention_layers(runner)
    }
    return ", ".join(sorted(shapes)) if len(shapes) > 1 else ""


def _sinks(runner: Any) -> str:
    # Layers get their sinks as an argument of the call; the models keep them under these names.
    for name, module in runner.model.named_modules():
        for attribute in ("sinks", "attention_sink_bias"):
            if getattr(module, attribute, None) is not None:
                return f"{name}.{attribute}"
    return ""


_UNPROVEN = "not proven in this release"
_OTHER_BACKEND = "Use the backend that SGLang picks for this model"
_TWIN = "tests/test_dense_twin.py::test_dense_twin"
_ARGUMENTS = "tests/test_support.py::test_refused_arguments"
_MODELS = "tests/test_support.py::test_refused_models"
_LAYERS = "tests/test_support.py::test_refused_layers"

_SINKS = Feature(
    "attention sinks (learned logits)",
    "refused",
    _MODELS,
    "the method has no term for them",
    _OTHER_BACKEND,
    model=_sinks,
)

GRAPHS_WITHOUT_KERNELS = Feature(
    "decode in CUDA graphs on a GPU or KV cache that the kernels do not take",
    "refused",
    "tests/test_backend.py::test_graphs_are_refused_without_kernels",
    "the kernels need compute capability 9.0 and a cache of the model's dtype; elsewhere decode runs on the torch reference",
    "Use --cuda-graph-backend-decode disabled",
)

SHORT_WITHOUT_GRAPHS = Feature(
    "short contexts (min_context_tokens) in CUDA graphs on this dense backend",
    "refused",
    "tests/test_backend.py::test_dense_graphs_are_refused_without_an_inner_backend",
    "SGLang cannot capture its decode",
    "Use --locks-dense-backend flashinfer, fa3 or triton, --locks-min-context-tokens 0 or --cuda-graph-backend-decode disabled",
)

EVALUATION_IN_GRAPHS = Feature(
    "evaluation (--locks-evaluation on) in CUDA graphs",
    "refused",
    "tests/test_backend.py::test_graphs_are_refused_in_evaluation",
    "a graph replays what was captured, whatever an evaluation switches to",
    "Use --cuda-graph-backend-decode disabled",
)

FEATURES: tuple[Feature, ...] = (
    Feature("MHA and GQA decoder models", "works", _TWIN),
    Feature("page size 16, 32, 64, 128 and 256", "works", "tests/test_backend.py::test_page_sizes"),
    Feature("radix cache, prefix hits, node splits", "works", "tests/test_inprocess.py::test_reuse_is_exact"),
    Feature("chunked prefill", "works", _TWIN),
    Feature("mixed chunk", "dense", "tests/test_inprocess.py::test_mixed_rows_are_counted"),
    Feature("overlap scheduling", "works", _TWIN),
    Feature("decode in CUDA graphs", "works", "tests/test_gpu_graph.py::test_replay_equals_eager"),
    GRAPHS_WITHOUT_KERNELS,
    Feature("abort in mid-prefill", "works", "tests/test_inprocess.py::test_abort_keeps_summaries"),
    Feature("retraction", "works", "tests/test_inprocess.py::test_retraction_keeps_summaries"),
    Feature("cache flush", "works", "tests/test_inprocess.py::test_flush_forgets"),
    Feature("weight update from disk", "works", "tests/test_inprocess.py::test_weight_update_keeps_summaries"),
    Feature("no radix cache (--disable-radix-cache)", "works", "tests/test_inprocess.py::test_no_radix_cache"),
    Feature("eviction and reuse of pages", "works", "tests/test_inprocess.py::test_eviction_keeps_summaries"),
    Feature("short contexts (min_context_tokens)", "dense", "tests/test_inprocess.py::test_short_batches_run_dense"),
    SHORT_WITHOUT_GRAPHS,
    EVALUATION_IN_GRAPHS,
    Feature("bf16, fp16 and fp32 KV cache", "works", "tests/test_backend.py::test_cache_dtypes"),
    Feature(
        "different prefill and decode attention backends",
        "refused",
        _ARGUMENTS,
        "a foreign prefill backend would fill pages without summarising them",
        "Use --attention-backend locks alone; --locks-dense-backend names the backend that prefill runs on",
        arguments=_backends_differ,
    ),
    Feature(
        "a page size outside 16, 32, 64, 128, 256",
        "refused",
        _ARGUMENTS,
        "a summary page is 16 contiguous tokens",
        "Leave --page-size out (it is 16 then) or use one of these",
        arguments=_page_size,
    ),
    Feature(
        "speculative decoding",
        "refused",
        _ARGUMENTS,
        "rejected draft tokens would leave summaries of pages that are written again",
        "Drop --speculative-algorithm",
        arguments=_given("speculative_algorithm"),
    ),
    Feature(
        "PD disaggregation",
        "refused",
        _ARGUMENTS,
        "a decode server's KV arrives without a forward pass, and a prefill server has no decode to make sparse",
        "Use locks on a server that does both; drop --disaggregation-mode and --enable-pd-role-switch",
        arguments=_either(_disaggregation, _given("enable_pd_role_switch")),
    ),
    Feature(
        "the hierarchical cache (HiCache)",
        "refused",
        _ARGUMENTS,
        _UNPROVEN,
        "Drop --enable-hierarchical-cache",
        arguments=_given("enable_hierarchical_cache"),
    ),
    Feature(
        "a quantised KV cache",
        "refused",
        _ARGUMENTS,
        _UNPROVEN,
        "Use --kv-cache-dtype bfloat16, or auto if the checkpoint asks for no other",
        arguments=_quantized_kv,
        model=_quantized_pool,
    ),
    Feature(
        "tensor, pipeline or data parallelism",
        "refused",
        _ARGUMENTS,
        _UNPROVEN,
        "Use --tp-size 1 --pp-size 1 --dp-size 1",
        arguments=_above_one("tp_size", "pp_size", "dp_size"),
    ),
    Feature(
        "context parallelism",
        "refused",
        _ARGUMENTS,
        "the pages of a request would be spread over ranks",
        "Drop --dcp-size, --attn-cp-size and --enable-prefill-cp",
        arguments=_either(_above_one("dcp_size", "attn_cp_size"), _given("enable_prefill_cp")),
    ),
    Feature(
        "two-batch overlap or pdmux",
        "refused",
        _ARGUMENTS,
        "it splits batches over several instances of the backend",
        "Drop --enable-two-batch-overlap and --enable-pdmux",
        arguments=_given("enable_two_batch_overlap", "enable_pdmux"),
    ),
    Feature(
        "a full CUDA graph for prefill",
        "refused",
        _ARGUMENTS,
        "pages are summarised eagerly after each layer's prefill attention",
        "Use --cuda-graph-backend-prefill disabled or breakable",
        arguments=_full_prefill_graph,
    ),
    Feature(
        "torch.compile",
        "refused",
        _ARGUMENTS,
        _UNPROVEN,
        "Drop --enable-torch-compile",
        arguments=_given("enable_torch_compile"),
    ),
    Feature(
        "LoRA",
        "refused",
        _ARGUMENTS,
        _UNPROVEN,
        "Serve without --enable-lora and --lora-paths",
        arguments=_given("enable_lora", "lora_paths"),
    ),
    Feature(
        "streaming sessions and the session radix cache",
        "refused",
        _ARGUMENTS,
        _UNPROVEN,
        "Drop --enable-streaming-session and --enable-session-radix-cache",
        arguments=_given("enable_streaming_session", "enable_session_radix_cache"),
    ),
    Feature(
        "the memory saver",
        "refused",
        _ARGUMENTS,
        _UNPROVEN,
        "Drop --enable-memory-saver",
        arguments=_given("enable_memory_saver"),
    ),
    Feature(
        "HiSparse, diffusion LLMs or multi-item scoring",
        "refused",
        _ARGUMENTS,
        "they bring an attention of their own",
        "Drop --enable-hisparse, --dllm-algorithm and --enable-mis",
        arguments=_given("enable_hisparse", "dllm_algorithm", "enable_mis"),
    ),
    Feature(
        "an external KV cache layer (LMCache, FlexKV, a cache linker, a custom radix cache)",
        "refused",
        _ARGUMENTS,
        "its KV arrives without a forward pass",
        "Drop --enable-lmcache, --enable-flexkv, --enable-unified-cache-external-linker and --radix-cache-backend",
        arguments=_given("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker", "radix_cache_backend"),
    ),
    Feature(
        "deterministic inference",
        "refused",
        _ARGUMENTS,
        "how the kernels cut their work follows the batch, and the last bits of an answer with it",
        "Drop --enable-deterministic-inference, and --rl-on-policy-target, which switches it on",
        arguments=_given("enable_deterministic_inference"),
    ),
    Feature(
        "page-major KV layouts and unified memory",
        "refused",
        _ARGUMENTS,
        "summaries are built from a cache that lies token by token",
        "Drop --enable-page-major-kv-layout and --enable-unified-memory",
        arguments=_given("enable_page_major_kv_layout", "enable_unified_memory"),
    ),
    Feature(
        "an encoder, embedding or cross-attention model",
        "refused",
        _MODELS,
        "the method needs a causal decoder that generates",
        _OTHER_BACKEND,
        arguments=_given("is_embedding"),
        model=_not_a_decoder,
        layer=_layer_not_causal,
    ),
    Feature(
        "multi-head latent attention (MLA)",
        "refused",
        _MODELS,
        "its cache holds latent vectors, not keys",
        _OTHER_BACKEND,
        model=_mla,
    ),
    Feature(
        "a hybrid linear-attention model",
        "refused",
        _MODELS,
        "only some of its layers have a KV cache",
        _OTHER_BACKEND,
        model=_hybrid_linear,
    ),
    Feature(
        "sliding-window attention",
        "refused",
        _MODELS,
        "a window is already a fixed budget",
        _OTHER_BACKEND,
        model=_window,
        layer=_layer_window,
    ),
    Feature(
        "a multimodal model",
        "refused",
        _MODELS,
        _UNPROVEN,
        _OTHER_BACKEND,
        model=_multimodal,
    ),
    _SINKS,
    Feature(
        "this kind of KV pool",
        "refused",
        _MODELS,
        "summaries are computed from SGLang's token-major MHA pool",
        "Unset SGLANG_USE_HND_KVCACHE and SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
        model=_other_pool,
    ),
    Feature(
        "a model that SGLang takes from transformers",
        "refused",
        _ARGUMENTS,
        "its attention layers are not where the start looks for what it must refuse",
        "Leave --model-impl out, and serve a model that SGLang has an implementation of its own for",
        arguments=_transformers_asked,
        model=_transformers_form,
    ),
    Feature(
        "layers without attention",
        "refused",
        _MODELS,
        "every layer's pages are summarised, a decode step's with the last layer",
        _OTHER_BACKEND,
        model=_without_attention,
    ),
    Feature(
        "layers of different shapes",
        "refused",
        _MODELS,
        "all layers share one size of summary",
        _OTHER_BACKEND,
        model=_shapes_differ,
    ),
    Feature(
        "this head dimension",
        "refused",
        _LAYERS,
        f"{', '.join(map(str, HEAD_DIMS))} are tested",
        _OTHER_BACKEND,
        layer=_layer_head_dim,
    ),
    Feature(
        "this number of query heads",
        "refused",
        _LAYERS,
        f"1 to {LARGEST_GROUP} per KV head are tested",
        _OTHER_BACKEND,
        layer=_layer_group,
    ),
    Feature(
        "a logit soft cap",
        "refused",
        _LAYERS,
        "SGLang's torch_native backend, which prefill runs on without a GPU, has none, and no other was tested with one",
        _OTHER_BACKEND,
        layer=_layer_cap,
    ),
    Feature(
        "this attention variant",
        "refused",
        _LAYERS,
        "the method has no term for it",
        _OTHER_BACKEND,
        layer=_layer_variant,
    ),
)


def check_arguments(view: Any) -> None:
    """Refuse server arguments that `locks` cannot serve.

    Args:
        view: server arguments under resolution or resolved.

    Raises:
        UnsupportedError: the first refused feature that is asked for.
    """
    for feature in FEATURES:
        if feature.arguments is not None and (found := feature.arguments(view)):
            raise UnsupportedError(feature.message(found))


def check_model(runner: Any) -> None:
    """Refuse models that `locks` cannot serve; `runner` is SGLang's `ModelRunner` with its model and KV pool.

    Raises:
        UnsupportedError: the first refused feature that the model has, in any layer.
    """
    for feature in FEATURES:
        if feature.model is not None and (found := feature.model(runner)):
            raise UnsupportedError(feature.message(found))
    for layer in attention_layers(runner):
        check_layer(layer, None)


def check_layer(layer: Any, sinks: Any) -> None:
    """Refuse a layer whose attention the method does not cover; `sinks` is what its call brings under this name.

    Raises:
        UnsupportedError: naming the layer and the feature.
    """
    for feature in FEATURES:
        if feature.layer is not None and (found := feature.layer(layer)):
            raise UnsupportedError(feature.message(f"layer {layer.layer_id}: {found}"))
    if sinks is not None:
        raise UnsupportedError(_SINKS.message(f"layer {layer.layer_id}"))


class AttendPath(NamedTuple):
    """What attends to the selected pages in decode, "flashinfer", "triton" or "reference", and why."""

    name: str
    reason: str


def attend_path(kernels: bool, dtype: str, head_dims: tuple[int, int], logit_cap: float, importable: bool) -> AttendPath:
    """Choose what attends to the selected pages.

    Args:
        kernels: whether this device runs the Triton kernels on this cache.
        dtype: of queries and cache, as torch names it.
        head_dims: of keys and values.
        logit_cap: 0 for none.
        importable: whether FlashInfer is installed.
    """
    if not kernels:
        return AttendPath("reference", "the kernels need a GPU of compute capability 9.0 and a cache of the model's dtype")
    if not importable:
        return AttendPath("triton", "FlashInfer is not installed")
    if dtype not in FLASHINFER_DTYPES:
        return AttendPath("triton", f"FlashInfer is used for {' and '.join(FLASHINFER_DTYPES)}, not for {dtype}")
    if head_dims[0] != head_dims[1] or head_dims[0] not in FLASHINFER_HEAD_DIMS:
        sizes = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
        return AttendPath("triton", f"FlashInfer is used for head dimension {sizes}, not for {head_dims[0]}/{head_dims[1]}")
    if logit_cap:
        return AttendPath("triton", "FlashInfer is not used with a logit soft cap")
    reason = f"{dtype}, head dimension {head_dims[0]}, no soft cap; triton for steps of fewer than {FLASHINFER_ROWS} rows"
    return AttendPath("flashinfer", f"{reason} (requests x KV heads)")


def in_range(version: str) -> bool:
    """Whether this SGLang version is supported."""
    return version_key(FIRST_VERSION) <= version_key(version) < version_key(END_VERSION)


def verification_level(version: str) -> str:
    """How far `locks` was tested on this SGLang version: "GPU-verified", "CPU-verified" or "unverified"."""
    release = version.split("+")[0]
    if release in GPU_VERIFIED:
        return "GPU-verified"
    return "CPU-verified" if release in CPU_VERIFIED else "unverified"


def check_version(version: str) -> None:
    """Refuse an SGLang outside the supported range.

    Raises:
        UnsupportedError: naming the version, the range and how to get there.
    """
    if not in_range(version):
        raise UnsupportedError(
            f"locks does not support SGLang {version}: it needs {FIRST_VERSION} to below {END_VERSION}. "
            f"pip install 'sglang>={FIRST_VERSION},<{END_VERSION}'"
        )


def markdown_matrix() -> str:
    """The matrix as a Markdown table, for the README and the docs."""
    rows = ["| feature | status | |", "|---|---|---|"]
    for feature in FEATURES:
        note = f"{feature.reason}. {feature.way_out}" if feature.reason else f"`{feature.test}`"
        rows.append(f"| {feature.name} | {feature.status} | {note} |")
    return "\n".join(rows)
