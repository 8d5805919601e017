"""Other ways to choose pages in a server that is being evaluated: against fp64, and switched while a real server runs."""

import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench import LAYERS, Bench
from live import SERVE, counters, generate, server_info
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from locks_sglang.config import ConfigError, LocksConfig
from locks_sglang.evaluation import SELECTORS
from locks_sglang.evaluation.served import ESTIMATES, HEAVY_HITTER, WINDOW, HeavyHitters, from_numbers, to_numbers
from locks_sglang.evaluation.switch import SwitchError, switch
from locks_sglang.ops import PAGE_SIZE
from locks_sglang.serving import serving

BUDGET = 80
"""Five pages."""


def evaluated(selector: str, **settings: Any) -> Bench:
    bench = Bench(budget_tokens=BUDGET, evaluation="on")
    assert bench.backend.evaluation is not None
    bench.backend.evaluation.switch(selector, **settings)
    return bench


def decoded(bench: Bench, rows: list[int], lengths: list[int], steps: int) -> list[tuple[list[int], list[torch.Tensor]]]:
    """Lengths and outputs of every one of some decode steps after a prefill."""
    bench.step(rows, [0] * len(rows), lengths, ForwardMode.EXTEND)
    made = []
    for _ in range(steps):
        lengths = [n + 1 for n in lengths]
        made.append((lengths, bench.step(rows, [n - 1 for n in lengths], lengths, ForwardMode.DECODE)))
    return made


def logits(bench: Bench, row: int, layer: int, length: int) -> np.ndarray:
    """fp64 [Hq, n]: the last token with every token."""
    q, k = (x[row, layer, :length].double().numpy() for x in (bench.queries, bench.keys))
    return np.einsum("hd,thd->ht", q[-1], k.repeat(bench.group, 1)) * bench.head_dim**-0.5


def attention(bench: Bench, row: int, layer: int, read: np.ndarray) -> np.ndarray:
    """fp64 [Hq, D]: attention of the last token to the tokens that each KV head reads, bool [H, n]."""
    scores = np.where(read.repeat(bench.group, 0), logits(bench, row, layer, read.shape[1]), -np.inf)
    share = np.exp(scores - scores.max(1, keepdims=True))
    values = bench.values[row, layer, : read.shape[1]].double().numpy().repeat(bench.group, 1)
    return np.einsum("ht,thd->hd", share / share.sum(1, keepdims=True), values)


def paged(tokens: np.ndarray, length: int) -> np.ndarray:
    """[..., n] of tokens as [..., complete pages, P]."""
    complete = length // PAGE_SIZE
    return tokens[..., : complete * PAGE_SIZE].reshape(*tokens.shape[:-1], complete, PAGE_SIZE)


def log_mass(bench: Bench, row: int, layer: int, length: int) -> np.ndarray:
    """Of every page, the partial one included: the oracle knows its mass too."""
    every = np.exp(logits(bench, row, layer, length))
    return np.log(np.add.reduceat(every, np.arange(0, length, PAGE_SIZE), axis=1))


def of_page_mean(bench: Bench, row: int, layer: int, length: int) -> np.ndarray:
    return paged(logits(bench, row, layer, length), length).mean(-1)


def of_bound(bench: Bench, row: int, layer: int, length: int) -> np.ndarray:
    q, k = (x[row, layer, :length].double().numpy() for x in (bench.queries, bench.keys))
    products = paged(np.einsum("hd,thd->hdt", q[-1], k.repeat(bench.group, 1)), length)
    return products.max(-1).sum(1) * bench.head_dim**-0.5


def best_pages(estimate: np.ndarray, group: int, length: int) -> np.ndarray:
    """bool [H, n]: the tokens of the first page, the newest one and the best of the others by their queries' mass."""
    newest = (length - 1) // PAGE_SIZE
    share = np.exp(estimate - estimate.max(1, keepdims=True))
    share = (share / share.sum(1, keepdims=True)).reshape(-1, group, estimate.shape[1]).sum(1)
    score = np.full((share.shape[0], newest + 1), np.inf)
    score[:, 1:newest] = share[:, 1:newest]
    read = np.zeros(score.shape, dtype=bool)
    np.put_along_axis(read, np.argsort(-score, 1)[:, : BUDGET // PAGE_SIZE], True, 1)
    return read.repeat(PAGE_SIZE, 1)[:, :length]


@pytest.mark.parametrize(
    ("selector", "estimate"),
    [("oracle", log_mass), ("page-mean", of_page_mean), ("min-max", of_bound)],
    ids=["oracle", "page-mean", "min-max"],
)
def test_best_pages_are_read(selector: str, estimate: Callable[..., np.ndarray]) -> None:
    """Over page borders, of requests of different lengths, one of which the budget holds as a whole."""
    bench, rows = evaluated(selector), [1, 4, 6]
    for lengths, out in decoded(bench, rows, [30, 200, 157], 5):
        for layer in range(LAYERS):
            for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                read = best_pages(estimate(bench, row, layer, length), bench.group, length)
                assert np.abs(out[layer][i].numpy() - attention(bench, row, layer, read)).max() < 2e-6


def test_window_reads_the_first_page_and_the_latest() -> None:
    bench = evaluated("window")
    for lengths, out in decoded(bench, [2], [203], 8):
        (length,) = lengths
        read = np.zeros((bench.heads, -(-length // PAGE_SIZE)), dtype=bool)
        read[:, 0] = read[:, 1 - BUDGET // PAGE_SIZE :] = True
        read = read.repeat(PAGE_SIZE, 1)[:, :length]
        for layer in range(LAYERS):
            assert np.abs(out[layer][0].numpy() - attention(bench, 2, layer, read)).max() < 2e-6


def test_random_pages_differ_from_the_best() -> None:
    best, lot, again = (decoded(evaluated(name), [2], [400], 1)[0][1][0] for name in ("oracle", "random", "random"))
    assert torch.equal(lot, again)
    assert (lot - best).abs().max() > 0.01


def test_dense_reads_everything_and_is_counted() -> None:
    bench = evaluated("dense")
    for lengths, out in decoded(bench, [2], [203], 3):
        assert (out[1][0] - bench.truth(2, lengths[0] - 1, 1)).abs().max() < 2e-6
    counts = bench.backend.counters.snapshot()
    assert (counts["sparse_rows"], counts["dense_rows"]) == (0, {"short": 3})


def test_heavy_hitters_are_never_read_again_once_evicted() -> None:
    """A request that outgrows its budget and one that begins beyond it, against a simulation in fp64."""
    bench, rows = evaluated("heavy-hitter"), [1, 4]
    kept: dict[tuple[int, int], np.ndarray] = {}
    mass: dict[tuple[int, int], np.ndarray] = {}
    for lengths, out in decoded(bench, rows, [70, 130], 30):
        for layer in range(LAYERS):
            for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                place = row, layer
                before = kept.get(place, np.zeros((bench.heads, 0), dtype=bool))
                read = np.pad(before, ((0, 0), (0, length - before.shape[1])), constant_values=True)
                assert np.abs(out[layer][i].numpy() - attention(bench, row, layer, read)).max() < 2e-6
                scores = np.where(read.repeat(bench.group, 0), logits(bench, row, layer, length), -np.inf)
                share = np.exp(scores - scores.max(1, keepdims=True))
                share = (share / share.sum(1, keepdims=True)).reshape(bench.heads, bench.group, length).sum(1)
                old = mass.get(place, np.zeros((bench.heads, 0)))
                mass[place] = np.pad(old, ((0, 0), (0, length - old.shape[1]))) + share
                kept[place] = read
                if length > BUDGET:
                    worth = np.where(read, mass[place], -np.inf)
                    worth[:, length - BUDGET // 2 :] = np.inf
                    kept[place] = np.zeros_like(read)
                    np.put_along_axis(kept[place], np.argsort(-worth, 1)[:, :BUDGET], True, 1)
    assert all(tokens.sum(1).tolist() == [BUDGET] * bench.heads for tokens in kept.values())


def test_heavy_hitters_of_other_requests_are_dropped() -> None:
    heavy, ones = HeavyHitters(), torch.ones(20, 2, 4)
    for place in (("a", 0), ("b", 0)):
        heavy.attend(place, torch.ones(2, 4), ones, ones, 1.0, 0.0, 16)
    heavy.keep(["b", "c"])
    assert [place for place, _ in heavy._states] == ["b"]


def test_oracle_with_a_tail_is_the_product_where_both_read_the_same() -> None:
    """All pages but one are read; the oracle's exact part and the product's tail."""
    settings: dict[str, Any] = {"budget_tokens": 12 * PAGE_SIZE, "tail_correction": "flat"}
    ours, oracle, off = evaluated("locks", **settings), evaluated("oracle", **settings), evaluated("oracle", budget_tokens=192)
    ((_, a),), ((_, b),), ((_, c),) = (decoded(bench, [2], [207], 1) for bench in (ours, oracle, off))
    assert (a[0] - b[0]).abs().max() < 2e-6
    assert (b[0] - c[0]).abs().max() > 1e-4


def test_settings_go_back_to_those_of_the_start() -> None:
    bench = Bench(budget_tokens=BUDGET, evaluation="on", tail_correction="flat")
    backend = bench.backend
    assert backend.evaluation is not None
    backend.evaluation.switch("oracle", budget_tokens=512)
    assert (backend.config.budget_tokens, backend.config.tail_correction) == (512, "off")
    backend.evaluation.switch("oracle", tail_correction="qmu", combine="max")
    assert dataclasses.replace(backend.config, combine="mass", tail_correction="flat") == bench.config
    backend.evaluation.switch()
    assert (backend.config, backend.evaluation.selector) == (bench.config, "locks")


@pytest.mark.parametrize(
    ("selector", "settings", "said"),
    [
        ("orcale", {}, r"'orcale' is unknown here; did you mean oracle\?; known: locks, dense, oracle"),
        ("oracle", {"rank": 4}, "'rank' is unknown here; known: budget_tokens"),
        ("oracle", {"budget_tokens": 50}, "budget_tokens = 50 is not allowed"),
        ("dense", {"tail_correction": "qmu"}, "dense has no tail to correct"),
        ("window", {"tail_correction": "flat"}, "window has no tail to correct"),
        ("heavy-hitter", {"tail_correction": "qmu"}, "heavy-hitter has no tail to correct"),
    ],
)
def test_refused_switches_change_nothing(selector: str, settings: dict[str, Any], said: str) -> None:
    bench = evaluated("window")
    before = bench.backend.config
    assert bench.backend.evaluation is not None
    with pytest.raises(ConfigError, match=said):
        bench.backend.evaluation.switch(selector, **settings)
    assert (bench.backend.config, bench.backend.evaluation.selector) == (before, "window")


def test_a_tail_needs_value_means() -> None:
    bench = Bench(evaluation="on", tail_correction="off")
    assert bench.backend.evaluation is not None
    with pytest.raises(ConfigError, match="start it with --locks-tail-correction qmu or flat"):
        bench.backend.evaluation.switch("locks", tail_correction="qmu")


def test_selectors_are_those_that_are_named() -> None:
    assert {"locks", "dense", *ESTIMATES, WINDOW, HEAVY_HITTER} == set(SELECTORS)


def test_no_evaluation_unless_asked_for() -> None:
    assert LocksConfig().evaluation == "off"
    assert Bench().backend.evaluation is None


@pytest.mark.server
def test_a_running_server_is_switched(model_path: str, tmp_path: Path) -> None:
    """Settings and selector are told by /server_info; a prompt is prefilled once for all of them; not while a request runs."""
    command = [
        *SERVE,
        "--model-path",
        model_path,
        "--max-total-tokens",
        "4096",
        "--skip-server-warmup",
        "--locks-evaluation",
        "on",
    ]
    prompt = list(range(1000, 1600))
    with serving(command, tmp_path / "log", {**os.environ, "HF_HUB_OFFLINE": "1"}, lambda phase: None) as url:
        answers = {}
        for selector, budget in (("dense", None), ("oracle", 1024), ("oracle", 64), ("window", 64), ("locks", 1024)):
            switch(url, selector=selector, budget_tokens=budget)
            state = server_info(url)["internal_states"][0]["locks"]
            assert state["selector"] == selector
            assert state["config"]["budget_tokens"] == (budget or 2048)
            assert state["config"]["tail_correction"] == ("qmu" if selector == "locks" else "off")
            answers[selector, budget] = generate(url, prompt, 8)
        assert [answer.cached_tokens > 500 for answer in answers.values()] == [False, True, True, True, True]
        dense = answers["dense", None]
        assert dense.tokens == answers["oracle", 1024].tokens == answers["locks", 1024].tokens
        assert dense.candidates != answers["oracle", 64].candidates != answers["window", 64].candidates

        with pytest.raises(SwitchError, match="did not switch to dense; its log says why"):
            switch(url, selector="dense", tail_correction="qmu")
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(generate, url, prompt, 400)
            steps = counters(url)["decode_steps"]
            while counters(url)["decode_steps"] < steps + 2:
                assert not running.done()
            with pytest.raises(SwitchError, match="while it is idle"):
                switch(url, selector="dense")
            assert not running.done()
        assert server_info(url)["internal_states"][0]["locks"]["selector"] == "locks"
    assert "what decode reads stays as it is: dense has no tail to correct" in (tmp_path / "log").read_text()


def test_a_switch_survives_its_numbers() -> None:
    for selector in SELECTORS:
        settings = {"budget_tokens": 512, "recent_pages": 3, "combine": "max", "tail_correction": "flat"}
        assert from_numbers(to_numbers(selector, settings)) == (selector, settings)
    for numbers in (
        {"locks_evaluation": len(SELECTORS)},
        {"locks_evaluation": 0, "locks_rank": 4},
        {"locks_budget_tokens": 64},
    ):
        with pytest.raises(ConfigError, match="is no switch of this release"):
            from_numbers(numbers)
    with pytest.raises(SwitchError, match=r"'orcale' is unknown here; did you mean oracle\?"):
        switch("http://127.0.0.1:9", selector="orcale")


def test_no_server_no_switch() -> None:
    with pytest.raises(SwitchError, match="gave no answer"):
        switch("http://127.0.0.1:9", timeout_s=5)
