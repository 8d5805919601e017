"""Serve a text for an evaluation, and write down what was served."""

import argparse
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .. import __version__
from ..inprocess import InProcessServer
from ..models import checked, fetch
from .capture import CapturedRun
from .text import TextError, load_text

DEFAULT_MODEL = "smollm2"
MODELS_FOLDER = Path("build") / "models"
"""Where a fetched model is kept, under the working directory; `locks-sglang demo` keeps it there too."""

LEAST_TOKENS = 64
MOST_TOKENS = 8000
"""Of a prompt whose length was not asked for."""


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


def serve_text(given: argparse.Namespace) -> tuple[CapturedRun, dict[str, Any]]:
    """Prefill the first `tokens` tokens of a text.

    Args:
        given: as for `read_text`.

    Returns:
        The run, and what identifies it, ready for JSON.

    Raises:
        TextError, ModelError: see `read_text`. CaptureError: the prompt does not fit the model.
    """
    text = read_text(given)
    with tqdm(desc="prefill", unit="token x layer", unit_scale=True, disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        run = CapturedRun(text.model, text.device, text.ids, progress)
    return run, text.identity(run.server)
