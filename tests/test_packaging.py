"""What is built and installed: wheel, source distribution, wheel of the source distribution, editable; and what is not.

`make release-check` runs this file alone.
"""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from pages import image, the_command
from starts import clean_environment

from locks_sglang import __version__
from locks_sglang.packages import normalized

ROOT = Path(__file__).parents[1]
SOURCES = ("locks_sglang", "benchmarks", "kernels", "patches", "pyproject.toml", "README.md", "LICENSE")
KEPT = re.compile(r"^(torch|torchvision|torchaudio|triton|flashinfer.*|sgl-kernel|sglang.*|transformers|numpy)$")
IMPORT_ALL = """
import importlib, json, pkgutil, sys
import locks_sglang
names = [module.name for module in pkgutil.walk_packages(locks_sglang.__path__, "locks_sglang.")]
for part in ("benchmarks", "kernels", "patches"):
    package = importlib.import_module(f"locks_sglang.{part}")
    names += [module.name for module in pkgutil.walk_packages(package.__path__, f"locks_sglang.{part}.")]
names = [name for name in names if not name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(json.dumps({"folder": list(locks_sglang.__path__)[0], "names": names}))
"""


def modules() -> set[str]:
    """Every module of the package, from the sources."""
    found = set()
    for folder, prefix in (
        ("locks_sglang", "locks_sglang"),
        ("benchmarks", "locks_sglang.benchmarks"),
        ("kernels", "locks_sglang.kernels"),
        ("patches", "locks_sglang.patches"),
    ):
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([prefix, *[part for part in parts if part != "__init__"]])
            if not name.endswith("__main__"):
                found.add(name)
    return found - {"locks_sglang"}


def run(*command: str, **settings: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **settings)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources alone, links kept: building leaves its traces there."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A fresh virtual environment that sees the packages here, and that one thing can be installed into."""
    folder = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    site = next((folder / "lib").glob("python*")) / "site-packages"
    here = next(path for path in sys.path if path.endswith("site-packages"))
    # A path file is read like a folder's own: packages here are seen, their path files (and so this repository) are not.
    (site / "host.pth").write_text(here + "\n")
    return str(folder / "bin" / "python")


def install(python: str, *what: str) -> None:
    """Install into `python`'s environment with the pip here: nothing is fetched."""
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    run(*pip, *what)


def imported(python: str, folder: Path) -> dict[str, object]:
    """Import every module in a fresh interpreter, away from the repository."""
    answer: dict[str, object] = json.loads(run(python, "-c", IMPORT_ALL, cwd=folder, env=clean_environment()).splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def built(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, the source distribution, and in "again" the wheel of the source distribution."""
    out = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"]
    run(*command, "--sdist", "--wheel", "--outdir", str(out), str(copy), cwd=out)
    (archive,) = out.glob("*.tar.gz")
    shutil.unpack_archive(archive, out / "unpacked")
    (sources,) = (out / "unpacked").iterdir()
    run(*command, "--wheel", "--outdir", str(out / "again"), str(sources), cwd=out)
    return out


def wheel(built: Path, kind: str) -> Path:
    (path,) = (built / kind).glob("*.whl")
    return path


WHEELS = pytest.mark.parametrize("kind", [".", "again"], ids=["wheel", "wheel of the sdist"])


@WHEELS
def test_wheel_holds_the_package_alone(built: Path, kind: str) -> None:
    names = zipfile.ZipFile(wheel(built, kind)).namelist()
    assert {name.split("/")[0] for name in names} == {"locks_sglang", f"locks_sglang-{__version__}.dist-info"}
    found = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names if name.endswith(".py")}
    assert found - {"locks_sglang", "locks_sglang.__main__"} == modules()
    assert "locks_sglang/py.typed" in names
    shapes = [file.relative_to(ROOT).as_posix() for file in (ROOT / "benchmarks" / "models").glob("*/config.json")]
    assert shapes
    assert {f"locks_sglang/{shape}" for shape in shapes} <= set(names)
    assert {"locks_sglang/report/style.css", "locks_sglang/report/map.js"} <= set(names)
    assert f"locks_sglang-{__version__}.dist-info/licenses/LICENSE" in names
    assert "locks_sglang/kernels/__init__.py" not in names
    assert "locks_sglang/patches/__init__.py" not in names


@WHEELS
def test_metadata(built: Path, kind: str) -> None:
    archive = zipfile.ZipFile(wheel(built, kind))
    metadata = message_from_string(archive.read(f"locks_sglang-{__version__}.dist-info/METADATA").decode())
    assert (metadata["Name"], metadata["Version"]) == ("locks-sglang", __version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line.replace(" ", "") for line in required] in (["sglang<0.5.24,>=0.5.17"], ["sglang>=0.5.17,<0.5.24"])
    entries = archive.read(f"locks_sglang-{__version__}.dist-info/entry_points.txt").decode()
    assert "[sglang.srt.plugins]\nlocks = locks_sglang.plugin:register\n" in entries + "\n"
    assert "[console_scripts]\nlocks-sglang = locks_sglang.cli:main\n" in entries + "\n"


def test_sdist_holds_the_sources(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    assert archive.name == f"locks_sglang-{__version__}.tar.gz"
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    assert {"pyproject.toml", "README.md", "LICENSE", "locks_sglang/py.typed", "locks_sglang/plugin.py"} <= names


@WHEELS
def test_wheel_imports(built: Path, kind: str, python: str, tmp_path: Path) -> None:
    install(python, str(wheel(built, kind)))
    found = imported(python, tmp_path)
    assert str(found["folder"]).startswith(str(Path(python).parents[1]))
    assert set(found["names"]) >= modules()  # type: ignore[call-overload]


def test_editable_install_imports(copy: Path, python: str, tmp_path: Path) -> None:
    install(python, "--editable", str(copy))
    found = imported(python, tmp_path)
    assert found["folder"] == str(copy / "locks_sglang")
    assert set(found["names"]) >= modules()  # type: ignore[call-overload]


def test_entry_point_loads_after_install(built: Path, python: str, tmp_path: Path) -> None:
    install(python, str(wheel(built, ".")))
    code = (
        "from importlib.metadata import entry_points\n"
        "found = [e for e in entry_points(group='sglang.srt.plugins') if e.name == 'locks']\n"
        "print(len(found), found[0].load().__module__)"
    )
    assert run(python, "-c", code, cwd=tmp_path, env=clean_environment()).split() == ["1", "locks_sglang.plugin"]
    script = Path(python).parent / "locks-sglang"
    assert run(str(script), "--version", cwd=tmp_path, env=clean_environment()).strip() == f"locks-sglang {__version__}"


@pytest.mark.one_version
@pytest.mark.parametrize("where", ["README", "image"])
def test_pip_lines_install_this_package_alone(where: str, copy: Path, python: str) -> None:
    """The pages' line and that of `examples/Dockerfile`, in an environment that sees SGLang, without an index.

    pip resolves every dependency, and finds what is there enough. That it builds with the setuptools here stands for the one
    that it would fetch.
    """
    words = shlex.split(the_command("pip install .")) if where == "README" else image()[0]
    assert words[:2] == ["pip", "install"]
    target = words[-1]
    assert target == ("." if where == "README" else "/opt/locks-sglang")
    run(
        python, "-m", *words[:-1], "--quiet", "--no-index", "--no-build-isolation", str(copy), cwd=copy, env=clean_environment()
    )
    folder = next((Path(python).parents[1] / "lib").glob("python*")) / "site-packages"
    assert {found.name for found in folder.glob("*.dist-info")} == {f"locks_sglang-{__version__}.dist-info"}


@WHEELS
def test_doctor_answers_in_a_bare_environment(built: Path, kind: str, tmp_path: Path) -> None:
    """Without SGLang, or any package at all: the command is there, says what is missing, and ends with 1."""
    folder = tmp_path / "bare"
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin" / "python"),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    run(*pip, str(wheel(built, kind)), env=clean_environment())
    command = [str(folder / "bin" / "locks-sglang"), "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 1, done.stderr
    assert "PROBLEM  SGLang is not installed\nFIX      pip install 'sglang>=0.5.17,<0.5.24'" in done.stdout
    assert f"locks-sglang      {__version__}" in done.stdout


@pytest.mark.parametrize("how", [["-c", "import kernels; print(kernels.__file__)"], ["-m", "probe"]], ids=["-c", "-m"])
def test_import_kernels_from_the_repository_root(how: list[str], tmp_path: Path) -> None:
    """`kernels` is a package that SGLang and transformers import: the folder of that name here must not answer for it."""
    (tmp_path / "probe.py").write_text("import kernels; print(kernels.__file__)")
    environment = clean_environment() | {"PYTHONPATH": str(tmp_path)}
    found = Path(run(sys.executable, *how, cwd=ROOT, env=environment).strip())
    # Not by the repository root: the environment of `make test` lies inside it.
    assert found.parent.parent == Path(sysconfig.get_path("purelib"))
    assert (ROOT / "kernels").is_dir()


def test_linked_folders_are_no_packages_of_their_own() -> None:
    for name in ("benchmarks", "kernels", "patches"):
        assert not (ROOT / name / "__init__.py").exists()
        assert (ROOT / "locks_sglang" / name).is_symlink()
        assert (ROOT / "locks_sglang" / name).readlink() == Path("..") / name


def test_version_is_the_same_everywhere() -> None:
    assert f'\nversion = "{__version__}"\n' in (ROOT / "pyproject.toml").read_text()
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__


def test_kernels_import_neither_sglang_nor_the_configuration() -> None:
    """Data flows one way."""
    for file in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not re.match(r"sglang|.*\bconfig$|.*\b(backend|plan|summary_pool|seams|support)$", node.module or ""), (
                    file
                )
            if isinstance(node, ast.Import):
                assert not any(name.name.split(".")[0] == "sglang" for name in node.names), file


@pytest.mark.network
def test_installing_moves_nothing_of_the_stack(copy: Path, tmp_path: Path) -> None:
    """pip would add this package and change nothing that SGLang pins, in this environment and with every extra."""
    report = tmp_path / "report.json"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-build-isolation", "--report", str(report)]
    run(*pip, f"{copy}[demo,test]", env=clean_environment())
    names = {normalized(item["metadata"]["name"]) for item in json.loads(report.read_text())["install"]}
    assert "locks-sglang" in names
    assert [name for name in names if KEPT.match(name)] == []
