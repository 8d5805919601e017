"""Starts of SGLang up to the point where it would load a model: arguments parsed and resolved by SGLang itself.

Many starts share one child interpreter, each with its own environment variables, because loading SGLang takes long.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

SGLANG = version("sglang")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Start:
    """Outcome of one start.

    Attributes:
        error: type of what stopped it, "" if nothing did. message: its text, or what argparse printed. log: what was logged.
        page_size, backend: as SGLang resolved them. settings, sources, digest: the configuration of `locks` then.
    """

    error: str
    message: str = ""
    page_size: int | None = None
    backend: str | None = None
    settings: Mapping[str, Any] | None = None
    sources: Mapping[str, str] | None = None
    digest: str = ""
    log: str = ""


def model_folder(folder: Path, **changes: Any) -> str:
    """A folder with the configuration file of a small Llama, some fields changed, and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return str(folder)


def clean_environment() -> dict[str, str]:
    """This process's variables without any that belong to `locks`."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LOCKS_")}


def fake_sglang(folder: Path, release: str) -> str:
    """A folder whose metadata say, once it comes first on the path, that this release of SGLang is installed."""
    info = folder / f"sglang-{release}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n")
    return str(folder)


def run_all(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[subprocess.CompletedProcess[str]]:
    """Run commands, two at a time: (command, variables)."""

    def run(job: tuple[Sequence[str], Mapping[str, str]]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(job[0], capture_output=True, text=True, env=clean_environment() | job[1])

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, commands))


def start_all(model: str, attempts: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[Start]:
    """Start SGLang on CPU once an attempt: (arguments after the model's, variables; PYTHONPATH adds to the path)."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        question = json.dumps({"model": model, "attempts": [(list(flags), dict(given)) for flags, given in attempts]})
        child = subprocess.run(
            [sys.executable, __file__, str(answer)], input=question, text=True, capture_output=True, env=clean_environment()
        )
        assert answer.exists(), child.stderr
        return [Start(**fields) for fields in json.loads(answer.read_text())]


def resolve(arguments: Sequence[str]) -> Any:
    """SGLang's resolved arguments. From 0.5.20 on they are resolved by whoever launches, before a process is spawned."""
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(list(arguments))
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    return server_args


def _start(arguments: Sequence[str]) -> Start:
    import dataclasses

    from sglang.srt.arg_groups.overrides import resolved_view

    from locks_sglang.config import load_config

    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            view = resolved_view(resolve(arguments))
    except SystemExit:
        return Start("SystemExit", printed.getvalue())
    except Exception as error:
        return Start(type(error).__name__, str(error))
    if view.attention_backend != "locks":
        return Start("", page_size=view.page_size, backend=view.attention_backend, log=printed.getvalue())
    loaded = load_config()
    settings = dataclasses.asdict(loaded.config)
    sources, digest = dict(loaded.sources), loaded.config.digest
    return Start("", "", view.page_size, "locks", settings, sources, digest, printed.getvalue())


def _main(answer: Path) -> None:
    import dataclasses

    from sglang.srt.plugins import load_plugins

    load_plugins()
    question = json.load(sys.stdin)
    before, path, outcomes = dict(os.environ), list(sys.path), []
    for flags, given in question["attempts"]:
        os.environ.clear()
        os.environ.update(before | given)
        sys.path[:] = [*filter(None, [given.get("PYTHONPATH")]), *path]
        outcomes.append(dataclasses.asdict(_start(["--model-path", question["model"], "--device", "cpu", *flags])))
    answer.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
