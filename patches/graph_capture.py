"""Which steps run in CUDA graphs. Decode does, but a batch that `min_context_tokens` sends to the dense backend runs eagerly:
the graphs hold the sparse step. On CPU there are no graphs at all, though SGLang 0.5.17 tries one for prefill with a backend
that it does not know."""

from collections.abc import Callable
from typing import Any

from ..config import LocksConfig
from ..seams import Seam, selected


def short_runs_eagerly(result: bool, graph_runner: Any, forward_batch: Any) -> bool | None:
    """After the runner of decode graphs said whether it can run a batch."""
    # Asked every step, so it is not the server's arguments that tell whose backend this is.
    config = getattr(graph_runner.attn_backend, "config", None)
    if not result or not isinstance(config, LocksConfig) or config.min_context_tokens == 0:
        return None
    return False if config.runs_dense(forward_batch.seq_lens_cpu.tolist()) else None


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
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
        "after",
        short_runs_eagerly,
        "keeps short batches, which run dense, out of the decode graph",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph",
        "around",
        skip_prefill_on_cpu,
        "captures no prefill graph on CPU",
        device="cpu",
    ),
)
