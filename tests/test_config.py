"""Settings: every source, their precedence, every bad value, and SGLang's own command line."""

import argparse
import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starts import Start, clean_environment, model_folder, start_all

from locks_sglang import ConfigError, LocksConfig, configure
from locks_sglang.config import COMBINES, DENSE_BACKENDS, EVALUATIONS, FLAGS_VARIABLE, NAMES, TAIL_CORRECTIONS, load_config
from locks_sglang.patches.command_line import add_flags

FIELDS = {spec.name: spec for spec in dataclasses.fields(LocksConfig)}
NUMBERS = ("rank", "budget_tokens", "sink_pages", "recent_pages", "min_context_tokens", "idle_audit_ms")
CHOICES = {
    "combine": COMBINES,
    "tail_correction": TAIL_CORRECTIONS,
    "dense_backend": DENSE_BACKENDS,
    "evaluation": EVALUATIONS,
}
JUST_OUT_OF_RANGE = {
    "rank": ("0", "16"),
    "budget_tokens": ("32", "47", "2047", "2049"),
    "sink_pages": ("-1", "1025"),
    "recent_pages": ("0", "1025"),
    "min_context_tokens": ("-1",),
    "idle_audit_ms": ("-1", "10001"),
}
NOT_A_FILE = ("abc", "-1", "", "missing.toml")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts without a setting of `locks` in the environment, and leaves none."""
    for name in [name for name in os.environ if name.startswith("LOCKS_")]:
        monkeypatch.delenv(name)
    yield
    os.environ.pop(FLAGS_VARIABLE, None)


def refused(environ: dict[str, str]) -> str:
    """The message with which these variables are refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(environ)
    return str(caught.value)


# --- variables --------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    loaded = load_config({})
    assert loaded.config == LocksConfig()
    assert loaded.config == LocksConfig(8, 2048, 1, 1, "mass", "qmu", 0, "auto")
    assert set(loaded.sources.values()) == {"default"}


def bad_values() -> Iterator[tuple[str, str]]:
    for name in NAMES:
        for value in ("abc", "-1", "", *JUST_OUT_OF_RANGE.get(name, ())):
            yield name, value


@pytest.mark.parametrize(("name", "value"), sorted(set(bad_values())))
def test_bad_variable(name: str, value: str) -> None:
    """The message names the variable, the value and what is allowed."""
    message = refused({"LOCKS_" + name.upper(): value})
    assert "LOCKS_" + name.upper() in message
    assert repr(value) in message or f"= {value} " in message
    allowed = FIELDS[name].metadata["allowed"]
    assert allowed in message or (name == "budget_tokens" and "multiple of 16 and at least 48" in message)


@pytest.mark.parametrize("value", NOT_A_FILE)
def test_bad_file_variable(value: str) -> None:
    message = refused({"LOCKS_CONFIG": value})
    assert f"LOCKS_CONFIG = {value!r}" in message
    assert ("cannot be read" if value.endswith(".toml") else "must end in .toml or .json") in message


@pytest.mark.parametrize("value", ["abc", "-1", "", "[]", '{"speed": 3}'])
def test_internal_variable_is_not_for_users(value: str) -> None:
    assert f"{FLAGS_VARIABLE} is written by locks itself" in refused({FLAGS_VARIABLE: value})


@pytest.mark.parametrize(
    ("name", "edges"),
    [
        ("rank", ("1", "15")),
        ("budget_tokens", ("48", "1048576")),
        ("sink_pages", ("0", "1024")),
        ("recent_pages", ("1", "1024")),
        ("min_context_tokens", ("0", "1000000")),
        ("idle_audit_ms", ("0", "10000")),
    ],
)
def test_edges_of_the_range_are_accepted(name: str, edges: tuple[str, str]) -> None:
    for value in edges:
        room = {} if name == "budget_tokens" else {"LOCKS_BUDGET_TOKENS": "32768"}
        loaded = load_config({"LOCKS_" + name.upper(): value, **room})
        assert getattr(loaded.config, name) == int(value)
        assert loaded.sources[name] == "variable"


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in CHOICES.items() for value in values])
def test_every_choice_is_accepted(name: str, value: str) -> None:
    assert getattr(load_config({"LOCKS_" + name.upper(): value}).config, name) == value


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("LOCKS_BUGDET_TOKENS", "LOCKS_BUDGET_TOKENS"),
        ("LOCKS_BUGDET", "LOCKS_BUDGET_TOKENS"),
        ("LOCKS_RANKS", "LOCKS_RANK"),
        ("LOCKS_SINKPAGES", "LOCKS_SINK_PAGES"),
        ("LOCKS_DENSE", "LOCKS_DENSE_BACKEND"),
    ],
)
def test_unknown_variable_names_the_nearest(variable: str, meant: str) -> None:
    message = refused({variable: "512"})
    assert f"unknown variable {variable}; did you mean {meant}?" in message
    assert "LOCKS_CONFIG" in message


def test_misspelt_choice_names_the_nearest() -> None:
    assert "did you mean flashinfer?" in refused({"LOCKS_DENSE_BACKEND": "flash_infer"})


def test_budget_names_the_nearest_valid_value() -> None:
    assert "nearest valid value 512" in refused({"LOCKS_BUDGET_TOKENS": "519"})
    assert "nearest valid value 528" in refused({"LOCKS_BUDGET_TOKENS": "527"})
    assert "nearest valid value 2048" in refused({"LOCKS_BUDGET_TOKENS": "2047"})
    assert "nearest valid value 48" in refused({"LOCKS_BUDGET_TOKENS": "3"})


def test_budget_must_hold_sink_recent_and_one_more() -> None:
    settings = {"LOCKS_SINK_PAGES": "4", "LOCKS_RECENT_PAGES": "3", "LOCKS_BUDGET_TOKENS": "112"}
    message = refused(settings)
    assert "at least 128 = 16 * (sink_pages + recent_pages + 1)" in message
    assert all(f"{name} = {value}" in message for name, value in settings.items())
    assert load_config(settings | {"LOCKS_BUDGET_TOKENS": "128"}).config.budget_pages == 8


def test_other_variables_are_not_read() -> None:
    assert load_config({"LOCK_RANK": "abc", "SGLANG_LOCKS_RANK": "abc"}).config == LocksConfig()


# --- the object -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, False, 8.0, "8", None, [8]])
def test_object_wants_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} = .* is not allowed: it must be a whole number: "):
        LocksConfig(**{name: value})


@pytest.mark.parametrize("name", sorted(CHOICES))
@pytest.mark.parametrize("value", [True, 1, None])
def test_object_wants_names(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} = .* is not allowed: it must be a name: "):
        LocksConfig(**{name: value})


def test_object_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LocksConfig().rank = 4  # type: ignore[misc]


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "rank": st.integers(1, 15),
        "budget_tokens": st.integers(3, 6).map(lambda pages: 16 * pages),
        "combine": st.sampled_from(COMBINES),
        "tail_correction": st.sampled_from(TAIL_CORRECTIONS),
        "min_context_tokens": st.integers(0, 2),
        "dense_backend": st.sampled_from(DENSE_BACKENDS),
        "idle_audit_ms": st.sampled_from((0, 20)),
        "evaluation": st.sampled_from(EVALUATIONS),
    },
)


@given(SETTINGS, SETTINGS)
def test_digests_are_equal_exactly_when_settings_are(first: dict[str, Any], second: dict[str, Any]) -> None:
    one, two = LocksConfig(**first), LocksConfig(**second)
    assert (one.digest == two.digest) == (one == two)
    assert len(one.digest) == 12


def test_digest_depends_on_every_setting() -> None:
    other: dict[str, Any] = {"rank": 4, "budget_tokens": 512, "sink_pages": 2, "recent_pages": 2, "combine": "max"}
    other |= {"tail_correction": "off", "min_context_tokens": 1, "dense_backend": "triton", "idle_audit_ms": 0}
    other |= {"evaluation": "on"}
    assert set(other) == set(NAMES)
    digests = [LocksConfig(**{name: value}).digest for name, value in other.items()]
    assert len({LocksConfig().digest, *digests}) == len(NAMES) + 1


def test_description_has_every_setting_with_its_source() -> None:
    text = load_config({"LOCKS_RANK": "4"}).describe()
    assert f"locks config {LocksConfig(rank=4).digest}: rank=4 (variable), budget_tokens=2048 (default)" in text
    assert all(f"{name}=" in text for name in NAMES)


# --- files ------------------------------------------------------------------------------------------------------------

WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    ".toml": lambda data: "".join(f"{name} = {json.dumps(value)}\n" for name, value in data.items()),
    ".json": json.dumps,
}


@pytest.fixture(params=sorted(WRITERS))
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[dict[str, Any]], dict[str, str]]:
    """Write settings to a file of either kind; returns the variables that name it."""

    def writer(data: dict[str, Any]) -> dict[str, str]:
        file = tmp_path / f"settings{request.param}"
        file.write_text(WRITERS[request.param](data))
        return {"LOCKS_CONFIG": str(file)}

    return writer


Write = Callable[[dict[str, Any]], dict[str, str]]


def test_file(write: Write) -> None:
    loaded = load_config(write({"rank": 4, "combine": "peak"}))
    assert loaded.config == LocksConfig(rank=4, combine="peak")
    assert loaded.sources["rank"] == loaded.sources["combine"] == "file"
    assert loaded.sources["budget_tokens"] == "default"


def test_file_with_a_table_named_locks(tmp_path: Path) -> None:
    toml, jsn = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text("[locks]\nrank = 4\n")
    jsn.write_text('{"locks": {"rank": 4}}')
    for file in (toml, jsn):
        assert load_config({"LOCKS_CONFIG": str(file)}).config == LocksConfig(rank=4)


def test_empty_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.touch()
    assert load_config({"LOCKS_CONFIG": str(file)}).config == LocksConfig()


def test_unknown_key_in_file(write: Write) -> None:
    environ = write({"rank": 4, "bugdet_tokens": 512})
    message = refused(environ)
    assert environ["LOCKS_CONFIG"] in message
    assert "unknown setting 'bugdet_tokens'; did you mean budget_tokens?" in message


def test_table_beside_settings_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("rank = 4\n[locks]\nrank = 2\n")
    assert "unknown setting 'locks'" in refused({"LOCKS_CONFIG": str(file)})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"rank": True}, "rank = True is not allowed: it must be a whole number"),
        ({"rank": 8.0}, "rank = 8.0 is not allowed: it must be a whole number"),
        ({"rank": 16}, "rank = 16 is not allowed: it must be 1 to 15"),
        ({"rank": "eight"}, "= 'eight' is not a whole number"),
        ({"combine": 1}, "combine = 1 is not allowed: it must be a name"),
        ({"combine": "mas"}, "did you mean mass?"),
        ({"budget_tokens": 500}, "nearest valid value 496"),
    ],
)
def test_bad_value_in_file(write: Write, data: dict[str, Any], expected: str) -> None:
    environ = write(data)
    message = refused(environ)
    assert expected in message
    assert environ["LOCKS_CONFIG"] in message


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.toml", "rank = ", "not valid TOML"),
        ("a.json", "{rank: 4}", "not valid JSON"),
        ("a.json", "", "not valid JSON"),
        ("a.json", "[" * 100_000, "not valid JSON"),
        ("a.json", "[4]", "must hold a table"),
        ("a.json", '{"locks": 4}', "must hold a table"),
        ("a.yaml", "rank: 4", "must end in .toml or .json"),
        ("a.py", "rank = 4", "must end in .toml or .json"),
        ("a", "rank = 4", "must end in .toml or .json"),
        ("a.toml", b"rank = 4 # \xff", "cannot be read"),
    ],
)
def test_bad_file(tmp_path: Path, name: str, content: str | bytes, expected: str) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused({"LOCKS_CONFIG": str(file)})
    assert expected in message
    assert f"LOCKS_CONFIG = {str(file)!r}" in message


def test_missing_and_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    for name in ("none.toml", "folder.toml", "loop.json"):
        assert "the file cannot be read" in refused({"LOCKS_CONFIG": str(tmp_path / name)})


def test_files_cannot_run_code(tmp_path: Path) -> None:
    """Only TOML and JSON are read, and nothing in them is evaluated."""
    mark = tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    for name, content in {"a.py": code, "b.toml": f'combine = "{code}"', "c.json": json.dumps({"rank": code})}.items():
        (tmp_path / name).write_text(content)
        refused({"LOCKS_CONFIG": str(tmp_path / name)})
    assert not mark.exists()


# --- precedence and configure() ---------------------------------------------------------------------------------------


def test_flag_over_variable_over_file_over_default(write: Write) -> None:
    environ = write({"rank": 2, "budget_tokens": 256, "sink_pages": 2})
    environ |= {"LOCKS_RANK": "4", "LOCKS_BUDGET_TOKENS": "512", FLAGS_VARIABLE: json.dumps({"rank": "15"})}
    loaded = load_config(environ)
    assert loaded.config == LocksConfig(rank=15, budget_tokens=512, sink_pages=2)
    sources = {name: loaded.sources[name] for name in ("rank", "budget_tokens", "sink_pages", "recent_pages")}
    assert sources == {"rank": "flag", "budget_tokens": "variable", "sink_pages": "file", "recent_pages": "default"}


def test_file_of_the_flag_over_file_of_the_variable(tmp_path: Path) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text("rank = 2")
    two.write_text("rank = 4")
    environ = {"LOCKS_CONFIG": str(one), FLAGS_VARIABLE: json.dumps({"config": str(two)})}
    assert load_config(environ).config.rank == 4


def test_bad_value_counts_even_where_another_source_wins(write: Write) -> None:
    """A bad value is an error wherever it stands: it may win in the next start."""
    environ = {"LOCKS_RANK": "abc", FLAGS_VARIABLE: json.dumps({"rank": "4"})}
    assert "LOCKS_RANK = 'abc'" in refused(environ)


def test_configure_adds_to_earlier_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKS_RANK", "2")
    assert configure(budget_tokens=512) == LocksConfig(rank=2, budget_tokens=512)
    assert configure(rank=4) == LocksConfig(rank=4, budget_tokens=512)
    loaded = load_config()
    assert loaded.config == LocksConfig(rank=4, budget_tokens=512)
    assert loaded.sources["rank"] == loaded.sources["budget_tokens"] == "flag"


def test_configure_reads_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("rank = 4")
    assert configure(config=file, sink_pages=2) == LocksConfig(rank=4, sink_pages=2)
    assert load_config().sources["rank"] == "file"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"bugdet_tokens": 512}, "configure(): unknown setting 'bugdet_tokens'; did you mean budget_tokens?"),
        ({"rank": 0}, "rank = 0 is not allowed: it must be 1 to 15"),
        ({"rank": True}, "rank = True is not allowed"),
        ({"rank": object()}, "is not a whole number"),
        ({"combine": b"mass"}, "combine = \"b'mass'\" is not allowed"),
        ({"rank": 4, "sink_pages": -1}, "sink_pages = -1 is not allowed"),
        ({"config": "missing.toml"}, "'missing.toml': the file cannot be read"),
        ({"config": 5}, "must end in .toml or .json"),
    ],
)
def test_configure_changes_nothing_on_error(settings: dict[str, Any], expected: str) -> None:
    configure(budget_tokens=512)
    before = dict(os.environ)
    with pytest.raises(ConfigError) as caught:
        configure(**settings)
    assert expected in str(caught.value)
    assert dict(os.environ) == before
    assert load_config().config == LocksConfig(budget_tokens=512)


def _digest_here(_: int) -> tuple[str, dict[str, str]]:
    loaded = load_config()
    return loaded.config.digest, dict(loaded.sources)


def test_spawned_process_has_the_same_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("sink_pages = 2")
    monkeypatch.setenv("LOCKS_RANK", "4")
    configure(budget_tokens=512, config=str(file))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        digest, sources = pool.apply(_digest_here, (0,))
    assert digest == LocksConfig(rank=4, budget_tokens=512, sink_pages=2).digest
    assert sources == dict(load_config().sources)


def test_a_further_command_line_starts_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags of an earlier one are gone, and what they covered is back."""
    monkeypatch.setenv(FLAGS_VARIABLE, "{}")
    configure(rank=4, sink_pages=2)

    def parse(*words: str) -> LocksConfig:
        parser = argparse.ArgumentParser()
        add_flags(None, parser)
        parser.parse_args(words)
        return load_config().config

    first = parse("--locks-rank", "2", "--locks-budget-tokens", "512")
    assert (first.rank, first.budget_tokens, first.sink_pages) == (2, 512, 2)
    again = parse()
    assert (again.rank, again.budget_tokens, again.sink_pages) == (4, 2048, 2)
    assert parse("--locks-sink-pages", "3").sink_pages == 3
    configure(sink_pages=5)
    assert parse().sink_pages == 5


# --- SGLang's command line --------------------------------------------------------------------------------------------

LOCKS = ["--attention-backend", "locks"]


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Start]:
    folder = tmp_path_factory.mktemp("starts")
    settings, yaml, bad = folder / "settings.toml", folder / "server.yaml", folder / "bad.json"
    settings.write_text("rank = 4\nsink_pages = 2\n")
    bad.write_text('{"bugdet_tokens": 512}')
    yaml.write_text("attention-backend: locks\nlocks-budget-tokens: 512\nlocks-rank: 2\n")
    every = {"rank": "4", "budget_tokens": "512", "sink_pages": "2", "recent_pages": "3", "combine": "peak"}
    every |= {"tail_correction": "off", "min_context_tokens": "100", "dense_backend": "torch_native", "idle_audit_ms": "5"}
    every |= {"evaluation": "on"}
    spaced = [part for name, value in every.items() for part in ("--locks-" + name.replace("_", "-"), value)]
    joined = [f"--locks-{name.replace('_', '-')}={value}" for name, value in every.items()]
    attempts: dict[str, tuple[list[str], dict[str, str]]] = {
        "plain": (LOCKS, {}),
        "every flag": (LOCKS + spaced, {}),
        "every flag with =": (["--attention-backend=locks", *joined], {}),
        "flag over variable over file": (
            [*LOCKS, "--locks-config", str(settings), "--locks-budget-tokens", "512"],
            {"LOCKS_BUDGET_TOKENS": "1024", "LOCKS_SINK_PAGES": "3"},
        ),
        "file with =": ([*LOCKS, f"--locks-config={settings}"], {}),
        "flags in SGLang's file": (["--config", str(yaml)], {}),
        "bad flag": ([*LOCKS, "--locks-rank", "99"], {}),
        "bad text": ([*LOCKS, "--locks-rank", "abc"], {}),
        "bad variable": (LOCKS, {"LOCKS_RANK": "99"}),
        "unknown variable": (LOCKS, {"LOCKS_BUGDET_TOKENS": "512"}),
        "bad file": ([*LOCKS, "--locks-config", str(bad)], {}),
        "unknown flag": ([*LOCKS, "--locks-bugdet-tokens", "512"], {}),
        "bad variable, decode only": (["--prefill-attention-backend", "locks"], {"LOCKS_RANK": "99"}),
        "other backend": (["--attention-backend", "torch_native"], {}),
        "other backend, bad variables": (
            ["--attention-backend", "torch_native"],
            {"LOCKS_RANK": "99", "LOCKS_BUGDET_TOKENS": "x", "LOCKS_CONFIG": str(bad)},
        ),
        "other backend, bad flag": (["--attention-backend", "torch_native", "--locks-rank", "99"], {}),
        "no backend, bad variable": ([], {"LOCKS_RANK": "99"}),
    }
    outcomes = start_all(model_folder(folder / "model"), list(attempts.values()))
    return dict(zip(attempts, outcomes, strict=True))


def test_start_without_settings(starts: dict[str, Start]) -> None:
    start = starts["plain"]
    assert (start.error, start.backend, start.digest) == ("", "locks", LocksConfig().digest)


@pytest.mark.parametrize("form", ["every flag", "every flag with ="])
def test_every_flag(starts: dict[str, Start], form: str) -> None:
    expected = LocksConfig(4, 512, 2, 3, "peak", "off", 100, "torch_native", 5, "on")
    assert starts[form].error == ""
    assert starts[form].settings == dataclasses.asdict(expected)
    assert starts[form].digest == expected.digest
    assert starts[form].sources == dict.fromkeys(NAMES, "flag")


def test_flags_over_variables_over_file_on_the_command_line(starts: dict[str, Start]) -> None:
    start = starts["flag over variable over file"]
    assert start.settings == dataclasses.asdict(LocksConfig(rank=4, budget_tokens=512, sink_pages=3))
    assert start.sources is not None
    assert [start.sources[name] for name in ("rank", "budget_tokens", "sink_pages")] == ["file", "flag", "variable"]


def test_file_on_the_command_line(starts: dict[str, Start]) -> None:
    assert starts["file with ="].settings == dataclasses.asdict(LocksConfig(rank=4, sink_pages=2))


def test_flags_in_sglangs_own_configuration_file(starts: dict[str, Start]) -> None:
    start = starts["flags in SGLang's file"]
    assert start.settings == dataclasses.asdict(LocksConfig(rank=2, budget_tokens=512)), start


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bad flag", "rank = 99 is not allowed: it must be 1 to 15 (given: --locks-rank = 99)"),
        ("bad text", "--locks-rank = 'abc' is not a whole number; allowed: 1 to 15"),
        ("bad variable", "rank = 99 is not allowed: it must be 1 to 15 (given: LOCKS_RANK = 99)"),
        ("unknown variable", "unknown variable LOCKS_BUGDET_TOKENS; did you mean LOCKS_BUDGET_TOKENS?"),
        ("bad file", "the file: unknown setting 'bugdet_tokens'; did you mean budget_tokens?"),
        ("bad variable, decode only", "rank = 99 is not allowed: it must be 1 to 15 (given: LOCKS_RANK = 99)"),
    ],
)
def test_bad_settings_stop_the_start(starts: dict[str, Start], name: str, expected: str) -> None:
    """Before a model is loaded: there are no weights in the folder that these starts name."""
    assert starts[name].error == "ConfigError"
    assert expected in starts[name].message


def test_unknown_flag_is_refused(starts: dict[str, Start]) -> None:
    assert starts["unknown flag"].error == "SystemExit"
    message = starts["unknown flag"].message
    assert "unrecognized arguments: --locks-bugdet-tokens" in message
    assert "did you mean --locks-budget-tokens?" in message


def test_other_backends_do_not_read_the_settings(starts: dict[str, Start]) -> None:
    for name in ("other backend", "other backend, bad variables", "other backend, bad flag"):
        assert (starts[name].error, starts[name].backend, starts[name].page_size) == ("", "torch_native", 1)
        assert "locks" not in starts[name].log
    assert starts["no backend, bad variable"].error == ""


def test_import_is_light() -> None:
    """`import locks_sglang`, the configuration and the support matrix need nothing but the standard library."""
    code = (
        "import sys; before = set(sys.modules); import locks_sglang, locks_sglang.config, locks_sglang.support, "
        "locks_sglang.seams, locks_sglang.plugin; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment(), check=True)
    assert child.stdout.strip() == "['locks_sglang']"
