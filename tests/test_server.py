"""The real server, started as users start it: both commands serve the real model with `locks`."""

import json
import os
import pydoc_data.topics
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import dashboard
import openai
import pytest
from live import Series, audited_at_idle, scraped_at, server_info
from registrations import assert_registered_once, watching

from locks_sglang.admin import KEY_VARIABLE
from locks_sglang.cli import main as cli
from locks_sglang.demo import ask
from locks_sglang.metrics import METRICS, PREFIX
from locks_sglang.serving import serving

pytestmark = pytest.mark.server

COMMON = ["--device", "cpu", "--dtype", "float32", "--attention-backend", "locks", "--max-total-tokens", "8192"]
ADMIN_KEY = "of the tests"
LAYERS, HEADS, DIM = 30, 3, 64  # of SmolLM2-135M
RECORD = 576  # bytes of a summary of rank 8 at this head dimension
BUDGET = 512
LOG_INTERVAL = 4
LAUNCHERS = {
    "launch_server": [sys.executable, "-m", "sglang.launch_server", "--model-path"],
    "sglang serve": [str(Path(sys.executable).with_name("sglang")), "serve", "--model-path"],
}


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
    assert cli(["audit", url]) == 2
    assert "/set_internal_state answered 401" in (said := capsys.readouterr().err)
    assert KEY_VARIABLE in said
    monkeypatch.setenv(KEY_VARIABLE, ADMIN_KEY)
    assert cli(["audit", url + "/", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["looked_at"] == told["pages"] >= stored // 16
    assert told["mismatched"] == told["unsummarised"] == 0
    assert cli(["audit", url, "--pages", "10"]) == 0
    assert f"10 of {told['pages']} pages looked at" in capsys.readouterr().out
    counters = server_info(url)["internal_states"][0]["locks"]["counters"]
    assert (counters["audits"], counters["summaries_mismatched"]) == (2, 0)


class Truth:
    """What the metrics must have grown by, counted from the lengths of prompts and answers alone."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.shares: list[float] = []

    def add_turn(self, prompt: int, cached: int, steps: int) -> None:
        """A turn of one request: tokens of its prompt, of these from the cache, and decode steps, each of one more token."""
        held = [-(-(prompt + step) // 16) for step in range(1, steps + 1)]
        read = [min(pages, BUDGET // 16) for pages in held]
        self.shares += [100 * one / pages for one, pages in zip(read, held, strict=True)]
        self.counts.update(
            decode_steps_total=steps,
            sparse_rows_total=steps,
            pages_held_total=sum(held),
            pages_read_total=sum(read),
            kv_bytes_saved_total=(sum(held) - sum(read)) * LAYERS * HEADS * 16 * 2 * DIM * 4,  # float32 keys and values
            summary_bytes_read_total=sum(pages - 1 for pages in held) * LAYERS * HEADS * RECORD,
            summaries_built_total=(prompt + steps) // 16 - cached // 16,
            summaries_reused_total=cached // 16,
        )


def check_metrics(before: Series, after: Series, truth: Truth) -> None:
    """Every series of ours: once, with SGLang's labels, and exactly what the test counted."""
    ((labels, _),) = after["sglang:gen_throughput"]
    for metric in METRICS:
        series = after[PREFIX + metric.name]
        own = [tuple(told[name] for name in metric.labels) for told, _ in series]
        assert [{name: told[name] for name in told if name not in metric.labels} for told, _ in series] == [labels] * len(own)
        if metric.name == "build_info":
            ((told, value),) = series
            assert value == 1
            expected = {"rank": "8", "budget_tokens": str(BUDGET), "basis_bits": "4", "coefficient_bits": "8"}
            assert told.items() >= expected.items()
        elif metric.name == "summary_bytes":
            assert [value for _, value in series] == [(8192 // 16 + 1) * LAYERS * HEADS * RECORD]
        else:
            assert sorted(own) == ([("mixed",), ("short",)] if metric.name == "dense_rows_total" else [()])
            first = before[PREFIX + metric.name]
            grown = [value - earlier for (_, value), (_, earlier) in zip(series, first, strict=True)]
            assert grown == [truth.counts[metric.name]] * len(grown), metric.name


def check_decode_lines(log: str, shares: Sequence[float]) -> None:
    """Every decode line ends with the share of pages read since the last; those within a turn have the share of its steps."""
    lines = re.findall(r"Decode batch.*", log)
    told = [re.search(r", locks pages read: ([\d.]+)%$", line) for line in lines]
    assert all(told), lines
    within = [match for match in told if match and min(shares) - 0.05 <= float(match[1]) <= max(shares) + 0.05]
    assert max(shares) < 50
    # A line may also cover steps of two requests, at the beginning and at the end of a turn.
    assert len(within) >= len(shares) // LOG_INTERVAL - 4, (lines, shares)


def check_report(url: str, folder: Path) -> None:
    """`locks-sglang report --server`: the page has the server's counters."""
    page = folder / "page.html"
    assert cli(["report", "--server", url, "--out", str(page)]) == 0
    counters = server_info(url)["internal_states"][0]["locks"]["counters"]
    for name in ("decode_steps", "sparse_rows", "pages_read", "pages_held"):
        assert f'data-value="{counters[name]}" data-at="server:1:counters.{name}"' in page.read_text()


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_launchers_serve_multi_turn_chat(
    launcher: str, model_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two streamed turns over one document: the second finds the first in the cache and builds no summary for it."""
    command = [*LAUNCHERS[launcher], model_path, *COMMON, "--locks-budget-tokens", str(BUDGET), "--enable-cache-report"]
    command += ["--admin-api-key", ADMIN_KEY, "--enable-metrics", "--decode-log-interval", str(LOG_INTERVAL)]
    log = tmp_path / "server.log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **watching(tmp_path)}
    with serving(command, log, environment, lambda phase: None) as url:
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", timeout=300)
        state = server_info(url)["internal_states"][0]["locks"]
        assert state["config"]["budget_tokens"] == BUDGET
        at_first = scraped_at(url, "locks:decode_steps_total", state["counters"]["decode_steps"])
        truth = Truth()
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
            steps = after["decode_steps"] - before["decode_steps"]
            assert usage.completion_tokens - 1 <= steps <= usage.completion_tokens
            truth.add_turn(usage.prompt_tokens, cached, steps)
            stored = usage.prompt_tokens + steps
            assert after["summaries_reused"] - before["summaries_reused"] == cached // 16
            for layer, count in after["summaries_built"].items():
                assert count - before["summaries_built"].get(layer, 0) == stored // 16 - cached // 16
            assert after["invalid_pages"] == 0
            # A pause after a turn has one audit at idle, whose summaries all fit.
            audited = audited_at_idle(url, before["idle_audits"])
            assert (audited["idle_audits"] - before["idle_audits"], audited["summaries_mismatched"]) == (1, 0)
            truth.counts["idle_audits_total"] += 1
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Give an example."}]
        assert usages[0][1] == 0
        assert usages[1][1] >= usages[0][0] // 16 * 16
        told = scraped_at(url, "locks:idle_audits_total", audited["idle_audits"])
        check_metrics(at_first, told, truth)
        assert dashboard.unanswered({metric: [labels for labels, _ in series] for metric, series in told.items()}) == []
        if launcher == "launch_server":
            check_what_the_judge_asks(client, messages[:1])
            check_audit(url, usages[1][0], capsys, monkeypatch)
            ((_, mismatched),) = scraped_at(url, "locks:audits_total", 2)["locks:summaries_mismatched_total"]
            assert mismatched == 0
            check_report(url, tmp_path)
        info = server_info(url)
        assert info["internal_states"][0]["locks"]["counters"]["pages_read"] > 0
    text = log.read_text()
    assert "Failed to" not in text
    assert_registered_once(tmp_path)
    assert len(re.findall(r"locks config [0-9a-f]{12}: ", text)) == 1
    assert len(re.findall(r"--page-size is 16", text)) == 1
    check_decode_lines(text, truth.shares)


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
