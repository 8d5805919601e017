"""Offline batch with `sgl.Engine` over one long document: python examples/offline_engine.py MODEL FILE [cuda|cpu]

The document is longer than the budget, so decode is sparse: a step reads fewer pages than the requests hold. The first question
is asked alone and leaves the document's pages and summaries in the cache; the batch of the others builds none for it again.
"""

import json
import sys
from pathlib import Path

QUESTIONS = ("What is this text about?", "Which numbers does it give?", "Whom is it written for?")
SAMPLING = {"temperature": 0, "max_new_tokens": 12}


def main(model: str, document: str, device: str) -> None:
    """Ask every question, and print the answers and what the backend counted."""
    import locks_sglang

    # sgl.Engine has no command line: settings come from LOCKS_* variables or from here, before it starts.
    locks_sglang.configure(budget_tokens=512, rank=4)

    import sglang as sgl

    engine = sgl.Engine(
        model_path=model,
        device=device,
        dtype="float32" if device == "cpu" else "auto",
        attention_backend="locks",
        max_total_tokens=8192,
        log_level="info",
    )
    try:
        prompts = [f"{document}\n\nQuestion: {question}\nAnswer:" for question in QUESTIONS]
        answers = [engine.generate(prompts[0], SAMPLING), *engine.generate(prompts[1:], SAMPLING)]
        state = engine.get_server_info()["internal_states"][0]["locks"]
        counters = state["counters"]
        for question, answer in zip(QUESTIONS, answers, strict=True):
            told = {name: answer["meta_info"][name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
            print(json.dumps({"question": question, "answer": answer["text"], **told}))
        share = f"{counters['pages_read'] / counters['pages_held']:.0%} of the pages that the requests held were read"
        print(json.dumps({"said": share, "config": state["config"], "counters": counters}))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).read_text(), sys.argv[3] if len(sys.argv) > 3 else "cuda")
