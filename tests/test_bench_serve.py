"""`locks-sglang bench serve`: arguments, load, tokenizer, arithmetic, a run with a real server, and one that is stopped."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from starts import clean_environment, model_folder

from locks_sglang.benchmarks import serve
from locks_sglang.cli import main

COMMAND = [sys.executable, "-m", "locks_sglang", "bench", "serve"]
SMALL = ["--users", "1", "--turns", "2", "--prefix", "200", "--question", "20", "--answer", "8"]
SMALL += ["--conversations", "2", "--share", "2", "--budget", "128"]
POOL = ["--server-args", "--max-total-tokens", "4096"]


@pytest.fixture
def whole_model(tmp_path: Path) -> str:
    """A folder with a configuration and a tokenizer, and no weights."""
    Path(model_folder(tmp_path / "shape"))
    return str(serve.dressed(tmp_path / "shape", tmp_path / "model"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --model --config is required"),
        (["--config", "gpt2"], "invalid choice: 'gpt2'"),
        (["--config", "qwen3-4b", "--model", "x"], "not allowed with argument --config"),
        (["--model", "no/such/folder"], "no/such/folder is no model's folder"),
        (["--config", "qwen3-4b", "--users", "0"], "must be a whole number from 1 to 1024, got '0'"),
        (["--config", "qwen3-4b", "--turns", "1"], "must be a whole number from 2 to 64, got '1'"),
        (["--config", "qwen3-4b", "--budget", "100"], "--budget must be a multiple of 16 tokens, got 100"),
        (["--config", "qwen3-4b", "--backends", "locks", "vllm"], "invalid choice: 'vllm'"),
        (["--config", "qwen3-4b", "--backends", "locks", "locks"], "--backends names one twice"),
        (["--config", "qwen3-4b", "--backends", "locks", "fa3"], "fa3: needs a GPU"),
        (["--config", "qwen3-4b", "--prefix", "45000"], "a conversation has 45768 tokens and more, qwen3-4b takes 40960"),
        (["--config", "qwen3-4b", "--server-args", "--port=1"], "--server-args must leave --port=1 to this command"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(serve, "serving", lambda *given: pytest.fail("a server was started"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_model_must_have_a_tokenizer_and_a_known_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = model_folder(tmp_path / "bare")
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_text('{"num_hidden_layers": 2}')
    for folder, message in ((bare, "has no tokenizer"), (str(odd), "has no num_key_value_heads")):
        with pytest.raises(SystemExit) as ended:
            main(["bench", "serve", "--model", folder, "--prefix", "100"])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_load_has_whole_groups_of_conversations() -> None:
    load = serve.Load([1], conversations=8, share=4, turns=3, prefix=1000, question=10, answer=20)
    assert [load.prefixes(users) for users in (1, 4, 16, 18, 64)] == [2, 2, 4, 5, 16]
    assert load.longest == 1090


def test_text_of_a_shape_s_tokenizer_becomes_the_same_tokens(whole_model: str) -> None:
    """So that prompts have the lengths asked for and answers are found in the cache; roles are one token each."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    tokenizer: Any = get_tokenizer(whole_model)
    ids = random.Random(0).choices(range(1024), k=5000)
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    said = tokenizer.decode(ids[:50])
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": said}, {"role": "user", "content": "w1"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    user, assistant = 1022, 1023
    assert tokenizer.encode(chat) == [user, *ids[:50], assistant, *ids[:50], user, 1, assistant]


def test_rows_are_by_turn() -> None:
    """Two conversations of two turns, the last request of which failed."""
    result = {
        "duration": 2.0,
        "completed": 3,
        "total_output_tokens": 7,
        "output_throughput": 3.5,
        "ttfts": [0.5, 0.1, 0.3, 0.0],
        "itls": [[0.01, 0.03], [0.02], [0.04], []],
        "output_lens": [3, 2, 2, 0],
        "input_lens": [100, 110, 101, 111],
        "cached_tokens": [0, 96, 64, 0],
        "errors": ["", "", "", "gone"],
    }
    first, second = serve.rows_of(result, 2)
    assert (first["turn"], first["requests"], first["completed"], first["answer_tokens"]) == (1, 2, 2, 5)
    assert (first["first_token_ms"]["p50"], first["first_token_ms"]["p99"]) == (300, 500)
    assert (first["token_ms"]["p50"], first["token_ms"]["max"]) == (20, 40)
    assert (first["gap_ms"]["p50"], first["gap_ms"]["max"]) == (30, 40)
    assert (first["prompt_tokens"]["max"], first["cached_tokens"]["max"]) == (101, 64)
    assert (second["turn"], second["requests"], second["completed"]) == (2, 2, 1)
    assert second["first_token_ms"]["max"] == 100
    assert first["run"] == second["run"]
    assert first["run"]["output_tokens_per_s"] == 3.5
    nothing = result | {"output_lens": [0] * 4, "errors": ["gone"] * 4, "completed": 0}
    assert serve.rows_of(nothing, 2) == []


def test_counts_are_differences() -> None:
    def snapshot(factor: int, invalid: int) -> dict[str, Any]:
        names = ("decode_steps", "sparse_rows", "summaries_reused", "summaries_rebuilt")
        counted: dict[str, Any] = dict.fromkeys(names, 10 * factor)
        counted |= {"pages_held": 500 * factor, "pages_read": 80 * factor, "dense_rows": {"mixed": factor}}
        return counted | {"summaries_built": {"0": 7 * factor, "1": 6 * factor}, "invalid_pages": invalid}

    found = serve.counts(snapshot(1, 0), snapshot(3, 2))
    assert (found["decode_steps"], found["sparse_rows"], found["reused"]) == (20, 20, 20)
    assert (found["pages_held"], found["pages_read"]) == (50, 8)
    assert (found["built"], found["dense_rows"], found["invalid_pages"]) == ([12, 14], {"mixed": 2}, 2)


@pytest.mark.server
def test_measures_a_real_server(model_path: str, tmp_path: Path) -> None:
    """Two conversations one after the other: the second one's first turn finds the prefix, second turns all that was said."""
    out = tmp_path / "serve.jsonl"
    command = [*COMMAND, "--model", model_path, "--backends", "locks", *SMALL, "--out", str(out), *POOL]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["backend"], row["users"], row["turn"]) for row in rows] == [("locks", 1, 1), ("locks", 1, 2)]
    for row in rows:
        assert row["completed"] == row["requests"] == 2
        assert row["answer_tokens"] == 16
        assert 0 < row["token_ms"]["p50"] <= row["token_ms"]["p99"]
        assert 0 < row["first_token_ms"]["p50"] <= row["first_token_ms"]["p99"]
        assert row["run"]["output_tokens"] == 32
        assert row["counted"]["invalid_pages"] == 0
        assert row["counted"]["sparse_rows"] >= 4 * 7
        assert row["counted"]["pages_read"] <= 128 // 16 < row["counted"]["pages_held"]
        assert row["settings"]["budget_tokens"] == 128
    first, second = rows
    assert second["prompt_tokens"]["p10"] >= first["prompt_tokens"]["max"] + 8
    assert first["cached_tokens"]["p10"] < 16
    assert first["cached_tokens"]["max"] >= 192
    assert second["cached_tokens"]["p10"] >= first["prompt_tokens"]["p10"] // 16 * 16
    assert first["counted"]["reused"] * 16 == sum(row["cached_tokens"][end] for row in rows for end in ("p10", "max"))


@pytest.mark.server
def test_nothing_is_left_when_it_is_stopped(whole_model: str, tmp_path: Path) -> None:
    """Stopped while its server starts: the server, known by the model's folder in its command, is gone with it."""
    command = [*COMMAND, "--model", whole_model, "--backends", "locks", *SMALL, "--out", str(tmp_path / "out.jsonl"), *POOL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean_environment())
    try:
        deadline = time.monotonic() + 200
        while not servers(whole_model):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "interrupted; the server is stopped" in said
    assert servers(whole_model) == []


def servers(model: str) -> list[int]:
    """Processes whose command is SGLang's server of this model."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(model) in words and b"sglang.launch_server" in words:
            found.append(int(folder.name))
    return found
