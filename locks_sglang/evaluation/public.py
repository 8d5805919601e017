"""Public sets through a running server: with `lm-eval`, which fetches them, or from a local file of the same form.

Both ask the server as it is. Dense and locks are two runs, against two servers or against one that was restarted.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tqdm import tqdm

from .client import KEY, Completion, Prompt, PromptFormat, Server, gather
from .results import write_results

INSTALL = "pip install 'lm-eval[api,longbench,math]==0.4.13'"
REQUEST_S = 3600


class PublicError(ValueError):
    """A set that cannot be had, or a line that is not of its form."""


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
        group: under which it is reported. new_tokens: most tokens of an answer. points: of an answer, 0 to 100.
    """

    group: str
    prompt: Prompt
    new_tokens: int
    points: Callable[[str], float]


def field_of(line: Mapping[str, Any], place: str, *names: str) -> Any:
    """The value of the first of these fields that a line has.

    Raises:
        PublicError: it has none of them.
    """
    for name in names:
        if name in line:
            return line[name]
    raise PublicError(f"{place} has no field {' or '.join(names)}; it has {', '.join(line)}")


def read_items(file: Path, read: Callable[[Mapping[str, Any], str], Item], most: int | None) -> list[Item]:
    """The questions of a file of JSON lines.

    Args:
        read: a line's question; the line's place is for messages. most: of the first lines; None for all.

    Raises:
        PublicError: it cannot be read, is empty, or a line is not of the form.
    """
    items = []
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise PublicError(f"{file} cannot be read: {error}") from None
    for number, text in enumerate(lines[:most], 1):
        place = f"{file}, line {number}"
        try:
            line = json.loads(text)
        except ValueError as error:
            raise PublicError(f"{place} is no JSON: {error}") from None
        if not isinstance(line, dict):
            raise PublicError(f"{place} is no JSON object")
        items.append(read(line, place))
    if not items:
        raise PublicError(f"{file} has no lines")
    return items


def fitted(items: Sequence[Item], form: PromptFormat, context: int) -> tuple[list[list[int]], int]:
    """Token ids of every prompt, cut in the middle where prompt and answer would not fit the context.

    Returns:
        The prompts, and how many of them were cut.

    Raises:
        PublicError: an answer alone does not fit.
    """
    encoded = form.encode([item.prompt for item in items])
    cut = 0
    for i, item in enumerate(items):
        room, kept = (
            context - item.new_tokens,
            form.tokenizer(item.prompt.text, add_special_tokens=False, verbose=False)["input_ids"],
        )
        keep = len(kept)
        if room < 1:
            raise PublicError(f"answers of {item.new_tokens} tokens do not fit the server's context of {context}")
        while len(encoded[i]) > room:
            # What stands around the text is not cut; joined halves may have a token more than their parts.
            keep -= len(encoded[i]) - room
            if keep < 2:
                raise PublicError(f"no part of a prompt fits the server's context of {context} tokens")
            text = form.tokenizer.decode(kept[: keep // 2]) + form.tokenizer.decode(kept[len(kept) - keep // 2 :])
            (encoded[i],) = form.encode([replace(item.prompt, text=text)])
        cut += keep < len(kept)
    return encoded, cut


def run_file(given: argparse.Namespace, items: Sequence[Item]) -> int:
    """Ask the questions of a file, print means by group, write the results.

    Returns:
        0.

    Raises:
        ClientError: the server cannot be asked. PublicError: see `fitted`.
    """
    began = time.monotonic()
    server = Server(given.url)
    form = PromptFormat(server.tokenizer(given.tokenizer), given.thinking)
    prompts, cut = fitted(items, form, server.context)
    identity = server.identity() | {"format": form.identity() | {"thinking": given.thinking}}
    with tqdm(total=len(items), unit="answer", disable=None) as bar:
        answers = gather(server, prompts, [item.new_tokens for item in items], given.concurrency, bar.update)
    points = [item.points(answer.text) for item, answer in zip(items, answers, strict=True)]
    by_group = summary(items, answers, points)
    record = {
        "kind": given.evaluation,
        **identity,
        "command": given.command,
        "file": given.file.name,
        "seconds": round(time.monotonic() - began, 1),
        "prompts_cut": cut,
        "groups": by_group,
        "points": points,
        "cut_off": [answer.truncated for answer in answers],
    }
    print(f"{given.file.name}: {identity['model']['name']}, {len(items)} questions, {cut} prompts cut in the middle")
    width = max(map(len, by_group))
    for group, told in by_group.items():
        spread = "" if told["standard_error"] is None else f" +- {told['standard_error']:.1f}"
        print(f"{group:{width}}  {told['mean']:.1f}{spread}, {told['answered']} answers, {told['truncated']} of them cut off")
    write_results(given.json, record)
    return 0


def summary(items: Sequence[Item], answers: Sequence[Completion], points: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Mean points, their standard error (None of a single answer), and answers that were cut off, by group."""
    found = {}
    for group in dict.fromkeys(item.group for item in items):
        at = [i for i, item in enumerate(items) if item.group == group]
        of_group = [points[i] for i in at]
        found[group] = {
            "answered": len(at),
            "mean": fmean(of_group),
            "standard_error": stdev(of_group) / math.sqrt(len(at)) if len(at) > 1 else None,
            "truncated": sum(answers[i].truncated for i in at),
        }
    return found


# --- lm-eval ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Harness:
    """One run of `lm-eval`: its tasks, in the chat format or as bare text."""

    tasks: Sequence[str]
    chat: bool


def lm_eval_command(given: argparse.Namespace, run: Harness, server: Server, out: Path) -> list[str]:
    """The command of one run against a server."""
    path, kind = ("chat/completions", "local-chat-completions") if run.chat else ("completions", "local-completions")
    facts = {
        "model": server.model,
        "base_url": f"{server.url}/v1/{path}",
        "max_length": server.context,
        "num_concurrent": given.concurrency,
        "timeout": REQUEST_S,
        # Text, so that it is the server's own tokenizer and template that add a BOS, once.
        "tokenizer_backend": "none",
        "tokenized_requests": False,
    }
    words = [given.lm_eval, "--model", kind, "--model_args", ",".join(f"{name}={value}" for name, value in facts.items())]
    words += ["--tasks", ",".join(run.tasks), "--seed", str(given.seed), "--output_path", str(out), "--log_samples"]
    if run.chat:
        words += ["--apply_chat_template", "--gen_kwargs", json.dumps(_thinking(given))]
    if given.samples is not None:
        words += ["--limit", str(given.samples)]
    return words


def _thinking(given: argparse.Namespace) -> dict[str, Any]:
    switches = {"chat_template_kwargs": {"enable_thinking": given.thinking}, "repetition_penalty": 1.0}
    return switches if given.new_tokens is None else {**switches, "max_gen_toks": given.new_tokens}


def run_lm_eval(given: argparse.Namespace, runs: Sequence[Harness]) -> int:
    """Run `lm-eval` and gather what it wrote.

    Returns:
        0.

    Raises:
        ClientError: the server cannot be asked. PublicError: `lm-eval` is not there, or a run of it failed.
    """
    if shutil.which(given.lm_eval) is None:
        raise PublicError(
            f"the command {given.lm_eval} is not there. Install it, best into an environment of its own, and name it with "
            f"--lm-eval: {INSTALL}; or give a local file of the same form with --file"
        )
    began = time.monotonic()
    server = Server(given.url)
    identity = server.identity()
    results: dict[str, Any] = {}
    commands = []
    for run in runs:
        out = given.out / ("chat" if run.chat else "bare")
        command = lm_eval_command(given, run, server, out)
        commands.append(shlex.join(command))
        print(f"$ {commands[-1]}", flush=True)
        started = time.time()
        done = subprocess.run(command, env={**os.environ, "OPENAI_API_KEY": os.environ.get("OPENAI_API_KEY", KEY)})
        written = [file for file in out.rglob("results_*.json") if file.stat().st_mtime >= started]
        if done.returncode or not written:
            raise PublicError(
                f"{given.lm_eval} ended with {done.returncode} and {len(written)} files of results; its last lines say why. "
                "Where the data set could not be fetched: fetch it where there is a network (HF_HOME is the cache that lm-eval "
                "reads), or give a local file of the same form with --file"
            )
        told = json.loads(max(written, key=lambda file: file.stat().st_mtime).read_text(encoding="utf-8"))
        results["chat" if run.chat else "bare"] = {
            key: told.get(key) for key in ("results", "groups", "versions", "n-samples", "lm_eval_version", "git_hash")
        }
    record = {
        "kind": given.evaluation,
        **identity,
        "command": given.command,
        "lm_eval": commands,
        "seconds": round(time.monotonic() - began, 1),
        "seed": given.seed,
        "results": results,
    }
    write_results(given.json, record)
    return 0
