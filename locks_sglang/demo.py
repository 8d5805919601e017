"""`locks-sglang demo`: a real server with `--attention-backend locks` holds a chat over a long document.

The same prompts are then answered by SGLang's dense attention, token for token, and a table shows both. One server runs at
a time. Everything the table says, and more, is in `demo.json`.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import pydoc_data.topics
import re
import shlex
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import Tokenizer

from . import ConfigError, LocksConfig, __version__
from .dense_cpu import dense_environment
from .models import ModelError, checked, fetch
from .serving import ServerError, serving, stopped_by_signals

MODEL = "smollm2"
LEAST_DOCUMENT_TOKENS = 4000
CLOSE_CALL = 0.1
"""Two logits this near to each other may change places by rounding alone."""
JUDGED_SHARE = 0.9

TOPICS = (
    "if",
    "while",
    "for",
    "break",
    "continue",
    "pass",
    "return",
    "yield",
    "raise",
    "with",
    "assert",
    "del",
    "global",
    "nonlocal",
)
"""What CPython's own reference says about these statements is the document."""
# A model of this size answers from the text only if it has seen how; so each conversation opens with one worked example.
EXAMPLE = 'In the words of this text, what is the "while" statement used for?'
EXAMPLE_ANSWER = 'The "while" statement is used for repeated execution as long as an expression is true.'
QUESTIONS = (
    'In the words of this text, what is the "global" statement?',
    'In the words of this text, what does the "nonlocal" statement do?',
    'In the words of this text, what is the "for" statement used for?',
)
SECOND_QUESTION = 'In the words of this text, what is the "if" statement used for?'

RULE = (
    f"Every token of turn 1.1 must be the one that dense chooses after the same tokens, but for close calls (dense's two best "
    f"logits at most {CLOSE_CALL} apart, and the token one of them) and the last {1 - JUDGED_SHARE:.0%} of the answer; "
    f"where it ends counts always; and no page may be met without a valid summary."
)
END = "(end)"
"""Stands for whichever token ended an answer."""

Messages = list[dict[str, str]]


# --- what is asked ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """Text of whole reference topics, and its length in tokens of the model."""

    topics: tuple[str, ...]
    text: str
    tokens: int


def unwrap(text: str) -> str:
    """Prose paragraphs on one line each; code, lists with indented lines and headings as they are."""

    def paragraph(lines: list[str]) -> str:
        if any(line.startswith(" ") for line in lines) or set(lines[-1]) <= set("*=-~"):
            return "\n".join(lines)
        return re.sub(r"(?<=\w)- (?=\w)", "-", " ".join(lines))

    return "\n\n".join(paragraph(part.split("\n")) for part in text.strip().split("\n\n"))


def read_document(count: Callable[[str], int], least: int = LEAST_DOCUMENT_TOKENS) -> Document:
    """The reference topics of `TOPICS`, and further ones where this Python's are shorter than `least` tokens.

    Args:
        count: tokens of a text.
    """
    library = pydoc_data.topics.topics
    names = [name for name in TOPICS if name in library]
    rest = iter(sorted(set(library) - set(names)))
    while True:
        text = "\n\n".join(unwrap(library[name]) for name in names)
        tokens = count(text)
        if tokens >= least:
            return Document(tuple(names), text, tokens)
        names.append(next(rest))


def opening(document: Document) -> Messages:
    """What every conversation starts with: the document and the worked example."""
    return [
        {"role": "user", "content": f"{document.text}\n\n{EXAMPLE}"},
        {"role": "assistant", "content": EXAMPLE_ANSWER},
    ]


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One streamed answer.

    Attributes:
        tokens: text of each token. seconds: of the second best at each. margins: difference of their logits.
        ended: whether the model ended it.
        prompt_tokens, cached_tokens: of the prompt, and of it found in the prefix cache.
        first_token_s: seconds from the request to the first token. tokens_per_s: of those after the first, if any.
    """

    text: str
    tokens: list[str]
    seconds: list[str]
    margins: list[float]
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    tokens_per_s: float | None
    ended: bool


def ask(
    client: openai.OpenAI,
    messages: Messages,
    max_tokens: int,
    on_token: Callable[[int], None],
    *,
    begun: str = "",
    past_end: bool = False,
) -> Answer:
    """Stream one greedy answer; `on_token` gets the number of tokens so far.

    Args:
        begun: text that the answer begins with; only what follows is returned.
        past_end: go on behind tokens that end an answer, which then are tokens like any other.
    """
    tokens: list[str] = []
    seconds: list[str] = []
    margins: list[float] = []
    text, usage, reason, times = "", None, None, [time.monotonic()]
    stream: Any = client.chat.completions.create(
        model=MODEL,
        messages=[*messages, {"role": "assistant", "content": begun}] if begun else messages,
        temperature=0,
        max_tokens=max_tokens,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
        # SGLang streams no entry for a last token without text, which a special token is unless it is shown.
        extra_body={"continue_final_message": bool(begun), "ignore_eos": past_end, "skip_special_tokens": not past_end},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for entry in choice.logprobs.content if choice.logprobs else ():
                best, second = entry.top_logprobs
                tokens.append(entry.token)
                seconds.append(second.token)
                margins.append(best.logprob - second.logprob)
                times.append(time.monotonic())
                on_token(len(tokens))
    if usage is None or not tokens:
        raise ServerError("the answer had no tokens or no usage")
    details = usage.prompt_tokens_details
    return Answer(
        text,
        tokens,
        seconds,
        margins,
        usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        first_token_s=times[1] - times[0],
        tokens_per_s=(len(tokens) - 1) / (times[-1] - times[1]) if times[-1] > times[1] else None,
        ended=reason == "stop",
    )


def ends_of_answers(model: Path, tokenizer: Tokenizer) -> frozenset[str]:
    """Texts of the tokens that end an answer of this model.

    Raises:
        ModelError: the model's files name none.
    """
    for file in (model / "generation_config.json", model / "config.json"):
        named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.exists() else None
        if named is not None:
            return frozenset(tokenizer.id_to_token(token) for token in (named if isinstance(named, list) else [named]))
    raise ModelError(f"{model}: neither generation_config.json nor config.json names an eos_token_id")


def equal_share(answer: Answer, dense: Answer) -> float:
    """Share of positions at which both answers have the same token; the longer one counts."""
    same = sum(ours == theirs for ours, theirs in zip(answer.tokens, dense.tokens, strict=False))
    return same / max(len(answer.tokens), len(dense.tokens))


def first_difference(answer: Answer, dense: Answer) -> int | None:
    """Position of the first token that differs or that only one of them has; None when the answers are equal."""
    if answer.tokens == dense.tokens:
        return None
    pairs = zip(answer.tokens, dense.tokens, strict=False)
    shorter = min(len(answer.tokens), len(dense.tokens))
    return next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)


@dataclass(frozen=True)
class Choices:
    """An answer's tokens, `END` included, and what dense would choose at each position after the same tokens.

    `excused` says where another token than dense's is a close call. `dense`, `excused` and `margins` are shorter where a
    difference that is none ended the comparison.
    """

    answer: list[str]
    dense: list[str]
    excused: list[bool]
    margins: list[float]


def follow(answer: Answer, ends: Set[str], resume: Callable[[str, int], Answer]) -> Choices:
    """Dense's choices along `answer`.

    Behind a close call the two would continue different texts, so dense is asked again from where `answer` stands.

    Args:
        ends: texts of the tokens that end an answer.
        resume: dense's continuation of the answer that begins with a text, by so many tokens, ends among them.
    """
    choices = Choices(answer.tokens + [END] * answer.ended, [], [], [])
    while len(choices.dense) < len(choices.answer):
        at = len(choices.dense)
        more = resume("".join(answer.tokens[:at]), len(choices.answer) - at)
        for token, second, margin in zip(more.tokens, more.seconds, more.margins, strict=True):
            token, second = (END if text in ends else text for text in (token, second))
            wanted = choices.answer[len(choices.dense)]
            choices.dense.append(token)
            choices.margins.append(margin)
            choices.excused.append(margin <= CLOSE_CALL and wanted in (token, second))
            if token != wanted:
                break
        if choices.dense[-1] != choices.answer[len(choices.dense) - 1] and not choices.excused[-1]:
            break
    return choices


@dataclass(frozen=True)
class Verdict:
    """Whether an answer keeps to `RULE`, and why in one sentence."""

    passed: bool
    reason: str


def judge(choices: Choices, invalid_pages: int) -> Verdict:
    """Apply `RULE` to an answer and dense's choices along it; `invalid_pages` of the whole run."""
    if invalid_pages:
        return Verdict(False, f"{invalid_pages} times a page was met without a valid summary")
    length = len(choices.answer)
    pairs = enumerate(zip(choices.answer, choices.dense, strict=False))
    apart = {at: ours for at, (ours, dense) in pairs if ours != dense}
    for at, ours in apart.items():
        if (at < JUDGED_SHARE * length or ours == END) and not choices.excused[at]:
            margin = f"where dense's two best logits are {choices.margins[at]:.3f} apart"
            return Verdict(False, f"token {at + 1} of {length}, {ours!r}, is not the one that dense chooses, {margin}")
    if not apart:
        return Verdict(True, f"all {length} tokens are those that dense chooses")
    return Verdict(
        True, f"{len(apart)} of {length} tokens differ, close calls or in the last {1 - JUDGED_SHARE:.0%} of the answer"
    )


# --- the machine and its servers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What the servers run on: the device, what SGLang is told for it, and whether locks can decode in CUDA graphs there."""

    device: str
    dtype: str
    facts: dict[str, Any]
    graphs: bool = True

    @property
    def flags(self) -> list[str]:
        """Server arguments for this device; on a GPU SGLang finds the device itself."""
        return ["--device", "cpu", "--dtype", self.dtype] if self.device == "cpu" else ["--dtype", self.dtype]

    def sparse(self, budget_tokens: int) -> list[str]:
        """Server arguments that switch locks on."""
        flags = ["--attention-backend", "locks", "--locks-budget-tokens", str(budget_tokens)]
        return flags if self.graphs else [*flags, "--cuda-graph-backend-decode", "disabled"]


def look_at_machine() -> Machine:
    """A GPU if there is one."""
    import torch

    facts = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if torch.cuda.is_available():
        from .kernels.common.capability import COMPUTE_CAPABILITY

        graphs = torch.cuda.get_device_capability(0) >= COMPUTE_CAPABILITY
        return Machine("cuda", "bfloat16", {**facts, "gpu": torch.cuda.get_device_name(0)}, graphs)
    return Machine("cpu", "float32", facts)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def server_command(model: Path, machine: Machine, backend: Sequence[str]) -> list[str]:
    """Command of a server; small KV pool, since one conversation runs at a time."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *machine.flags]
    return [*command, "--max-total-tokens", "16384", "--enable-cache-report", *backend]


def server_state(url: str) -> dict[str, Any]:
    """What `locks` reports in `/server_info`: configuration and counters."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
        return dict(json.load(answer)["internal_states"][0]["locks"])


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PageCounts:
    """What one turn did, as differences of the server's counters.

    Attributes:
        decode_steps: steps that decoded. held, read: 16-token pages of the request and those read of them, mean of a step.
        built: pages summarised, one number a layer. reused: cached pages that the prompt started with.
        invalid: pages that a scan met without a valid summary.
    """

    decode_steps: int
    held: float
    read: float
    built: list[int]
    reused: int
    invalid: int


def page_counts(before: dict[str, Any], after: dict[str, Any]) -> PageCounts:
    """Differences between two snapshots of the counters."""

    def grown(name: str) -> int:
        return int(after[name] - before[name])

    steps = grown("sparse_rows")
    return PageCounts(
        decode_steps=grown("decode_steps"),
        held=grown("pages_held") / max(steps, 1),
        read=grown("pages_read") / max(steps, 1),
        built=[count - before["summaries_built"].get(layer, 0) for layer, count in after["summaries_built"].items()],
        reused=grown("summaries_reused"),
        invalid=grown("invalid_pages"),
    )


@dataclass
class Turn:
    """One question, with both backends' answers to the same prompt, and for the turn that is judged dense's choices along
    locks' answer. `name` is conversation.turn."""

    name: str
    question: str
    prompt: Messages = field(repr=False)
    answer: Answer
    pages: PageCounts
    dense: Answer | None = None
    choices: Choices | None = None


class Screen:
    """What a person sees. Bars appear on a terminal only; every other line goes to a file as well."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console = Console(highlight=False, width=140)

    def say(self, text: str, style: str = "") -> None:
        """Print one paragraph."""
        self.console.print(text, style=style, markup=False, soft_wrap=True)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Bars for steps whose length is unknown (moving) or counted in tokens."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            yield progress


@contextmanager
def _server(command: Sequence[str], log: Path, environment: dict[str, str], bars: Progress) -> Iterator[str]:
    """A server, with a bar that says what its start is doing."""
    task = bars.add_task("", total=None)
    with serving(command, log, environment, lambda phase: bars.update(task, description=f"starting: {phase}")) as url:
        bars.remove_task(task)
        yield url


def _watch(progress: Progress, name: str, max_tokens: int) -> tuple[Any, Callable[[int], None]]:
    """A bar for one answer: moving while the prompt is read, then counting tokens."""
    task = progress.add_task(f"{name}: reading the prompt", total=None)
    return task, lambda done: progress.update(task, description=f"{name}: answering", total=max_tokens, completed=done)


def hold_conversations(url: str, document: Document, turns: int, max_tokens: int, screen: Screen, bars: Progress) -> list[Turn]:
    """A chat of `turns` questions, then a second conversation over the same document."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=1800, max_retries=0)
    held: list[Turn] = []
    for conversation, questions in ((1, QUESTIONS[:turns]), (2, (SECOND_QUESTION,))):
        messages = opening(document)
        for number, question in enumerate(questions, 1):
            messages.append({"role": "user", "content": question})
            before = server_state(url)["counters"]
            name = f"{conversation}.{number}"
            task, on_token = _watch(bars, f"locks {name}", max_tokens)
            answer = ask(client, messages, max_tokens, on_token)
            bars.remove_task(task)
            pages = page_counts(before, server_state(url)["counters"])
            held.append(Turn(name, question, list(messages), answer, pages))
            messages.append({"role": "assistant", "content": answer.text})
            screen.say(f"  {name}  {question}")
            screen.say(f"       {answer.text.strip()}", "cyan")
    return held


def answer_densely(url: str, turns: Sequence[Turn], max_tokens: int, ends: Set[str], bars: Progress) -> None:
    """The dense server's answers to exactly the prompts of these turns, locks' earlier answers included.

    Along the first turn's answer, which is judged, also dense's choice at every position; `ends` end one.
    """
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=1800, max_retries=0)
    for turn in turns:
        task, on_token = _watch(bars, f"dense {turn.name}", max_tokens)
        turn.dense = ask(client, turn.prompt, max_tokens, on_token)
        bars.remove_task(task)
    judged = turns[0]
    judged.choices = follow(
        judged.answer,
        ends,
        lambda begun, tokens: ask(client, judged.prompt, tokens, lambda done: None, begun=begun, past_end=True),
    )


def table(turns: Sequence[Turn]) -> Table:
    """The comparison, one row a turn."""
    made = Table(title="locks and dense on the same prompts", title_style="bold", header_style="bold")
    made.add_column("turn")
    for heading in ("prompt\ntokens", "cached", "pages\nheld", "read\na step", "share\nread", "summaries\nbuilt", "reused"):
        made.add_column(heading, justify="right")
    for heading in ("first token\nlocks", "\ndense", "tokens/s\nlocks", "\ndense"):
        made.add_column(heading, justify="right", style="dim")
    made.add_column("tokens equal\nto dense", justify="right", style="bold green")
    for turn in turns:
        assert turn.dense is not None
        pages, least, most = turn.pages, min(turn.pages.built, default=0), max(turn.pages.built, default=0)
        made.add_row(
            turn.name,
            f"{turn.answer.prompt_tokens:,}",
            f"{turn.answer.cached_tokens:,}",
            f"{pages.held:.0f}",
            f"{pages.read:.0f}",
            f"{pages.read / pages.held:.1%}" if pages.held else "",
            f"{most}" if least == most else f"{least}-{most}",
            f"{pages.reused}",
            f"{turn.answer.first_token_s:.1f} s",
            f"{turn.dense.first_token_s:.1f} s",
            _rate(turn.answer),
            _rate(turn.dense),
            f"{equal_share(turn.answer, turn.dense):.0%} of {max(len(turn.answer.tokens), len(turn.dense.tokens))}",
        )
    return made


def _rate(answer: Answer) -> str:
    return "" if answer.tokens_per_s is None else f"{answer.tokens_per_s:.1f}"


def report(turns: Sequence[Turn], verdict: Verdict) -> dict[str, Any]:
    """The part of `demo.json` that the run itself decides."""

    def row(turn: Turn) -> dict[str, Any]:
        assert turn.dense is not None
        return {
            "turn": turn.name,
            "question": turn.question,
            "prompt_tokens": turn.answer.prompt_tokens,
            "cached_tokens": turn.answer.cached_tokens,
            "pages": dataclasses.asdict(turn.pages),
            "locks": dataclasses.asdict(turn.answer),
            "dense": dataclasses.asdict(turn.dense),
            "equal_share": equal_share(turn.answer, turn.dense),
            "first_difference": first_difference(turn.answer, turn.dense),
            "choices": dataclasses.asdict(turn.choices) if turn.choices else None,
        }

    return {"turns": [row(turn) for turn in turns], "rule": RULE, **dataclasses.asdict(verdict)}


def run(options: argparse.Namespace, screen: Screen) -> int:
    """Serve, chat, compare, print and write. Returns 0, or 1 when `RULE` is broken."""
    started = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    LocksConfig(budget_tokens=options.budget_tokens)  # a bad value is told now, not by a server half a minute later
    model = checked(options.model) if options.model else fetch(MODEL, options.output / "models")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ends = ends_of_answers(model, tokenizer)
    document = read_document(lambda text: len(tokenizer.encode(text).ids))
    machine = look_at_machine()
    place = machine.facts.get("gpu") or f"{machine.facts['cores']} cores of {machine.facts['processor']}, no GPU"
    screen.say(f"model     {model}\nmachine   {place}; {machine.dtype}")
    screen.say(f"document  {document.tokens:,} tokens of Python's language reference: {', '.join(document.topics)}")
    screen.say(f"example   each conversation opens with one answered question: {EXAMPLE}\n")

    backend = ["--attention-backend", "torch_native"] if machine.device == "cpu" else []
    commands = {
        "locks": server_command(model, machine, machine.sparse(options.budget_tokens)),
        "dense": server_command(model, machine, backend),
    }
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as scratch, screen.progress() as bars:
        dense_variables = dense_environment(Path(scratch)) if machine.device == "cpu" else dict(os.environ)
        screen.say(f"$ {_shown(commands['locks'])}", "bold")
        with _server(commands["locks"], options.output / "demo-locks.log", environment, bars) as url:
            turns = hold_conversations(url, document, options.turns, options.max_tokens, screen, bars)
            config = server_state(url)["config"]
        screen.say(f"\n$ {_shown(commands['dense'])}", "bold")
        if machine.device == "cpu":
            screen.say(
                "(with an empty package named vllm on PYTHONPATH: SGLang imports one for this backend and uses nothing of it)"
            )
        dense_variables["HF_HUB_OFFLINE"] = "1"
        with _server(commands["dense"], options.output / "demo-dense.log", dense_variables, bars) as url:
            answer_densely(url, turns, options.max_tokens, ends, bars)
    assert turns[0].choices is not None
    verdict = judge(turns[0].choices, sum(turn.pages.invalid for turn in turns))

    facts = {
        "versions": {name: version(name) for name in ("sglang", "torch", "transformers", "openai")}
        | {"locks-sglang": __version__, "python": platform.python_version()},
        "machine": machine.facts | {"device": machine.device, "dtype": machine.dtype},
        "config": config,
        "commands": commands,
        "document": {
            "topics": document.topics,
            "tokens": document.tokens,
            "sha256": hashlib.sha256(document.text.encode()).hexdigest(),
        },
        "elapsed_s": round(time.monotonic() - started, 1),
    }
    (options.output / "demo.json").write_text(json.dumps(facts | report(turns, verdict), indent=1) + "\n")
    screen.console.print()
    screen.console.print(table(turns))
    screen.say(_notes(turns, machine))
    screen.say(f"\nRule: {RULE}")
    screen.say(("PASSED: " if verdict.passed else "FAILED: ") + verdict.reason, "bold green" if verdict.passed else "bold red")
    screen.say(f"{facts['elapsed_s']:.0f} s; numbers and answers in {options.output / 'demo.json'}")
    return 0 if verdict.passed else 1


def _shown(command: Sequence[str]) -> str:
    return shlex.join(["python", *command[1:]])


def _notes(turns: Sequence[Turn], machine: Machine) -> str:
    """How to read the table."""
    built = ", ".join(str(max(turn.pages.built, default=0)) for turn in turns)
    notes = (
        "A page is 16 tokens; pages are counted per KV head and layer. A prompt's cached prefix brings its summaries with it,\n"
        f"so only pages behind it are summarised: {built}. Every turn's dense answer is to the same prompt, greedy as well."
    )
    if machine.device == "cpu":
        notes += "\nOn a CPU both backends are plain torch: these speeds say nothing about a GPU."
    return notes


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The demo's options."""
    parser = argparse.ArgumentParser(prog="locks-sglang demo", description="Serve a small model with locks and with dense.")
    parser.add_argument("--budget-tokens", type=int, default=512, help="tokens that each KV head reads a step (default 512)")
    parser.add_argument(
        "--turns", type=int, default=len(QUESTIONS), choices=range(1, len(QUESTIONS) + 1), help="of the first chat"
    )
    parser.add_argument("--max-tokens", type=int, default=48, help="longest answer, in tokens (default 48)")
    parser.add_argument("--model", type=Path, help="folder of a model to serve instead of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--output", type=Path, default=Path("build"), help="folder for logs, demo.json and model (default build)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        0; 1 when `RULE` is broken; 2 when the demo could not run; 130 when it was interrupted.
    """
    options, screen = parse(argv), Screen()
    try:
        with stopped_by_signals():
            return run(options, screen)
    except (ConfigError, ModelError, ServerError, openai.OpenAIError) as error:
        screen.say(f"error: {error}", "bold red")
        return 2
    except KeyboardInterrupt:
        screen.say("interrupted; the server is stopped")
        return 130
