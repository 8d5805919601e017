"""MATH-500 and AIME from a local file, and the tasks of `lm-eval` for the public sets.

An answer is what stands in its last `\\boxed{...}`. It is right where it equals the given one after `normalised`, which knows
spellings and no algebra: "1/2" and "0.5" differ. So scores from a local file are a lower bound, and compare settings with
each other; `lm-eval` compares expressions by their value.
"""

import argparse
import re
from collections.abc import Mapping
from typing import Any

from .client import Prompt
from .public import Harness, Item, field_of, read_items, run_file, run_lm_eval

TASKS = ("minerva_math500", "aime24", "aime25")
"""Of `lm-eval`."""
ASK = "Solve the problem step by step, and put the final answer into \\boxed{}.\n\n"
BOX = re.compile(r"\\f?boxed\s*\{")


def boxed(text: str) -> str | None:
    """What stands in the last complete box of a text; None where there is none."""
    for opening in reversed(list(BOX.finditer(text))):
        depth = 1
        for at in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[opening.end() : at]
    return None


def normalised(answer: str) -> str:
    """One spelling for what differs in nothing but its LaTeX: spaces, sizes of brackets and fractions, units, thousands."""
    text = answer.strip().rstrip(".").replace("$", "")
    text = re.sub(r"\\(left|right|displaystyle|!|,|;|:| |quad)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<=[\d}])\s*\\(?:text|mbox|mathrm)\{[^{}]*\}\s*$", "", text)
    text = re.sub(r"\\(?:text|mbox|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\^\{?\\circ\}?|\\?%", "", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"^[A-Za-z]\s*=\s*", "", re.sub(r"\s+", " ", text).strip())
    text = text.replace(" ", "")
    return str(int(text)) if re.fullmatch(r"-?\d+", text) else text


def read_item(line: Mapping[str, Any], place: str, new_tokens: int) -> Item:
    """A line of MATH-500 (`problem`, `answer`, `subject`) or AIME (`Problem`, `Answer`).

    Raises:
        PublicError: a field is missing.
    """
    problem, right = field_of(line, place, "problem", "Problem"), str(field_of(line, place, "answer", "Answer"))

    def points(answer: str) -> float:
        found = boxed(answer)
        return 100.0 * (found is not None and normalised(found) == normalised(right))

    return Item(str(line.get("subject", "all")), Prompt(f"{ASK}{problem}"), new_tokens, points)


def run(given: argparse.Namespace) -> int:
    """`locks-sglang eval math`: from a file, or by `lm-eval`. Options as `cli` parses them.

    Raises:
        PublicError, ClientError: see `run_file` and `run_lm_eval`.
    """
    if given.file is None:
        return run_lm_eval(given, [Harness(TASKS, chat=True)])
    return run_file(given, read_items(given.file, lambda line, place: read_item(line, place, given.new_tokens), given.samples))
