"""A soak of the real server on a CPU: conversations over shared documents, clients that hang up, pages taken from requests.

Afterwards every summary fits, no page has leaked, and answers are those that their prompts get alone. Which answers: sparse
decode stores other keys for its own tokens than a prefill of them does, so those of a first turn whose pages were not taken.
"""

import json
import os
import pydoc_data.topics
import random
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import live
import pytest
from transformers import AutoTokenizer

from locks_sglang.audit import main as audit
from locks_sglang.serving import serving

pytestmark = [pytest.mark.server, pytest.mark.one_version]

SOAK_S = float(os.environ.get("TEST_SOAK_S", "200"))
CLIENTS = 4
TURNS = 3
DOCUMENT_TOKENS = 700
HANGS_UP = 0.25
"""Share of requests whose client does not wait for the answer."""
ALONE = 40
"""Answers that are asked for again."""
TIE = 1e-3
"""Two logits of float32 nearer than that may change places with the other requests of a batch."""


@dataclass(frozen=True)
class Asked:
    """A request that was answered: its place in a conversation, and prompt and answer as token ids."""

    turn: int
    prompt: list[int]
    answer: live.Answer


class Clients:
    """All clients; what they ask follows from a seed and from the answers."""

    def __init__(self, url: str, text: list[int]) -> None:
        self.url, self.text = url, text
        self.answered: list[Asked] = []
        self.hung_up = 0
        self._lock = threading.Lock()

    def run(self, until: float) -> None:
        """All of them, until then."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(self._talk, seed, until) for seed in range(CLIENTS)]:
                done.result()

    def _talk(self, seed: int, until: float) -> None:
        dice = random.Random(seed)
        while time.monotonic() < until:
            document = dice.randrange(3) * DOCUMENT_TOKENS
            history = self.text[document : document + DOCUMENT_TOKENS]
            for turn in range(TURNS):
                at = dice.randrange(3 * DOCUMENT_TOKENS, len(self.text) - 100)
                prompt = [*history, *self.text[at : at + dice.randint(5, 60)]]
                new_tokens = dice.randint(4, 16)
                if dice.random() < HANGS_UP:
                    self._hang_up(prompt, dice.uniform(0.0, 3.0))
                    break
                answer = live.generate(self.url, prompt, new_tokens, candidates=False)
                with self._lock:
                    self.answered.append(Asked(turn, prompt, answer))
                history = [*prompt, *answer.tokens]
                if time.monotonic() > until:
                    break

    def _hang_up(self, prompt: list[int], patience: float) -> None:
        body = {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True},
        }
        request = urllib.request.Request(
            f"{self.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        begun = time.monotonic()
        with urllib.request.urlopen(request, timeout=live.REQUEST_S) as answer:
            while time.monotonic() - begun < patience and answer.readline():
                pass
        with self._lock:
            self.hung_up += 1


def test_nothing_is_lost(model_path: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))[:40_000]
    tokens = list(AutoTokenizer.from_pretrained(model_path)(text)["input_ids"])
    command = [*live.SERVE, "--model-path", model_path, "--locks-budget-tokens", "256", "--max-total-tokens", "5120"]
    command += ["--chunked-prefill-size", "256"]
    # SGLang ends itself where pages have leaked once it is idle.
    environment = {**os.environ, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"}
    log = tmp_path / "server.log"
    with serving(command, log, environment, lambda phase: None) as url:
        clients = Clients(url, tokens)
        before = live.counters(url)["idle_audits"]
        clients.run(time.monotonic() + SOAK_S)
        counted = live.audited_at_idle(url, before)
        assert counted["summaries_mismatched"] == counted["invalid_pages"] == 0
        assert audit([url, "--json"]) == 0
        (told,) = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
        assert told["looked_at"] == told["pages"] > 0
        assert told["mismatched"] == told["unsummarised"] == 0
        differ = []
        same = [asked for asked in clients.answered if asked.turn == 0 and asked.answer.retractions == 0]
        again = random.Random(0).sample(same, min(ALONE, len(same)))
        for asked in again:
            alone = live.generate(url, asked.prompt, len(asked.answer.tokens))
            found = live.difference(asked.answer.tokens, alone.tokens, alone.candidates)
            if found is not None and found.gap > TIE:
                differ.append(found)
        assert not differ, f"{len(differ)} of {len(again)} answers differ from those given alone: {differ[:3]}"
        assert live.counters(url)["summaries_mismatched"] == 0
    retracted = sum(asked.answer.retractions for asked in clients.answered)
    print(f"{len(clients.answered)} answers, {len(again)} repeated, {clients.hung_up} hung up, {retracted} retractions")
    assert len(clients.answered) >= SOAK_S / 10
    assert len(again) >= SOAK_S / 20
    assert clients.hung_up > 0
    assert retracted > 0
    assert counted["sparse_rows"] > 0
    assert "memory leak" not in log.read_text()
