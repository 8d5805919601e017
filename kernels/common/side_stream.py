"""Work beside the rest of a step, on a stream of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A second stream: what is launched `beside` runs while the current stream goes on, until that is told to `join`.

    Both happen in CUDA graphs as well. On a CPU everything runs in turn. Results are read after `join`, and memory of the
    current stream that is read beside is given back after it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched here begins once the current stream has done what it was given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the current stream is given from now on waits for all that was launched beside."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
