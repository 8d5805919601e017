"""`locks-sglang bench`: `bench serve` times the real server, `bench decode` whole models, `bench KERNEL` single kernels."""

import sys
from collections.abc import Sequence

from . import decode, kernels, serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that the arguments name."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["decode"]:
        return decode.main(arguments[1:])
    if arguments[:1] == ["serve"]:
        return serve.main(arguments[1:])
    return kernels.main(arguments)
