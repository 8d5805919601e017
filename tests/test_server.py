"""The real server, started as users start it, and `sgl.Engine`: all three entry points serve the real model with `locks`."""

import json
import os
import pydoc_data.topics
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from locks_sglang.audit import KEY_VARIABLE
from locks_sglang.cli import main as audit
from locks_sglang.demo import ask
from locks_sglang.serving import serving

pytestmark = pytest.mark.server

COMMON = ["--device", "cpu", "--dtype", "float32", "--attention-backend", "locks", "--max-total-tokens", "8192"]
ADMIN_KEY = "of the tests"
LAUNCHERS = {
    "launch_server": [sys.executable, "-m", "sglang.launch_server", "--model-path"],
    "sglang serve": [str(Path(sys.executable).with_name("sglang")), "serve", "--model-path"],
}


def server_info(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/server_info", timeout=60) as answer:
        return dict(json.load(answer))


def document(characters: int) -> str:
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))[:characters]


def check_what_the_judge_asks(client: openai.OpenAI, messages: list[dict[str, str]]) -> None:
    """The demo's judge has an answer continued from where it stands, and counts its end as a token."""
    whole = ask(client, messages, 60, lambda done: None, past_end=True)
    assert len(whole.tokens) == 60
    assert not whole.ended
    rest = ask(client, messages, 12, lambda done: None, begun="".join(whole.tokens[:12]))
    assert rest.prompt_tokens == whole.prompt_tokens + 12
    assert rest.tokens == whole.tokens[12:24]
    short = ask(client, [{"role": "user", "content": "Say yes."}], 200, lambda done: None)
    assert short.ended
    beyond = ask(client, [{"role": "user", "content": "Say yes."}], len(short.tokens) + 1, lambda done: None, past_end=True)
    assert beyond.tokens == [*short.tokens, "<|im_end|>"]


def check_audit(url: str, stored: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`locks-sglang audit`: refused without the admin key, and all that the chats left, at least so many tokens, fits."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert audit(["audit", url]) == 2
    assert "/set_internal_state answered 401" in (said := capsys.readouterr().err)
    assert KEY_VARIABLE in said
    monkeypatch.setenv(KEY_VARIABLE, ADMIN_KEY)
    assert audit(["audit", url + "/", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["looked_at"] == told["pages"] >= stored // 16
    assert told["mismatched"] == told["unsummarised"] == 0
    assert audit(["audit", url, "--pages", "10"]) == 0
    assert f"10 of {told['pages']} pages looked at" in capsys.readouterr().out
    counters = server_info(url)["internal_states"][0]["locks"]["counters"]
    assert (counters["audits"], counters["summaries_mismatched"]) == (2, 0)


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_launchers_serve_multi_turn_chat(
    launcher: str, model_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two streamed turns over one document: the second finds the first in the cache and builds no summary for it."""
    command = [*LAUNCHERS[launcher], model_path, *COMMON, "--locks-budget-tokens", "512", "--enable-cache-report"]
    command += ["--admin-api-key", ADMIN_KEY]
    log = tmp_path / "server.log"
    with serving(command, log, {**os.environ, "HF_HUB_OFFLINE": "1"}, lambda phase: None) as url:
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", timeout=300)
        state = server_info(url)["internal_states"][0]["locks"]
        assert state["config"]["budget_tokens"] == 512
        messages: list[dict[str, str]] = [{"role": "user", "content": document(5000) + "\nWhat is an assert statement?"}]
        usages = []
        for _ in range(2):
            before = server_info(url)["internal_states"][0]["locks"]["counters"]
            stream = client.chat.completions.create(
                model="default",
                messages=messages,  # type: ignore[arg-type]
                temperature=0,
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
            )
            text = ""
            for chunk in stream:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                usage = chunk.usage or None
            assert text.strip()
            assert usage is not None
            after = server_info(url)["internal_states"][0]["locks"]["counters"]
            cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
            usages.append((usage.prompt_tokens, cached))
            # Every decode step stores one token, the surplus one of overlap scheduling too.
            stored = usage.prompt_tokens + after["decode_steps"] - before["decode_steps"]
            assert after["summaries_reused"] - before["summaries_reused"] == cached // 16
            for layer, count in after["summaries_built"].items():
                assert count - before["summaries_built"].get(layer, 0) == stored // 16 - cached // 16
            assert after["invalid_pages"] == 0
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Give an example."}]
        assert usages[0][1] == 0
        assert usages[1][1] >= usages[0][0] // 16 * 16
        if launcher == "launch_server":
            check_what_the_judge_asks(client, messages[:1])
            check_audit(url, usages[1][0], capsys, monkeypatch)
        info = server_info(url)
        assert info["internal_states"][0]["locks"]["counters"]["pages_read"] > 0
    text = log.read_text()
    assert "Failed to" not in text
    assert len(re.findall(r"locks config [0-9a-f]{12}: ", text)) == 1
    assert len(re.findall(r"--page-size is 16", text)) == 1


def test_engine_serves(model_path: str) -> None:
    """`sgl.Engine`, configured by `locks_sglang.configure`: the example."""
    example = Path(__file__).resolve().parent.parent / "examples" / "offline_engine.py"
    run = subprocess.run(
        [sys.executable, str(example), model_path, "cpu"],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith('{"text"')]
    result = json.loads(line)
    assert "Paris" in result["text"]
    assert result["config"]["rank"] == 4
    assert result["config"]["budget_tokens"] == 512
    assert result["counters"]["sparse_rows"] >= 11
    assert len(re.findall(r"locks config [0-9a-f]{12}: ", run.stdout + run.stderr)) == 1


def test_refusal_stops_the_start(model_path: str) -> None:
    """A refused flag and a bad setting stop the server with our message, before a model is loaded."""
    for extra, message in (
        (["--page-size", "24"], "locks does not support a page size outside 16, 32, 64, 128, 256 (page_size=24)"),
        (["--locks-budget-tokens", "100"], "budget_tokens = 100 is not allowed"),
    ):
        run = subprocess.run(
            [*LAUNCHERS["launch_server"], model_path, *COMMON, *extra], capture_output=True, text=True, timeout=200
        )
        assert run.returncode != 0
        assert message in run.stdout + run.stderr
        assert "Load weight begin" not in run.stdout + run.stderr


def test_benchmark_module_runs(model_path: str, tmp_path: Path) -> None:
    """`locks-sglang run` takes SGLang's one-batch benchmark through prefill and sparse decode."""
    command = [str(Path(sys.executable).with_name("locks-sglang")), "run", "sglang.benchmark.one_batch"]
    command += [
        "--model-path",
        model_path,
        *COMMON,
        "--locks-budget-tokens",
        "256",
        "--result-filename",
        str(tmp_path / "results"),
    ]
    command += ["--batch-size", "1", "--input-len", "600", "--output-len", "4"]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=600)
    said = run.stdout + run.stderr
    assert run.returncode == 0, said[-3000:]
    assert "locks config" in said
    assert "Decode.  median latency" in said
