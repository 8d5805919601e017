"""A chat of several turns over one long document, with the official OpenAI client: python examples/openai_chat.py URL FILE

Two conversations open with the same document: the second question, and the second conversation, find its pages and their
summaries in the cache. How much of a prompt was cached a server tells with `--enable-cache-report`. One line of JSON a turn.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import openai

CONVERSATIONS = (
    ("What is this text about?", "Explain one of its terms."),
    ("Which numbers does this text give?",),
)


def server_info(url: str) -> dict[str, Any]:
    """Arguments and state of the server."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
        return dict(json.load(answer))


def counters(url: str) -> dict[str, Any]:
    """What the backend has counted since the server's start."""
    return dict(server_info(url)["internal_states"][0]["locks"]["counters"])


def main(url: str, document: str) -> None:
    """Ask every question of every conversation, and print what was cached, read and summarised for it."""
    # With the flag, older releases leave the number out where it is 0.
    without = 0 if server_info(url)["enable_cache_report"] else "unknown: the server runs without --enable-cache-report"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
    for conversation, questions in enumerate(CONVERSATIONS, 1):
        messages: list[Any] = [{"role": "system", "content": f"Answer questions about this text:\n\n{document}"}]
        for turn, question in enumerate(questions, 1):
            messages.append({"role": "user", "content": question})
            before = counters(url)
            answer = client.chat.completions.create(model="default", messages=messages, temperature=0, max_tokens=16)
            after = counters(url)
            text, usage = answer.choices[0].message.content or "", answer.usage
            messages.append({"role": "assistant", "content": text})
            assert usage is not None
            details = usage.prompt_tokens_details
            print(
                json.dumps(
                    {
                        "turn": f"{conversation}.{turn}",
                        "answer": text,
                        "prompt_tokens": usage.prompt_tokens,
                        "cached_tokens": details.cached_tokens if details else without,
                        "decode_steps": after["decode_steps"] - before["decode_steps"],
                        "pages_held": after["pages_held"] - before["pages_held"],
                        "pages_read": after["pages_read"] - before["pages_read"],
                        "summaries_reused": after["summaries_reused"] - before["summaries_reused"],
                        "summaries_built": after["summaries_built"]["0"] - before["summaries_built"].get("0", 0),
                    }
                )
            )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).read_text())
