"""Which steps run in CUDA graphs. Decode does; with `min_context_tokens` every graph is captured twice, sparse and with the
dense inner backend, and the host replays the one that the lengths of its batch ask for. On CPU there are no graphs at all,
though SGLang 0.5.17 tries one for prefill with a backend that it does not know.

The two are told apart by the label that SGLang gives graphs with and without LoRA adapters, which `locks` refuses: every
supported release has it, while `AttentionGraphVariants` came with 0.5.20.
"""

from collections.abc import Callable
from typing import Any

from ..seams import Seam, selected

SPARSE, DENSE = "locks sparse", "locks dense"


def capture_both(
    original: Callable[..., Any],
    graph_runner: Any,
    size: int,
    forward: Callable[..., Any],
    stream_idx: int | None = None,
    variant_label: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around the capture of the decode graph of one size."""
    # Asked at every size, so it is not the server's arguments that tell whose backend this is.
    backend = graph_runner.attn_backend
    if not getattr(backend, "dense_graphs", False):
        return original(graph_runner, size, forward, stream_idx, variant_label, *args, **kwargs)
    # The sparse graph needs more memory; the later one finds its own in the pool of both, as SGLang's smaller sizes do.
    try:
        for label in (SPARSE, DENSE):
            backend.captures_dense = label == DENSE
            original(graph_runner, size, forward, stream_idx, label, *args, **kwargs)
    finally:
        backend.captures_dense = False
    return None


def choose(result: str | None, graph_runner: Any, forward_batch: Any) -> str | None:
    """After the runner chose the label of a batch's graph, before padding. The plan of the step goes by the same lengths."""
    backend = graph_runner.attn_backend
    if not getattr(backend, "dense_graphs", False):
        return None
    return DENSE if backend.config.runs_dense(forward_batch.seq_lens_cpu.tolist()) else SPARSE


def skip_prefill_on_cpu(
    original: Callable[..., Any], *, model_runner: Any, eager_runner: Any, **kwargs: Any
) -> Any:  # fmt: skip
    """Around the capture of the prefill graph."""
    if model_runner.device != "cpu" or not selected(model_runner.server_args):
        return original(model_runner=model_runner, eager_runner=eager_runner, **kwargs)
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture

    return GraphCapture(runner=eager_runner, memory_phase="prefill", memory_usage_gb=0, capture_time=0)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_one_shape",
        "around",
        capture_both,
        "captures a dense decode graph of every size beside the sparse one where short batches run dense",
    ),
    Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._resolve_lora_variant",
        "after",
        choose,
        "replays the dense decode graph for short batches",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph",
        "around",
        skip_prefill_on_cpu,
        "captures no prefill graph on CPU",
        device="cpu",
    ),
)
