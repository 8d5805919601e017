"""Serve a text for an evaluation, and write down what was served."""

import argparse
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .. import __version__
from ..models import checked, fetch
from .capture import CapturedRun
from .text import TextError, load_text

DEFAULT_MODEL = "smollm2"
MODELS_FOLDER = Path("build") / "models"
"""Where a fetched model is kept, under the working directory; `locks-sglang demo` keeps it there too."""

LEAST_TOKENS = 64


def serve_text(given: argparse.Namespace) -> tuple[CapturedRun, dict[str, Any]]:
    """Prefill the first `tokens` tokens of a text.

    Args:
        given: `model`, `device`, `tokens`, `text` and `seed`, as `cli` parses them.

    Returns:
        The run, and what identifies it, ready for JSON.

    Raises:
        TextError: the text cannot be read or is too short. ModelError: there is no such model.
        CaptureError: the prompt does not fit the model.
    """
    if given.tokens < LEAST_TOKENS:
        raise TextError(f"--tokens {given.tokens} is not allowed: at least {LEAST_TOKENS} are needed")
    device = given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    text, description = load_text(given.text)
    model = str(checked(Path(given.model)) if given.model else fetch(DEFAULT_MODEL, MODELS_FOLDER))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    # The tokenizer adds its own special tokens, once: a BOS where it defines one, none where it does not.
    ids = tokenizer.encode(text)
    if len(ids) < given.tokens:
        raise TextError(f"the text ({description}) has {len(ids)} tokens; --tokens {given.tokens} is too many")
    with tqdm(desc="prefill", unit="token x layer", unit_scale=True, disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        run = CapturedRun(model, device, ids[: given.tokens], progress)
    return run, {
        "model": {
            "name": Path(model).resolve().name,
            "architecture": run.server.runner.model_config.hf_config.architectures[0],
            "layers": len(run.layer_ids),
            "dtype": str(run.dtype).removeprefix("torch."),
        },
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu ({torch.get_num_threads()} threads)",
        "text": {
            "name": given.text,
            "description": description,
            "tokens": given.tokens,
            "starts_with_bos": ids[0] == tokenizer.bos_token_id,
        },
        "seed": given.seed,
        "versions": {
            "locks-sglang": __version__,
            **{name: version(name) for name in ("sglang", "torch", "transformers")},
            "python": platform.python_version(),
        },
    }
