"""`locks-sglang eval ruler`: six RULER tasks through a running server, with dense attention and with selections of pages.

One server answers the same prompts with every setting, switched between them: prompts are prefilled once, densely, and
every further setting finds them in the radix cache. So settings differ in decoding alone, and differences are paired.
"""

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..config import load_config
from .client import ClientError, PromptFormat, Server, gather
from .results import write_results
from .ruler_tasks import TASKS, Sample, TaskError, Words, load_words, make_samples, score

KIND = "ruler"
"""What a results file says that it is."""
DENSE = "dense"
LOCKS = "locks"

LOWEST_BOUND = {2048: -2.0, 512: -3.0}
"""By budget in tokens: least that the lower 95 % bound of the mean paired difference of locks from dense may be, in points."""
ABOVE_CHANCE = 20.0
"""Points that dense must be above chance in a task and length for it to be judged."""
FEWEST_SAMPLES = 100
"""Of a task and length that is judged."""
RESAMPLES = 10_000
LEVEL = 0.95
POOL_SHARE = 0.8
"""Share of the server's KV cache that the prompts of one group may fill, so that they stay until every setting has answered."""


@dataclass(frozen=True)
class Setting:
    """One way to decode. `budget` is None for dense alone, `tail` for the tail correction that the server was started with."""

    selector: str
    budget: int | None = None
    tail: str | None = None

    @property
    def name(self) -> str:
        """As tables and files call it."""
        selector = f"{self.selector}/{self.tail}" if self.tail else self.selector
        return selector if self.budget is None else f"{selector} {self.budget}"


def settings_of(selectors: Sequence[tuple[str, str | None]], budgets: Sequence[int]) -> list[Setting]:
    """Dense, then every other selector (name and tail correction) at every budget."""
    sparse = [(name, tail) for name, tail in selectors if name != DENSE]
    return [Setting(DENSE), *(Setting(name, budget, tail) for name, tail in sparse for budget in budgets)]


@dataclass(frozen=True)
class Answer:
    """How one question was answered: points (0 to 100), tokens of the answer, and whether it was cut off."""

    points: float
    tokens: int
    truncated: bool


@dataclass
class Cell:
    """One task at one length.

    Attributes:
        sizes: by sample, in the task's units; None where it was not made yet.
        answers: by setting and sample; None where there is none yet.
    """

    task: str
    length: int
    samples: int
    sizes: list[int | None] = field(init=False)
    answers: dict[str, list[Answer | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = [None] * self.samples

    def of(self, setting: str) -> list[Answer | None]:
        """Answers of a setting, by sample."""
        return self.answers.setdefault(setting, [None] * self.samples)

    def given(self, setting: str) -> list[Answer]:
        """The answers that there are."""
        return [answer for answer in self.of(setting) if answer is not None]

    def missing(self, settings: Sequence[Setting]) -> list[int]:
        """Samples that some setting has not answered."""
        return [i for i in range(self.samples) if any(self.of(setting.name)[i] is None for setting in settings)]

    def mean(self, setting: str) -> float | None:
        """Mean points; None without answers."""
        points = [answer.points for answer in self.given(setting)]
        return float(np.mean(points)) if points else None

    def differences(self, setting: str) -> np.ndarray:
        """Points of a setting less those of dense: fp64 [n], of the n samples that both answered."""
        pairs = zip(self.of(setting), self.of(DENSE), strict=True)
        return np.array([ours.points - dense.points for ours, dense in pairs if ours is not None and dense is not None])

    @property
    def judged(self) -> bool:
        """Whether dense is far enough above chance for differences to mean anything."""
        dense = self.mean(DENSE)
        return dense is not None and dense >= TASKS[self.task].chance + ABOVE_CHANCE

    def as_json(self) -> dict[str, Any]:
        """What a file holds: no text, lists by sample."""
        task = TASKS[self.task]
        return {
            "task": self.task,
            "length": self.length,
            "new_tokens": task.new_tokens,
            "chance": task.chance,
            "unit": task.unit,
            "sizes": self.sizes,
            "answers": {
                name: {
                    "answered": len(self.given(name)),
                    "mean": self.mean(name),
                    "truncated": sum(answer.truncated for answer in self.given(name)),
                    **{key: [a and getattr(a, key) for a in answers] for key in ("points", "tokens")},
                    "cut_off": [a and a.truncated for a in answers],
                }
                for name, answers in self.answers.items()
            },
        }

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> "Cell":
        """What `as_json` wrote."""
        cell = Cell(told["task"], told["length"], len(told["sizes"]))
        cell.sizes = list(told["sizes"])
        for name, lists in told["answers"].items():
            rows = zip(lists["points"], lists["tokens"], lists["cut_off"], strict=True)
            cell.answers[name] = [None if points is None else Answer(points, tokens, cut) for points, tokens, cut in rows]
        return cell


Told = dict[str, dict[str, Any]]
"""By setting, what the server told of itself while it answered: the settings of `locks` and what it counted."""


# --- statistics -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A mean and the bounds between which it lies with a probability of `LEVEL`, in points."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def interval(differences: Sequence[np.ndarray], seed: int) -> Interval:
    """Bootstrap over samples of the mean over groups of their means, every group of equal weight.

    Args:
        differences: fp64 [n] a group, none empty; samples are drawn anew within each.
    """
    rng = np.random.default_rng(seed)
    drawn = np.zeros(RESAMPLES)
    for group in differences:
        drawn += group[rng.integers(0, len(group), (RESAMPLES, len(group)))].mean(1)
    drawn /= len(differences)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(np.mean([group.mean() for group in differences])), float(low), float(high))


@dataclass(frozen=True)
class Comparison:
    """A setting against dense at one length, over the tasks that are judged there.

    Attributes:
        tasks: the judged ones. samples: fewest of one of them. difference: None where no task is judged or answered.
    """

    setting: Setting
    length: int
    tasks: tuple[str, ...]
    samples: int
    difference: Interval | None


def compare(cells: Sequence[Cell], settings: Sequence[Setting], seed: int) -> list[Comparison]:
    """Every sparse setting against dense, length by length."""
    found = []
    for length in sorted({cell.length for cell in cells}):
        judged = [cell for cell in cells if cell.length == length and cell.judged]
        for setting in settings:
            if setting.selector == DENSE:
                continue
            pairs = {cell.task: cell.differences(setting.name) for cell in judged}
            pairs = {task: differences for task, differences in pairs.items() if len(differences)}
            samples = min(map(len, pairs.values()), default=0)
            difference = interval(list(pairs.values()), seed) if pairs else None
            found.append(Comparison(setting, length, tuple(pairs), samples, difference))
    return found


@dataclass(frozen=True)
class Verdict:
    """One sentence on one requirement; `met` is None where it could not be judged."""

    met: bool | None
    sentence: str


def verdicts(comparisons: Sequence[Comparison], told: Told, unanswered: int) -> list[Verdict]:
    """What the run shows: `LOWEST_BOUND` for locks, no setting above dense, no dense step in between, and nothing left out.

    Args:
        unanswered: questions that were planned and not answered.
    """
    found = []
    for one in comparisons:
        at = f"{one.setting.name} at {one.length} tokens"
        if one.difference is not None and one.difference.low > 0:
            found.append(
                Verdict(
                    False,
                    f"{at}: {one.difference} points from dense, above it by more than the spread: a fault of the harness "
                    "until it is explained",
                )
            )
        lowest = LOWEST_BOUND.get(one.setting.budget or 0)
        if one.setting.selector != LOCKS or lowest is None:
            continue
        required = f"a lower bound of {lowest:+.0f} is required"
        if one.difference is None:
            found.append(Verdict(None, f"{at}: dense is nowhere {ABOVE_CHANCE:.0f} points above chance; {required}"))
            continue
        sentence = f"{at}: {one.difference} points from dense in {len(one.tasks)} tasks; {required}"
        if one.samples < FEWEST_SAMPLES:
            found.append(Verdict(None, f"{sentence}, with {FEWEST_SAMPLES} samples a task, not {one.samples}"))
        else:
            found.append(Verdict(one.difference.low >= lowest, sentence))
    if not any(one.setting.selector == LOCKS and one.setting.budget in LOWEST_BOUND for one in comparisons):
        budgets = " and ".join(map(str, LOWEST_BOUND))
        found.append(Verdict(None, f"quality is required of {LOCKS} at budgets of {budgets} tokens, and neither was asked for"))
    for name, counted in told.items():
        rows = sum(counted["dense_rows"].values())
        if rows and name != DENSE:
            reasons = ", ".join(f"{count} {reason}" for reason, count in counted["dense_rows"].items() if count)
            found.append(
                Verdict(False, f"{name}: {rows} rows beside {counted['sparse_rows']} sparse ones decoded dense ({reasons})")
            )
    if unanswered:
        found.append(Verdict(None, f"{unanswered} questions were not answered: the time was over"))
    return found


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is to be asked.

    Attributes:
        order_seed: draws the order of settings and questions; None for that of the command.
        concurrency: requests at a time. deadline: of `time.monotonic()`, after which nothing is asked any more.
    """

    settings: Sequence[Setting]
    words: Words
    seed: int
    order_seed: int | None
    concurrency: int
    deadline: float


Switch = Callable[[Setting], None]
"""Has the idle server decode with a setting from now on."""


def groups(cells: Sequence[Cell], plan: Plan, pool: int) -> Iterator[tuple[Cell, list[int]]]:
    """Samples that are asked together: as many of a cell as the server's cache holds."""
    for cell in cells:
        numbers = cell.missing(plan.settings)
        most = max(1, int(POOL_SHARE * pool) // cell.length)
        for at in range(0, len(numbers), most):
            yield cell, numbers[at : at + most]


def measure(
    cells: Sequence[Cell], plan: Plan, server: Server, form: PromptFormat, switch: Switch, told: Told, save: Callable[[], None]
) -> None:
    """Answer what is missing in `cells`, and add to `told`, until the time is over.

    Args:
        save: called after every group.

    Raises:
        ClientError: see `Server.complete`; or a setting did not decode as it is called. TaskError: see `make_samples`.
    """
    work = list(groups(cells, plan, server.pool))
    questions = sum(len(numbers) for _, numbers in work) * len(plan.settings)

    def make(job: tuple[Cell, list[int]]) -> list[Sample]:
        cell, numbers = job
        return make_samples(TASKS[cell.task], plan.words, cell.length, plan.seed, numbers, form.encode)

    # While the server answers one group, the next one is written.
    with ThreadPoolExecutor(1) as writer, tqdm(total=questions, unit="answer", disable=None) as bar:
        coming: Future[list[Sample]] | None = writer.submit(make, work[0]) if work else None
        for number, (cell, numbers) in enumerate(work):
            assert coming is not None
            samples = coming.result()
            coming = writer.submit(make, work[number + 1]) if number + 1 < len(work) else None
            bar.set_description(f"{cell.task} {cell.length}")
            try:
                for i, sample in zip(numbers, samples, strict=True):
                    cell.sizes[i] = sample.size
                for setting in _order(plan, plan.settings, cell, "settings"):
                    if time.monotonic() >= plan.deadline:
                        return
                    _answer(cell, dict(zip(numbers, samples, strict=True)), setting, plan, server, switch, bar, told)
            finally:
                save()


def _order(plan: Plan, things: Sequence[Any], cell: Cell, what: str) -> list[Any]:
    things = list(things)
    if plan.order_seed is not None:
        random.Random(f"{plan.order_seed}/{what}/{cell.task}/{cell.length}").shuffle(things)
    return things


def _answer(
    cell: Cell,
    samples: Mapping[int, Sample],
    setting: Setting,
    plan: Plan,
    server: Server,
    switch: Switch,
    bar: Any,
    told: Told,
) -> None:
    """Have the samples of a group answered with one setting."""
    answers = cell.of(setting.name)
    open_numbers = _order(plan, [i for i in samples if answers[i] is None], cell, "questions")
    if not open_numbers:
        return
    switch(setting)
    before = server.locks()
    most = TASKS[cell.task].new_tokens
    prompts = [samples[i].ids for i in open_numbers]
    completions = gather(server, prompts, [most] * len(prompts), plan.concurrency, bar.update)
    after = server.locks()
    for i, completion in zip(open_numbers, completions, strict=True):
        answers[i] = Answer(score(completion.text, samples[i].answers), completion.tokens, completion.truncated)
    if before is not None and after is not None:
        _record(told.setdefault(setting.name, {}), setting, before, after)


def _record(told: dict[str, Any], setting: Setting, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Add what the server counted during one group's answers.

    Raises:
        ClientError: the server decoded with another setting, or pages had no summary.
    """
    decoded = Setting(after["selector"], None if setting.budget is None else after["config"]["budget_tokens"], setting.tail)
    if decoded != setting:
        raise ClientError(f"the server was switched to {setting.name} and decoded with {decoded.name}")
    old, new = before["counters"], after["counters"]
    sparse = new["sparse_rows"] - old["sparse_rows"]
    if (sparse > 0) is (setting.selector == DENSE):
        hint = "" if sparse else "; start the server with --locks-min-context-tokens 0"
        raise ClientError(f"with the setting {setting.name} the server decoded {sparse} rows sparse{hint}")
    if new["invalid_pages"] > old["invalid_pages"]:
        raise ClientError(f"with the setting {setting.name} the server met pages without a summary")
    told["config"], told["config_digest"] = after["config"], after["config_digest"]
    for name in ("decode_steps", "sparse_rows", "pages_held", "pages_read"):
        told[name] = told.get(name, 0) + new[name] - old[name]
    dense_rows = told.setdefault("dense_rows", {})
    for reason, count in new["dense_rows"].items():
        dense_rows[reason] = dense_rows.get(reason, 0) + count - old["dense_rows"].get(reason, 0)


# --- the report -------------------------------------------------------------------------------------------------------


def format_table(cells: Sequence[Cell], comparisons: Sequence[Comparison], settings: Sequence[Setting], seed: int) -> str:
    """Plain text, length by length: dense's points, and every other setting's paired difference from them."""
    sparse = [setting.name for setting in settings if setting.selector != DENSE]
    width, column = 16, 22
    lines = []
    for length in sorted({cell.length for cell in cells}):
        head = f"{f'{length} tokens':{width}}{'n':>5}{DENSE:>8}" + "".join(f"{name:>{column}}" for name in sparse)
        lines += [head, "-" * len(head)]
        here = [cell for cell in cells if cell.length == length]
        for cell in here:
            mean = cell.mean(DENSE)
            row = f"{cell.task:{width}}{len(cell.given(DENSE)):>5}" + (f"{'-':>8}" if mean is None else f"{mean:>8.1f}")
            for name in sparse:
                differences = cell.differences(name)
                told = str(interval([differences], seed)) if len(differences) else "-"
                row += f"{told:>{column}}"
            lines.append(row if cell.judged else f"{row}  not judged")
        compared = [one for one in comparisons if one.length == length]
        row = f"{'mean of judged':{width}}{'':>13}"
        lines.append(row + "".join(f"{one.difference or '-'!s:>{column}}" for one in compared))
        row = f"{'truncated':{width}}{'':>5}"
        for at, setting in enumerate(settings):
            given = [answer for cell in here for answer in cell.given(setting.name)]
            told = f"{sum(answer.truncated for answer in given)} of {len(given)}"
            row += f"{told:>{column if at else 8}}"
        lines += [row, ""]
    return "\n".join(lines)


def _parts(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def run(given: argparse.Namespace) -> int:
    """`locks-sglang eval ruler`: ask, print the table, write the file. Options as `cli` parses them.

    Returns:
        0 where every requirement was judged and met, else 1.

    Raises:
        ConfigError: a budget that the product would refuse. ClientError: the server cannot be asked or switched.
        TaskError, TextError: see `make_samples`, `load_words`.
    """
    for budget in given.budgets:
        dataclasses.replace(load_config().config, budget_tokens=budget)
    from .switch import SwitchError
    from .switch import switch as switch_server

    began = time.monotonic()
    settings = settings_of(given.selectors, given.budgets)
    words = load_words(given.text)
    server = Server(given.url)
    too_long = [length for length in given.lengths if length > server.context]
    if too_long:
        raise TaskError(f"--lengths {_parts(too_long)}: the server takes {server.context} tokens")
    form = PromptFormat(server.tokenizer(given.tokenizer))
    identity = server.identity() | {"format": form.identity()}
    asked = {
        "tasks": given.tasks,
        "lengths": given.lengths,
        "samples": given.samples,
        "settings": [setting.name for setting in settings],
        "seed": given.seed,
        "order_seed": given.order_seed,
        "words": {"name": words.name, "description": words.description, "count": len(words.words), "sha256": words.digest},
        "concurrency": given.concurrency,
    }
    cells = [Cell(task, length, given.samples) for length in given.lengths for task in given.tasks]
    told: Told = {}
    if given.resume:
        cells, told = _resumed(given.json, asked, identity)

    def as_json(comparisons: Sequence[Comparison], found: Sequence[Verdict]) -> dict[str, Any]:
        return {
            "kind": KIND,
            **identity,
            "command": given.command,
            "asked": asked,
            "seconds": round(time.monotonic() - began, 1),
            "unanswered": _unanswered(cells, settings),
            "told": told,
            "cells": [cell.as_json() for cell in cells],
            "compared": [
                {
                    "setting": one.setting.name,
                    "length": one.length,
                    "judged_tasks": one.tasks,
                    "samples": one.samples,
                    "difference": one.difference and dataclasses.asdict(one.difference),
                }
                for one in comparisons
            ],
            "verdicts": [dataclasses.asdict(verdict) for verdict in found],
        }

    def save(comparisons: Sequence[Comparison] = (), found: Sequence[Verdict] = ()) -> None:
        write_results(given.json, as_json(comparisons, found))

    def switch(setting: Setting) -> None:
        try:
            switch_server(server.url, selector=setting.selector, budget_tokens=setting.budget, tail_correction=setting.tail)
        except SwitchError as error:
            raise ClientError(f"the server was not switched to {setting.name}: {error}") from error

    deadline = began + given.time_limit if given.time_limit else float("inf")
    plan = Plan(settings, words, given.seed, given.order_seed, given.concurrency, deadline)
    measure(cells, plan, server, form, switch, told, save)
    comparisons = compare(cells, settings, given.seed)
    found = verdicts(comparisons, told, _unanswered(cells, settings))
    save(comparisons, found)
    print(
        f"{len(given.tasks)} of RULER's 13 tasks: {identity['model']['name']}, SGLang {identity['versions']['sglang']}, "
        f"seed {given.seed}, {given.samples} samples a task and length, {time.monotonic() - began:.0f} s"
    )
    print(f"Points, and paired differences from dense with their {LEVEL:.0%} intervals, by bootstrap over samples.\n")
    print(format_table(cells, comparisons, settings, given.seed))
    words_of = {True: "MET", False: "MISSED", None: "NOT JUDGED"}
    print("\n".join(f"{words_of[verdict.met]:<12}{verdict.sentence}" for verdict in found))
    return 0 if all(verdict.met for verdict in found) else 1


def _unanswered(cells: Sequence[Cell], settings: Sequence[Setting]) -> int:
    return sum(cell.samples - len(cell.given(setting.name)) for cell in cells for setting in settings)


def _resumed(file: Path, asked: Mapping[str, Any], identity: Mapping[str, Any]) -> tuple[list[Cell], Told]:
    """The cells of an earlier run that was cut off, and what its server told.

    Raises:
        TaskError: there is none, or it asked something else or another model.
    """
    try:
        earlier = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"--resume: {file} cannot be read: {error}") from None
    differing = [key for key in asked if earlier.get("asked", {}).get(key) != asked[key]]
    same = {"kind": KIND, **identity}
    differing += [key for key in ("kind", "model", "versions", "commit", "format") if earlier.get(key) != same[key]]
    if differing:
        raise TaskError(f"--resume: {file} is of a run with another {', '.join(differing)}")
    return [Cell.from_json(told) for told in earlier["cells"]], earlier["told"]
