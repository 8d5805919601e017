"""Which CUDA graphs are captured. Decode runs eagerly: this release has no form of the method that a graph could capture.
On CPU there are no graphs at all, though SGLang 0.5.17 tries one for prefill with a backend that it does not know."""

import logging
from collections.abc import Callable
from typing import Any

from ..seams import Seam, selected

logger = logging.getLogger(__name__)


def _no_capture(phase: str, runner: Any = None) -> Any:
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture

    return GraphCapture(runner=runner, memory_phase=phase, memory_usage_gb=0, capture_time=0)


def skip_decode(original: Callable[..., Any], *, model_runner: Any) -> Any:
    """Around the capture of decode graphs."""
    if not selected(model_runner.server_args):
        return original(model_runner=model_runner)
    logger.info("locks: decode runs without a CUDA graph in this release")
    return _no_capture("decode")


def skip_prefill_on_cpu(
    original: Callable[..., Any], *, model_runner: Any, eager_runner: Any, **kwargs: Any
) -> Any:  # fmt: skip
    """Around the capture of the prefill graph."""
    if model_runner.device != "cpu" or not selected(model_runner.server_args):
        return original(model_runner=model_runner, eager_runner=eager_runner, **kwargs)
    return _no_capture("prefill", eager_runner)


_SETUP = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup."

SEAMS: tuple[Seam, ...] = (
    Seam(_SETUP + "capture_decode_graph", "around", skip_decode, "keeps decode out of CUDA graphs"),
    Seam(
        _SETUP + "capture_prefill_graph",
        "around",
        skip_prefill_on_cpu,
        "captures no prefill graph on CPU",
        device="cpu",
    ),
)
