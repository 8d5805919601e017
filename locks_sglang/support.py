"""The support matrix: one table from which the start-up checks, the tests and the docs come.

A feature is "works" with the test that shows it, "dense" (runs, decoded by the dense backend and counted), or "refused" at
start with the reason and the way out. What has no test yet is refused, not tried.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .seams import version_key

FIRST_VERSION, END_VERSION = "0.5.17", "0.5.24"
GPU_VERIFIED: tuple[str, ...] = ()
CPU_VERIFIED = ("0.5.17", "0.5.23")
PAGE_SIZES = (16, 32, 64, 128, 256)
HEAD_DIMS = (64, 96, 128, 256)
DENSE_BACKENDS = ("flashinfer", "fa3", "triton", "torch_native")


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
        asked: for "refused": how to see from the facts (see `stage`) that it is asked for; None where SGLang refuses.
        stage: "arguments" (resolved server arguments, before a model is loaded) or "model" (the model runner, once the
            KV pool exists).
    """

    name: str
    status: str
    test: str
    reason: str = ""
    way_out: str = ""
    asked: Callable[[Any], bool] | None = None
    stage: str = "arguments"

    @property
    def message(self) -> str:
        """What a refused start says."""
        return f"locks: {self.name} is not supported: {self.reason}. {self.way_out}."


def _flag(name: str) -> Callable[[Any], bool]:
    """Whether a boolean or optional argument is set."""
    return lambda view: bool(getattr(view, name, None))


def _above_one(*names: str) -> Callable[[Any], bool]:
    return lambda view: any((getattr(view, name, None) or 1) > 1 for name in names)


def _backends_differ(view: Any) -> bool:
    prefill = view.prefill_attention_backend or view.attention_backend
    decode = view.decode_attention_backend or view.attention_backend
    return prefill != decode


def _full_prefill_graph(view: Any) -> bool:
    config = getattr(view, "cuda_graph_config", None)
    prefill = getattr(config, "prefill", None)
    return str(getattr(prefill, "backend", "")).rsplit(".", 1)[-1].lower() == "full"


def _quantized_kv(view: Any) -> bool:
    return getattr(view, "kv_cache_dtype", None) not in (None, "auto", "bfloat16", "bf16", "float16", "half")


def _other_pool(runner: Any) -> bool:
    pool = runner.token_to_kv_pool
    return (
        type(pool).__name__ != "MHATokenToKVPool"
        or bool(getattr(pool, "use_hnd", False))
        or bool(getattr(pool, "post_capture_active", False))
    )


def _cross_attention(runner: Any) -> bool:
    config = runner.model_config
    return bool(getattr(config, "is_encoder_decoder", False)) or not getattr(config, "is_generation", True)


def _sliding_window(runner: Any) -> bool:
    size = getattr(runner, "sliding_window_size", None)
    return (size is not None and size > -1) or bool(getattr(runner.model_config, "is_hybrid_swa", False))


def _hybrid_linear(runner: Any) -> bool:
    names = ("mambaish_config", "linear_attn_model_spec", "hybrid_gdn_config", "kimi_linear_config")
    return any(getattr(runner, name, None) is not None for name in names)


_ISSUE = "not proven in this release"
_TWIN = "tests/test_server.py::test_dense_twin"

FEATURES: tuple[Feature, ...] = (
    Feature("MHA and GQA decoder models", "works", _TWIN),
    Feature("page size 16, 32, 64, 128 and 256", "works", "tests/test_backend.py::test_page_sizes"),
    Feature("radix cache, prefix hits, node splits", "works", "tests/test_server.py::test_reuse_is_exact"),
    Feature("chunked prefill", "works", _TWIN),
    Feature("mixed chunk", "dense", "tests/test_backend.py::test_mixed_rows_are_counted"),
    Feature("overlap scheduling", "works", _TWIN),
    Feature("abort in mid-prefill", "works", "tests/test_server.py::test_abort_leaves_summaries_intact"),
    Feature("eviction and reuse of pages", "works", "tests/test_server.py::test_eviction_leaves_summaries_intact"),
    Feature("short contexts (min_context_tokens)", "dense", "tests/test_backend.py::test_short_batches_run_dense"),
    Feature("bf16, fp16 and fp32 KV cache", "works", "tests/test_backend.py::test_cache_dtypes"),
    Feature("logit soft cap", "works", "tests/test_backend.py::test_logit_cap"),
    Feature(
        "different prefill and decode attention backends",
        "refused",
        "tests/test_support.py",
        "a foreign prefill backend would fill pages without summarising them",
        "Use --attention-backend locks alone; --locks-dense-backend names the backend that prefill runs on",
        _backends_differ,
    ),
    Feature(
        "a page size outside 16, 32, 64, 128, 256",
        "refused",
        "tests/test_support.py",
        "a summary page is 16 contiguous tokens",
        "Leave --page-size out (it is 16 then) or use one of these",
        lambda view: view.page_size is not None and view.page_size not in PAGE_SIZES,
    ),
    Feature(
        "speculative decoding",
        "refused",
        "tests/test_support.py",
        "rejected draft tokens would leave summaries of pages that are written again",
        "Drop --speculative-algorithm",
        _flag("speculative_algorithm"),
    ),
    Feature(
        "the decode role of PD disaggregation",
        "refused",
        "tests/test_support.py",
        "its KV arrives without a forward pass",
        "Use locks on a server that prefills itself",
        lambda view: getattr(view, "disaggregation_mode", None) == "decode",
    ),
    Feature(
        "hierarchical cache (HiCache)",
        "refused",
        "tests/test_support.py",
        _ISSUE,
        "Drop --enable-hierarchical-cache",
        _flag("enable_hierarchical_cache"),
    ),
    Feature(
        "a quantised KV cache",
        "refused",
        "tests/test_support.py",
        _ISSUE,
        "Use --kv-cache-dtype auto",
        _quantized_kv,
    ),
    Feature(
        "tensor, pipeline or data parallelism",
        "refused",
        "tests/test_support.py",
        _ISSUE,
        "Use --tp 1 --pp 1 --dp 1",
        _above_one("tp_size", "pp_size", "dp_size"),
    ),
    Feature(
        "context parallelism",
        "refused",
        "tests/test_support.py",
        "the pages of a request would be spread over ranks",
        "Drop --dcp-size and --attn-cp-size",
        lambda view: _above_one("dcp_size", "attn_cp_size")(view) or _flag("enable_prefill_context_parallel")(view),
    ),
    Feature(
        "two-batch overlap or pdmux",
        "refused",
        "tests/test_support.py",
        "it splits batches over several instances of the backend",
        "Drop --enable-two-batch-overlap and --enable-pdmux",
        lambda view: _flag("enable_two_batch_overlap")(view) or _flag("enable_pdmux")(view),
    ),
    Feature(
        "a full CUDA graph for prefill",
        "refused",
        "tests/test_support.py",
        "pages are summarised eagerly after each layer's prefill attention",
        "Use --cuda-graph-backend-prefill disabled or breakable",
        _full_prefill_graph,
    ),
    Feature(
        "LoRA",
        "refused",
        "tests/test_support.py",
        _ISSUE,
        "Serve without --enable-lora and --lora-paths",
        lambda view: _flag("enable_lora")(view) or _flag("lora_paths")(view),
    ),
    Feature(
        "streaming sessions",
        "refused",
        "tests/test_support.py",
        _ISSUE,
        "Drop --enable-streaming-session",
        _flag("enable_streaming_session"),
    ),
    Feature(
        "memory saver",
        "refused",
        "tests/test_support.py",
        _ISSUE,
        "Drop --enable-memory-saver",
        _flag("enable_memory_saver"),
    ),
    Feature(
        "HiSparse, diffusion LLMs or multi-item scoring",
        "refused",
        "tests/test_support.py",
        "they bring an attention of their own",
        "Drop --enable-hisparse, --dllm-algorithm and --enable-mis",
        lambda view: any(_flag(name)(view) for name in ("enable_hisparse", "dllm_algorithm", "enable_mis")),
    ),
    Feature(
        "an external KV cache layer (LMCache, FlexKV, a custom radix cache)",
        "refused",
        "tests/test_support.py",
        "its KV arrives without a forward pass",
        "Drop --enable-lmcache, --enable-flexkv and --radix-cache-backend",
        lambda view: any(_flag(name)(view) for name in ("enable_lmcache", "enable_flexkv", "radix_cache_backend")),
    ),
    Feature(
        "multi-head latent attention (MLA)",
        "refused",
        "tests/test_support.py",
        "its cache holds latent vectors, not keys",
        "Use the backend that SGLang picks for this model",
        _flag("use_mla_backend"),
        "model",
    ),
    Feature(
        "a hybrid linear-attention model",
        "refused",
        "tests/test_support.py",
        "only some of its layers have a KV cache",
        "Use the backend that SGLang picks for this model",
        _hybrid_linear,
        "model",
    ),
    Feature(
        "sliding-window attention",
        "refused",
        "tests/test_support.py",
        "a window is already a fixed budget",
        "Use the backend that SGLang picks for this model",
        _sliding_window,
        "model",
    ),
    Feature(
        "an encoder, embedding or cross-attention model",
        "refused",
        "tests/test_support.py",
        "the method needs a causal decoder that generates",
        "Use the backend that SGLang picks for this model",
        _cross_attention,
        "model",
    ),
    Feature(
        "this head dimension",
        "refused",
        "tests/test_support.py",
        f"head dimensions {', '.join(map(str, HEAD_DIMS))} are tested",
        "Use another backend for this model",
        lambda runner: runner.model_config.head_dim not in HEAD_DIMS,
        "model",
    ),
    Feature(
        "this kind of KV pool",
        "refused",
        "tests/test_support.py",
        "summaries are computed from SGLang's token-major MHA pool",
        "Drop --enable-page-major-kv-layout, --enable-unified-memory and SGLANG_USE_HND_KVCACHE",
        _other_pool,
        "model",
    ),
    Feature(
        "deterministic inference",
        "refused",
        "tests/test_support.py",
        "SGLang itself refuses backends that it does not list for it",
        "Drop --enable-deterministic-inference",
        _flag("enable_deterministic_inference"),
    ),
)


def check_arguments(view: Any) -> None:
    """Refuse server arguments that `locks` cannot serve.

    Args:
        view: server arguments under resolution or resolved.

    Raises:
        UnsupportedError: the first refused feature that is asked for.
    """
    _check(view, "arguments")


def check_model(runner: Any) -> None:
    """Refuse models that `locks` cannot serve; `runner` is SGLang's `ModelRunner` with its KV pool.

    Raises:
        UnsupportedError: the first refused feature that is asked for.
    """
    _check(runner, "model")


def _check(facts: Any, stage: str) -> None:
    for feature in FEATURES:
        if feature.asked is not None and feature.stage == stage and feature.asked(facts):
            raise UnsupportedError(feature.message)


def check_version(version: str) -> None:
    """Refuse an SGLang outside the supported range.

    Raises:
        UnsupportedError: naming the version, the range and how to get there.
    """
    if not version_key(FIRST_VERSION) <= version_key(version) < version_key(END_VERSION):
        raise UnsupportedError(
            f"locks: SGLang {version} is not supported: {FIRST_VERSION} to below {END_VERSION} is. "
            f"pip install 'sglang>={FIRST_VERSION},<{END_VERSION}'"
        )


def check_layer(layer: Any, sinks: Any) -> None:
    """Refuse a layer whose attention the method does not cover; checked at every call, so that no request slips through.

    Raises:
        UnsupportedError: naming the layer and the feature.
    """
    window = getattr(layer, "sliding_window_size", None)
    if window is not None and window > -1:
        raise UnsupportedError(f"locks: layer {layer.layer_id} has a sliding window of {window}; use another backend")
    if getattr(layer, "is_cross_attention", False):
        raise UnsupportedError(f"locks: layer {layer.layer_id} is cross-attention; use another backend")
    if sinks is not None:
        raise UnsupportedError(f"locks: layer {layer.layer_id} has attention sinks; use another backend")


def markdown_matrix() -> str:
    """The matrix as a Markdown table, for the README and the docs."""
    rows = ["| feature | status | |", "|---|---|---|"]
    for feature in FEATURES:
        note = f"{feature.reason}. {feature.way_out}" if feature.reason else f"`{feature.test}`"
        rows.append(f"| {feature.name} | {feature.status} | {note} |")
    return "\n".join(rows)
