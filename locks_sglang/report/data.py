"""Results files, read and checked, and values that know where they stand.

A row is one line of a file of JSON lines, or the object of a JSON file. What a file holds is told by what its rows have, so
files may have any name.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..evaluation import ATTENTION_MAP, ATTENTION_MASS, OUTPUT_ERROR


class ReportError(ValueError):
    """Something that no page can be drawn from: says what was given and what is allowed."""


@dataclass(frozen=True)
class Figure:
    """A value and where it stands.

    Args:
        value: a number or a text.
        at: "FILE:LINE:PATH", "FILE:PATH" for a JSON file, an expression of such terms, or a call of this package's code.
    """

    value: Any
    at: str

    def __truediv__(self, other: "Figure") -> "Figure":
        return Figure(self.value / other.value, f"{self.at} / {other.at}")

    def __add__(self, other: "Figure") -> "Figure":
        return Figure(self.value + other.value, f"{self.at} + {other.at}")


@dataclass(frozen=True)
class Row:
    """One row of a results file.

    Args:
        file: name of the file on the page. line: its line, counted from 1; 0 for the object of a JSON file.
        data: what it says.
    """

    file: str
    line: int
    data: Mapping[str, Any]

    def get(self, path: str) -> Any:
        """Value at a dotted path, list indices included; None where there is none."""
        found: Any = self.data
        for key in path.split("."):
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, TypeError, ValueError):
                return None
        return found

    def figure(self, path: str) -> Figure:
        """Value at a dotted path, which is there."""
        where = f"{self.file}:{self.line}" if self.line else self.file
        value = self.get(path)
        assert value is not None, f"{where} has no {path}"
        return Figure(value, f"{where}:{path}")

    @property
    def machine(self) -> str:
        """What it was measured on."""
        gpu = self.get("gpu")
        return str(self.get("device") or "CPU") if gpu in (None, "none") else str(gpu)

    @property
    def versions(self) -> str:
        """Versions of what took part."""
        named = self.get("versions") or {name: self.get(name) for name in ("torch", "triton") if self.get(name)}
        ours = {"locks-sglang": self.get("version")} if self.get("version") else {}
        return ", ".join(f"{name} {version}" for name, version in {**ours, **named}.items())

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.get("model.name") or self.get("model"))


@dataclass(frozen=True)
class Kind:
    """A form of results.

    Args:
        what: for people. made_by: the command that makes them. mark: whether a row is of this form.
        numbers: paths of numbers that a row must have. others: paths of anything else that it must have.
        check: further complaint about a row, "" for none.
    """

    what: str
    made_by: str
    mark: Callable[[Mapping[str, Any]], bool]
    numbers: Sequence[str]
    others: Sequence[str] = ()
    check: Callable[[Row], str] = lambda row: ""


def _lists_agree(row: Row) -> str:
    """Of a mass evaluation: one share a budget."""
    budgets = row.get("budgets")
    for index, method in enumerate(row.get("methods")):
        if not isinstance(method, dict) or not {"name", "label", "family", "bytes_per_page", "mass"} <= set(method):
            return f"methods.{index} lacks name, label, family, bytes_per_page or mass"
        if not _numbers(method["mass"]) or len(method["mass"]) != len(budgets):
            return f"methods.{index}.mass must be {len(budgets)} numbers, one a budget"
    return ""


def _errors_agree(row: Row) -> str:
    """Of an evaluation of outputs: one error a budget."""
    budgets = row.get("budgets")
    for index, method in enumerate(row.get("methods")):
        if not isinstance(method, dict) or not {"label", "selector", "bytes_per_page", "error"} <= set(method):
            return f"methods.{index} lacks label, selector, bytes_per_page or error"
        if not _numbers(method["error"]) or len(method["error"]) != len(budgets):
            return f"methods.{index}.error must be {len(budgets)} numbers, one a budget"
    return ""


def _map_agrees(row: Row) -> str:
    """Of an attention map: one count a layer, KV head and page."""
    layers, heads, pages = len(row.get("layers")), row.get("kv_heads"), len(row.get("pages"))
    held, reads = row.get("held"), row.get("reads")
    if not _numbers(held, pages) or not all(1 <= steps <= MOST_STEPS for steps in held):
        return f"held must be {pages} numbers from 1 to {MOST_STEPS}, one a page"
    if not _shaped(reads, layers, heads, pages):
        return f"reads must be {layers} layers x {heads} KV heads x {pages} pages of numbers"
    if not all(0 <= count <= most for rows in reads for head in rows for count, most in zip(head, held, strict=True)):
        return "reads must lie between 0 and the page's entry in held"
    return ""


def _shaped(reads: Any, layers: int, heads: int, pages: int) -> bool:
    """Whether counts are [layers, heads, pages]."""
    whole = isinstance(reads, list) and len(reads) == layers and all(isinstance(rows, list) for rows in reads)
    return whole and all(len(rows) == heads and all(_numbers(head, pages) for head in rows) for rows in reads)


def _published_agrees(row: Row) -> str:
    """Of published figures: three numbers a context."""
    wanted = ("context", "dense_ms", "locks_ms")
    for index, entry in enumerate(row.get("rows")):
        if not isinstance(entry, dict) or not all(_number(entry.get(name)) for name in wanted):
            return f"rows.{index} lacks a number of {', '.join(wanted)}"
    return ""


KINDS = {
    "decode": Kind(
        "time per token",
        "locks-sglang bench decode --model NAME",
        lambda row: "token_ms" in row and "context" in row,
        ("context", "batch", "token_ms.p50", "token_ms.p10", "token_ms.p90", "token_ms.p99"),
        ("model", "backend", "gpu", "shape.dim", "command"),
    ),
    "kernels": Kind(
        "time of kernels",
        "locks-sglang bench all",
        lambda row: "kernel" in row,
        ("heads", "group", "dim", "context", "batch", "us"),
        ("kernel", "gpu", "command"),
    ),
    "serve": Kind(
        "multi-turn chat",
        "locks-sglang bench serve --model PATH",
        lambda row: "first_token_ms" in row and "turn" in row,
        ("users", "turn", "first_token_ms.p50", "first_token_ms.p99", "token_ms.p50"),
        ("model", "backend", "gpu", "command"),
    ),
    "mass": Kind(
        "attention mass captured",
        "locks-sglang eval mass --json FILE",
        lambda row: row.get("kind") == ATTENTION_MASS,
        ("text.tokens", "late_queries", "page_tokens"),
        ("model.name", "device", "budgets", "layers", "methods"),
        _lists_agree,
    ),
    "output": Kind(
        "error of the attention output",
        "locks-sglang eval output --json FILE",
        lambda row: row.get("kind") == OUTPUT_ERROR,
        ("text.tokens", "late_queries", "page_tokens"),
        ("model.name", "device", "budgets", "layers", "methods"),
        _errors_agree,
    ),
    "map": Kind(
        "attention map of one request",
        "locks-sglang eval map --question TEXT --json FILE",
        lambda row: row.get("kind") == ATTENTION_MAP,
        ("prompt_tokens", "steps", "page_tokens", "kv_heads", "settings.budget_tokens"),
        ("model.name", "device", "layers", "pages", "held", "reads", "command"),
        _map_agrees,
    ),
    "published": Kind(
        "published figures, for comparison",
        "written by hand, with their source",
        lambda row: row.get("kind") == "published",
        ("batch",),
        ("title", "source", "model", "gpu", "rows"),
        _published_agrees,
    ),
}
SUFFIXES = (".json", ".jsonl")
MOST_STEPS = 65535
"""Steps of an attention map: its counts travel in 16 bits."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(values: Any, length: int | None = None) -> bool:
    return isinstance(values, list) and all(map(_number, values)) and length in (None, len(values))


class UnknownKindError(ReportError):
    """A file whose rows are of no form that the report draws."""


@dataclass(frozen=True)
class Results:
    """All that a page is drawn from.

    Args:
        rows: by kind, in the order of files and lines. skipped: files of a folder that hold something else.
    """

    rows: Mapping[str, Sequence[Row]]
    skipped: Sequence[str] = ()

    def of(self, kind: str) -> Sequence[Row]:
        """Rows of a kind."""
        return self.rows.get(kind, ())

    def last(self, kind: str, *paths: str) -> list[Row]:
        """Rows of a kind, of those that agree in what stands at `paths` only the last: files of results are appended to."""
        kept: dict[str, Row] = {}
        for row in self.of(kind):
            same = json.dumps([row.get(path) for path in paths], sort_keys=True)
            kept.pop(same, None)
            kept[same] = row
        return list(kept.values())


def read(paths: Iterable[Path]) -> Results:
    """Read files, and the results files of folders.

    Raises:
        ReportError: a path that is not there or cannot be read, a file that no form fits, or a row that lacks something.
    """
    rows: dict[str, list[Row]] = {}
    skipped: list[str] = []
    named: dict[str, Path] = {}
    for path in paths:
        within = path.is_dir()
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if within else [path]
        for file in files:
            whole = file.resolve()
            if whole in named.values():
                continue
            name = file.name if file.name not in named else str(file)
            named[name] = whole
            try:
                kind, found = _read_file(file, name)
            except UnknownKindError:
                if not within:
                    raise
                skipped.append(name)
                continue
            rows.setdefault(kind, []).extend(found)
    return Results(rows, skipped)


def _read_file(path: Path, name: str) -> tuple[str, list[Row]]:
    """Kind and rows of one file."""
    if path.suffix not in SUFFIXES:
        raise ReportError(f"{path}: results files end with {' or '.join(SUFFIXES)}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ReportError(f"{path} does not exist; name results files or a folder with some") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read: {error}") from None
    if path.suffix == ".jsonl":
        rows = [Row(name, n, _object(line, f"{path} line {n}")) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        rows = [Row(name, 0, _object(text, str(path)))]
    if not rows:
        raise ReportError(f"{path} is empty; expected {_allowed()}")
    kinds = [_kind(row, path) for row in rows]
    for row, kind in zip(rows, kinds, strict=True):
        if kind != kinds[0]:
            raise ReportError(f"{_where(path, row)} is {KINDS[kind].what}, the rows before it are {KINDS[kinds[0]].what}")
        _checked(row, KINDS[kind], path)
    return kinds[0], rows


def _where(path: Path, row: Row) -> str:
    return f"{path} line {row.line}" if row.line else str(path)


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ReportError(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ReportError(f"{where} holds {type(found).__name__}, not an object")
    return found


def _kind(row: Row, path: Path) -> str:
    for name, kind in KINDS.items():
        if kind.mark(row.data):
            return name
    has = ", ".join(list(row.data)[:6]) or "nothing"
    raise UnknownKindError(f"{_where(path, row)} is of no kind that can be drawn (it has {has}); allowed: {_allowed()}")


def _allowed() -> str:
    return "; ".join(f"{kind.what} ({kind.made_by})" for kind in KINDS.values())


def _checked(row: Row, kind: Kind, path: Path) -> None:
    """Refuse a row that lacks what the page shows."""
    for name in kind.numbers:
        if not _number(row.get(name)):
            raise ReportError(f"{_where(path, row)}: {name} must be a number, got {row.get(name)!r}; {kind.what} has it")
    for name in kind.others:
        if row.get(name) in (None, "", []):
            raise ReportError(f"{_where(path, row)}: {name} is missing; {kind.what} has it")
    complaint = kind.check(row)
    if complaint:
        raise ReportError(f"{_where(path, row)}: {complaint}")
