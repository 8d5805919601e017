"""Serve a text for an evaluation, and write down what was served."""

import argparse
import hashlib
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .. import __version__
from ..benchmarks.kernels import commit
from ..config import load_config
from ..inprocess import InProcessServer
from ..models import checked, fetch
from .capture import CapturedRun, CaptureError, Run
from .stored import StoredRun, keep
from .text import TextError, load_text

DEFAULT_MODEL = "smollm2"
MODELS_FOLDER = Path("build") / "models"
"""Where a fetched model is kept, under the working directory; `locks-sglang demo` keeps it there too."""

LEAST_TOKENS = 64
MOST_TOKENS = 8000
"""Of a prompt whose length was not asked for, and of a calibration text."""


@dataclass(frozen=True)
class ServedText:
    """A text that is to be served, and with what.

    Args:
        model: folder of the model. device: "cuda" or "cpu". tokenizer: of the model.
        ids: its first `--tokens` tokens. name: as given. description: one line saying what it is.
        seed: as given.
    """

    model: str
    device: str
    tokenizer: Any
    ids: list[int]
    name: str
    description: str
    seed: int

    def identity(self, server: InProcessServer) -> dict[str, Any]:
        """What identifies a run of this text on this server, ready for JSON."""
        runner = server.runner
        return {
            "model": {
                "name": Path(self.model).resolve().name,
                "architecture": runner.model_config.hf_config.architectures[0],
                "layers": len(server.backend.summaries.layer_ids),
                "dtype": str(runner.dtype).removeprefix("torch."),
            },
            "device": torch.cuda.get_device_name() if self.device == "cuda" else f"cpu ({torch.get_num_threads()} threads)",
            "text": {
                "name": self.name,
                "description": self.description,
                "tokens": len(self.ids),
                "starts_with_bos": self.ids[0] == self.tokenizer.bos_token_id,
            },
            "seed": self.seed,
            "versions": {
                "locks-sglang": __version__,
                **{name: version(name) for name in ("sglang", "torch", "transformers")},
                "python": platform.python_version(),
            },
        }


def read_text(given: argparse.Namespace) -> ServedText:
    """Find the model, and tokenize the text.

    Args:
        given: `model`, `device`, `tokens` (None for `MOST_TOKENS`, or all of a shorter text), `text` and `seed`, as parsed.

    Raises:
        TextError: the text cannot be read or is too short. ModelError: there is no such model.
    """
    if given.tokens is not None and given.tokens < LEAST_TOKENS:
        raise TextError(f"--tokens {given.tokens} is not allowed: at least {LEAST_TOKENS} are needed")
    device = given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    text, description = load_text(given.text)
    model = str(checked(Path(given.model)) if given.model else fetch(DEFAULT_MODEL, MODELS_FOLDER))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    # The tokenizer adds its own special tokens, once: a BOS where it defines one, none where it does not.
    ids = tokenizer.encode(text)
    if len(ids) < LEAST_TOKENS:
        raise TextError(f"the text ({description}) has {len(ids)} tokens; at least {LEAST_TOKENS} are needed")
    tokens = given.tokens or min(MOST_TOKENS, len(ids))
    if len(ids) < tokens:
        raise TextError(f"the text ({description}) has {len(ids)} tokens; --tokens {tokens} is too many")
    return ServedText(model, device, tokenizer, ids[:tokens], given.text, description, given.seed)


def other_text(text: str) -> str:
    """What methods are calibrated on when nothing else is said: code for prose, prose for anything else."""
    return "code" if text == "prose" else "prose"


def serve_text(given: argparse.Namespace) -> tuple[Run, dict[str, Any]]:
    """Prefill the first `tokens` tokens of a text, and as many of another one, up to `MOST_TOKENS`; or take both from a file.

    Args:
        given: as for `read_text`; `calibration`, the name of the other text or None; `queries`, late queries that are kept;
            `capture`, a file that the run is taken from, or written to where there is none, or None.

    Returns:
        The run, and what identifies it, ready for JSON.

    Raises:
        TextError, ModelError: see `read_text`. CaptureError: a text does not fit the model, or the file holds another run.
    """
    text = read_text(given)
    name = given.calibration or other_text(given.text)
    if name == given.text:
        raise TextError(f"--calibration {name} is the measured text: methods must be calibrated on another one")
    content, description = load_text(name)
    ids = text.tokenizer.encode(content)[: min(len(text.ids), MOST_TOKENS)]
    if len(ids) < LEAST_TOKENS:
        raise TextError(f"the calibration text ({description}) has {len(ids)} tokens; at least {LEAST_TOKENS} are needed")
    asked = {
        "prompt_sha256": _digest(text.ids),
        "calibration": {"name": name, "description": description, "tokens": len(ids), "sha256": _digest(ids)},
        "late_queries": given.queries,
    }
    if given.capture and given.capture.exists():
        stored = StoredRun(given.capture)
        _check_same(stored, text, asked, given.capture)
        return stored, stored.identity
    with tqdm(desc="prefill", unit="token x layer", unit_scale=True, disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        run = CapturedRun(text.model, text.device, text.ids, ids, given.queries, progress)
    identity = text.identity(run.server) | asked | {"served_at_commit": commit()}
    if given.capture:
        keep(run, identity, given.capture)
    return run, identity


def _digest(ids: list[int]) -> str:
    """Sixteen hex digits that tell token sequences apart."""
    return hashlib.sha256(str(ids).encode()).hexdigest()[:16]


def _check_same(stored: StoredRun, text: ServedText, asked: dict[str, Any], file: Path) -> None:
    """Refuse a stored run of something else than what is asked for.

    Raises:
        CaptureError: says what differs.
    """
    config = load_config().config
    wanted = asked | {"model": Path(text.model).resolve().name, "settings": config.digest}
    held = stored.identity | {"model": stored.identity["model"]["name"], "settings": stored.config.digest}
    different = [key for key, value in wanted.items() if held.get(key) != value]
    if different:
        key = different[0]
        raise CaptureError(
            f"{file} holds another run: its {key} is {held.get(key)!r}, asked for is {wanted[key]!r}; name another file, or "
            "delete it and it is made anew"
        )
