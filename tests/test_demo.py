"""The demo: its rule, its document, its table, the care it takes of its servers, and a short run of the whole."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from functools import partial
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from tokenizers import Tokenizer

from locks_sglang import demo, serving
from locks_sglang.demo import (
    Answer,
    Choices,
    PageCounts,
    Turn,
    Verdict,
    equal_share,
    first_difference,
    follow,
    judge,
    page_counts,
    read_document,
    unwrap,
)
from locks_sglang.models import ModelError
from locks_sglang.serving import ServerError


def answer(tokens: str, margins: dict[int, float] | None = None, usual: float = 3.0, *, ended: bool = False) -> Answer:
    """An answer with one-letter tokens, "X" second at each; the two are `usual` apart but at the given positions."""
    apart = [(margins or {}).get(at, usual) for at in range(len(tokens))]
    return Answer(tokens, list(tokens), ["X"] * len(tokens), apart, 4300, 16, 12.34, 6.78, ended)


# --- the rule ---------------------------------------------------------------------------------------------------------


def followed(ours: Answer, *dense: Answer) -> tuple[Choices, list[tuple[str, int]]]:
    """Dense's choices along an answer, and what it was asked, in turn."""
    asked: list[tuple[str, int]] = []

    def resume(begun: str, tokens: int) -> Answer:
        continuation = dense[len(asked)]
        asked.append((begun, tokens))
        assert len(continuation.tokens) == tokens
        return continuation

    return follow(ours, {".", "!"}, resume), asked


@pytest.mark.parametrize(
    ("ours", "dense", "passed", "reason"),
    [
        (answer("abcdefghij"), [answer("abcdefghij")], True, "all 10 tokens are those that dense chooses"),
        (answer("abXdefghij"), [answer("abcdefghij")], False, "token 3 of 10, 'X', .* dense's two best logits are 3.000 apart"),
        (answer("abXdefghij"), [answer("abcdefghij", {2: 0.101})], False, "are 0.101 apart"),
        (answer("abXdefghij"), [answer("abcQQQQQQQ", {2: 0.1}), answer("defghij")], True, "1 of 10 tokens differ, close calls"),
        (answer("abYdefghij"), [answer("abcdefghij", {2: 0.1})], False, "token 3 of 10, 'Y'"),
        (answer("abXdXfghij"), [answer("abcQQQQQQQ", {2: 0.1}), answer("defghij")], False, "token 5 of 10"),
        (answer("abcdefghiX"), [answer("abcdefghij")], True, "1 of 10 tokens differ, close calls or in the last 10%"),
        (answer("abcdefghXj"), [answer("abcdefghij")], False, "token 9 of 10"),
        (answer("X"), [answer("a")], False, "token 1 of 1"),
        (answer("abcdefghi", ended=True), [answer("abcdefghi.")], True, "all 10 tokens"),
        (answer("abcdefghi", ended=True), [answer("abcdefghi!")], True, "all 10 tokens"),
        (answer("abcdefghijklmno", ended=True), [answer("abcdefghijklmnop")], False, r"token 16 of 16, '\(end\)'"),
        (answer("abcdefghij"), [answer("abcde.ghij")], False, "token 6 of 10"),
    ],
)
def test_rule(ours: Answer, dense: list[Answer], passed: bool, reason: str) -> None:
    verdict = judge(followed(ours, *dense)[0], 0)
    assert verdict.passed is passed
    assert re.search(reason, verdict.reason), verdict.reason


def test_rule_allows_no_invalid_page() -> None:
    choices, _ = followed(answer("ab"), answer("ab"))
    assert judge(choices, 2) == Verdict(False, "2 times a page was met without a valid summary")


def test_dense_goes_on_from_every_close_call() -> None:
    """After each it continues the answer that is judged, not its own; what it chose there stays on record."""
    dense = answer("abcZZZZZ", {2: 0.1}), answer("dYQQQ", {1: 0.05}), answer("fgh", usual=2.0)
    choices, asked = followed(answer("abXdXfgh"), *dense)
    assert asked == [("", 8), ("abX", 5), ("abXdX", 3)]
    excused = [False, False, True, False, True, False, False, False]
    assert choices == Choices(list("abXdXfgh"), list("abcdYfgh"), excused, [3.0, 3.0, 0.1, 3.0, 0.05, 2.0, 2.0, 2.0])


def test_dense_stops_at_a_difference_that_is_no_close_call() -> None:
    choices, asked = followed(answer("abXdefgh"), answer("abcdefgh"))
    assert asked == [("", 8)]
    assert choices == Choices(list("abXdefgh"), list("abc"), [False] * 3, [3.0] * 3)


def test_ends_of_answers_are_found(model_path: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))
    assert demo.ends_of_answers(Path(model_path), tokenizer) == {"<|im_end|>"}
    (tmp_path / "config.json").write_text('{"eos_token_id": [0, 2]}')
    assert demo.ends_of_answers(tmp_path, tokenizer) == {"<|endoftext|>", "<|im_end|>"}
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="names an eos_token_id"):
        demo.ends_of_answers(tmp_path, tokenizer)


def test_equal_share_counts_the_longer_answer() -> None:
    assert equal_share(answer("abcd"), answer("abXd")) == 0.75
    assert equal_share(answer("abcd"), answer("ab")) == 0.5
    assert equal_share(answer("ab"), answer("abcd")) == 0.5
    assert first_difference(answer("abcd"), answer("abcd")) is None
    assert first_difference(answer("abcd"), answer("ab")) == 2
    assert first_difference(answer("abcd"), answer("aXcd")) == 1


# --- the document -----------------------------------------------------------------------------------------------------


def test_document_is_long_enough_for_the_real_tokenizer(model_path: str) -> None:
    tokenizer = Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))
    document = read_document(lambda text: len(tokenizer.encode(text).ids))
    assert document.tokens == len(tokenizer.encode(document.text).ids) >= 4000
    assert document.text.startswith('The "if" statement\n***')
    for quoted in (demo.EXAMPLE_ANSWER[:-1], '"global" statement', '"nonlocal" statement'):
        assert quoted in document.text
    assert document.topics[: len(demo.TOPICS)] == demo.TOPICS


def test_document_grows_where_the_topics_are_shorter() -> None:
    document = read_document(lambda text: len(text) // 8)
    assert len(document.topics) > len(demo.TOPICS)
    assert len(set(document.topics)) == len(document.topics)
    assert document.tokens == len(document.text) // 8 >= 4000


def test_unwrap_joins_prose_only() -> None:
    text = "Heading\n*******\n\nProse of\n*two* re-\nraised lines.\n\n   code\n   more\n\n1. item\n   its rest\n"
    assert unwrap(text) == "Heading\n*******\n\nProse of *two* re-raised lines.\n\n   code\n   more\n\n1. item\n   its rest"


# --- counters and table -----------------------------------------------------------------------------------------------


def counters(steps: int, held: int, read: int, built: dict[str, int], reused: int, invalid: int) -> dict[str, object]:
    return {
        "decode_steps": steps,
        "sparse_rows": steps,
        "pages_held": held,
        "pages_read": read,
        "summaries_built": built,
        "summaries_reused": reused,
        "invalid_pages": invalid,
    }


def test_flags_of_a_gpu_without_kernels() -> None:
    """A server would refuse to start there with its default graphs."""
    usual = demo.Machine("cuda", "bfloat16", {}).sparse(512)
    assert usual == ["--attention-backend", "locks", "--locks-budget-tokens", "512"]
    older = demo.Machine("cuda", "bfloat16", {}, graphs=False).sparse(512)
    assert older == [*usual, "--cuda-graph-backend-decode", "disabled"]


def test_page_counts_are_differences() -> None:
    before = counters(2, 10, 8, {"0": 5}, 7, 1)
    after = counters(12, 2750, 328, {"0": 9, "1": 4}, 277, 1)
    assert page_counts(before, after) == PageCounts(10, 274.0, 32.0, [4, 4], 270, 0)
    assert page_counts(after, after) == PageCounts(0, 0.0, 0.0, [0, 0], 0, 0)


def test_table_shows_every_number() -> None:
    ours, dense = answer("abcdefghij"), answer("abcdXXXXXX")
    turns = [
        Turn("1.1", "?", [], ours, PageCounts(10, 274.0, 32.0, [268] * 30, 0, 0), dense),
        Turn("2.1", "?", [], answer("a"), PageCounts(0, 0.0, 0.0, [3, 4], 265, 0), answer("a")),
    ]
    out = StringIO()
    Console(file=out, width=140).print(demo.table(turns))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if line.startswith("│")]
    cells = ["1.1", "4,300", "16", "274", "32", "11.7%", "268", "0", "12.3 s", "12.3 s", "6.8", "6.8", "40% of 10"]
    assert rows == [cells, ["2.1", "4,300", "16", "0", "0", "", "3-4", "265", "12.3 s", "12.3 s", "6.8", "6.8", "100% of 1"]]


# --- servers ----------------------------------------------------------------------------------------------------------

SERVER = """
import http.server, os, signal, subprocess, sys
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/crash":
            print("out of memory, say", flush=True)
            child.kill()
            os._exit(7)
        self.send_response(200); self.end_headers(); self.wfile.write(str(child.pid).encode())
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return str(reply.read().decode())


def still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; an orphan that nobody waits for stays in the table as a zombie."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("arguments", [[], ["stubborn"]])
def test_server_and_its_children_end_with_the_block(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PATIENCE_S", 1.0)
    command = [sys.executable, "-c", SERVER, *arguments]
    seen: list[psutil.Process] = []

    def interrupted() -> None:
        with serving.serving(command, tmp_path / "log", os.environ, lambda phase: None) as url:
            child = psutil.Process(int(get(url)))
            seen.extend((child.parent(), child))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(seen) == 2
    assert still_running(seen) == []


def test_failed_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print(*range(40), sep='\\n', flush=True); raise SystemExit('rank = 99 is not allowed')"]
    with (
        pytest.raises(ServerError) as error,
        serving.serving(command, tmp_path / "log", os.environ, lambda phase: None),
    ):
        pass
    text = str(error.value)
    assert "ended with code 1" in text
    assert "rank = 99 is not allowed" in text
    assert str(tmp_path / "log") in text
    assert "\n  39\n" in text
    assert "\n  20\n" not in text


def test_server_that_dies_in_the_block_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVER]
    with (
        pytest.raises(ServerError, match=r"ended with code 7(.|\n)*out of memory, say"),
        serving.serving(command, tmp_path / "log", os.environ, lambda phase: None) as url,
    ):
        get(f"{url}/crash")


def test_other_errors_in_the_block_stay_what_they_are(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVER]
    with (
        pytest.raises(ZeroDivisionError),
        serving.serving(command, tmp_path / "log", os.environ, lambda phase: None),
    ):
        _ = 1 / 0


# --- the whole --------------------------------------------------------------------------------------------------------


def demo_command(model: str, output: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "locks_sglang", "demo", "--model", model, "--output", str(output), *arguments]


def test_bad_options_are_explained(model_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--model", model_path, "--output", str(tmp_path), "--budget-tokens", "100"]) == 2
    assert "error: budget_tokens = 100 is not allowed: it must be a multiple of 16" in capsys.readouterr().out
    assert demo.main(["--model", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert f"error: {tmp_path} is not a complete model (config.json: " in capsys.readouterr().out


@pytest.mark.server
@pytest.mark.one_version
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_no_process(number: signal.Signals, model_path: str, tmp_path: Path) -> None:
    """Interrupted while the real server starts, its scheduler process included."""
    process = subprocess.Popen(
        demo_command(model_path, tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with SIGINT ignored, and the demo keeps to that.
        preexec_fn=partial(signal.signal, number, signal.SIG_DFL),
    )
    started = psutil.Process(process.pid)
    children: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 300
        while not any("scheduler" in child.name() for child in children):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.2)
            children = started.children(recursive=True)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "interrupted; the server is stopped" in said
        assert still_running(children) == []
    finally:
        for left in (process, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


@pytest.mark.server
@pytest.mark.one_version
@pytest.mark.timeout(1200)
def test_short_demo(model_path: str, tmp_path: Path) -> None:
    """One turn and a second conversation of 16 tokens each, budget 512, 4,000 tokens of text: sparse, reused, right."""
    command = demo_command(model_path, tmp_path, "--turns", "1", "--max-tokens", "16")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED: " in done.stdout
    assert demo.RULE in " ".join(done.stdout.split())
    result = json.loads((tmp_path / "demo.json").read_text())
    assert result["passed"] is True
    assert result["config"]["budget_tokens"] == 512
    assert result["document"]["tokens"] >= 4000
    assert set(result["versions"]) == {"locks-sglang", "sglang", "torch", "transformers", "openai", "python"}
    assert "torch_native" in result["commands"]["dense"]

    document_pages = result["document"]["tokens"] // 16
    turns = result["turns"]
    assert [turn["turn"] for turn in turns] == ["1.1", "2.1"]
    assert [turn["cached_tokens"] > 0 for turn in turns] == [False, True]
    for turn in turns:
        pages, prompt, cached = turn["pages"], turn["prompt_tokens"], turn["cached_tokens"]
        assert cached % 16 == 0
        assert pages["reused"] == cached // 16
        # Every decode step stores one token. Exactly the pages behind the cached prefix are summarised, in every layer.
        assert pages["built"] == [(prompt + pages["decode_steps"]) // 16 - cached // 16] * 30
        assert pages["invalid"] == 0
        assert pages["read"] == 32
        assert pages["held"] > document_pages
        assert pages["read"] < 0.15 * pages["held"]
        assert turn["locks"]["prompt_tokens"] == turn["dense"]["prompt_tokens"]
        assert len(turn["locks"]["tokens"]) == len(turn["locks"]["margins"]) <= 16
    assert all(turn["cached_tokens"] // 16 >= document_pages for turn in turns[1:])
