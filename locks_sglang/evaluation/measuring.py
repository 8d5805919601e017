"""What every measurement on captured layers does: budgets, the loop over layers, the check of the capture, the file."""

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..benchmarks.kernels import commit
from ..config import LocksConfig, load_config
from ..kernels.common import PAGE_SIZE
from .capture import LayerCapture, Run
from .serving import serve_text

DEFAULT_BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096)
DIGITS = 6
"""Of shares and errors in a file."""

LARGEST_REPLAY_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest relative difference between dense attention over what was captured and what the server returned, by the server's
type: a few roundings of that type. More means that queries, keys and positions do not belong together."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One measurement of a run.

    Args:
        run: what was measured. identity: of the run, ready for JSON. budgets: ascending, tokens.
        layers: indices of the layers measured. dims: D and Dv.
        values: by name of what was measured, fp64 [L, S, B, H].
        replay_error: the largest of the layers. seconds: by part of the work.
    """

    run: Run
    identity: dict[str, Any]
    budgets: Sequence[int]
    layers: Sequence[int]
    dims: tuple[int, int]
    values: dict[str, torch.Tensor]
    replay_error: float
    seconds: dict[str, float]

    def failures(self) -> list[str]:
        """A sentence where the capture is not sound, else nothing."""
        allowed = LARGEST_REPLAY_ERROR[self.run.dtype]
        if self.replay_error <= allowed:
            return []
        return [f"the capture does not reproduce the served attention: error {self.replay_error:.1e}, allowed {allowed:g}"]

    def record(self, kind: str, command: str) -> dict[str, Any]:
        """What every results file says, ready for JSON."""
        return {
            "kind": kind,
            **self.identity,
            "commit": commit(),
            "command": command,
            "settings": dataclasses.asdict(self.run.config),
            "page_tokens": PAGE_SIZE,
            "replay_error": self.replay_error,
            "seconds": self.seconds,
            "budgets": list(self.budgets),
            "layers": list(self.layers),
        }


Measurement = Callable[[LayerCapture, Sequence[LocksConfig]], dict[str, torch.Tensor]]
"""One layer at several budgets: by name fp64 [S, B, H]. The settings differ in `budget_tokens`."""


def measure(given: argparse.Namespace, prepare: Callable[[int, int], Measurement]) -> Measured:
    """Serve a text, or take a captured run, and measure its layers.

    Args:
        given: options as `cli` parses them.
        prepare: makes the measurement for D and Dv.

    Raises:
        ConfigError: a budget that the product would refuse. TextError, ModelError, CaptureError: see `serve_text`.
    """
    for budget in given.budgets or ():
        dataclasses.replace(load_config().config, budget_tokens=budget)
    started = time.monotonic()
    run, identity = serve_text(given)
    served = time.monotonic()
    tokens = identity["text"]["tokens"]
    budgets = given.budgets or [budget for budget in DEFAULT_BUDGETS if budget < tokens or budget == DEFAULT_BUDGETS[0]]
    configs = [dataclasses.replace(run.config, budget_tokens=budget) for budget in budgets]
    layers = run.layer_ids[:: given.layers]
    first = run.layer(layers[0])
    dims = first.keys.shape[-1], first.values.shape[-1]
    one = prepare(*dims)
    rows, replay_error = [], 0.0
    with _one_thread():
        for layer_id in tqdm(layers, desc="measure", unit="layer", disable=None):
            layer = run.layer(layer_id)
            replay_error = max(replay_error, layer.replay_error())
            rows.append({name: value.cpu() for name, value in one(layer, configs).items()})
    values = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    seconds = {"serve": served - started, "measure": time.monotonic() - served}
    return Measured(run, identity, budgets, layers, dims, values, replay_error, seconds)


@contextmanager
def _one_thread() -> Iterator[None]:
    """A layer is many short operations on a CPU: further threads gain a little where cores are idle, and waiting for each
    other cost tenfold where they are not."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def rounded(values: torch.Tensor) -> Any:
    """A tensor as nested lists of numbers with `DIGITS` digits behind the point."""
    return [rounded(row) for row in values] if values.dim() > 1 else [round(value, DIGITS) for value in values.tolist()]


def write(file: Path, record: dict[str, Any]) -> None:
    """Write a results file: a line a value, lists of numbers on one."""
    text = json.dumps(record, indent=1)
    text = re.sub(r"\[[^][{}\"]*\]", lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n", encoding="utf-8")
