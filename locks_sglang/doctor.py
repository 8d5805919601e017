"""`locks-sglang doctor`: what is installed, what would run, and the fix for every problem.

This process uses the standard library alone and always prints. Whether SGLang can be entered is asked of a child
interpreter, which may fail.
"""

import argparse
import dataclasses
import importlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Any

from . import __version__
from .config import ConfigError, load_config
from .packages import STACK, Problem, installed, missing_package, normalized, wanted
from .support import (
    END_VERSION,
    FIRST_VERSION,
    FLASHINFER_DTYPES,
    FLASHINFER_HEAD_DIMS,
    FLASHINFER_ROWS,
    UnsupportedError,
    attend_path,
    check_version,
    verification_level,
)

SEAMS_TIMEOUT_S = 300
CPU_FLAGS = "--device cpu --dtype float32 --max-total-tokens N"
"""What a start without a GPU needs: SGLang's CPU engine, a type that any processor computes in, and a limit for the cache,
which takes most of the memory otherwise."""
_MARK = "locks-sglang doctor: "
_INSTALL = "pip install --force-reinstall --no-deps locks-sglang"
_REPAIR = "repair what this names; reinstalling SGLang restores the packages that it pins"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0 without problems, else 1."""
    parser = argparse.ArgumentParser(prog="locks-sglang doctor", description="Check this installation.")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    given = parser.parse_args(argv)
    report = collect()
    print(json.dumps(report, indent=2) if given.json else describe(report))
    return 1 if report["problems"] else 0


def collect() -> dict[str, Any]:
    """Examine this installation. Every value is plain data; "problems" lists what keeps `locks` from running."""
    problems: list[Problem] = []
    report: dict[str, Any] = {
        "package": {
            "locks-sglang": __version__,
            "folder": str(Path(__file__).parent),
            "python": f"{platform.python_version()} ({sys.executable})",
            "platform": platform.platform(),
        },
        "stack": _stack(problems),
        "sglang": _sglang(problems),
        "gpus": _gpus(),
        "attend": [],
        "entry_point": _entry_point(problems),
        "config": _config(problems),
    }
    report["attend"] = _attend(_kernels_run(report["gpus"]), report["stack"]["flashinfer-python"] is not None)
    report["seams"] = _seams(problems) if report["sglang"]["in_range"] else []
    report["problems"] = [problem._asdict() for problem in problems]
    report["verdict"] = _verdict(report)
    return report


def _stack(problems: list[Problem]) -> dict[str, str | None]:
    versions = {name: installed(name) for name in STACK}
    versions["sglang-kernel"] = versions["sglang-kernel"] or installed("sgl-kernel")
    for name, version in versions.items():
        if version is None and name != "sglang" and versions["sglang"] is not None:
            problems.append(Problem(f"{name} is not installed", f"pip install '{wanted(name)}'"))
    return versions


def _sglang(problems: list[Problem]) -> dict[str, Any]:
    version = installed("sglang")
    supported = f">={FIRST_VERSION},<{END_VERSION}"
    if version is None:
        problems.append(Problem("SGLang is not installed", f"pip install 'sglang{supported}'"))
        return {"version": None, "supported": supported, "in_range": False, "level": None}
    try:
        check_version(version)
    except UnsupportedError as error:
        problems.append(Problem(f"SGLang {version} is outside the supported range", str(error)))
        return {"version": version, "supported": supported, "in_range": False, "level": "unverified"}
    return {"version": version, "supported": supported, "in_range": True, "level": verification_level(version)}


def _gpus() -> list[str]:
    """One line a GPU, from nvidia-smi or, where that is missing, from the driver's files."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=30, check=True).stdout
        return [line.strip() for line in listing.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError):
        pass
    found = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            model = re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE)
        except OSError:
            model = None
        found.append(model.group(1).strip() if model else "NVIDIA GPU")
    return found


def _kernels_run(gpus: list[str]) -> bool:
    """Whether a GPU of these lines has the compute capability that the kernels need; one whose line does not tell counts."""
    told = [re.search(r", (\d+)\.\d+, [^,]*$", line) for line in gpus]
    return any(found is None or int(found[1]) >= 9 for found in told)


def _attend(gpu: bool, flashinfer: bool) -> list[str]:
    """What attends to the selected pages in decode, by the rule that a server starts with."""
    usual = attend_path(gpu, FLASHINFER_DTYPES[0], (FLASHINFER_HEAD_DIMS[0],) * 2, 0.0, flashinfer)
    if usual.name != "flashinfer":
        return [f"{usual.name}: {usual.reason}"]
    sizes = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
    kinds = f"{' and '.join(FLASHINFER_DTYPES)} caches of head dimension {sizes} without a soft cap"
    rows = f"from {FLASHINFER_ROWS} rows (requests x KV heads) a step on"
    return [f"flashinfer: {kinds}, {rows}, if it can build its kernel", "triton: every other"]


def _entry_point(problems: list[Problem]) -> dict[str, Any]:
    """Who offers `locks` to SGLang. A copy counts if it was installed: a source folder on the path has no WHEEL file."""
    offered = [
        f"{entry.value} of {entry.dist.name if entry.dist else 'an unknown package'}"
        for entry in entry_points(group="sglang.srt.plugins")
        if entry.name == "locks"
    ]
    copies = sorted(
        {
            str(Path(str(found.locate_file(""))).resolve())
            for found in distributions()
            if normalized(found.metadata["Name"] or "") == "locks-sglang" and found.read_text("WHEEL") is not None
        }
    )
    if not offered:
        problems.append(Problem("SGLang does not find the entry point of locks-sglang", _INSTALL))
    if len(offered) > 1:
        problems.append(
            Problem(f"more than one package offers locks to SGLang: {'; '.join(offered)}", "pip uninstall all but one")
        )
    if len(copies) > 1:
        fix = "pip uninstall locks-sglang until none is left, then install it once"
        problems.append(Problem(f"locks-sglang is installed {len(copies)} times: {', '.join(copies)}", fix))
    if _filtered():
        what = f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} keeps SGLang from loading locks"
        problems.append(Problem(what, "add locks to it, or unset it"))
    return {"offered": offered, "copies": copies}


def _filtered() -> bool:
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    return bool(allowed) and "locks" not in [name.strip() for name in allowed.split(",")]


def _config(problems: list[Problem]) -> dict[str, Any]:
    try:
        loaded = load_config()
    except ConfigError as error:
        problems.append(Problem("the configuration is refused", str(error)))
        return {"error": str(error)}
    values = dataclasses.asdict(loaded.config)
    settings = {name: {"value": value, "source": loaded.sources[name]} for name, value in values.items()}
    return {"digest": loaded.config.digest, "settings": settings}


def _seams(problems: list[Problem]) -> list[dict[str, str]]:
    """Every seam with its state in a fresh interpreter that loads SGLang's plugins."""
    command = [sys.executable, "-c", "from locks_sglang.doctor import print_seams; print_seams()"]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=SEAMS_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        problems.append(
            Problem(
                f"loading SGLang's plugins took more than {SEAMS_TIMEOUT_S} s",
                'run python -c "import sglang.srt.plugins as p; p.load_plugins()" and see where it stops',
            )
        )
        return []
    except OSError as error:
        problems.append(Problem(f"the interpreter {sys.executable} does not start: {error}", "reinstall Python"))
        return []
    answers = [line.removeprefix(_MARK) for line in child.stdout.splitlines() if line.startswith(_MARK)]
    if not answers:
        last = next((line for line in reversed(child.stderr.splitlines()) if line.strip()), "no output").strip()
        what = f"SGLang's plugins do not load (exit code {child.returncode}): {last}"
        problems.append(Problem(what, _REPAIR))
        return []
    answer = json.loads(answers[-1])
    problems += [Problem(*problem) for problem in answer["problems"]]
    missing = [seam["target"] for seam in answer["seams"] if seam["state"] == "missing"]
    if missing and not answer["problems"] and not _filtered():
        what = f"{len(missing)} of {len(answer['seams'])} seams are not active: {', '.join(missing)}"
        problems.append(Problem(what, f"pip install --force-reinstall --no-deps 'sglang=={installed('sglang')}' locks-sglang"))
    return list(answer["seams"])


def print_seams() -> None:
    """In the child: load SGLang's plugins and print every seam's state, and why it is missing, as one marked line of JSON."""
    seams: list[dict[str, str]] = []
    problems: list[Problem] = []
    try:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from .plugin import register
        from .seams import seam_status

        for known, state in seam_status(installed("sglang") or ""):
            seams.append({"target": known.target, "changes": known.why, "device": known.device, "state": state})
        # SGLang logs what a plugin or a hook raises and goes on: do both again to see it.
        register()
        for seam in seams:
            if seam["state"] == "missing":
                _import_module_of(seam["target"])
    except ImportError as error:
        problems.append(missing_package(error))
    except Exception as error:
        problems.append(Problem(f"{type(error).__name__}: {error}", _REPAIR))
    print(_MARK + json.dumps({"seams": seams, "problems": problems}))


def _import_module_of(target: str) -> None:
    """Import the module that holds a dotted target. Raises what its import raises."""
    parts = target.split(".")
    for count in range(1, len(parts)):
        module = ".".join(parts[:count])
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            return


def _verdict(report: dict[str, Any]) -> str:
    problems = report["problems"]
    if problems:
        return f"not ready: {len(problems)} problem{'s' if len(problems) > 1 else ''} above, each with its fix"
    sglang, gpus = report["sglang"], report["gpus"]
    where = f"on {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}" if gpus else f"on CPU (no GPU found) with {CPU_FLAGS}"
    if gpus and not _kernels_run(gpus):
        where += " with --cuda-graph-backend-decode disabled, on the torch reference"
    return f"ready: --attention-backend locks on SGLang {sglang['version']} ({sglang['level']}) {where}"


def describe(report: dict[str, Any]) -> str:
    """The report as text; the verdict is the last line."""
    sglang, entry, config = report["sglang"], report["entry_point"], report["config"]
    state = "in range" if sglang["in_range"] else "NOT in range"
    lines = [f"{name:<18}{value}" for name, value in report["package"].items()]
    lines += [f"{name:<18}{version or 'not installed'}" for name, version in report["stack"].items()]
    lines += [f"{'supported SGLang':<18}{sglang['supported']}: {state}, {sglang['level'] or 'not installed'}"]
    lines += [f"{'GPU':<18}{line}" for line in report["gpus"] or ["none found"]]
    lines += [f"{'decode attends by':<18}{line}" for line in report["attend"]]
    lines += [f"{'entry point':<18}{line}" for line in entry["offered"] or ["missing"]]
    lines += ["", f"configuration {config.get('digest', 'refused')}"]
    if "error" in config:
        lines += [f"  {config['error']}"]
    for name, setting in config.get("settings", {}).items():
        lines += [f"  {name:<20}{setting['value']!s:<8}({setting['source']})"]
    lines += ["", "seams" if report["seams"] else "seams: unknown"]
    for seam in report["seams"]:
        note = "" if seam["device"] == "any" else f" (on {seam['device']})"
        lines += [f"  {seam['state']:<11}{seam['target'].removeprefix('sglang.srt.')}: {seam['changes']}{note}"]
    for problem in report["problems"]:
        lines += ["", f"PROBLEM  {problem['what']}", f"FIX      {problem['fix']}"]
    return "\n".join([*lines, "", report["verdict"]])
