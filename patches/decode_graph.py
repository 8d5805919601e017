"""Decode runs eagerly: this release has no form of the method that a CUDA graph could capture."""

import logging
from collections.abc import Callable
from typing import Any

from ..seams import Seam, selected

logger = logging.getLogger(__name__)


def skip_capture(original: Callable[..., Any], *, model_runner: Any) -> Any:
    """Around the capture of decode graphs."""
    if not selected(model_runner.server_args):
        return original(model_runner=model_runner)
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture

    logger.info("locks: decode runs without a CUDA graph in this release")
    return GraphCapture(runner=None, memory_phase="decode", memory_usage_gb=0, capture_time=0)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph",
        "around",
        skip_capture,
        "keeps decode out of CUDA graphs",
    ),
)
