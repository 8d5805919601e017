"""`locks-sglang eval map`: counting of what layers choose, and the command on the real model."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from locks_sglang.cli import main
from locks_sglang.evaluation.attention_map import AttentionMap, ReadCounts, counted, prompt_of
from locks_sglang.evaluation.serving import ServedText


class Words:
    """A tokenizer whose tokens are characters, with or without a chat format."""

    def __init__(self, template: str | None) -> None:
        self.chat_template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([0] if add_special_tokens else []), *map(ord, text)]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) if i else "^" * (not skip_special_tokens) for i in ids)

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        return f"<{messages[0]['content']}>"


def served(template: str | None) -> ServedText:
    return ServedText("model", "cpu", Words(template), [0, *map(ord, "abc")], "name", "what it is", 0)


def test_prompt_is_the_text_alone_or_with_a_question() -> None:
    assert prompt_of(served("chat"), "") == [0, *map(ord, "abc")]
    assert prompt_of(served("chat"), "d?") == list(map(ord, "<abc\n\nd?>"))
    assert prompt_of(served(None), "d?") == [0, *map(ord, "abc\n\nd?")]


def test_choices_of_every_layer_are_counted() -> None:
    counts = ReadCounts(range(2, 4), heads=2, pages=5, device=torch.device("cpu"))
    steps = {2: [[0, 3, 4], [0, 1, -1]], 3: [[0, 2, 4], [2, 3, 4]]}

    class Backend:
        def _step(self, q: Any, layer: Any, plan: Any) -> Any:
            return SimpleNamespace(pages=torch.tensor([steps[layer.layer_id]], dtype=torch.int32))

    backend: Any = Backend()
    with counted(backend, counts):
        for layer_id in (2, 3, 2, 3):
            backend._step(None, SimpleNamespace(layer_id=layer_id), None)
    backend._step(None, SimpleNamespace(layer_id=2), None)
    assert counts.steps == 2
    assert counts.reads[..., :5].tolist() == [[[2, 0, 0, 2, 2], [2, 2, 0, 0, 0]], [[2, 0, 2, 0, 2], [0, 0, 2, 2, 2]]]


def test_pages_of_the_answer_are_held_for_fewer_steps() -> None:
    """30 tokens of prompt; steps see 31, 32, 33 and 34 tokens, the third page from 33 on."""
    made = AttentionMap(list(map(ord, "p" * 30)), list(map(ord, "abcde")), 4, torch.zeros(1, 1, 3))
    assert made.held == [4, 4, 2]
    assert made.texts(Words(None)) == ["p" * 16, "p" * 14 + "ab", "cd"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--new-tokens", "1"], "must be a whole number from 2 to 4096, got '1'"),
        (["--budget", "much"], "invalid int value: 'much'"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", "map", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_budget_that_the_product_refuses_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "map", "--budget", "100"]) == 2
    assert "budget_tokens = 100 is not allowed" in capsys.readouterr().err


@pytest.mark.server
@pytest.mark.one_version
def test_map_of_a_real_request(model_path: str, tmp_path: Path) -> None:
    """A question about 700 tokens, 8 pages a step: every KV head reads the budget in every step, the first and the newest page
    always, and what is between not evenly. Nothing of the text is printed."""
    out = tmp_path / "map.json"
    command = [sys.executable, "-m", "locks_sglang", "eval", "map", "--model", model_path, "--device", "cpu", "--tokens", "700"]
    command += ["--question", "What is an assert statement?", "--new-tokens", "24", "--budget", "128", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    reads, steps, held = torch.tensor(result["reads"]), result["steps"], result["held"]
    assert list(reads.shape) == [result["model"]["layers"], result["kv_heads"], len(result["pages"])]
    assert 1 <= steps <= 23
    assert set(reads.sum(-1).flatten().tolist()) == {8 * steps}
    assert set(reads[..., 0].flatten().tolist()) == {steps}
    assert (reads <= torch.tensor(held)).all()
    newest = [page for page in range(len(held)) if held[page] < steps]
    assert all((reads[..., page] >= min(16, held[page])).all() for page in newest)
    assert 0 < int((reads[..., 1:-2] == 0).sum()) < reads[..., 1:-2].numel()
    assert "assert" in "".join(result["pages"])
    assert result["question"] in "".join(result["pages"])
    assert "assert" not in done.stdout + done.stderr
    assert result["settings"]["budget_tokens"] == 128
    assert result["command"].startswith("locks-sglang eval map --model")
