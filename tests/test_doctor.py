"""`locks-sglang doctor` in sound and in broken installations: it always prints, and names the fix for every problem."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pages import the_command
from starts import SGLANG, clean_environment, fake_sglang, run_all

from locks_sglang import LocksConfig, __version__, doctor
from locks_sglang.seams import all_seams
from locks_sglang.support import verification_level

DOCTOR = [sys.executable, "-m", "locks_sglang", "doctor"]
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""

Run = subprocess.CompletedProcess[str]


def blocked(folder: Path, package: str) -> str:
    """A folder that keeps every interpreter with it on the path from importing a package."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKER.format(package=package))
    return str(folder)


def second_copy(folder: Path) -> str:
    """A folder with the metadata of another installed copy of this package."""
    info = folder / "locks_sglang-0.0.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: locks-sglang\nVersion: 0.0.9\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nlocks = locks_sglang.plugin:register\n")
    return str(folder)


def fork(folder: Path) -> str:
    """A folder with the metadata of another package that offers a plugin of our name."""
    info = folder / "other_locks-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-locks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nlocks = locks_sglang.plugin:register\n")
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    at = tmp_path_factory.mktemp("doctor")
    crash = at / "crash"
    crash.mkdir()
    (crash / "sitecustomize.py").write_text("import sys\nif '-c' in sys.orig_argv:\n    sys.exit('the disk is on fire')\n")
    json_too = [*DOCTOR, "--json"]
    jobs: dict[str, tuple[list[str], dict[str, str]]] = {
        "sound": (json_too, {"LOCKS_RANK": "4"}),
        "bad variable, not allowed": (DOCTOR, {"LOCKS_BUGDET_TOKENS": "512", "SGLANG_PLUGINS": "other"}),
        "triton": (DOCTOR, {"PYTHONPATH": blocked(at / "triton", "triton")}),
        "flashinfer": (json_too, {"PYTHONPATH": blocked(at / "flashinfer", "flashinfer")}),
        "crash": (DOCTOR, {"PYTHONPATH": str(crash)}),
        "too new": (json_too, {"PYTHONPATH": fake_sglang(at / "new", "0.6.0")}),
        "too old": (DOCTOR, {"PYTHONPATH": fake_sglang(at / "old", "0.5.16")}),
        "two copies": (DOCTOR, {"PYTHONPATH": f"{second_copy(at / 'copy')}:{fake_sglang(at / 'copy-old', '0.5.16')}"}),
        "two packages": (DOCTOR, {"PYTHONPATH": f"{fork(at / 'fork')}:{fake_sglang(at / 'fork-old', '0.5.16')}"}),
    }
    return dict(zip(jobs, run_all(list(jobs.values())), strict=True))


def problems(run: Run) -> list[tuple[str, str]]:
    """Problems and fixes that were printed."""
    if run.stdout.startswith("{"):
        return [(problem["what"], problem["fix"]) for problem in json.loads(run.stdout)["problems"]]
    lines = run.stdout.splitlines()
    whats = [line.removeprefix("PROBLEM").strip() for line in lines if line.startswith("PROBLEM")]
    fixes = [line.removeprefix("FIX").strip() for line in lines if line.startswith("FIX")]
    return list(zip(whats, fixes, strict=True))


def test_sound_installation(runs: dict[str, Run]) -> None:
    run = runs["sound"]
    assert run.returncode == 0, run.stdout
    report: dict[str, Any] = json.loads(run.stdout)
    assert report["problems"] == []
    assert report["package"]["locks-sglang"] == __version__
    assert report["stack"]["sglang"] == SGLANG
    assert None not in report["stack"].values()
    level = verification_level(SGLANG)
    assert report["sglang"] == {"version": SGLANG, "supported": ">=0.5.17,<0.5.24", "in_range": True, "level": level}
    assert report["config"]["digest"] == LocksConfig(rank=4).digest
    assert report["config"]["settings"]["rank"] == {"value": 4, "source": "variable"}
    assert report["config"]["settings"]["budget_tokens"] == {"value": 2048, "source": "default"}
    assert len(report["entry_point"]["offered"]) == len(report["entry_point"]["copies"]) == 1
    states = {(seam["target"], seam["state"]) for seam in report["seams"]}
    assert states == {(seam.target, "active" if seam.applies_to(SGLANG) else "not needed") for seam in all_seams()}
    assert report["verdict"].startswith(f"ready: --attention-backend locks on SGLang {SGLANG} ({level}) on ")


def test_text_has_what_the_report_has(runs: dict[str, Run], capsys: pytest.CaptureFixture[str]) -> None:
    from locks_sglang.doctor import describe

    report = json.loads(runs["sound"].stdout)
    lines = describe(report).splitlines()
    assert lines[-1] == report["verdict"]
    text = "\n".join(lines)
    for version in report["stack"].values():
        assert version in text
    for name, setting in report["config"]["settings"].items():
        assert any(line.split() == [name, str(setting["value"]), f"({setting['source']})"] for line in lines)
    for seam in report["seams"]:
        assert seam["changes"] in text


def test_bad_variable_and_a_list_of_plugins_without_ours(runs: dict[str, Run]) -> None:
    run = runs["bad variable, not allowed"]
    assert run.returncode == 1
    (plugins, allow), (config, meant) = problems(run)
    assert plugins == "SGLANG_PLUGINS=other keeps SGLang from loading locks"
    assert allow == "add locks to it, or unset it"
    assert config == "the configuration is refused"
    assert meant.startswith("unknown variable LOCKS_BUGDET_TOKENS; did you mean LOCKS_BUDGET_TOKENS?")
    assert run.stdout.splitlines()[-1] == "not ready: 2 problems above, each with its fix"
    assert f"  missing    {all_seams()[1].target.removeprefix('sglang.srt.')}" in run.stdout


@pytest.mark.parametrize(("package", "distribution"), [("triton", "triton"), ("flashinfer", "flashinfer-python")])
def test_package_that_does_not_import(runs: dict[str, Run], package: str, distribution: str) -> None:
    run = runs[package]
    assert run.returncode == 1
    ((what, fix),) = problems(run)
    assert what.startswith(f"{distribution} cannot be imported (No module named '{package}'); installed: ")
    assert fix.startswith(f"pip install --force-reinstall --no-deps '{distribution}")
    assert fix.split("'")[1] in what


def test_child_that_fails(runs: dict[str, Run]) -> None:
    run = runs["crash"]
    assert run.returncode == 1
    ((what, fix),) = problems(run)
    assert what == "SGLang's plugins do not load (exit code 1): SystemExit: the disk is on fire"
    assert "reinstalling SGLang" in fix
    assert "seams: unknown" in run.stdout


@pytest.mark.parametrize(("name", "version"), [("too new", "0.6.0"), ("too old", "0.5.16")])
def test_version_outside_the_range(runs: dict[str, Run], name: str, version: str) -> None:
    run = runs[name]
    assert run.returncode == 1
    assert problems(run) == [
        (
            f"SGLang {version} is outside the supported range",
            f"locks does not support SGLang {version}: it needs 0.5.17 to below 0.5.24. pip install 'sglang>=0.5.17,<0.5.24'",
        )
    ]


def test_two_copies(runs: dict[str, Run]) -> None:
    assert runs["two copies"].returncode == 1
    what, fix = next(found for found in problems(runs["two copies"]) if "installed" in found[0])
    assert what.startswith("locks-sglang is installed 2 times: ")
    assert fix == "pip uninstall locks-sglang until none is left, then install it once"


def test_two_packages_offer_the_name(runs: dict[str, Run]) -> None:
    assert runs["two packages"].returncode == 1
    what, fix = next(found for found in problems(runs["two packages"]) if "more than one" in found[0])
    assert "of locks-sglang" in what
    assert "of other-locks" in what
    assert fix == "pip uninstall all but one"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, str]], Run]:
    """Run the doctor in a virtual environment without any package, this one on its path."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (folder / "path").mkdir()
    (folder / "path" / "locks_sglang").symlink_to(Path(__file__).parents[1] / "locks_sglang")

    def run(variables: dict[str, str]) -> Run:
        environment = clean_environment() | {"PYTHONPATH": str(folder / "path")} | variables
        command = [str(folder / "venv" / "bin" / "python"), "-m", "locks_sglang", "doctor"]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)

    return run


def test_without_sglang(bare: Callable[[dict[str, str]], Run]) -> None:
    """Nothing is installed, and a variable is bad: everything is printed all the same."""
    run = bare({"LOCKS_RANK": "99", "PATH": ""})
    assert run.returncode == 1
    assert run.stderr == ""
    found = dict(problems(run))
    assert found["SGLang is not installed"] == "pip install 'sglang>=0.5.17,<0.5.24'"
    assert "SGLang does not find the entry point of locks-sglang" in found
    assert "rank = 99 is not allowed: it must be 1 to 15" in found["the configuration is refused"]
    assert len(found) == 3
    assert run.stdout.splitlines()[-1] == "not ready: 3 problems above, each with its fix"
    assert run.stdout.count("not installed") >= 7


@pytest.mark.parametrize(
    ("line", "runs"),
    [
        ("NVIDIA H200, 143771 MiB, 9.0, 570.1", True),
        ("NVIDIA B200, 183359 MiB, 10.0, 580.1", True),
        ("NVIDIA A100-SXM4-80GB, 81920 MiB, 8.0, 570.1", False),
        ("NVIDIA GPU", True),
        ("NVIDIA GPU, [N/A], [N/A], 570.1", True),
    ],
)
def test_a_gpu_without_kernels_is_told(line: str, runs: bool) -> None:
    """The verdict names the flag without which a server refuses such a GPU; what is not known is taken for good."""
    sglang = {"version": "0.5.23", "level": "CPU-verified"}
    verdict = doctor._verdict({"problems": [], "sglang": sglang, "gpus": [line]})
    assert ("--cuda-graph-backend-decode disabled" in verdict) == (not runs)


def test_a_start_without_a_gpu_is_told_its_flags() -> None:
    """The same as in the serving guide, whose line a test starts."""
    sglang = {"version": "0.5.23", "level": "CPU-verified"}
    verdict = doctor._verdict({"problems": [], "sglang": sglang, "gpus": []})
    flags = re.findall(r"--[\w-]+(?: [a-z]\w*)?", verdict.partition("(no GPU found) with ")[2])
    assert flags == ["--device cpu", "--dtype float32", "--max-total-tokens"]
    guide = the_command("python -m sglang.launch_server --model-path build/models/smollm2")
    assert all(f" {flag} " in guide for flag in flags)


def test_gpus_are_listed(bare: Callable[[dict[str, str]], Run], tmp_path: Path) -> None:
    """What nvidia-smi prints, if there is one; a failing one is no error."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 9.0, 570.1'\necho 'NVIDIA H200, 143771 MiB, 9.0, 570.1'\n")
    tool.chmod(0o755)
    assert bare({"PATH": f"{tmp_path}:/bin"}).stdout.count("NVIDIA H200, 143771 MiB, 9.0, 570.1") == 2
    tool.write_text("#!/bin/sh\nprintf 'NVIDIA \\377 H200, 9.0\\n'\n")
    assert "H200, 9.0" in bare({"PATH": f"{tmp_path}:/bin"}).stdout
    tool.write_text("#!/bin/sh\necho 'driver lost' >&2\nexit 9\n")
    assert bare({"PATH": f"{tmp_path}:/bin"}).stderr == ""
