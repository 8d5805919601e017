"""The `locks-sglang` command: its subcommands, and SGLang's benchmark modules through `run`."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from starts import clean_environment, run_all

from locks_sglang import __version__
from locks_sglang.cli import COMMANDS, main

CLI = [sys.executable, "-m", "locks_sglang"]
BENCHMARKS = ("sglang.benchmark.one_batch", "sglang.benchmark.one_batch_server")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"\n  {name} " in printed for name in COMMANDS)


@pytest.mark.parametrize("argv", [[], ["serve"], ["--rank", "8"]])
def test_unknown_commands_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"locks-sglang {__version__}"


@pytest.mark.parametrize("command", ["audit", "bench", "doctor", "report", "run", "state"])
def test_options_after_a_command_are_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: locks-sglang {command}")


def test_audit_and_state_need_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert main(["audit", url]) == 2
    assert f"{url}/server_info gave no answer" in capsys.readouterr().err
    assert main(["state", url]) == 2
    assert f"locks-sglang state: {url}/server_info gave no answer" in capsys.readouterr().err
    assert main(["audit", "127.0.0.1:30000"]) == 2
    assert "127.0.0.1:30000/server_info is no address of a server: it begins with http://" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["audit", url, "--pages", "-1"])
    assert ended.value.code == 2
    assert "--pages must be 0 (all) or more, got -1" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_a_main(command: str) -> None:
    module, _ = COMMANDS[command]
    file = Path(__file__).parents[1] / "locks_sglang" / (module.lstrip(".").replace(".", "/") + ".py")
    assert "\ndef main(" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "KERNEL"),
        (["sort"], "invalid choice: 'sort'"),
        (["scan", "--shapes", "4,8"], "must be KV heads,group,head dimension such as 8,4,128, got '4,8'"),
        (["scan", "--shapes", "4,8,100"], "head dimensions 64, 96, 128, 256, got '4,8,100'"),
        (["scan", "--contexts", "16385"], "must be a multiple of 16 tokens"),
        (["scan", "--batches", "0"], "must be a whole number from 1 to 256, got '0'"),
        (["select", "--budget", "many"], "must be a whole number from 3 to 65536, got 'many'"),
        (["all", "--rank", "3"], "invalid choice: 3"),
        (["all", "--replays", "5"], "must be a whole number from 30 to 10000"),
    ],
)
def test_bench_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_bench_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "all", "--out", str(tmp_path / "kernels.jsonl")]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_demo_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "locks_sglang.demo", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["demo", "--help"]) == 2
    assert "locks-sglang demo needs the package rich" in capsys.readouterr().err


def test_command_line_needs_the_standard_library_alone() -> None:
    """So that `doctor` runs where nothing else does."""
    code = (
        "import sys; before = set(sys.modules); import locks_sglang.cli, locks_sglang.doctor, locks_sglang.run; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "['locks_sglang']"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    script = tmp_path_factory.mktemp("run") / "probe_module.py"
    script.write_text(
        "import sys\n"
        "from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES\n"
        "print('NAME', __name__, 'ARGV', sys.argv[1:], 'KNOWN', 'locks' in ATTENTION_BACKEND_CHOICES)\n"
        "print('FILE', sys.argv[0], 'MAIN', sys.modules['__main__'].__spec__.name)\n"
        "sys.exit(7)\n"
    )
    ask = ["--attention-backend", "locks", "--locks-budget-tokens", "512", "--help"]
    commands = {name: [*CLI, "run", name, *ask] for name in BENCHMARKS}
    commands["without run"] = [sys.executable, "-m", BENCHMARKS[0], "--attention-backend", "locks", "--help"]
    commands["probe"] = [*CLI, "run", "probe_module", "--flag", "-x", "1", "--", "rest"]
    outcomes = run_all([(command, {"PYTHONPATH": str(script.parent)}) for command in commands.values()])
    return dict(zip(commands, outcomes, strict=True))


@pytest.mark.parametrize("module", BENCHMARKS)
def test_benchmarks_accept_the_backend(runs: dict[str, subprocess.CompletedProcess[str]], module: str) -> None:
    """argparse checks `--attention-backend locks` before it comes to `--help`."""
    run = runs[module]
    assert run.returncode == 0, run.stderr
    assert "--attention-backend" in run.stdout
    assert "--locks-budget-tokens" in run.stdout


def test_benchmarks_need_run(runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """Why there is a `run`: by itself the module does not know the backend."""
    assert runs["without run"].returncode == 2
    assert "invalid choice: 'locks'" in runs["without run"].stderr


def test_modules_run_as_with_python_m(runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """Arguments, exit code, and `__main__` as the processes that it spawns look for it."""
    run = runs["probe"]
    assert run.returncode == 7, run.stderr
    assert "NAME __main__ ARGV ['--flag', '-x', '1', '--', 'rest'] KNOWN True" in run.stdout
    assert "probe_module.py MAIN probe_module" in run.stdout


@pytest.mark.parametrize("module", ["sglang.benchmark.no_such_module", "no_such_package.module", "no_such_package"])
def test_modules_that_do_not_exist(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", module, "--flag"])
    assert ended.value.code == 2
    assert f"there is no module {module}" in capsys.readouterr().err


def test_run_without_sglang(tmp_path: Path) -> None:
    """In an interpreter that has no package but ours."""
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-S", "-m", "locks_sglang", "run", "sglang.benchmark.one_batch"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean_environment() | {"PYTHONPATH": root})
    assert run.returncode == 1
    assert "sglang cannot be imported (No module named 'sglang'); installed: none, wanted: sglang" in run.stderr
    assert "pip install" in run.stderr
