"""Offline generation with `sgl.Engine`: python examples/offline_engine.py MODEL [cuda|cpu]"""

import json
import sys


def main(model: str, device: str) -> None:
    """Generate from one prompt and print what the backend counted."""
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
        answer = engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 12})
        state = engine.get_server_info()["internal_states"][0]["locks"]
        print(json.dumps({"text": answer["text"], "config": state["config"], "counters": state["counters"]}))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cuda")
