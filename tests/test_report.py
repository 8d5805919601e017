"""`locks-sglang report`: every number on the page is that of its file, bad files are refused, what a browser makes of it."""

import base64
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import pytest

from locks_sglang.cli import main
from locks_sglang.kernels.build_page_summaries import RecordLayout
from locks_sglang.report import charts, cli, views
from locks_sglang.report.data import KINDS, ReportError, Results, Row, read
from locks_sglang.report.heatmap import DARK, LEVELS, LIGHT, level, picture, ramp
from locks_sglang.report.page import render

from . import browser

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


# --- results to draw from ---------------------------------------------------------------------------------------------------


def decode_row(backend: str, context: int, p50: float, **changes: Any) -> dict[str, Any]:
    percentiles = {"p50": p50, "p10": p50 - 0.01, "p90": p50 + 0.01, "p99": p50 + 1, "max": p50 + 2}
    row = {
        "model": "some-model",
        "shape": {"layers": 4, "heads": 4, "group": 8, "dim": 64},
        "backend": backend,
        "gpu": "NVIDIA H200",
        "versions": {"sglang": "0.5.23"},
        "commit": "0123456789ab",
        "command": "locks-sglang bench decode",
        "context": context,
        "batch": 1,
        "page_size": 16,
        "token_ms": percentiles,
        "memory": {"cache": 1 << 30, "summaries": 1 << 27},
    }
    if backend == "locks":
        row |= {"settings": {"rank": 4, "budget_tokens": 1024, "tail_correction": "off"}}
        row |= {"counted": {"pages_read": 640, "pages_held": 10 * context // 16}}
    return row | changes


def serve_row(backend: str, turn: int, p50: float, users: int = 4) -> dict[str, Any]:
    times = {"p50": p50, "p10": p50 - 1, "p90": p50 + 1, "p99": p50 + 2, "max": p50 + 3}
    row = {"model": "some-model", "backend": backend, "gpu": "none", "device": "cpu", "users": users, "turn": turn}
    return row | {"first_token_ms": times, "token_ms": times, "command": "locks-sglang bench serve", "commit": "0123456789ab"}


def small_map(**changes: Any) -> dict[str, Any]:
    """Two layers of two KV heads, eight pages of which four are read a step, ten steps."""
    first = [[10, 0, 10, 0, 0, 5, 5, 10], [10, 10, 0, 0, 0, 0, 10, 10]]
    second = [[10, 1, 9, 0, 0, 0, 10, 10], [10, 10, 0, 0, 0, 0, 10, 10]]
    made: dict[str, Any] = {
        "kind": "attention_map",
        "model": {"name": "some-model"},
        "device": "cpu (2 threads)",
        "text": {"name": "prose"},
        "settings": {"budget_tokens": 64, "sink_pages": 1, "recent_pages": 1},
        "page_tokens": 16,
        "prompt_tokens": 118,
        "question": "Why?",
        "answer": "Because </script><b>so</b>.",
        "steps": 10,
        "layers": [0, 1],
        "kv_heads": 2,
        "held": [10] * 8,
        "pages": [f"words of <page> {n} </script>\nand more" for n in "abcdefgh"],
        "reads": [first, second],
        "command": "locks-sglang eval map",
        "commit": "0123456789ab",
    }
    return made | changes


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    """A folder with everything: four dense backends, two settings of `locks`, two models, seven contexts, chat, a map."""
    contexts = (4096, 16384, 65536, 131072, 262144, 524288, 1048576)
    folder = tmp_path / "rich"
    folder.mkdir()
    rows = [decode_row("locks", n, 6 + n / 2e5) for n in contexts]
    rows += [decode_row("locks", n, 5 + n / 1e5, settings={"rank": 4, "budget_tokens": 4096}) for n in contexts]
    names = ("flashinfer", "fa3", "triton", "torch_native", "none")
    rows += [decode_row(name, n, 5 + (n / 5e4 if name != "none" else 0)) for name in names for n in contexts]
    rows += [decode_row(name, 16384, 9.5, model="another-model", batch=8) for name in ("locks", "flashinfer")]
    lines(folder / "decode.jsonl", *rows)
    chat = [
        serve_row(name, turn, 900 / turn, users) for name in ("locks", "flashinfer") for turn in (1, 2, 3) for users in (1, 64)
    ]
    lines(folder / "serve.jsonl", *chat)
    (folder / "map.json").write_text(json.dumps(small_map()))
    for name in ("kernels.jsonl", "eval_mass_smollm2_prose.json"):
        (folder / name).write_text((RESULTS / name).read_text())
    return folder


# --- a page, read ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page says.

    Attributes:
        traced: (data-at, data-value, text shown) of every element that shows a value.
        rest: all other text, but for scales, references, code, sources, what the request said and page numbers of the map.
        links: every address in it. headline: text of the first heading.
    """

    APART = frozenset({"ref", "said", "sources", "name", "scale"})
    VOID = ("meta", "img", "source", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.traced: list[list[str]] = []
        self.rest = ""
        self.headline = ""
        self.links: list[str] = []
        self._open: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.links += [given[name] for name in ("href", "src", "srcset", "action", "poster") if name in given]
        if tag in self.VOID:
            return
        role = "plain"
        classes = given.get("class", "").split()
        if "data-at" in given:
            role = "traced"
            self.traced.append([given["data-at"], given["data-value"], ""])
        elif tag in ("script", "style", "code", "q", "title") or self.APART & set(classes) or "data-page" in given:
            role = "apart"
        self._open.append((tag, role))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, text: str) -> None:
        roles = [role for _, role in self._open]
        if "h1" in [tag for tag, _ in self._open]:
            self.headline += text
        if "traced" in roles:
            if not any(tag == "title" for tag, _ in self._open):
                self.traced[-1][2] += text
        elif "apart" not in roles:
            self.rest += text + "\n"


class Files:
    """Looks up what a `data-at` names, in the files themselves and by other code than the page's."""

    def __init__(self, folder: Path) -> None:
        self.rows: dict[tuple[str, str], Any] = {}
        for file in folder.iterdir():
            text = file.read_text()
            if file.suffix == ".jsonl":
                self.rows |= {(file.name, str(n)): json.loads(line) for n, line in enumerate(text.splitlines(), 1)}
            else:
                self.rows[file.name, ""] = json.loads(text)

    def value(self, at: str) -> Any:
        for sign in (" / ", " + "):
            if sign in at:
                first, *others = (self.value(term) for term in at.split(sign))
                for other in others:
                    first = first / other if sign == " / " else first + other
                return first
        if re.fullmatch(r"\d+", at):
            return int(at)
        if at == "PAGE_SIZE":
            return 16
        if at.startswith("CONTEXTS."):
            return (4096, 16384, 65536, 131072, 262144, 524288, 1048576)[int(at.removeprefix("CONTEXTS."))]
        layout = re.fullmatch(r"RecordLayout\((\d+), (\d+), (\d+), (True|False)\)\.summary_bytes", at)
        if layout:
            return RecordLayout(*map(int, layout.groups()[:3]), layout[4] == "True").summary_bytes
        summed = re.fullmatch(r"(\S+?)(?::(\d+))?:reads \((.*)\)", at)
        if summed:
            return self.summed(self.rows[summed[1], summed[2] or ""], summed[3])
        file, line, path = re.fullmatch(r"(.+?\.jsonl?)(?::(\d+))?:(.*)", at).groups()  # type: ignore[union-attr]
        found = self.rows[file, line or ""]
        for key in path.split("."):
            found = found[int(key)] if isinstance(found, list) else found[key]
        return found

    def summed(self, row: dict[str, Any], what: str) -> Any:
        heads = [head for layer in row["reads"] for head in layer]
        columns = [[head[page] for head in heads] for page in range(len(row["pages"]))]
        budget = row["settings"]["budget_tokens"] // 16
        newest = -(-row["prompt_tokens"] // 16) - budget + row["settings"]["sink_pages"]
        page = re.fullmatch(r"mean share of page (\d+)", what)
        if page:
            return sum(columns[int(page[1])]) / len(heads) / row["held"][int(page[1])]
        return {
            "pages": len(columns),
            "pages read at least once": sum(any(column) for column in columns),
            "median KV head's pages": int(median(sum(count > 0 for count in head) for head in heads)),
            "share beyond a window": sum(map(sum, columns[row["settings"]["sink_pages"] : newest])) / sum(map(sum, columns)),
        }[what]


UNITS = {"K": 1 << 10, "M": 1 << 20, " %": 0.01, " GiB": 2**30}


def says(text: str, value: Any) -> bool:
    """Whether a text is a value, rounded as far as its own last digit."""
    if isinstance(value, str | bool):
        return text == str(value)
    found = re.fullmatch(r"(-?[\d,]+(?:\.\d+)?)(K|M| %| GiB|×| µs| B|)", text)  # noqa: RUF001
    if not found:
        return False
    digits = len(found[1].partition(".")[2])
    unit = UNITS.get(found[2], 1)
    return abs(float(found[1].replace(",", "")) * unit - value) <= 0.501 * 10**-digits * unit


def strings(found: Any) -> Iterator[str]:
    """Every text in a results file."""
    if isinstance(found, str):
        yield found
    for inner in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from strings(inner)


@pytest.fixture(params=["checkout", "rich"])
def folder(request: pytest.FixtureRequest, rich: Path) -> Path:
    return RESULTS if request.param == "checkout" else rich


def drawn(folder: Path) -> Page:
    return Page(render(read([folder])))


# --- every number ----------------------------------------------------------------------------------------------------------


def test_every_number_is_that_of_its_file(folder: Path) -> None:
    page, files = drawn(folder), Files(folder)
    assert len(page.traced) > 200
    for at, value, text in page.traced:
        truth = files.value(at)
        assert value == str(truth) if isinstance(truth, str | bool) else float(value) == pytest.approx(truth, rel=1e-12), at
        assert not text or says(text, truth), f"{at} is {truth}, the page says {text!r}"


def test_no_other_number_is_on_the_page(folder: Path) -> None:
    """Names from the files apart, and the two head dimensions by which the table of sizes is headed."""
    page = drawn(folder)
    names = {text for row in Files(folder).rows.values() for text in strings(row) if re.search(r"\d", text)}
    names |= {"fa3"}  # a backend that was not measured
    rest = page.rest
    for name in sorted(names, key=len, reverse=True):
        rest = rest.replace(name, "")
    rest = re.sub(r"\bD\s(128|64)\b|, budget tokens (1024|4096)\b|rank 4\b", "", rest)
    assert [line for line in rest.splitlines() if re.search(r"\d", line)] == []


def test_the_headline_follows_the_file(tmp_path: Path) -> None:
    """2.5 times as fast at the longest context, and slower at the shortest; then the file changes."""
    rows = [decode_row("locks", 16384, 8.0), decode_row("locks", 1048576, 10.0)]
    rows += [decode_row("flashinfer", 16384, 6.0), decode_row("flashinfer", 1048576, 25.0), decode_row("fa3", 1048576, 30.0)]
    page = drawn(lines(tmp_path / "decode.jsonl", *rows).parent)
    assert page.headline == "2.50× as fast at 1M tokens of context, slower at 16K"  # noqa: RUF001
    assert "Faster from \n" in page.rest
    rows[3]["token_ms"]["p50"], rows[2]["token_ms"]["p50"] = 12.0, 9.0
    page = drawn(lines(tmp_path / "decode.jsonl", *rows).parent)
    assert page.headline == "1.20× as fast at 1M tokens of context"  # noqa: RUF001
    assert "Faster at every context measured" in page.rest
    rows[1]["token_ms"]["p50"], rows[0]["token_ms"]["p50"] = 24.0, 18.0
    page = drawn(lines(tmp_path / "decode.jsonl", *rows).parent)
    assert page.headline == "0.50× as fast at 1M tokens of context: slower than dense"  # noqa: RUF001
    assert "Slower at every context measured" in page.rest
    rows += [decode_row("locks", 4096, 5.0), decode_row("flashinfer", 4096, 6.0)]
    page = drawn(lines(tmp_path / "decode.jsonl", *rows).parent)
    assert "Slower at the longest context measured" in page.rest
    rows[1]["token_ms"]["p50"] = 6.0
    page = drawn(lines(tmp_path / "decode.jsonl", *rows).parent)
    assert page.headline == "2.00× as fast at 1M tokens of context, slower at 16K"  # noqa: RUF001


@pytest.mark.parametrize(
    ("file", "path"),
    [
        ("decode.jsonl", "token_ms.p99"),
        ("decode.jsonl", "memory.summaries"),
        ("decode.jsonl", "counted.pages_read"),
        ("kernels.jsonl", "us"),
        ("serve.jsonl", "first_token_ms.p50"),
        ("eval_mass_smollm2_prose.json", "methods.1.mass.0"),
        ("map.json", "reads.0.0.3"),
    ],
)
def test_a_changed_number_changes_the_page(rich: Path, file: str, path: str) -> None:
    before = render(read([rich]))
    rows = [json.loads(line) for line in (rich / file).read_text().splitlines()] if file.endswith("l") else None
    whole = [json.loads((rich / file).read_text())] if rows is None else rows
    last = next(row for row in reversed(whole) if Row("", 0, row).get(path) is not None and row.get("kernel") != "build")
    if file == "decode.jsonl":
        last = whole[6]  # locks at the longest context, from which sizes and shares are taken
    *keys, end = path.split(".")
    for key in keys:
        last = last[int(key)] if isinstance(last, list) else last[key]
    last_key: Any = int(end) if isinstance(last, list) else end
    last[last_key] = last[last_key] + 1 if path.startswith("reads") else last[last_key] * 0.875
    (rich / file).write_text("".join(json.dumps(row) + "\n" for row in whole))
    assert render(read([rich])) != before


# --- what is compared with what ---------------------------------------------------------------------------------------------


def test_of_repeated_rows_the_last_counts_and_the_fastest_dense_backend(tmp_path: Path) -> None:
    rows = [decode_row("locks", 16384, 99.0), decode_row("locks", 16384, 5.0), decode_row("flashinfer", 16384, 8.0)]
    rows += [decode_row("triton", 16384, 7.5), decode_row("none", 16384, 1.0), decode_row("locks", 32768, 6.0)]
    (case,) = views.cases(read([lines(tmp_path / "a.jsonl", *rows)]))
    (point,) = case.longest()
    assert (point.ratio.value, point.ratio.at) == (1.5, "a.jsonl:4:token_ms.p50 / a.jsonl:2:token_ms.p50")
    assert (case.dense, case.locks) == (["flashinfer", "triton"], ["locks"])


def test_other_models_machines_and_batches_are_never_compared(tmp_path: Path) -> None:
    rows = [decode_row("locks", 16384, 5.0), decode_row("flashinfer", 16384, 9.0, model="other")]
    rows += [decode_row("flashinfer", 16384, 9.0, batch=8), decode_row("flashinfer", 16384, 9.0, gpu="another")]
    found = views.cases(read([lines(tmp_path / "a.jsonl", *rows)]))
    assert len(found) == 4
    assert not any(case.longest() for case in found)
    assert "No speed measured yet" in drawn(tmp_path).headline


def test_settings_apart_are_lines_apart(rich: Path) -> None:
    case = views.cases(read([rich]))[0]
    assert len(case.locks) == 2
    assert any("budget tokens 4096" in name for name in case.locks)
    assert all(len(case.speedups(name)) == 7 for name in case.locks)


def test_published_figures_are_a_marked_comparison_of_their_model_alone(tmp_path: Path) -> None:
    given = json.loads((RESULTS / "published_decode.json").read_text())
    (tmp_path / "published.json").write_text(json.dumps(given))
    rows = [decode_row(name, 1048576, 5.0, model=given["model"]) for name in ("locks", "flashinfer")]
    lines(tmp_path / "a.jsonl", *rows)
    page = drawn(tmp_path)
    assert "is not ours" in page.rest
    assert ["published.json:rows.5.dense_ms / published.json:rows.5.locks_ms", str(26.19 / 12.95), ""] in page.traced
    lines(tmp_path / "a.jsonl", *(decode_row(name, 1048576, 5.0) for name in ("locks", "flashinfer")))
    assert "is not ours" not in drawn(tmp_path).rest


def test_points_lie_where_their_values_are(rich: Path) -> None:
    """Heights in the chart of times are one affine function of all values in it."""
    text = render(read([rich]))
    chart = text[text.index("Time per token against context") :]
    chart = chart[: chart.index("</svg>")]
    marks = re.findall(r'd="M(-?[\d.]+) (-?[\d.]+)a3.6[^"]*" class="mark locks" data-value="([\d.]+)"', chart)
    assert len(marks) == 7
    (_, y0, v0), *_, (_, y1, v1) = [tuple(map(float, mark)) for mark in marks]
    for _, y, value in marks:
        assert float(y) == pytest.approx(y0 + (float(value) - v0) * (y1 - y0) / (v1 - v0), abs=0.02)


def test_the_lead_says_from_where_on_short_contexts_go_dense(tmp_path: Path) -> None:
    """Where short contexts lose and long ones do not, and nowhere else; the number is the first context that wins for good."""
    times = {16384: (8.0, 6.0), 65536: (9.0, 8.0), 131072: (10.0, 11.0), 262144: (11.0, 15.0)}
    rows = [decode_row(name, at, pair[n]) for at, pair in times.items() for n, name in enumerate(("locks", "fa3"))]
    page = drawn(lines(tmp_path / "a.jsonl", *rows).parent)
    assert "Where shorter contexts come too" in page.rest
    # The last row of two at one context counts.
    assert ["131072", "131072"] in [told[1:] for told in page.traced if told[0] == "a.jsonl:5:context"]
    for faster in (16384, 65536):
        rows += [decode_row("locks", faster, 5.0)]
    assert "Where shorter contexts come too" not in drawn(lines(tmp_path / "a.jsonl", *rows).parent).rest


def test_names_of_lines_lie_apart_and_near_their_ends() -> None:
    assert charts._apart([20, 60, 100], [15, 30, 15], 225) == [20, 60, 100]
    assert charts._apart([50, 50, 52], [15, 15, 15], 225) == [35.67, 50.67, 65.67]
    assert charts._apart([14, 15], [15, 15], 225) == [14, 29]
    assert charts._apart([210, 210], [30, 15], 225) == [180, 210]
    places = charts._apart([3, 40, 41, 42, 200, 222], [15, 15, 30, 15, 15, 15], 225)
    assert places[0] == charts.TOP
    assert all(low + height <= high + 0.02 for low, high, height in zip(places, places[1:], [15, 15, 30, 15, 15], strict=False))


def test_words_of_the_quality_table_are_explained_where_they_are_used(tmp_path: Path) -> None:
    whole = json.loads((RESULTS / "eval_mass_smollm2_prose.json").read_text())
    (tmp_path / "m.json").write_text(json.dumps(whole))
    assert "A global sketch describes all keys of a KV head in one basis" in drawn(tmp_path).rest
    whole["methods"] = [method for method in whole["methods"] if not method["name"].startswith("global")]
    (tmp_path / "m.json").write_text(json.dumps(whole))
    assert "global sketch" not in drawn(tmp_path).rest


def test_a_map_within_the_budget_reads_all_of_its_pages() -> None:
    settings = {"budget_tokens": 4096, "sink_pages": 1, "recent_pages": 1}
    sums = views.totals(Row("m.json", 0, small_map(settings=settings)))
    assert (sums.budget.value, sums.pages.value) == (8, 8)


def test_a_map_adds_up() -> None:
    sums = views.totals(Row("m.json", 0, small_map()))
    assert (sums.pages.value, sums.ever.value, sums.budget.value) == (8, 6, 4)
    assert sums.by_head.value == 4
    # Eight pages of prompt, a budget of four with the first one kept: a window holds the last three.
    assert sums.beyond.value == pytest.approx((21 + 19 + 0 + 0) / 160)
    assert [page for page, _ in views.most_read(Row("m.json", 0, small_map()), 2)] == [1, 2]


# --- the map's picture -------------------------------------------------------------------------------------------------------


def test_the_picture_holds_every_count() -> None:
    """Decoded again: one pixel a page and KV head; never and always have shades of their own."""
    row = Row("m.json", 0, small_map())
    raw = base64.b64decode(picture(row, LIGHT).removeprefix("data:image/png;base64,"))
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(raw):
        (length,) = struct.unpack(">I", raw[at : at + 4])
        name, body = raw[at + 4 : at + 8], raw[at + 8 : at + 8 + length]
        assert struct.unpack(">I", raw[at + 8 + length : at + 12 + length]) == (zlib.crc32(name + body),)
        chunks[name] = body
        at += 12 + length
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (8, 4)
    pixels = zlib.decompress(chunks[b"IDAT"])
    shades = [list(pixels[1 + 9 * n : 9 + 9 * n]) for n in range(4)]
    assert shades == [[level(count, 10) for count in head] for layer in row.data["reads"] for head in layer]
    assert (level(0, 10), level(10, 10), level(1, 10000), level(9999, 10000)) == (0, LEVELS - 1, 1, LEVELS - 2)


@pytest.mark.parametrize("stops", [LIGHT, DARK])
def test_the_ramp_says_the_same_in_grey(stops: Any) -> None:
    greys = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in ramp(stops)]
    if stops == LIGHT:
        greys.reverse()
    assert greys == sorted(greys)
    assert greys[-1] - greys[0] > 150
    assert min(high - low for low, high in pairwise(greys)) > 1


# --- self-contained and safe -----------------------------------------------------------------------------------------------


def test_nothing_comes_from_elsewhere(folder: Path) -> None:
    text = render(read([folder]))
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in Page(text).links)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in text


def test_what_files_say_is_text_and_nothing_else(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    rows = [decode_row(name, 16384, 5.0, model=evil, gpu=evil, command=evil) for name in ("locks", evil)]
    lines(tmp_path / "a.jsonl", *rows)
    (tmp_path / "m.json").write_text(json.dumps(small_map(question=evil, answer=evil, pages=[evil] * 8)))
    text = render(read([tmp_path]))
    assert "<img src=x" not in text
    assert text.count("<script") == text.count("</script>") == 2
    data = re.search(r'<script type="application/json">(.*?)</script>', text, re.S)
    assert data is not None
    assert json.loads(data[1])["pages"] == [evil] * 8


def test_without_results_the_page_names_the_commands(tmp_path: Path) -> None:
    text = render(Results({}))
    for name in ("decode", "kernels", "mass", "serve", "map"):
        assert KINDS[name].made_by in text
    assert "No speed measured yet" in text
    page = Page(text)
    assert all(re.match(r"RecordLayout|\d+$|PAGE_SIZE", at) for at, *_ in page.traced)


# --- bad input ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.jsonl", None, "absent.jsonl does not exist; name results files or a folder with some"),
        ("notes.md", "text", "results files end with .json or .jsonl"),
        ("empty.jsonl", "\n", "empty.jsonl is empty; expected time per token (locks-sglang bench decode"),
        ("a.jsonl", '{"kernel": ', "a.jsonl line 1 is not JSON: "),
        ("a.jsonl", json.dumps(decode_row("locks", 64, 1.0)) + "\n[1]\n", "a.jsonl line 2 holds list, not an object"),
        (
            "a.json",
            '{"speed": 1, "colour": 2}',
            "a.json is of no kind that can be drawn (it has speed, colour); allowed: time",
        ),
        (
            "a.jsonl",
            json.dumps(decode_row("x", 64, 1.0) | {"token_ms": {}}),
            "line 1: token_ms.p50 must be a number, got None",
        ),
        (
            "a.jsonl",
            json.dumps(decode_row("x", 64, 1.0) | {"context": "64"}),
            "line 1: context must be a number, got '64'",
        ),
        ("a.jsonl", json.dumps(decode_row("x", 64, 1.0, gpu="")), "a.jsonl line 1: gpu is missing; time per token has it"),
        (
            "a.jsonl",
            json.dumps(decode_row("x", 64, 1.0)) + "\n" + json.dumps(serve_row("x", 1, 1.0)),
            "a.jsonl line 2 is multi-turn chat, the rows before it are time per token",
        ),
        ("m.json", json.dumps(small_map(held=[10] * 7)), "m.json: held must be 8 numbers from 1 to 65535, one a page"),
        ("m.json", json.dumps(small_map(layers=[0])), "m.json: reads must be 1 layers x 2 KV heads x 8 pages of numbers"),
        ("m.json", json.dumps(small_map(held=[9] * 8)), "m.json: reads must lie between 0 and the page's entry in held"),
    ],
)
def test_bad_files_are_refused(
    name: str, text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    assert main(["report", str(file), "--out", str(tmp_path / "page.html")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_mass_file_must_be_whole() -> None:
    whole = json.loads((RESULTS / "eval_mass_smollm2_prose.json").read_text())
    whole["methods"][1]["mass"].pop()
    complaint = KINDS["mass"].check(Row("m.json", 0, whole))
    assert complaint == "methods.1.mass must be 7 numbers, one a budget"


def test_other_files_of_a_folder_are_named_and_not_drawn(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", decode_row("locks", 64, 1.0))
    (tmp_path / "other.json").write_text('{"speed": 1}')
    results = read([tmp_path, tmp_path / "a.jsonl"])
    assert (len(results.of("decode")), results.skipped) == (1, ["other.json"])
    assert "lies beside the results. It holds something else" in Page(render(results)).rest
    with pytest.raises(ReportError, match="of no kind"):
        read([tmp_path / "other.json"])


# --- the command -------------------------------------------------------------------------------------------------------------


def test_the_page_is_drawn_from_the_working_directory_or_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 0
    assert "KiB, from" in capsys.readouterr().out
    assert "glm4-9b-1m" in (tmp_path / "report.html").read_text()
    (tmp_path / cli.WRITTEN).mkdir(parents=True)
    lines(tmp_path / cli.WRITTEN / "decode.jsonl", decode_row("locks", 16384, 5.0))
    assert main(["report", "--out", "new/page.html"]) == 0
    assert "glm4-9b-1m" not in (tmp_path / "new" / "page.html").read_text()
    assert main(["report", "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path} cannot be written" in capsys.readouterr().err


STATE = {
    "config": {"rank": 8, "budget_tokens": 2048, "combine": "mass"},
    "summary_bytes_per_page": 1728,
    "summary_bytes": 3 << 30,
    "counters": {
        "decode_steps": 12,
        "sparse_rows": 11,
        "dense_rows": {"short": 3},
        "pages_held": 4000,
        "pages_read": 1000,
        "summaries_built": {"0": 250, "1": 250},
        "idle_audits": 6,
    },
    "audit": None,
}


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    """Something that answers /server_info, its address, and the states that it tells."""
    states: list[Any] = [{"locks": STATE}]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"internal_states": states}).encode())

        def log_message(self, *args: Any) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}", states
    httpd.shutdown()
    httpd.server_close()


def test_a_server_is_asked(server: tuple[str, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, states = server
    out = tmp_path / "page.html"
    assert main(["report", str(RESULTS), "--server", url + "/", "--out", str(out)]) == 0
    page = Page(out.read_text())
    told = {at: (value, text) for at, value, text in page.traced if at.startswith("server:")}
    assert told["server:1:counters.pages_read / server:1:counters.pages_held"] == ("0.25", "25.0 %")
    assert told["server:1:summary_bytes"] == (str(3 << 30), "3.00 GiB")
    assert told["server:1:counters.dense_rows.short"] == ("3", "3")
    assert told["server:1:counters.summaries_built.0"] == ("250", "250")
    assert told["server:1:counters.idle_audits"] == ("6", "6")
    assert told["server:1:config.combine"] == ("mass", "mass")
    states[:] = [{}]
    assert main(["report", "--server", url, "--out", str(out)]) == 2
    assert "does not run --attention-backend locks" in capsys.readouterr().err


# --- in a browser ------------------------------------------------------------------------------------------------------------

MEASURE = """(() => {
  const boxes = [], wrong = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const name = (node) => JSON.stringify(node.textContent.trim().slice(0, 40)) + " in " +
    node.parentElement.outerHTML.slice(0, 60);
  for (let node; (node = walker.nextNode());) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || parent.closest("script, style, title, details:not([open]) > :not(summary)")) continue;
    if (getComputedStyle(parent).display === "none") continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (box.width < 1) continue;
      if (box.left < -0.5 || box.right > innerWidth + 0.5) wrong.push(`beyond the page: ${name(node)}`);
      if (box.height < 9.5) wrong.push(`too small, ${box.height}: ${name(node)}`);
      const frame = parent.closest("figure, .tile, .map, .missing");
      const outer = frame?.getBoundingClientRect();
      if (outer && (box.left < outer.left || box.right > outer.right + 0.5)) wrong.push(`beyond its frame: ${name(node)}`);
      // Line boxes of a font reach into each other; letters do not.
      const rim = 0.2 * box.height;
      boxes.push({ node, left: box.left + 0.5, right: box.right - 0.5, top: box.top + rim, bottom: box.bottom - rim });
    }
  }
  boxes.sort((a, b) => a.top - b.top);
  for (let i = 0; i < boxes.length; i++)
    for (let j = i + 1; j < boxes.length && boxes[j].top < boxes[i].bottom; j++) {
      const [a, b] = [boxes[i], boxes[j]];
      if (a.node !== b.node && a.left < b.right && b.left < a.right) wrong.push(`overlap: ${name(a.node)} and ${name(b.node)}`);
    }
  for (const element of document.querySelectorAll("body *")) {
    const style = getComputedStyle(element);
    if (style.overflowX !== "visible" && !element.closest("svg") && element.scrollWidth > element.clientWidth + 1)
      wrong.push(`cut: ${element.outerHTML.slice(0, 80)}`);
  }
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) wrong.push(`the page is ${wide} wide`);
  return { wrong, boxes: boxes.length };
})()"""

READOUT = """(() => {
  const box = document.querySelector(".readout");
  const mark = box.querySelector("mark")?.textContent;
  return { row: box.dataset.row, column: box.dataset.column, text: box.textContent, mark };
})()"""

needs_chromium = pytest.mark.skipif(
    browser.chromium() is None and os.environ.get("CHROMIUM_REQUIRED") != "1",
    reason="no chromium here: apt-get install chromium; CHROMIUM_REQUIRED=1 makes its absence a failure",
)


@pytest.fixture
def page(folder: Path, tmp_path: Path) -> Path:
    file = tmp_path / "page.html"
    file.write_text(render(read([folder])))
    return file


@needs_chromium
@pytest.mark.one_version
def test_nothing_overlaps_and_nothing_is_cut(page: Path, tmp_path: Path) -> None:
    """At 1280 and 390 pixels, light and dark, all details open, with a page of the map read out."""

    async def look(tab: browser.Tab) -> None:
        for width in (1280, 820, 390):
            for scheme in ("light", "dark"):
                await tab.show(page, width, scheme=scheme)
                await tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
                await tab.evaluate("document.querySelector('.most-read button').click()")
                found = await tab.evaluate(MEASURE)
                assert found["wrong"] == [], f"{width} {scheme}"
                assert found["boxes"] > 300
                dark = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (sum(map(int, re.findall(r"\d+", dark))) < 150) == (scheme == "dark")
                await tab.picture(tmp_path / f"{width}-{scheme}.png")
        assert {address.partition(":")[0] for address in tab.requests} == {"file", "data"}
        assert tab.complaints == []

    browser.browse(look)
    assert (tmp_path / "390-dark.png").stat().st_size > 20_000


@needs_chromium
@pytest.mark.one_version
def test_the_map_is_read_by_pointer_keys_and_tap(tmp_path: Path) -> None:
    file, made = tmp_path / "page.html", small_map()
    (tmp_path / "m.json").write_text(json.dumps(made))
    file.write_text(render(read([tmp_path / "m.json"])))

    async def point(tab: browser.Tab) -> None:
        async def expect(row: int, column: int) -> None:
            told = await tab.evaluate(READOUT)
            assert (told["row"], told["column"]) == (str(row), str(column))
            assert told["mark"] == f"words of <page> {'abcdefgh'[column]} </script> ↵ and more"
            count = made["reads"][row // 2][row % 2][column]
            every = sum(head[column] for layer in made["reads"] for head in layer)
            where = f"Layer {row // 2}, KV head {row % 2}, page {column} (tokens {16 * column} to {16 * column + 15})"
            assert where in told["text"]
            assert f"read in {count} of 10 steps; over all layers and heads in {int(100 * every / 40 + 0.5)} %" in told["text"]

        await tab.show(file, 1280)
        await tab.evaluate("document.querySelector('.cells').scrollIntoView({ block: 'center', behavior: 'instant' })")
        box = await tab.evaluate(
            "(({ left, top, width, height }) => ({ left, top, width, height }))"
            "(document.querySelector('.cells').getBoundingClientRect())"
        )

        def place(row: int, column: int) -> tuple[float, float]:
            return box["left"] + box["width"] * (column + 0.5) / 8, box["top"] + box["height"] * (row + 0.5) / 4

        await tab.mouse("mouseMoved", *place(2, 5))
        await expect(2, 5)
        await tab.mouse("mousePressed", *place(0, 7))
        await expect(0, 7)
        for name, row, column in (
            ("ArrowRight", 0, 7),
            ("ArrowDown", 1, 7),
            ("ArrowLeft", 1, 6),
            ("Home", 1, 0),
            ("ArrowUp", 0, 0),
            ("End", 0, 7),
        ):
            await tab.key(name)
            await expect(row, column)
        await tab.evaluate("document.querySelector('[data-key=ArrowDown]').click()")
        await expect(1, 7)
        assert await tab.evaluate("document.querySelector('.cells').tabIndex") == 0
        assert tab.complaints == []

    browser.browse(point)
