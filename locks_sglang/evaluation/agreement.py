"""How far next-token distributions of sparse decoding lie from dense ones after the same tokens: `locks-sglang eval agreement`.

Every method decodes the same forced tokens from the same cache, one token a step, in the served backend. Rows of one batch are
parts of the text that follow one another, each after a prefill of all that comes before it, or answers that the model itself
gave, so a position differs from its dense twin by the sparse steps of its own row.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ..benchmarks.kernels import commit
from ..config import load_config
from ..inprocess import InProcessServer, Request
from .capture import TIMEOUT_S, CaptureError, cpu_arguments
from .results import write_results
from .serving import ServedText, read_text

ORACLE = "oracle"
AGREEMENT = "agreement"
"""Kind of the results file."""
RESAMPLES = 2000
"""Of the bootstrap over positions."""
INTERVAL = (0.025, 0.975)
QUARTERS = 4
"""Parts of the forced positions, first to last, whose divergence is told one by one."""
SPARE_ROW = 512
"""Tokens of the KV pool a row beyond those that it decodes: what SGLang's admission holds back."""


@dataclass(frozen=True)
class Method:
    """One way to decode: a selector of `served.SELECTORS`, and the tail correction where it is not the configured one."""

    selector: str
    tail_correction: str | None = None

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        return self.selector + (f"/{self.tail_correction}" if self.tail_correction else "")

    def settings(self, budget_tokens: int) -> dict[str, Any]:
        """What `Evaluation.switch` takes beside the selector."""
        tail = {} if self.tail_correction is None else {"tail_correction": self.tail_correction}
        return {"budget_tokens": budget_tokens, **tail}


@dataclass(frozen=True)
class ForcedRow:
    """A prompt, and the tokens that follow it whatever the model would have chosen."""

    prompt_ids: list[int]
    answer_ids: list[int]


def rows_of_text(ids: Sequence[int], positions: int, rows: int) -> list[ForcedRow]:
    """The last `positions` tokens of a text in `rows` parts of equal length, each after all that comes before it.

    Raises:
        CaptureError: parts of no token, or no text before them.
    """
    each = positions // rows
    first = len(ids) - each * rows
    if each < 1 or first < 1:
        raise CaptureError(
            f"{positions} positions in {rows} rows of a text of {len(ids)} tokens: fewer rows, or other positions"
        )
    starts = range(first, len(ids), each)
    return [ForcedRow(list(ids[:start]), list(ids[start : start + each])) for start in starts]


class Divergence:
    """Compares the logits of every decode step with those of dense decoding after the same tokens.

    Args:
        rows: as they are decoded.

    Attributes:
        kl: fp64 [rows, steps], Kullback-Leibler divergence from dense in nats; NaN before its step.
        same: bool [rows, steps], whether the likeliest token is dense's.
    """

    def __init__(self, rows: Sequence[ForcedRow]) -> None:
        self._lengths = [len(row.prompt_ids) for row in rows]
        self._steps = len(rows[0].answer_ids)
        self._dense: torch.Tensor | None = None
        self.kl, self.same = self._empty()

    def _empty(self) -> tuple[np.ndarray, np.ndarray]:
        shape = len(self._lengths), self._steps
        return np.full(shape, np.nan), np.zeros(shape, dtype=bool)

    def taken(self) -> tuple[np.ndarray, np.ndarray]:
        """`kl` and `same` of the steps since the last call, in the order of the positions.

        Raises:
            CaptureError: a step is missing.
        """
        kl, same = self.kl.flatten(), self.same.flatten()
        self.kl, self.same = self._empty()
        if np.isnan(kl).any():
            raise CaptureError(f"{int(np.isnan(kl).sum())} of {len(kl)} forced positions were not decoded")
        return kl, same

    def add(self, rows: Sequence[int], lengths: Sequence[int], logits: torch.Tensor, *, dense: bool) -> None:
        """A decode step.

        Args:
            rows: by row of the batch, which of the forced ones it is. lengths: tokens, the one that was fed included.
            logits: [B, V]. dense: keep them to compare with, instead of comparing them.
        """
        found = torch.log_softmax(logits.float(), -1)
        if self._dense is None:
            self._dense = torch.full((*self.kl.shape, found.shape[1]), torch.nan, device=found.device)
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            step = length - self._lengths[row] - 1
            if not 0 <= step < self._steps:
                continue  # the prefill's own token, or one step too many of the scheduler's
            if dense:
                self._dense[row, step] = found[i]
                continue
            truth = self._dense[row, step]
            self.kl[row, step] = float((truth.exp() * (truth - found[i])).double().sum())
            self.same[row, step] = bool(truth.argmax() == found[i].argmax())


@contextmanager
def forced(server: InProcessServer, requests: Mapping[str, int], rows: Sequence[ForcedRow], seen: Any) -> Iterator[None]:
    """Let every request go on with its row's tokens, whatever the model prefers, and show `seen` the logits of each step.

    Args:
        requests: by id, the index of its row; filled by the caller before the server runs.
        seen: called with rows, lengths and logits [B, V] of every decode step.
    """
    runner = server.runner
    sample = runner.sample
    device = server.backend.summaries.valid.device
    answers = torch.tensor([[*row.answer_ids, row.answer_ids[-1]] for row in rows], device=device)

    def choose(logits_output: Any, forward_batch: Any) -> Any:
        at = [requests[rid] for rid in forward_batch.rids]
        lengths = forward_batch.seq_lens_cpu.tolist()
        if forward_batch.forward_mode.is_decode():
            seen(at, lengths, logits_output.next_token_logits)
        ids = sample(logits_output, forward_batch)
        places = [length - len(rows[row].prompt_ids) for row, length in zip(at, lengths, strict=True)]
        last = answers.shape[1] - 1
        ids.copy_(answers[at, [min(max(place, 0), last) for place in places]])
        return ids

    runner.sample = choose
    try:
        yield
    finally:
        del runner.sample


def decode(
    server: InProcessServer,
    rows: Sequence[ForcedRow],
    divergence: Divergence,
    which: Sequence[int] | None = None,
    *,
    dense: bool = False,
) -> None:
    """Decode rows together, as the backend is switched, and compare every step.

    Args:
        which: indices of the rows, all when None. dense: as for `Divergence.add`.
    """
    requests: dict[str, int] = {}

    def seen(at: Sequence[int], lengths: Sequence[int], logits: torch.Tensor) -> None:
        divergence.add(at, lengths, logits, dense=dense)

    with forced(server, requests, rows, seen):
        for index in range(len(rows)) if which is None else which:
            row = rows[index]
            # The prefill yields one token more than there are decode steps.
            requests[server.submit(row.prompt_ids, max_new_tokens=len(row.answer_ids) + 1).rid] = index
        server.run(timeout_s=TIMEOUT_S)


def generated(server: InProcessServer, prompts: Sequence[Sequence[int]], tokens: int) -> list[ForcedRow]:
    """The model's own greedy answers of `tokens` tokens, as the backend is switched."""
    answers: list[Request] = server.generate(prompts, max_new_tokens=tokens)
    return [ForcedRow(list(prompt), answer.output_ids) for prompt, answer in zip(prompts, answers, strict=True)]


def cell(kl: np.ndarray, same: np.ndarray, oracle: np.ndarray | None, seed: int) -> dict[str, Any]:
    """What one method's positions come to, with 95 % intervals by a bootstrap over positions, paired with the oracle's.

    Args:
        kl: fp64 [n] in nats, in the order of the positions. same: bool [n]. oracle: the oracle's [n], None for itself.
        seed: of the bootstrap.
    """
    draws = np.random.default_rng(seed).integers(0, len(kl), (RESAMPLES, len(kl)))

    def interval(values: np.ndarray) -> list[float]:
        return [float(x) for x in np.quantile(values, INTERVAL)]

    told: dict[str, Any] = {
        "kl": {
            "mean": float(kl.mean()),
            "interval": interval(kl[draws].mean(1)),
            "p95": float(np.quantile(kl, 0.95)),
            "p95_interval": interval(np.quantile(kl[draws], 0.95, axis=1)),
            "p99": float(np.quantile(kl, 0.99)),
            "p99_interval": interval(np.quantile(kl[draws], 0.99, axis=1)),
            "max": float(kl.max()),
            "by_quarter": [float(part.mean()) for part in np.array_split(kl, QUARTERS)],
        },
        "top1": {"share": float(same.mean()), "interval": interval(same[draws].mean(1))},
    }
    if oracle is not None:
        told["kl"]["of_oracle"] = float(kl.mean() / oracle.mean())
        told["kl"]["of_oracle_interval"] = interval(kl[draws].mean(1) / oracle[draws].mean(1))
    return told


def start(text: ServedText, rows: int, tokens: int, dtype: str) -> InProcessServer:
    """A server in evaluation that decodes eagerly and without overlap, so that steps and tokens agree.

    Args:
        rows: of a batch. tokens: that the KV pool must hold for all of them.

    Raises:
        CaptureError: the text does not fit the model's context.
    """
    arguments: dict[str, Any] = cpu_arguments(len(text.ids)) if text.device == "cpu" else {}
    if dtype != "auto":
        arguments["dtype"] = dtype
    if text.device != "cpu" and dtype == "float32":
        # FlashInfer and FA3 take 16-bit types only.
        arguments["locks_dense_backend"] = "triton"
    return InProcessServer(
        text.model,
        device=text.device,
        attention_backend="locks",
        locks_evaluation="on",
        locks_idle_audit_ms=0,
        locks_min_context_tokens=0,
        max_running_requests=rows,
        max_total_tokens=tokens + rows * SPARE_ROW,
        disable_overlap_schedule=True,
        cuda_graph_backend_decode="disabled",
        log_level="warning",
        **arguments,
    )


def measure(
    server: InProcessServer, rows: Sequence[ForcedRow], methods: Sequence[Method], budgets: Sequence[int], seed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Dense once to compare with, every method at every budget, and dense again in another batch: what rounding alone makes.

    Returns:
        Cells, one a method and budget, the oracle first; and that of dense against itself, in batches of half the size, so that
        sums are not made in the very same order.
    """
    divergence = Divergence(rows)
    evaluation = server.backend.evaluation
    ordered = sorted(methods, key=lambda method: method.name != ORACLE)
    found = []
    with tqdm(total=len(budgets) * len(ordered) + 2, desc="decode", unit="run", disable=None) as bar:
        evaluation.switch("dense")
        decode(server, rows, divergence, dense=True)
        bar.update()
        for budget in budgets:
            oracle = None
            for method in ordered:
                evaluation.switch(method.selector, **method.settings(budget))
                decode(server, rows, divergence)
                kl, same = divergence.taken()
                found.append({"method": method.name, "budget": budget, **cell(kl, same, oracle, seed)})
                oracle = kl if method.name == ORACLE else oracle
                bar.update()
        evaluation.switch("dense")
        half = len(rows) // 2
        for part in (range(half), range(half, len(rows))):
            decode(server, rows, divergence, part)
        bar.update()
    return found, cell(*divergence.taken(), None, seed)


def run(given: argparse.Namespace) -> int:
    """`locks-sglang eval agreement`: decode, print the table, write the file. Options as `cli` parses them.

    Raises:
        ConfigError: a method or a budget that the product would refuse. TextError, ModelError: see `read_text`.
        CaptureError: the text does not fit the model's context, or what was asked for does not fit the text.
    """
    methods = [Method(*selector) for selector in given.selectors]
    for budget in given.budgets:
        dataclasses.replace(load_config().config, budget_tokens=budget)
    text = read_text(given)
    began = time.monotonic()
    if given.answer:
        prompts = prompts_of_text(text.ids, given.rows)
        server = start(text, given.rows, len(text.ids) + given.rows * given.answer, given.dtype)
        check_context(server, max(map(len, prompts)) + given.answer)
        server.backend.evaluation.switch("dense")
        rows = generated(server, prompts, given.answer)
    else:
        rows = rows_of_text(text.ids, given.positions, given.rows)
        server = start(text, given.rows, len(text.ids) + given.positions, given.dtype)
        check_context(server, len(text.ids))
        # Once, densely: every row then finds what comes before it in the radix cache.
        server.generate([text.ids[: len(rows[-1].prompt_ids)]], max_new_tokens=1)
    found, again = measure(server, rows, methods, given.budgets, given.seed)
    result = {
        "kind": AGREEMENT,
        **text.identity(server),
        "commit": commit(),
        "command": given.command,
        "settings": dataclasses.asdict(load_config().config),
        "forced": {
            "source": "the model's own greedy answers" if given.answer else "the text",
            "rows": len(rows),
            "positions": sum(len(row.answer_ids) for row in rows),
            "shortest_prompt": min(len(row.prompt_ids) for row in rows),
            "longest_prompt": max(len(row.prompt_ids) for row in rows),
        },
        "resamples": RESAMPLES,
        "cells": found,
        "dense_again": again,
        "invalid_pages": server.backend.counters.snapshot()["invalid_pages"],
        "seconds": time.monotonic() - began,
    }
    print(format_result(result))
    write_results(given.json, result)
    if result["invalid_pages"]:
        print(f"FAILED: {result['invalid_pages']} pages were met without a valid summary")
        return 1
    return 0


def prompts_of_text(ids: Sequence[int], rows: int) -> list[list[int]]:
    """A text cut into `rows` prompts of equal length, each with the text's own first token (a BOS where there is one).

    Raises:
        CaptureError: a prompt would have no token of its own.
    """
    each = len(ids) // rows
    if each < 2:
        raise CaptureError(f"{len(ids)} tokens do not make {rows} prompts: ask for fewer --rows or more --tokens")
    return [[ids[0], *ids[i * each + 1 : (i + 1) * each]] for i in range(rows)]


def check_context(server: InProcessServer, tokens: int) -> None:
    """Refuse a row of more tokens than the model takes.

    Raises:
        CaptureError: with what is allowed.
    """
    context = server.scheduler.model_config.context_len
    if tokens + 1 > context:
        raise CaptureError(f"{tokens} tokens do not fit the model's context of {context}: {context - 1} or fewer do")


def format_result(result: Mapping[str, Any]) -> str:
    """The result as plain text: a row a method and budget."""
    forced_tokens, text, model = result["forced"], result["text"], result["model"]
    head = f"{'budget':>6}  {'method':<14}{'KL':>9}  {'95 % interval':<19}{'p95':>9}{'p99':>9}{'largest':>9}{'of oracle':>11}"
    lines = [
        f"{model['name']} ({model['dtype']}), {forced_tokens['positions']} forced positions in {forced_tokens['rows']} rows of "
        f"{forced_tokens['source']}, {text['name']}, after {forced_tokens['shortest_prompt']} to "
        f"{forced_tokens['longest_prompt']} tokens",
        "KL: divergence from dense decoding after the same tokens, in nats; top-1: the likeliest token is dense's.",
        "",
        head + f"{'95 % interval':>19}  {'top-1':>7}",
        "-" * (len(head) + 28),
    ]
    for entry in result["cells"]:
        kl = entry["kl"]
        ratio = f"{kl['of_oracle']:>11.3f}" if "of_oracle" in kl else " " * 11
        spread = _interval(kl["of_oracle_interval"]) if "of_oracle" in kl else ""
        lines.append(
            f"{entry['budget']:>6}  {entry['method']:<14}{kl['mean']:>9.5f}  {_interval(kl['interval']):<19}{kl['p95']:>9.4f}"
            f"{kl['p99']:>9.4f}{kl['max']:>9.3f}{ratio}{spread:>19}  {entry['top1']['share']:>7.2%}"
        )
    again = result["dense_again"]
    lines += [
        "",
        f"Dense against itself in batches of half the size: KL {again['kl']['mean']:.2e}, largest {again['kl']['max']:.2e}, "
        f"top-1 {again['top1']['share']:.2%}.",
        f"{result['device']}, SGLang {result['versions']['sglang']}, {result['seconds']:.0f} s.",
    ]
    return "\n".join(lines)


def _interval(bounds: Sequence[float]) -> str:
    return f"{bounds[0]:.5f}-{bounds[1]:.5f}"
