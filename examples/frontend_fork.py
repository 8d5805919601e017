"""Fork and join in SGLang's frontend language, over one long document: python examples/frontend_fork.py URL FILE

Before it forks, SGLang has the server read the document once. Every branch then starts with the document's pages in its
prefix, and their summaries with them: a branch builds summaries of its own tokens alone. One line of JSON a step.
"""

import json
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import sglang as sgl

QUESTIONS = ("What is this text about?", "Which numbers does it give?", "Whom is it written for?")
ANSWER = {"max_tokens": 16, "temperature": 0}


def counters(url: str) -> dict[str, Any]:
    """What the backend has counted since the server's start."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
        return dict(json.load(answer)["internal_states"][0]["locks"]["counters"])


@sgl.function
def review(s: Any, url: str, document: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Answer every question in a branch of its own, then draw one conclusion from all answers.

    Returns:
        The counters after each step, and what SGLang tells about the requests of a step.
    """
    counted, requests = {"start": counters(url)}, {}
    s += document
    s.sync()  # the document must be in the program's text by now: fork() has the server read what it finds there
    branches = s.fork(len(QUESTIONS))
    counted["document"] = counters(url)
    for branch, question in zip(branches, QUESTIONS, strict=True):
        branch += f"\n\nQuestion: {question}\nAnswer:"
        branch += sgl.gen("answer", **ANSWER)
    branches.join()
    requests["branches"] = [branch.get_meta_info("answer") for branch in branches]
    counted["branches"] = counters(url)
    for question, branch in zip(QUESTIONS, branches, strict=True):
        s += f"\n\nQuestion: {question}\nAnswer:{branch['answer']}"
    s += "\n\nIn one sentence:"
    s += sgl.gen("conclusion", **ANSWER)
    requests["join"] = [s.get_meta_info("conclusion")]
    counted["join"] = counters(url)
    return counted, requests


def main(url: str, document: str) -> None:
    """Run the program, and print what each step took from the cache and what it summarised."""
    counted, requests = review.run(url=url, document=document, backend=sgl.RuntimeEndpoint(url)).ret_value
    for (_, before), (step, after) in pairwise(counted.items()):
        line = {
            "step": step,
            "decode_rows": after["sparse_rows"] - before["sparse_rows"],
            "summaries_reused": after["summaries_reused"] - before["summaries_reused"],
            "summaries_built": after["summaries_built"]["0"] - before["summaries_built"].get("0", 0),
            "requests": [
                {name: told[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
                for told in requests.get(step, [])
            ],
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).read_text())
