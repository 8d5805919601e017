"""The real server with both real models on one GPU, run by hand there (`pytest -m gpu tests/test_gpu_server.py -s`).

For each model a dense server and one with locks run, all four at the same time, and are asked the same; no test here waits for
a second start. So no time that a server tells means anything. TEST_SERVER_RESULTS names a file to which every finding is
added as a line of JSON.
"""

import dataclasses
import json
import os
import pydoc_data.topics
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import live
import pytest
import torch
from pool_probe import PoolProbe

from locks_sglang.serving import serving

pytestmark = pytest.mark.gpu

PAGE = 16
START_S = 420.0
"""Most seconds for a start, in which kernels are compiled."""
CHUNK = 2048
TIE = 0.125, 1.0
"""What counts as a tie at least and at most, in logits: one unit of bf16, in which SGLang computes logits here, at logits of 16
to 32; and a difference that no rounding explains. Between them it is what rounding does to dense itself."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the servers of one model get and are asked.

    Attributes:
        budget_tokens: of locks. pool_tokens: of the KV cache.
        twin, twin_tokens: prompts answered one by one, all within the budget, and the longest of them.
        crowd, crowd_tokens: prompts answered together, and the longest of them.
        new_tokens: of an answer. turn_tokens: of the first of two turns.
        fact_tokens: of the text with facts in it; 0 for none.
        bench, bench_tokens: requests of SGLang's benchmark, and the longest of them.
    """

    budget_tokens: int
    pool_tokens: int
    twin: int
    twin_tokens: int
    crowd: int
    crowd_tokens: int
    new_tokens: int
    turn_tokens: int
    fact_tokens: int
    bench: int
    bench_tokens: int


SIZES = {
    "smollm2": Sizes(8192, 131_072, 24, 8100, 32, 8000, 48, 4000, 0, 32, 6000),
    "qwen-coder": Sizes(2048, 196_608, 24, 2000, 32, 16_000, 48, 6000, 28_000, 32, 8000),
}
BACKENDS = ("dense", "locks")
FACT_ANSWER_TOKENS = 24
LEAST_FOUND = 8
"""Facts that dense must find for a form of them to say something."""


def lengths(count: int, longest: int) -> list[int]:
    """Lengths from 17 on, in equal ratios, the longest last."""
    return [round(17 * (longest / 17) ** (i / (count - 1))) for i in range(count)]


SOURCES = ("heapq.py", "textwrap.py", "shlex.py", "csv.py", "queue.py", "calendar.py", "argparse.py", "inspect.py", "typing.py")


def real_text() -> str:
    """Python's reference and some of its library's sources, in turns."""
    topics = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [(library / name).read_text(encoding="utf-8") for name in SOURCES]
    step = -(-len(topics) // len(sources))
    parts = [part for i, source in enumerate(sources) for part in (*topics[i * step : (i + 1) * step], source)]
    return "\n\n".join(parts)


class Findings:
    """Prints findings, and adds them to the file that TEST_SERVER_RESULTS names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file = os.environ.get("TEST_SERVER_RESULTS")

    def add(self, what: str, **facts: Any) -> None:
        line = json.dumps({"what": what, **facts})
        with self._lock:
            print(line, flush=True)
            if self._file:
                with open(self._file, "a") as out:
                    out.write(line + "\n")


@dataclasses.dataclass
class Run:
    """What came of one server: results by name, or the traceback in place of one."""

    results: dict[str, Any] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    def get(self, name: str) -> Any:
        """A result; fails with the traceback of what kept it from being."""
        failure = self.failures.get("start") or self.failures.get(name)
        if failure:
            pytest.fail(failure, pytrace=False)
        return self.results[name]


class Exercise:
    """Asks one server everything, in an order in which what needs it to be idle comes first."""

    def __init__(self, url: str, model: str, sizes: Sizes, dense: bool, folder: Path, environment: dict[str, str]) -> None:
        from transformers import AutoTokenizer

        self.url, self.model, self.sizes, self.dense = url, model, sizes, dense
        self.folder, self.environment = folder, environment
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.text = real_text()
        self.tokens: list[int] = self.tokenizer(self.text, add_special_tokens=False)["input_ids"]

    def prompt(self, start: int, length: int) -> list[int]:
        """Real text from a place of its own, so that no prompt begins like another."""
        found = self.tokens[start : start + length]
        assert len(found) == length, f"{len(self.tokens)} tokens of text are too few"
        return found

    def twin(self) -> dict[str, Any]:
        """Prompts one by one; on dense each answer is computed a second time, by prefill."""
        wanted = lengths(self.sizes.twin, self.sizes.twin_tokens)
        prompts = [self.prompt(997 * i, length) for i, length in enumerate(wanted)]
        answers = [live.generate(self.url, prompt, self.sizes.new_tokens) for prompt in prompts]
        return {"lengths": wanted, "answers": answers, "along": self._along(prompts, answers)}

    def crowd(self) -> dict[str, Any]:
        """Prompts of very different lengths at the same time: chunks, and decode rows in prefill batches."""
        wanted = lengths(self.sizes.crowd, self.sizes.crowd_tokens)
        prompts = [self.prompt(1201 * i + 53, length) for i, length in enumerate(wanted)]
        before = live.counters(self.url)
        answers = live.together(self.url, prompts, self.sizes.new_tokens)
        after = live.counters(self.url)
        return {
            "lengths": wanted,
            "answers": answers,
            "along": self._along(prompts, answers),
            "before": before,
            "after": after,
        }

    def _along(self, prompts: list[list[int]], answers: list[live.Answer]) -> list[list[live.Candidates]]:
        if not self.dense:
            return []
        return [live.along(self.url, prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]

    def turns(self) -> list[dict[str, Any]]:
        """A second turn whose prompt is the first one, its answer and a question."""
        history, found = self.prompt(40_007, self.sizes.turn_tokens), []
        for _ in range(2):
            before = live.counters(self.url)
            answer = live.generate(self.url, history, self.sizes.new_tokens)
            found.append({"answer": answer, "before": before, "after": live.counters(self.url)})
            history = [*history, *answer.tokens, *self.prompt(40_007 + self.sizes.turn_tokens, 60)]
        return found

    def facts(self) -> dict[str, dict[str, Any]]:
        """Every fact of every form in a request of its own, behind the same text but where it is to be alone."""
        found = {}
        for form in live.FORMS:
            texts = live.plant(self.text, self.sizes.fact_tokens, form, self.tokenizer)
            before = live.counters(self.url)
            answers = {
                city: live.generate(
                    self.url, live.fact_prompt(planted, form, city, self.tokenizer), FACT_ANSWER_TOKENS, to_end=True
                )
                for planted in texts
                for city in planted.depths
            }
            found[form.name] = {
                "depths": {city: depth for planted in texts for city, depth in planted.depths.items()},
                "alone": form.alone,
                "answers": answers,
                "before": before,
                "after": live.counters(self.url),
            }
        return found

    def benchmark(self) -> dict[str, Any]:
        """SGLang's own benchmark of a server, for locks."""
        return live.benchmark(
            self.url,
            self.model,
            self.folder,
            self.environment,
            requests=self.sizes.bench,
            input_tokens=self.sizes.bench_tokens,
            output_tokens=64,
        )

    def info(self) -> dict[str, Any]:
        """SGLang's state once all is done."""
        return live.server_info(self.url)

    def everything(self) -> Run:
        """All of it; what fails leaves the rest to go on."""
        steps: list[Callable[[], Any]] = [self.twin, self.turns, self.crowd]
        steps += [self.facts] if self.sizes.fact_tokens else []
        steps += [] if self.dense else [self.benchmark]
        run = Run()
        for step in (*steps, self.info):
            began = time.monotonic()
            try:
                run.results[step.__name__] = step()
            except Exception:
                run.failures[step.__name__] = traceback.format_exc()
            took = time.monotonic() - began
            print(f"{Path(self.model).name} {'dense' if self.dense else 'locks'}: {step.__name__} {took:.1f} s", flush=True)
        return run


def command(model: str, sizes: Sizes, backend: str) -> list[str]:
    """A server that leaves room for three others: its KV cache is sized by tokens."""
    words = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        model,
        "--dtype",
        "bfloat16",
        "--page-size",
        str(PAGE),
    ]
    words += ["--max-total-tokens", str(sizes.pool_tokens), "--mem-fraction-static", "0.5"]
    words += ["--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk"]
    words += ["--cuda-graph-max-bs-decode", "32", "--cuda-graph-backend-prefill", "disabled"]
    if backend == "dense":
        return [*words, "--attention-backend", "triton"]
    words += ["--attention-backend", "locks", "--locks-dense-backend", "triton"]
    return [*words, "--locks-budget-tokens", str(sizes.budget_tokens)]


def serve_and_ask(words: list[str], model: str, sizes: Sizes, backend: str, folder: Path, environment: dict[str, str]) -> Run:
    """Start one server, ask it everything, stop it; never raises."""
    began, log, told = time.monotonic(), folder / "server.log", f"{Path(model).name} {backend}"
    folder.mkdir()

    def in_time(phase: str) -> None:
        if time.monotonic() - began > START_S:
            raise TimeoutError(f"no answer after {START_S:.0f} s, still {phase}")

    try:
        with serving(words, log, environment, in_time) as url:
            print(f"{told}: up after {time.monotonic() - began:.1f} s", flush=True)
            run = Exercise(url, model, sizes, backend == "dense", folder, environment).everything()
    except Exception:
        run = Run(failures={"start": traceback.format_exc()})
    text = log.read_text(errors="replace") if log.exists() else ""
    run.results["log"] = text
    for name, failure in run.failures.items():
        print(f"{told}: {name} failed\n{failure}", flush=True)
    if run.failures:
        print(f"{told}: the end of its log\n{text[-6000:]}", flush=True)
    return run


@pytest.fixture(scope="module")
def findings() -> Findings:
    made = Findings()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {name: version(name) for name in ("sglang", "torch", "triton", "locks-sglang")}
    made.add("machine", gpu=gpu, **versions, sizes={name: dataclasses.asdict(sizes) for name, sizes in SIZES.items()})
    return made


@pytest.fixture(scope="module")
def models(model_path: str) -> dict[str, str]:
    """Folder of each model: TEST_MODEL_PATH and TEST_QWEN_PATH, or fetched."""
    given = os.environ.get("TEST_QWEN_PATH")
    if not given:
        from locks_sglang.models import fetch

        given = str(fetch("qwen-coder", Path(__file__).resolve().parent.parent / "build" / "models"))
    return {"smollm2": model_path, "qwen-coder": given}


@pytest.fixture(scope="module")
def pools(models: dict[str, str]) -> Iterator[dict[tuple[str, str], PoolProbe]]:
    """SGLang as far as its KV pool, one process a server; they load at the same time and take the device in turns."""
    common = {"device": "cuda", "dtype": "bfloat16", "page_size": PAGE, "mem_fraction_static": 0.85}
    locks = {"LOCKS_BUDGET_TOKENS": "2048", "LOCKS_DENSE_BACKEND": "triton"}
    made = {
        (name, backend): PoolProbe(
            folder,
            locks if backend == "locks" else {},
            attention_backend=backend if backend == "locks" else "triton",
            **common,
        )
        for name, folder in models.items()
        for backend in BACKENDS
    }
    yield made
    for probe in made.values():
        probe.close()


@pytest.fixture(scope="module")
def runs(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Run]:
    """All servers at once, each asked everything."""
    import transformers  # here, not by several threads at once

    print(f"transformers {transformers.__version__}", flush=True)
    folder = tmp_path_factory.mktemp("servers")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with ThreadPoolExecutor(len(models) * len(BACKENDS)) as pool:
        started = {
            (name, backend): pool.submit(
                serve_and_ask,
                command(path, SIZES[name], backend),
                path,
                SIZES[name],
                backend,
                folder / f"{name}-{backend}",
                environment,
            )
            for name, path in models.items()
            for backend in BACKENDS
        }
        return {key: future.result() for key, future in started.items()}


@pytest.mark.parametrize("name", SIZES)
def test_pool_counts_summaries(
    name: str, models: dict[str, str], pools: dict[tuple[str, str], PoolProbe], findings: Findings
) -> None:
    """From the memory that is free, locks makes 1 / (1 + summary share) of dense's tokens, within 1 %."""
    dense, locks = (pools[name, backend].tokens() for backend in BACKENDS)
    share = summary_share(models[name])
    expected = dense / (1 + share)
    findings.add(
        "pool", model=name, dense=dense, locks=locks, summary_share=round(share, 5), off=round(locks / expected - 1, 5)
    )
    assert abs(locks / expected - 1) < 0.01


def summary_share(model: str) -> float:
    """Bytes of a page's summary over those of its bf16 keys and values, both of one KV head (rank 8, value mean)."""
    from transformers import AutoConfig

    from locks_sglang.kernels.build_page_summaries import RecordLayout

    config = AutoConfig.from_pretrained(model)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return RecordLayout(dim, dim, 8, True).summary_bytes / (2 * 2 * PAGE * dim)


def tie(dense: dict[str, Any]) -> tuple[float, list[float]]:
    """How near two logits of dense must be to change places by rounding, and what that is taken from (see `TIE`)."""
    changes = live.rounding([answer.candidates for answer in dense["answers"]], dense["along"])
    least, most = TIE
    return min(max(changes[-1], least), most), changes


def share_of(sorted_numbers: list[float], share: float) -> float | None:
    """A quantile of sorted numbers, None of none."""
    if not sorted_numbers:
        return None
    return round(sorted_numbers[min(int(share * len(sorted_numbers)), len(sorted_numbers) - 1)], 4)


@pytest.mark.parametrize("name", SIZES)
def test_budget_above_length_equals_dense(name: str, runs: dict[tuple[str, str], Run], findings: Findings) -> None:
    """One by one: every answer is dense's, or leaves it first where dense's own logits are within rounding of a tie."""
    dense, locks = (runs[name, backend].get("twin") for backend in BACKENDS)
    limit, changes = tie(dense)
    apart = [
        live.difference(ours.tokens, theirs.tokens, theirs.candidates)
        for ours, theirs in zip(locks["answers"], dense["answers"], strict=True)
    ]
    # How far dense's two best logits are from each other along the part that both answers have in common, in both backends.
    same = [len(a.tokens) if d is None else d.at for a, d in zip(dense["answers"], apart, strict=True)]
    between = live.rounding(
        [answer.candidates[:n] for answer, n in zip(dense["answers"], same, strict=True)],
        [answer.candidates[:n] for answer, n in zip(locks["answers"], same, strict=True)],
    )
    for length, there in zip(dense["lengths"], apart, strict=True):
        findings.add("twin prompt", model=name, tokens=length, difference=there and dataclasses.asdict(there))
    findings.add(
        "twin",
        model=name,
        prompts=len(apart),
        equal=sum(there is None for there in apart),
        largest_gap=max((there.gap for there in apart if there), default=None),
        tie=round(limit, 4),
        dense_against_itself={str(share): share_of(changes, share) for share in (0.5, 0.99, 1.0)},
        dense_against_locks={str(share): share_of(between, share) for share in (0.5, 0.99, 1.0)},
    )
    sizes = SIZES[name]
    assert len(apart) >= 20
    assert max(dense["lengths"]) + sizes.new_tokens <= sizes.budget_tokens
    assert [there for there in apart if there and there.gap > limit] == []


@pytest.mark.parametrize("name", SIZES)
def test_crowd_of_mixed_lengths(name: str, runs: dict[tuple[str, str], Run], findings: Findings) -> None:
    """32 requests at once, chunked and mixed: all complete, summaries valid; those within the budget are dense's, as above.

    Of the others, too, the first token is: it comes from prefill.
    """
    dense, locks = (runs[name, backend].get("crowd") for backend in BACKENDS)
    sizes, (limit, _) = SIZES[name], tie(runs[name, "dense"].get("twin"))
    apart = [
        live.difference(ours.tokens, theirs.tokens, along)
        for ours, theirs, along in zip(locks["answers"], dense["answers"], dense["along"], strict=True)
    ]
    fits = [length + sizes.new_tokens <= sizes.budget_tokens for length in locks["lengths"]]
    for length, inside, there in zip(locks["lengths"], fits, apart, strict=True):
        findings.add("crowd prompt", model=name, tokens=length, fits=inside, difference=there and dataclasses.asdict(there))
    grown = Counter(locks["after"]["dense_rows"]) - Counter(locks["before"]["dense_rows"])
    findings.add(
        "crowd",
        model=name,
        requests=len(apart),
        within_budget=sum(fits),
        equal_within=sum(inside and there is None for inside, there in zip(fits, apart, strict=True)),
        equal_beyond=sum(not inside and there is None for inside, there in zip(fits, apart, strict=True)),
        largest_gap=max((there.gap for there, inside in zip(apart, fits, strict=True) if there and inside), default=None),
        tie=round(limit, 4),
        mixed_rows=grown["mixed"],
        **pages(locks),
    )
    assert all(len(answer.tokens) == sizes.new_tokens for answer in locks["answers"])
    assert sum(length > CHUNK for length in locks["lengths"]) >= 3
    assert grown["mixed"] > 0
    assert locks["after"]["invalid_pages"] == 0
    judged = [there for there, inside in zip(apart, fits, strict=True) if there and (inside or there.at == 0)]
    assert [there for there in judged if there.gap > limit] == []


def pages(counted: dict[str, Any]) -> dict[str, int]:
    """Pages held and read, and sparse decode rows, between two snapshots of the counters."""
    names = ("sparse_rows", "pages_held", "pages_read")
    return {name: counted["after"][name] - counted["before"][name] for name in names}


@pytest.mark.parametrize("name", SIZES)
def test_second_turn_hits_the_cache(name: str, runs: dict[tuple[str, str], Run], findings: Findings) -> None:
    """The second turn finds all whole pages of the first, on both backends, and builds exactly the summaries of the rest."""
    dense, locks = (runs[name, backend].get("turns") for backend in BACKENDS)
    for number, (ours, theirs) in enumerate(zip(locks, dense, strict=True), 1):
        answer = ours["answer"]
        before, after = ours["before"], ours["after"]
        steps = after["decode_steps"] - before["decode_steps"]
        built = {layer: count - before["summaries_built"].get(layer, 0) for layer, count in after["summaries_built"].items()}
        reused = after["summaries_reused"] - before["summaries_reused"]
        findings.add(
            "turn",
            model=name,
            number=number,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            dense_cached_tokens=theirs["answer"].cached_tokens,
            summaries_built_a_layer=sorted(set(built.values())),
            summaries_reused=reused,
            tokens_equal_dense=answer.tokens == theirs["answer"].tokens,
        )
        assert reused == answer.cached_tokens // PAGE
        # Every decode step stores one token, the surplus one of overlap scheduling too.
        new_pages = (answer.prompt_tokens + steps) // PAGE - answer.cached_tokens // PAGE
        assert set(built.values()) == {new_pages}
        assert after["invalid_pages"] == 0
    first, second = (turn["answer"] for turn in locks)
    assert first.cached_tokens == 0
    # The last token of an answer is not stored, unless by the surplus step.
    stored = first.prompt_tokens + len(first.tokens)
    assert (stored - 1) // PAGE * PAGE <= second.cached_tokens <= stored // PAGE * PAGE


def test_facts_are_found_wherever_dense_finds_them(runs: dict[tuple[str, str], Run], findings: Findings) -> None:
    """Ten facts in 28,000 tokens at a budget of 2,048: of the first form of which dense finds eight, locks finds as many."""
    name = "qwen-coder"
    dense, locks = (runs[name, backend].get("facts") for backend in BACKENDS)
    found: dict[str, dict[str, list[str]]] = {}
    for form in dense:
        found[form] = {"dense": [], "locks": []}
        for city, code in live.CODES.items():
            theirs, ours = dense[form]["answers"][city], locks[form]["answers"][city]
            for backend, answer in (("dense", theirs), ("locks", ours)):
                if live.first_number(answer.text) == code:
                    found[form][backend].append(city)
            there = live.difference(ours.tokens, theirs.tokens, theirs.candidates)
            findings.add(
                "fact",
                model=name,
                form=form,
                city=city,
                code=code,
                depth=round(locks[form]["depths"][city], 4),
                prompt_tokens=ours.prompt_tokens,
                cached_tokens=ours.cached_tokens,
                dense=theirs.text,
                locks=ours.text,
                difference=there and dataclasses.asdict(there),
            )
        findings.add(
            "facts",
            model=name,
            form=form,
            budget_tokens=SIZES[name].budget_tokens,
            dense=len(found[form]["dense"]),
            locks=len(found[form]["locks"]),
            missed_by_locks_alone=sorted(set(found[form]["dense"]) - set(found[form]["locks"])),
            **pages(locks[form]),
        )
    telling = next((form for form in found if len(found[form]["dense"]) >= LEAST_FOUND), None)
    assert telling is not None, {form: len(by["dense"]) for form, by in found.items()}
    assert set(found[telling]["dense"]) <= set(found[telling]["locks"])
    counted, asked = pages(locks[telling]), list(locks[telling]["answers"].values())
    assert counted["pages_read"] < 0.1 * counted["pages_held"]
    # Behind the same text, or each behind one that differs from its fact on, the first at 5 % of it.
    assert all(answer.cached_tokens > (0.0 if locks[telling]["alone"] else 0.9) * answer.prompt_tokens for answer in asked[1:])
    assert locks[telling]["after"]["invalid_pages"] == 0


@pytest.mark.parametrize("name", SIZES)
def test_benchmark_serving_completes(name: str, runs: dict[tuple[str, str], Run], findings: Findings) -> None:
    """SGLang's benchmark gets all its answers from the locks server."""
    told = runs[name, "locks"].get("benchmark")
    wanted = ("completed", "total_input_tokens", "total_output_tokens", "max_concurrent_requests", "duration")
    findings.add("sglang.benchmark.serving", model=name, **{key: told[key] for key in wanted})
    assert told["completed"] == SIZES[name].bench
    assert told["total_output_tokens"] > 0


@pytest.mark.parametrize("name", SIZES)
def test_decode_ran_in_graphs(name: str, runs: dict[tuple[str, str], Run], findings: Findings) -> None:
    """Of the decode steps that SGLang logs all ran in CUDA graphs, on both backends; no summary was missing at the end."""
    for backend in BACKENDS:
        run = runs[name, backend]
        info = run.get("info")
        said = re.findall(r"Decode batch.*cuda graph: (True|False)", run.get("log"))
        findings.add(
            "server",
            model=name,
            backend=backend,
            logged_decode_steps=len(said),
            in_graphs=said.count("True"),
            memory_gb=info["internal_states"][0]["memory_usage"],
            max_total_num_tokens=info["max_total_num_tokens"],
            locks=info["internal_states"][0].get("locks"),
        )
        assert said
        assert set(said) == {"True"}
    assert runs[name, "locks"].get("info")["internal_states"][0]["locks"]["counters"]["invalid_pages"] == 0
