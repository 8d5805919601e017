"""Every command of the documents, copied from its page: run where this machine can, else parsed by what would run it."""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, ROOT, blocks, every_command, image, the_command
from registrations import assert_registered_once, watching
from starts import Start, clean_environment, model_folder, start_all

from locks_sglang.cli import main
from locks_sglang.config import LocksConfig, read_file
from locks_sglang.counters import TOLD
from locks_sglang.serving import serving

ADDRESS = "http://127.0.0.1:30000"
"""Where the pages' server listens; here it is wherever a port was free."""
LAUNCH = "python -m sglang.launch_server "
ONE_BATCH = "locks-sglang run sglang.benchmark.one_batch "
IMAGE = "docker run "
# Run below or elsewhere: by test_packaging (pip), by CI itself (make), by no one (docker build).
RUN_HERE = (
    *("curl ", "locks-sglang audit ", "locks-sglang doctor", "locks-sglang state ", "locks-sglang report"),
    *("python examples/", "python -m locks_sglang.models "),
)
PARSED = ("locks-sglang bench ", "locks-sglang eval ", LAUNCH, ONE_BATCH, IMAGE)
ELSEWHERE = ("pip install .", "make ", "docker build ")
COMMANDS = every_command()


def starting(*starts: str) -> list[str]:
    return [command for command in COMMANDS if command.startswith(starts)]


def test_every_command_is_looked_at() -> None:
    """A new kind of command on a page needs a test of its own."""
    assert len(COMMANDS) > 20
    assert set(COMMANDS) == set(starting(*RUN_HERE, *PARSED, *ELSEWHERE))
    for page in PAGES:
        assert not re.search(
            r"^ *```(bash|shell|console)?\n *(\$|pip|make|python|locks-sglang|curl)\b", page.read_text(), re.M
        ), f"{page.name}: commands belong into sh blocks"


@pytest.mark.parametrize("command", starting("make "))
def test_targets_exist(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bench_target_refuses_without_a_gpu(tmp_path: Path) -> None:
    """Before it installs anything, in words."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["make", "bench", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert done.returncode == 2
    assert "make bench needs an NVIDIA GPU" in done.stderr
    assert not (tmp_path / "venv").exists()


class Parsed(Exception):  # noqa: N818 - not an error
    """A command line that its own parser took."""


@pytest.mark.parametrize("command", starting("locks-sglang bench ", "locks-sglang eval ", "locks-sglang audit "))
def test_our_commands_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        given = real(parser, *args, **kwargs)
        if parser.prog == "locks-sglang":
            return given
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(Parsed):
        main(shlex.split(command)[1:])


def without_model(words: Sequence[str]) -> list[str]:
    """Arguments of a server without its model."""
    at = words.index("--model-path")
    return [*words[:at], *words[at + 2 :]]


def server_arguments(command: str) -> list[str]:
    """What SGLang would be given."""
    words = shlex.split(command)
    if command.startswith(IMAGE):
        _, entry = image()
        words = [*entry, *words[words.index("locks-sglang") + 1 :]]
    return without_model(words[words.index("sglang.launch_server") + 1 :])


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Start]:
    shown = starting(LAUNCH, IMAGE)
    model = model_folder(tmp_path_factory.mktemp("model"))
    return dict(zip(shown, start_all(model, [(server_arguments(command), {}) for command in shown]), strict=True))


@pytest.mark.parametrize("command", starting(LAUNCH, IMAGE))
def test_servers_would_start(launches: dict[str, Start], command: str) -> None:
    """SGLang takes and resolves every flag; only the model is another, and the device the CPU."""
    outcome = launches[command]
    assert (outcome.error, outcome.message) == ("", "")
    if "--attention-backend" not in command and not command.startswith(IMAGE):
        assert outcome.backend not in (None, "locks")
        return
    assert outcome.backend == "locks"
    budget = re.search(r"--locks-budget-tokens (\d+)", command)
    assert outcome.settings is not None
    assert outcome.settings["budget_tokens"] == (int(budget[1]) if budget else LocksConfig().budget_tokens)


@pytest.mark.parametrize("command", starting(ONE_BATCH))
def test_benchmark_modules_take_the_flags(command: str) -> None:
    code = (
        "import argparse, sys\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "from sglang.benchmark.one_batch import BenchArgs\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser()\n"
        "ServerArgs.add_cli_args(parser)\n"
        "BenchArgs.add_cli_args(parser)\n"
        "print('BACKEND', parser.parse_args(sys.argv[1:]).attention_backend)\n"
    )
    arguments = shlex.split(command)[3:]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=clean_environment())
    assert "BACKEND locks" in done.stdout, done.stderr


def test_settings_of_the_configuration_page(tmp_path: Path) -> None:
    page = ROOT / "docs" / "configuration.md"
    (toml,), (python,) = blocks(page, "toml"), blocks(page, "python")
    (tmp_path / "locks.toml").write_text(toml)
    wanted = LocksConfig(**read_file(str(tmp_path / "locks.toml")))
    print_it = "print('DIGEST', locks_sglang.config.load_config().config.digest)\n"
    done = subprocess.run([sys.executable, "-c", python + print_it], capture_output=True, text=True, env=clean_environment())
    assert f"DIGEST {wanted.digest}" in done.stdout, done.stderr
    assert wanted != LocksConfig()


# --- what runs here ---------------------------------------------------------------------------------------------------

Run = Callable[[str], str]


@pytest.fixture(scope="module")
def place(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a clone with the demo's model: pages, examples, results, build/models/smollm2, and a map."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copy(ROOT / "benchmarks" / "results" / "attention_map.json", folder / "map.json")
    for name in ("benchmarks", "docs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "build" / "models").mkdir(parents=True)
    (folder / "build" / "models" / "smollm2").symlink_to(Path(model_path).resolve())
    return folder


def variables() -> dict[str, str]:
    """Those in which the commands find this environment's programs first."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return clean_environment() | {"PATH": path, "HF_HUB_OFFLINE": "1"}


def finished(command: Sequence[str], place: Path, more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command that has succeeded, with more variables if given."""
    done = subprocess.run(command, cwd=place, env=variables() | (more or {}), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


def output(command: str, place: Path) -> str:
    """What a command of a page prints."""
    return finished(shlex.split(command), place).stdout


@pytest.fixture(scope="module")
def ask(place: Path) -> Iterator[Run]:
    """Run a command of a page against the server of the serving guide, started by the guide's own line."""
    words = shlex.split(the_command(f"{LAUNCH}--model-path build/models/smollm2"))
    words[words.index("--model-path") + 1] = str(place / "build" / "models" / "smollm2")
    with serving([sys.executable, *words[1:]], place / "server.log", variables(), lambda phase: None) as url:
        yield lambda command: output(command.replace(ADDRESS, url), place)


def test_doctor_is_ready(place: Path) -> None:
    assert output(the_command("locks-sglang doctor"), place).splitlines()[-1].startswith("ready: --attention-backend locks on ")


def test_model_is_fetched_once(place: Path) -> None:
    """The folder is there: its name is printed, and nothing is fetched."""
    assert output(the_command("python -m locks_sglang.models "), place).split() == ["build/models/smollm2"]


REPORT = "locks-sglang report benchmarks/results "


@pytest.mark.parametrize(("rest", "sources"), [("--out", ["decode.jsonl"]), ("map.json", ["decode.jsonl", "map.json"])])
def test_report_is_drawn(place: Path, rest: str, sources: list[str]) -> None:
    assert re.fullmatch(r"report\.html: \d+ KiB, from \d+ rows of results\n", output(the_command(REPORT + rest), place))
    page = (place / "report.html").read_text()
    assert all(f"<code>{name}</code>" in page for name in sources)
    assert "The server now" not in page


@pytest.mark.server
def test_report_asks_a_server(ask: Run, place: Path) -> None:
    assert ask(the_command(REPORT + "--server")).startswith("report.html: ")
    assert 'data-at="server:1:config.budget_tokens"' in (place / "report.html").read_text()


@pytest.mark.server
def test_curl_is_answered(ask: Run) -> None:
    answer = json.loads(ask(the_command(f"curl --silent {ADDRESS}/v1/chat/completions")))
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.server
def test_state_is_what_the_guide_says(ask: Run) -> None:
    (state,) = json.loads(ask(the_command("locks-sglang state ")))
    assert state["config"]["budget_tokens"] == 512
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "serving.md").read_text(), re.MULTILINE)
    assert table == list(state["counters"]) == list(TOLD)


@pytest.mark.server
def test_openai_client_chats_over_a_shared_document(ask: Run) -> None:
    """Counted per turn, exactly: cached pages bring their summaries, and only the others are built."""
    turns = [json.loads(line) for line in ask(the_command("python examples/openai_chat.py")).splitlines()]
    assert [turn["turn"] for turn in turns] == ["1.1", "1.2", "2.1"]
    for turn in turns:
        cached, stored = turn["cached_tokens"] // 16, (turn["prompt_tokens"] + turn["decode_steps"]) // 16
        assert turn["answer"].strip()
        assert turn["summaries_reused"] == cached
        assert turn["summaries_built"] == stored - cached
        assert turn["pages_read"] == turn["decode_steps"] * 512 // 16
        assert turn["pages_held"] > 2 * turn["pages_read"]
    first, second, other = turns
    assert second["cached_tokens"] >= first["prompt_tokens"] // 16 * 16
    assert other["cached_tokens"] > 0.95 * first["prompt_tokens"]


@pytest.mark.server
def test_branches_build_no_summary_for_the_shared_prefix(ask: Run) -> None:
    """Fork and join: the document is summarised once, before the fork, and every branch starts with it."""
    document, branches, join = (json.loads(line) for line in ask(the_command("python examples/frontend_fork.py")).splitlines())
    pages = document["summaries_built"]
    assert pages > 2 * 512 // 16
    assert document["summaries_reused"] == document["decode_rows"] == 0
    assert len(branches["requests"]) == 3
    for step in (branches, join):
        requests = step["requests"]
        assert all(request["cached_tokens"] // 16 >= pages for request in requests)
        assert step["summaries_reused"] == sum(request["cached_tokens"] // 16 for request in requests)
        # A decode row stores one token. Overlap scheduling runs one row too many for a request that ends early, after which
        # a page may be full; the sum tells how many requests had one.
        surplus = step["decode_rows"] - sum(request["completion_tokens"] - 1 for request in requests)
        own = [
            sum(
                (request["prompt_tokens"] + request["completion_tokens"] - (number not in longer)) // 16
                - request["cached_tokens"] // 16
                for number, request in enumerate(requests)
            )
            for longer in combinations(range(len(requests)), surplus)
        ]
        assert step["summaries_built"] in own
        assert step["summaries_built"] < pages // 4


@pytest.mark.server
def test_audit_finds_all_summaries_sound(ask: Run) -> None:
    said = ask(the_command("locks-sglang audit "))
    found = re.fullmatch(r"(\d+) of \1 pages looked at in [\d.]+ s, 0 summaries do not fit, 0 are missing\n", said)
    assert found is not None, said


@pytest.mark.server
def test_engine_serves(place: Path, tmp_path: Path) -> None:
    """`sgl.Engine`, configured by `locks_sglang.configure`."""
    done = finished(shlex.split(the_command("python examples/offline_engine.py")), place, watching(tmp_path))
    assert_registered_once(tmp_path)
    *answers, result = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(('{"question"', '{"said"'))]
    assert len(answers) == 3
    assert all(answer["answer"].strip() for answer in answers)
    assert result["config"]["rank"] == 4
    assert result["config"]["budget_tokens"] == 512
    counters = result["counters"]
    # Every row holds more than twice the budget of 32 pages; a request may have one row too many, by overlap scheduling.
    surplus = counters["sparse_rows"] - sum(answer["completion_tokens"] - 1 for answer in answers)
    assert 0 <= surplus <= len(answers)
    assert counters["pages_read"] == 32 * counters["sparse_rows"]
    assert counters["pages_held"] > 2 * counters["pages_read"]
    assert result["said"].startswith(f"{counters['pages_read'] / counters['pages_held']:.0%} of the pages")
    first, *others = answers
    assert all(answer["cached_tokens"] > 0.9 * first["prompt_tokens"] for answer in others)
    assert counters["summaries_reused"] == sum(answer["cached_tokens"] // 16 for answer in answers)
    assert len(re.findall(r"locks config [0-9a-f]{12}: ", done.stdout + done.stderr)) == 1


NOTEBOOK = ROOT / "examples" / "pages_and_summaries.ipynb"


def notebook_cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_notebook_is_stripped() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in notebook_cells())


@pytest.mark.server
@pytest.mark.one_version
def test_notebook_runs_top_to_bottom(place: Path) -> None:
    """Its code cells, one after the other in one interpreter, as a notebook's kernel runs them."""
    code = "\n\n".join("".join(cell["source"]) for cell in notebook_cells())
    done = finished([sys.executable, "-c", code], place)
    rows = [
        [int(number) for number in line.split()[:5]] for line in done.stdout.splitlines() if re.match(r" *\d+ +\d+ +\d+ ", line)
    ]
    assert len(rows) == 3
    for tokens, held, read, _, _ in rows:
        assert abs(held - tokens / 16) <= 2
        assert read == min(held, 32)
    first, *later = [row[4] for row in rows]
    assert first == 0 < min(later)
    reused, built = re.search(r"^(\d+) summaries reused, (\d+) built$", done.stdout, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert int(reused) >= rows[-1][0] // 16
    assert int(built) <= 2
