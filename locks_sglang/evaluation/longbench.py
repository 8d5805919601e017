"""LongBench-v1 (Bai et al., 2023, arXiv 2308.14508) from a local file, and the tasks of `lm-eval` for the public set.

Per definition: the form of a line, most tokens of an answer and the metric of every dataset, first lines as answers to few-shot
prompts, the best of several right answers, prompts that are too long cut in their middle, and bare text instead of the
chat format for few-shot and code datasets. Ours is the wording of the prompts, so scores from a local file compare settings
with each other; for figures that are compared with published ones there is `lm-eval`, which has the published wording.

Not scored here: the Chinese datasets, which need a word segmenter, and ROUGE-L where the package `rouge` is not installed.
"""

import argparse
import difflib
import importlib.util
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .client import Prompt
from .public import Harness, Item, PublicError, field_of, read_items, run_file, run_lm_eval

CHAT_TASKS = ("longbench_single", "longbench_multi", "longbench_summarization", "longbench_synthetic")
BARE_TASKS = ("longbench_fewshot", "longbench_code")
"""Groups of `lm-eval`, which its authors run with and without the chat format."""

Metric = Callable[[str, str, Sequence[str]], float]
"""Score (0 to 1) of an answer against one right answer; the third argument are the classes of the dataset."""


def _words(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def qa_f1(answer: str, right: str, classes: Sequence[str]) -> float:
    """F1 of the words."""
    given, wanted = _words(answer), _words(right)
    common = sum((Counter(given) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_l(answer: str, right: str, classes: Sequence[str]) -> float:
    """ROUGE-L of the package `rouge`; 0 for an answer without words."""
    from rouge import Rouge

    if not answer.strip(" .\n"):
        return 0.0
    return float(Rouge().get_scores([answer], [right], avg=True)["rouge-l"]["f"])


def classification(answer: str, right: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the answer names, where the right one is among them.

    A name that is part of the right one does not count.
    """
    named = [name for name in classes if name in answer and not (name in right and name != right)]
    return 1 / len(named) if right in named else 0.0


def _share_of_numbers(answer: str, right: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def retrieval(answer: str, right: str, classes: Sequence[str]) -> float:
    """Share of the answer's numbers that are the number of the right paragraph."""
    found = re.search(r"\d+", right)
    return _share_of_numbers(answer, found[0]) if found else 0.0


def count(answer: str, right: str, classes: Sequence[str]) -> float:
    """Share of the answer's numbers that are the right one."""
    return _share_of_numbers(answer, right.strip())


def code_similarity(answer: str, right: str, classes: Sequence[str]) -> float:
    """Similarity of the answer's first line of code, by `difflib`, in whole hundredths."""
    lines = [line for line in answer.splitlines() if line.strip() and not re.search(r"`|#|//", line)]
    return round(100 * difflib.SequenceMatcher(None, lines[0] if lines else "", right).ratio()) / 100


@dataclass(frozen=True)
class Dataset:
    """One of LongBench's datasets.

    Attributes:
        new_tokens: most tokens of an answer. wording: the prompt; {context} and {input} are the line's own.
        chat: in the chat format. first_line: only the first line of an answer counts.
    """

    new_tokens: int
    metric: Metric
    wording: str
    chat: bool = True
    first_line: bool = False


_ONE = (
    "Text:\n{context}\n\nAnswer the question about this text as briefly as you can, without an explanation.\nQuestion: {input}"
)
_MANY = (
    "Passages:\n{context}\n\nAnswer the question from these passages. Give the answer alone, without other words.\n"
    "Question: {input}"
)
_SUMMARY = "Text:\n{context}\n\nWrite a one-page summary of this text."

DATASETS = {
    "narrativeqa": Dataset(128, qa_f1, _ONE),
    "qasper": Dataset(128, qa_f1, _ONE),
    "multifieldqa_en": Dataset(64, qa_f1, _ONE),
    "hotpotqa": Dataset(32, qa_f1, _MANY),
    "2wikimqa": Dataset(32, qa_f1, _MANY),
    "musique": Dataset(32, qa_f1, _MANY),
    "gov_report": Dataset(512, rouge_l, _SUMMARY),
    "qmsum": Dataset(
        512, rouge_l, "Minutes of a meeting:\n{context}\n\nAnswer the question from these minutes in a few sentences.\n{input}"
    ),
    "multi_news": Dataset(512, rouge_l, _SUMMARY),
    "trec": Dataset(64, classification, "Name the type of the last question.\n\n{context}\n{input}", False, True),
    "triviaqa": Dataset(32, qa_f1, "Answer the last question from its passage.\n\n{context}\n{input}", False, True),
    "samsum": Dataset(128, rouge_l, "Summarise the last dialogue in a few short sentences.\n\n{context}\n{input}", False, True),
    "passage_count": Dataset(
        32,
        count,
        "Some of these paragraphs stand here more than once.\n\n{context}\n\nHow many different ones are there? Answer with "
        "the number alone.",
    ),
    "passage_retrieval_en": Dataset(
        32,
        retrieval,
        "{context}\n\nThis is a summary of one of the paragraphs above:\n{input}\n\nWhich one? Answer like this: Paragraph 1",
    ),
    "lcc": Dataset(64, code_similarity, "Complete the next line of this code.\n{context}", False),
    "repobench-p": Dataset(64, code_similarity, "Complete the next line of this code.\n{context}{input}", False),
}


def read_item(line: Mapping[str, Any], place: str) -> Item:
    """A line of LongBench's form: `input`, `context`, `answers`, `dataset`, and `all_classes` where there are classes.

    Raises:
        PublicError: a field is missing, or the dataset is not scored here.
    """
    name = str(field_of(line, place, "dataset")).removesuffix("_e")
    dataset = DATASETS.get(name)
    if dataset is None:
        raise PublicError(f"{place}: the dataset {name!r} is not scored here; {', '.join(DATASETS)} are")
    if dataset.metric is rouge_l and importlib.util.find_spec("rouge") is None:
        raise PublicError(f"{place}: {name} is scored with ROUGE-L, which needs the package rouge: pip install rouge")
    context, question = str(field_of(line, place, "context")), str(field_of(line, place, "input"))
    answers = [str(answer) for answer in field_of(line, place, "answers")]
    classes = [str(one) for one in line.get("all_classes") or ()]
    # By replacement, not by `format`: contexts are full of braces.
    text = dataset.wording.replace("{input}", question).replace("{context}", context)

    def points(answer: str) -> float:
        told = answer.lstrip("\n").split("\n")[0] if dataset.first_line else answer
        return 100 * max(dataset.metric(told, right, classes) for right in answers)

    return Item(name, Prompt(text, chat=dataset.chat), dataset.new_tokens, points)


def run(given: argparse.Namespace) -> int:
    """`locks-sglang eval longbench`: from a file, or by `lm-eval`. Options as `cli` parses them.

    Raises:
        PublicError, ClientError: see `run_file` and `run_lm_eval`.
    """
    if given.file is None:
        return run_lm_eval(given, [Harness(CHAT_TASKS, chat=True), Harness(BARE_TASKS, chat=False)])
    items = read_items(given.file, read_item, given.samples)
    if given.new_tokens is not None:
        items = [replace(item, new_tokens=given.new_tokens) for item in items]
    return run_file(given, items)
