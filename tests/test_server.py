"""The real server, started as users start it, and `sgl.Engine`: all three entry points serve the real model with `locks`."""

import json
import os
import pydoc_data.topics
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.server

COMMON = ["--device", "cpu", "--dtype", "float32", "--attention-backend", "locks", "--max-total-tokens", "8192"]
LAUNCHERS = {
    "launch_server": [sys.executable, "-m", "sglang.launch_server", "--model-path"],
    "sglang serve": [str(Path(sys.executable).with_name("sglang")), "serve", "--model-path"],
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def serving(command: list[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[str]:
    """Start a server, wait until it answers, stop its whole process group."""
    port = free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None, f"the server ended:\n{log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"the server did not start:\n{log.read_text()[-3000:]}"
            try:
                with urllib.request.urlopen(url + "/health_generate", timeout=30):
                    break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(1)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def server_info(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/server_info", timeout=60) as answer:
        return dict(json.load(answer))


def document(characters: int) -> str:
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))[:characters]


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_launchers_serve_multi_turn_chat(launcher: str, model_path: str, tmp_path: Path) -> None:
    """Two streamed turns over one document: the second finds the first in the cache and builds no summary for it."""
    command = [*LAUNCHERS[launcher], model_path, *COMMON, "--locks-budget-tokens", "512", "--enable-cache-report"]
    log = tmp_path / "server.log"
    with serving(command, log) as url:
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
            usages.append((usage.prompt_tokens, cached, usage.completion_tokens))
            stored = usage.prompt_tokens + usage.completion_tokens - 1
            expected = stored // 16 - cached // 16
            surplus = (stored + 1) // 16 - stored // 16  # overlap scheduling runs one step more
            for layer, count in after["summaries_built"].items():
                assert count - before["summaries_built"].get(layer, 0) in (expected, expected + surplus)
            assert after["invalid_pages"] == 0
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Give an example."}]
        assert usages[1][1] == (usages[0][0] + usages[0][2] - 1) // 16 * 16 or usages[1][1] == usages[0][0] // 16 * 16
        info = server_info(url)
        assert info["internal_states"][0]["locks"]["counters"]["pages_read"] > 0
    text = log.read_text()
    assert "Failed to" not in text
    assert len(re.findall(r"locks config [0-9a-f]{12}: ", text)) == 1
    assert len(re.findall(r"--page-size is 16", text)) == 1


ENGINE = """
import json, sys
if __name__ == "__main__":
    import locks_sglang
    locks_sglang.configure(budget_tokens=512, rank=4)
    import sglang as sgl
    engine = sgl.Engine(model_path=sys.argv[1], device="cpu", dtype="float32", attention_backend="locks",
                        max_total_tokens=8192, log_level="info")
    out = engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 12})
    state = engine.get_server_info()["internal_states"][0]["locks"]
    print("RESULT " + json.dumps({"text": out["text"], "config": state["config"]}))
    engine.shutdown()
"""


def test_engine_serves(model_path: str, tmp_path: Path) -> None:
    """`sgl.Engine`, configured by `locks_sglang.configure`."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    run = subprocess.run(
        [sys.executable, str(script), model_path],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(re.search(r"RESULT (.*)", run.stdout).group(1))  # type: ignore[union-attr]
    assert "Paris" in result["text"]
    assert result["config"]["rank"] == 4
    assert result["config"]["budget_tokens"] == 512


def test_refusal_stops_the_start(model_path: str) -> None:
    """A refused flag and a bad setting stop the server with our message, before a model is loaded."""
    for extra, message in (
        (["--page-size", "24"], "a page size outside 16, 32, 64, 128, 256 is not supported"),
        (["--locks-budget-tokens", "100"], "budget_tokens = 100 is not allowed"),
    ):
        run = subprocess.run(
            [*LAUNCHERS["launch_server"], model_path, *COMMON, *extra], capture_output=True, text=True, timeout=200
        )
        assert run.returncode != 0
        assert message in run.stdout + run.stderr
        assert "Load weight begin" not in run.stdout + run.stderr
