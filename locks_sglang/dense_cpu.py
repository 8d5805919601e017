"""SGLang's own dense backend on a CPU, to compare against: the demo and the tests start it beside `locks`."""

import os
from pathlib import Path

STUB = '''"""Stands where SGLang imports a rotary kernel on machines without a GPU; its CPU path never calls it."""


def rotary_embedding(*args: object, **kwargs: object) -> None:
    raise RuntimeError("the CPU path of SGLang calls its own rotary embedding")
'''


def dense_environment(folder: Path) -> dict[str, str]:
    """Environment in which SGLang starts with `--device cpu --attention-backend torch_native`.

    SGLang's released package imports a kernel of the vLLM package there, which it then does not use. The repairs under
    `patches/` act for `locks` alone, so the dense server gets an empty module of that name instead.

    Args:
        folder: an existing folder to write the module into.
    """
    package = folder / "vllm"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "_custom_ops.py").write_text(STUB)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
