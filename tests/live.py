"""What running servers are asked over HTTP, in sizes that the caller gives, and how the answers of two of them are compared."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from locks_sglang.benchmarks.serve import client_environment

TOP = 5
"""Candidates whose logits are compared at each position."""
REQUEST_S = 300.0
"""Most seconds that one request may take."""

SERVE = (sys.executable, "-m", "sglang.launch_server", "--device", "cpu", "--dtype", "float32", "--attention-backend", "locks")
"""Command of a server with `locks` on a CPU; the model and further flags follow."""

Candidates = list[tuple[float, int]]
"""The best next tokens, best first: (log-probability, token). Differences are those of the logits."""


@dataclass(frozen=True)
class Answer:
    """One answer of `/generate`.

    Attributes:
        tokens, text: what was generated. candidates: of every position, where they were asked for.
        prompt_tokens, cached_tokens: of the prompt, and of it found in the radix cache.
        retractions: times that SGLang took the request's pages away.
    """

    tokens: list[int]
    text: str
    candidates: list[Candidates]
    prompt_tokens: int
    cached_tokens: int
    retractions: int


def _post(url: str, body: Mapping[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
        return json.load(answer)


def server_info(url: str) -> dict[str, Any]:
    """SGLang's arguments and state."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=REQUEST_S) as answer:
        return dict(json.load(answer))


def counters(url: str) -> dict[str, Any]:
    """What `locks` counted; empty for another backend."""
    state = server_info(url)["internal_states"][0]
    return dict(state["locks"]["counters"]) if "locks" in state else {}


def audited_at_idle(url: str, more_than: int, timeout_s: float = 120.0) -> dict[str, Any]:
    """The counters of a server that has nothing to do, once it has audited itself at idle more often than this.

    Raises:
        TimeoutError: it has not in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = counters(url)
        if found["idle_audits"] > more_than:
            return found
        time.sleep(0.2)
    raise TimeoutError("the idle server did not audit itself")


Series = dict[str, list[tuple[dict[str, str], float]]]
"""What `/metrics` tells: labels and value of every series, by metric."""


def scraped(url: str) -> Series:
    """One scrape."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=REQUEST_S) as answer:
        text = answer.read().decode()
    found: Series = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name].append((sample.labels, sample.value))
    return dict(found)


def scraped_at(url: str, metric: str, value: float, timeout_s: float = 20.0) -> Series:
    """A scrape of an idle server that has told this value of a metric without labels of its own: then it has told all.

    Raises:
        TimeoutError: it has not told it in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if [told for _, told in scraped(url).get(metric, ())] == [value]:
            return scraped(url)
        time.sleep(0.05)
    raise TimeoutError(f"{metric} is {scraped(url).get(metric)}, not {value}")


def generate(url: str, prompt: Sequence[int], new_tokens: int, *, candidates: bool = True, to_end: bool = False) -> Answer:
    """Answer one prompt (token ids) greedily.

    Args:
        candidates: ask for them, which also keeps the request out of mixed batches.
        to_end: let the model end its answer; otherwise it always has `new_tokens` tokens.
    """
    body: dict[str, Any] = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": not to_end},
    }
    if candidates:
        body |= {"return_logprob": True, "top_logprobs_num": TOP}
    answer = _post(f"{url}/generate", body)
    meta = answer["meta_info"]
    return Answer(
        answer["output_ids"],
        answer["text"],
        [_candidates(entry) for entry in meta.get("output_top_logprobs", ())],
        meta["prompt_tokens"],
        meta["cached_tokens"],
        meta.get("num_retractions", 0),
    )


def _candidates(entry: Sequence[Sequence[Any]]) -> Candidates:
    return [(logprob, token) for logprob, token, _ in entry]


def along(url: str, prompt: Sequence[int], tokens: Sequence[int]) -> list[Candidates]:
    """The server's candidates at every position of an answer that is given: computed by prefill, not step by step."""
    body = {
        "input_ids": [*prompt, *tokens],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": TOP,
        "logprob_start_len": len(prompt) - 1,
    }
    # SGLang predicts nothing for the first position asked for, whose entry is None.
    _, *entries = _post(f"{url}/generate", body)["meta_info"]["input_top_logprobs"]
    assert len(entries) == len(tokens)
    return [_candidates(entry) for entry in entries]


def together(url: str, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Answer]:
    """All prompts at the same time, each by a client of its own, without candidates."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: generate(url, prompt, new_tokens, candidates=False), prompts))


# --- comparison -------------------------------------------------------------------------------------------------------


def gap(candidates: Candidates, token: int) -> float:
    """How far a token's logit is below the best one's; infinite where it is not among the candidates."""
    return next((candidates[0][0] - logprob for logprob, other in candidates if other == token), float("inf"))


def rounding(decoded: Sequence[Sequence[Candidates]], prefilled: Sequence[Sequence[Candidates]]) -> list[float]:
    """What rounding does to one backend: changes of the distance of its two best logits between two ways to compute them.

    Args:
        decoded: candidates of every position of every answer, step by step. prefilled: of the same positions, at once.

    Returns:
        One number a position, in ascending order.
    """
    changes = []
    for steps, whole in zip(decoded, prefilled, strict=True):
        for first, second in zip(steps, whole, strict=True):
            of = {token: logprob for logprob, token in second}
            (best, a), (next_best, b) = first[:2]
            if a in of and b in of:
                changes.append(abs((best - next_best) - (of[a] - of[b])))
    return sorted(changes)


@dataclass(frozen=True)
class Difference:
    """Where two answers part: the position, both tokens, and how far dense's logit of the other token is below its best."""

    at: int
    dense: int
    locks: int
    gap: float


def difference(locks: Sequence[int], dense: Sequence[int], candidates: Sequence[Candidates]) -> Difference | None:
    """The first position at which two answers differ, as far as both go; `candidates` are dense's along its own answer."""
    for at, (ours, theirs) in enumerate(zip(locks, dense, strict=False)):
        if ours != theirs:
            return Difference(at, theirs, ours, gap(candidates[at], ours))
    return None


# --- facts in a long text ---------------------------------------------------------------------------------------------

CODES = {
    "Lisbon": "7431",
    "Oslo": "2986",
    "Nairobi": "5167",
    "Quito": "8053",
    "Hanoi": "3729",
    "Tallinn": "9614",
    "Lima": "4285",
    "Cairo": "6370",
    "Dublin": "1548",
    "Riga": "8902",
}


@dataclass(frozen=True)
class Form:
    """How facts are told and asked for. {city} and {code} stand for themselves.

    Attributes:
        fact, question: as the user writes them. begun: words with which the model's answer begins.
        alone: each fact in a text of its own, so that there is no other to take it for.
    """

    name: str
    fact: str
    question: str
    begun: str
    alone: bool = False


_FACT = "The pass code of the {city} office is {code}."
_QUESTION = "What is the pass code of the {city} office?"
_BEGUN = "The pass code of the {city} office is"
FORMS = (
    Form("asked", _FACT, f"{_QUESTION} Answer with the code alone.", ""),
    Form("begun", _FACT, _QUESTION, _BEGUN),
    Form("told twice", f"{_FACT} Remember: the pass code of the {{city}} office is {{code}}.", _QUESTION, _BEGUN),
    Form("alone", _FACT, _QUESTION, _BEGUN, alone=True),
)
"""From hard to easy."""
INTRODUCTIONS = {
    False: "The text below tells the pass codes of ten offices. Remember them, and answer the question that follows it.",
    True: "The text below tells the pass code of an office. Remember it, and answer the question that follows it.",
}
"""By `Form.alone`."""


@dataclass(frozen=True)
class Planted:
    """A text of so many tokens with a fact for every city, and the share of its tokens that stand before each."""

    text: str
    tokens: int
    depths: dict[str, float]


def plant(text: str, length: int, form: Form, tokenizer: Any) -> list[Planted]:
    """Put a fact for every city of `CODES` into a text, at depths of 5 % to 95 % in equal steps.

    Args:
        text: real text, longer than `length` tokens; paragraphs that hold a code or a city are left out.
        length: tokens of a result, a few more or less.

    Returns:
        The text with all facts, or where the form wants them alone a text for every one.
    """
    cities = list(CODES)
    groups = [[city] for city in cities] if form.alone else [cities]
    return [_plant(text, length, form, tokenizer, group) for group in groups]


def _plant(text: str, length: int, form: Form, tokenizer: Any, cities: list[str]) -> Planted:
    """`plant` of some cities' facts, at the depths that they have among all."""

    def count(part: str) -> int:
        return len(tokenizer(part)["input_ids"])

    facts = {city: form.fact.format(city=city, code=CODES[city]) for city in cities}
    room = length - sum(count(f"\n\n{fact}") for fact in facts.values())
    blocks = [block for block in text.split("\n\n") if not any(word in block for pair in CODES.items() for word in pair)]
    ends, total = [], 0  # tokens before the end of each block, the blank line after it included
    for block in blocks:
        total += count(f"{block}\n\n")
        ends.append(total)
        if total >= room:
            break
    assert total >= room, f"the text has {total} tokens, not {room}"
    parts = blocks[: len(ends)]
    for city, fact in reversed(facts.items()):
        depth = (0.05 + 0.9 * list(CODES).index(city) / (len(CODES) - 1)) * total
        parts.insert(min(range(len(ends)), key=lambda block: abs(ends[block] - depth)) + 1, fact)
    whole = "\n\n".join(parts)
    tokens = count(whole)
    return Planted(whole, tokens, {city: count(whole[: whole.index(fact)]) / tokens for city, fact in facts.items()})


def fact_prompt(planted: Planted, form: Form, city: str, tokenizer: Any) -> list[int]:
    """Token ids of the question for one city behind the whole text, in the model's chat format."""
    content = f"{INTRODUCTIONS[form.alone]}\n\n{planted.text}\n\n{form.question.format(city=city)}"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    return list(tokenizer(chat + form.begun.format(city=city), add_special_tokens=False)["input_ids"])


def first_number(text: str) -> str | None:
    """The first run of digits of an answer, which is what it is judged by."""
    found = re.search(r"\d+", text)
    return found[0] if found else None


# --- SGLang's benchmark -----------------------------------------------------------------------------------------------


def benchmark(
    url: str, model: str, folder: Path, environment: Mapping[str, str], *, requests: int, input_tokens: int, output_tokens: int
) -> dict[str, Any]:
    """`sglang.benchmark.serving` against a server: random tokens, lengths up to the given ones, all requests at once.

    Returns:
        What it reports.
    """
    variables = client_environment(folder, environment)
    out = folder / "benchmark.jsonl"
    options = {
        "backend": "sglang",
        "base-url": url,
        "model": model,
        "tokenizer": model,
        "dataset-name": "random-ids",
        "num-prompts": requests,
        "random-input-len": input_tokens,
        "random-output-len": output_tokens,
        "random-range-ratio": 0.02,
        "output-file": out,
    }
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--tokenize-prompt", "--disable-tqdm"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    run = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=REQUEST_S)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    (line,) = out.read_text().splitlines()
    return dict(json.loads(line))
