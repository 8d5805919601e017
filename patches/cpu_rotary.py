"""On CPU: rotary embedding by SGLang's own torch form, without the vLLM package that it would import otherwise."""

from collections.abc import Callable
from typing import Any

from ..seams import Seam, serving


def without_fallback_kernel(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Around `RotaryEmbedding.__init__`.

    On a processor without a GPU the constructor imports a kernel from vLLM that the forward pass then never calls, unless
    SGLang's module takes the machine for its CPU engine. Setting SGLANG_USE_CPU_ENGINE instead would make other modules
    import a CPU build of sgl_kernel that the released package does not hold.
    """
    import torch
    from sglang.srt.layers.rotary_embedding import base

    if torch.cuda.is_available() or base._is_cpu or not serving():
        original(*args, **kwargs)
        return
    base._is_cpu = True
    try:
        original(*args, **kwargs)
    finally:
        base._is_cpu = False


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.__init__",
        "around",
        without_fallback_kernel,
        "lets the rotary embedding be built without vLLM",
        device="cpu",
    ),
)
