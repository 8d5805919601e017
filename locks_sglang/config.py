"""Settings of the backend: one frozen object, read once, identical in every process.

A setting comes from a command-line flag, from a `LOCKS_*` variable, from the file that `--locks-config` or
`LOCKS_CONFIG` names (TOML or JSON), or from its default, in this order. `configure()` stands where a flag would for
programs without a command line (`sgl.Engine`).
"""

import dataclasses
import difflib
import hashlib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE_SIZE = 16
PREFIX = "LOCKS_"
FILE_VARIABLE = "LOCKS_CONFIG"
FLAGS_VARIABLE = "LOCKS_COMMAND_LINE"
"""Internal: carries what flags and `configure()` set, as JSON, into the processes that SGLang spawns."""

COMBINES = ("mass", "peak", "max")
TAIL_CORRECTIONS = ("qmu", "flat", "off")
EVALUATIONS = ("off", "on")
DENSE_BACKENDS = ("auto", "flashinfer", "fa3", "triton", "torch_native")


class ConfigError(ValueError):
    """A setting that cannot be used: names the setting, its source, the value and what is allowed."""


def _setting(default: Any, allowed: str, help_text: str) -> Any:
    return field(default=default, metadata={"allowed": allowed, "help": help_text})


@dataclass(frozen=True)
class LocksConfig:
    """Validated settings of the `locks` attention backend.

    Raises:
        ConfigError: a value of the wrong type or outside its range.
    """

    rank: int = _setting(8, "1 to 15", "rank of a page summary")
    budget_tokens: int = _setting(
        2048, "a multiple of 16, at least 16 * (sink_pages + recent_pages + 1)", "tokens each KV head reads per step"
    )
    sink_pages: int = _setting(1, "0 to 1024", "first pages that are always read (16 tokens each), inside the budget")
    recent_pages: int = _setting(1, "1 to 1024", "last pages that are always read, inside the budget")
    combine: str = _setting("mass", ", ".join(COMBINES), "how the query heads of a KV head vote for pages")
    tail_correction: str = _setting("qmu", ", ".join(TAIL_CORRECTIONS), "estimate of the pages that are not read")
    min_context_tokens: int = _setting(
        0, "0 (never) or more", "decode dense while every request of a batch is shorter than this; doubles the decode graphs"
    )
    dense_backend: str = _setting(
        "auto", ", ".join(DENSE_BACKENDS), "backend for prefill; auto is what SGLang would have picked without locks"
    )
    idle_audit_ms: int = _setting(
        20, "0 (never) to 10000", "milliseconds at a time in which an idle server compares its summaries with fresh ones"
    )
    evaluation: str = _setting(
        "off", ", ".join(EVALUATIONS), "let `locks-sglang eval` change what decode reads while the server runs; not for serving"
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            self._check_type(spec)
        self._check("rank", 1 <= self.rank <= PAGE_SIZE - 1)
        self._check("sink_pages", 0 <= self.sink_pages <= 1024)
        self._check("recent_pages", 1 <= self.recent_pages <= 1024)
        least = PAGE_SIZE * (self.sink_pages + self.recent_pages + 1)
        if self.budget_tokens % PAGE_SIZE or self.budget_tokens < least:
            near = max(least, (self.budget_tokens + PAGE_SIZE // 2) // PAGE_SIZE * PAGE_SIZE)
            raise ConfigError(
                f"budget_tokens = {self.budget_tokens} is not allowed: it must be a multiple of {PAGE_SIZE} and at least "
                f"{least} = {PAGE_SIZE} * (sink_pages + recent_pages + 1); nearest valid value {near}"
            )
        self._check("combine", self.combine in COMBINES)
        self._check("tail_correction", self.tail_correction in TAIL_CORRECTIONS)
        self._check("min_context_tokens", self.min_context_tokens >= 0)
        self._check("dense_backend", self.dense_backend in DENSE_BACKENDS)
        self._check("idle_audit_ms", 0 <= self.idle_audit_ms <= 10_000)
        self._check("evaluation", self.evaluation in EVALUATIONS)

    def _check_type(self, spec: dataclasses.Field) -> None:
        value = getattr(self, spec.name)
        wanted = int if spec.type in (int, "int") else str
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ConfigError(
                f"{spec.name} = {value!r} is not allowed: it must be {'a whole number' if wanted is int else 'a name'}: "
                f"{spec.metadata['allowed']}"
            )

    def _check(self, name: str, good: bool) -> None:
        if good:
            return
        value, allowed = getattr(self, name), self.__dataclass_fields__[name].metadata["allowed"]
        hint = nearest(value, allowed.split(", ")) if isinstance(value, str) else ""
        raise ConfigError(f"{name} = {value!r} is not allowed: it must be {allowed}{hint}")

    @property
    def budget_pages(self) -> int:
        """Budget in 16-token pages."""
        return self.budget_tokens // PAGE_SIZE

    @property
    def value_mean(self) -> bool:
        """Whether summaries must hold value means."""
        return self.tail_correction != "off"

    def runs_dense(self, lengths: Sequence[int]) -> bool:
        """Whether a decode batch of requests with these tokens is too short to be sparse."""
        return max(lengths, default=self.min_context_tokens) < self.min_context_tokens

    @property
    def digest(self) -> str:
        """Twelve hex digits that are equal exactly when all settings are."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and where each setting came from ("flag", "variable", "file" or "default")."""

    config: LocksConfig
    sources: Mapping[str, str]

    def describe(self) -> str:
        """One line for the log: every setting with its source, and the digest."""
        values = ", ".join(f"{k}={v} ({self.sources[k]})" for k, v in dataclasses.asdict(self.config).items())
        return f"locks config {self.config.digest}: {values}"


NAMES = tuple(spec.name for spec in dataclasses.fields(LocksConfig))


def variable_name(name: str) -> str:
    """`LOCKS_*` variable of a setting."""
    return PREFIX + name.upper()


def flag_name(name: str) -> str:
    """Command-line flag of a setting."""
    return "--locks-" + name.replace("_", "-")


def nearest(name: str, candidates: Any) -> str:
    """ "; did you mean ...?" for the nearest candidate, or nothing."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _parse(name: str, value: Any, where: str) -> Any:
    """Turn the text of a flag or variable into the setting's type; values of files come typed already."""
    if not isinstance(value, str) or LocksConfig.__dataclass_fields__[name].type not in (int, "int"):
        return value
    try:
        return int(value)
    except ValueError:
        allowed = LocksConfig.__dataclass_fields__[name].metadata["allowed"]
        raise ConfigError(f"{where} = {value!r} is not a whole number; allowed: {allowed}") from None


def _known(keys: Any, where: str) -> None:
    for key in keys:
        if key not in NAMES:
            raise ConfigError(f"{where}: unknown setting {key!r}{nearest(key, NAMES)}; known: {', '.join(NAMES)}")


def read_file(path: str) -> dict[str, Any]:
    """Settings of a TOML or JSON file (by its ending), at its top level or in one table named `locks`."""
    file = Path(path)
    if file.suffix not in (".toml", ".json"):
        raise ConfigError("a configuration file must end in .toml or .json")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file cannot be read: {error}") from None
    try:
        data = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the file is not valid {file.suffix[1:].upper()}: {error}") from None
    if isinstance(data, dict) and list(data) == ["locks"]:
        data = data["locks"]
    if not isinstance(data, dict):
        raise ConfigError("the file must hold a table of settings")
    _known(data, "the file")
    return data


def _read_variables(environ: Mapping[str, str]) -> dict[str, str]:
    known = {variable_name(name): name for name in NAMES}
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in (FILE_VARIABLE, FLAGS_VARIABLE):
            continue
        if variable not in known:
            raise ConfigError(
                f"unknown variable {variable}{nearest(variable, known)}; known: {', '.join([*known, FILE_VARIABLE])}"
            )
        found[known[variable]] = value
    return found


def _read_flags(environ: Mapping[str, str]) -> dict[str, Any]:
    try:
        flags = json.loads(environ.get(FLAGS_VARIABLE, "{}"))
    except ValueError:
        flags = None
    if not isinstance(flags, dict) or not set(flags) <= {*NAMES, "config"}:
        raise ConfigError(f"{FLAGS_VARIABLE} is written by locks itself and must not be set: unset it")
    return flags


def load_config(environ: Mapping[str, str] | None = None) -> LoadedConfig:
    """Read every source and validate.

    Args:
        environ: the variables to read; `os.environ` when None.

    Raises:
        ConfigError: unknown names, unreadable files, bad values.
    """
    environ = os.environ if environ is None else environ
    flags = _read_flags(environ)
    where = flag_name("config") if "config" in flags else FILE_VARIABLE
    path = flags.pop("config", environ.get(FILE_VARIABLE))
    try:
        layers: list[tuple[str, dict[str, Any]]] = [("file", {} if path is None else read_file(str(path)))]
    except ConfigError as error:
        raise ConfigError(f"{where} = {path!r}: {error}") from None
    layers += [("variable", _read_variables(environ)), ("flag", flags)]
    values: dict[str, Any] = {}
    sources = dict.fromkeys(NAMES, "default")
    labels: dict[str, str] = {}
    for source, settings in layers:
        for name, value in settings.items():
            labels[name] = {"file": f"{name} in {path}", "variable": variable_name(name), "flag": flag_name(name)}[source]
            values[name] = _parse(name, value, labels[name])
            sources[name] = source
    try:
        return LoadedConfig(LocksConfig(**values), sources)
    except ConfigError as error:
        given = "; ".join(f"{labels[name]} = {value!r}" for name, value in values.items())
        raise ConfigError(f"{error} (given: {given})") from None


_beneath_flags: dict[str, Any] = {}
"""What each flag of the last command line took the place of: a setting of `configure()`, or None."""


def store_flag(name: str, value: str) -> None:
    """Record what a flag set, for this process and those it spawns. `name` may be "config"."""
    stored = _read_flags(os.environ)
    _beneath_flags.setdefault(name, stored.get(name))
    os.environ[FLAGS_VARIABLE] = json.dumps(stored | {name: value})


def forget_flags() -> None:
    """Undo `store_flag`: a further command line in the same process starts without the flags of the last."""
    if _beneath_flags:
        settings = {name: value for name, value in (_read_flags(os.environ) | _beneath_flags).items() if value is not None}
        os.environ[FLAGS_VARIABLE] = json.dumps(settings)
        _beneath_flags.clear()


def configure(**settings: Any) -> LocksConfig:
    """Set what flags would set, before `sgl.Engine(attention_backend="locks")`. A later call adds to an earlier one.

    Args:
        settings: fields of `LocksConfig`, or `config="file.toml"`.

    Returns:
        The resulting configuration.

    Raises:
        ConfigError: an unknown name or a bad value; nothing is changed then.
    """
    _known([name for name in settings if name != "config"], "configure()")
    # What JSON cannot hold cannot be a setting either: its text is refused with the other bad values.
    flags = json.dumps(_read_flags(os.environ) | settings, default=str)
    config = load_config({**os.environ, FLAGS_VARIABLE: flags}).config
    os.environ[FLAGS_VARIABLE] = flags
    for name in settings:
        _beneath_flags.pop(name, None)
    return config
