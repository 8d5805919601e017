"""Programmatic dependent launch (CUDA C++ programming guide): a kernel is brought onto the device while the one before it still
runs, so that its start costs nothing.

Every kernel that `chained` launches begins with `join_chain`, and does so in every program: then no kernel reads what an
earlier one of its stream has yet to write, nor writes what it has yet to read, however many of them are on the device at once.
"""

from typing import Any

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .capability import interpreted
from .lanes import helper


@helper
def join_chain(NATIVE: tl.constexpr) -> None:
    """Let the next kernel of the stream come onto the device, and wait until all before this one have ended."""
    if NATIVE:
        gdc_launch_dependents()
        gdc_wait()


def chained() -> dict[str, Any]:
    """What a kernel that calls `join_chain` is launched with."""
    return {"NATIVE": False} if interpreted() else {"NATIVE": True, "launch_pdl": True}
