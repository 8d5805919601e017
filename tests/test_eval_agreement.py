"""`locks-sglang eval agreement`: forced tokens, divergence and its statistics against small truths, and the command itself."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from locks_sglang.cli import main
from locks_sglang.evaluation.agreement import (
    Divergence,
    ForcedRow,
    Method,
    cell,
    format_result,
    prompts_of_text,
    rows_of_text,
)
from locks_sglang.evaluation.capture import CaptureError


def test_rows_are_the_end_of_the_text_in_parts() -> None:
    assert rows_of_text(range(10), 7, 3) == [
        ForcedRow([0, 1, 2, 3], [4, 5]),
        ForcedRow([0, 1, 2, 3, 4, 5], [6, 7]),
        ForcedRow([0, 1, 2, 3, 4, 5, 6, 7], [8, 9]),
    ]
    for positions, rows in ((2, 3), (10, 2)):
        with pytest.raises(CaptureError, match="of a text of 10 tokens"):
            rows_of_text(range(10), positions, rows)


def test_prompts_are_parts_of_the_text_that_all_begin_as_it_does() -> None:
    assert prompts_of_text(range(10), 3) == [[0, 1, 2], [0, 4, 5], [0, 7, 8]]
    with pytest.raises(CaptureError, match="do not make 6 prompts"):
        prompts_of_text(range(10), 6)


def test_methods_are_selectors_with_or_without_a_tail() -> None:
    assert Method("oracle", "qmu").name == "oracle/qmu"
    assert Method("locks", "off").settings(64) == {"budget_tokens": 64, "tail_correction": "off"}
    assert (Method("locks").name, Method("locks").settings(64)) == ("locks", {"budget_tokens": 64})


def test_divergence_is_that_of_dense_after_the_same_tokens() -> None:
    """Two rows that are decoded in different orders; steps that are no forced position are left out."""
    rows = [ForcedRow([1, 2, 3], [4, 5]), ForcedRow([1], [2, 3])]
    divergence, draw = Divergence(rows), np.random.default_rng(0)
    dense, sparse = draw.normal(0, 3, (2, 2, 2, 7))
    for logits, is_dense in ((dense, True), (sparse, False)):
        for step in (0, 1):
            tensor = torch.from_numpy(logits[::-1, step].copy()).float()
            divergence.add([1, 0], [2 + step, 4 + step], tensor, dense=is_dense)
        for length in (1, 4):  # the prefill's own token, and a step too many
            divergence.add([1], [length], torch.full((1, 7), 50.0), dense=is_dense)
    kl, same = divergence.taken()

    def shares(logits: np.ndarray) -> np.ndarray:
        return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    p, q = shares(dense), shares(sparse)
    assert kl == pytest.approx((p * np.log(p / q)).sum(-1).flatten(), rel=1e-5)
    assert same.tolist() == (p.argmax(-1) == q.argmax(-1)).flatten().tolist()
    with pytest.raises(CaptureError, match="4 of 4 forced positions were not decoded"):
        divergence.taken()


def test_equal_logits_do_not_diverge() -> None:
    divergence, logits = Divergence([ForcedRow([1], [2])]), torch.randn(1, 50)
    divergence.add([0], [2], logits, dense=True)
    divergence.add([0], [2], logits + 3.0, dense=False)
    kl, same = divergence.taken()
    assert abs(kl[0]) < 1e-6
    assert same.all()


def test_statistics_of_a_cell() -> None:
    kl = np.random.default_rng(1).exponential(0.01, 1000)
    same = np.arange(1000) % 10 > 0
    told = cell(kl, same, kl / 2, seed=3)
    assert told["kl"]["mean"] == kl.mean()
    assert (told["kl"]["max"], told["top1"]["share"]) == (kl.max(), 0.9)
    assert told["kl"]["by_quarter"] == pytest.approx(kl.reshape(4, 250).mean(1))
    # Of an exponential distribution the mean has a standard error of its mean over the root of n.
    low, high = told["kl"]["interval"]
    assert low < 0.01 < high
    assert high - low == pytest.approx(2 * 1.96 * kl.std() / 1000**0.5, rel=0.1)
    assert told["kl"]["p99_interval"][0] < told["kl"]["p99"] < told["kl"]["p99_interval"][1]
    # Paired: what is twice the oracle's at every position is so in every draw.
    assert told["kl"]["of_oracle"] == pytest.approx(2)
    assert told["kl"]["of_oracle_interval"] == pytest.approx([2, 2])
    assert "of_oracle" not in cell(kl, same, None, seed=3)["kl"]
    assert cell(kl, same, kl / 2, seed=3) == told != cell(kl, same, kl / 2, seed=4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budgets", "50"], "budget_tokens = 50 is not allowed"),
        (["--tokens", "100", "--positions", "200"], "of a text of 100 tokens"),
        (["--tokens", "100", "--answer", "5", "--rows", "60"], "100 tokens do not make 60 prompts"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, model_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "agreement", "--device", "cpu", "--model", model_path, *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("selector", ["orcale", "locks/of", "window/qmu", "locks,locks"])
def test_bad_selectors(selector: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "agreement", "--selectors", selector])
    assert "argument --selectors" in capsys.readouterr().err


@pytest.mark.server
@pytest.mark.parametrize("source", ["text", pytest.param("answers", marks=pytest.mark.one_version)])
def test_command(source: str, model_path: str, tmp_path: Path) -> None:
    """A budget that holds everything is dense but for rounding; a small one is not, and every position is decoded."""
    file = tmp_path / "agreement.json"
    command = [
        sys.executable,
        "-m",
        "locks_sglang",
        "eval",
        "agreement",
        "--model",
        model_path,
        "--device",
        "cpu",
        "--rows",
        "2",
    ]
    command += ["--budgets", "64,2048", "--selectors", "locks,oracle", "--tokens", "400", "--json", str(file)]
    command += ["--positions", "12"] if source == "text" else ["--answer", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(file.read_text())
    assert format_result(result) in done.stdout
    assert result["forced"]["positions"] == 12
    assert result["forced"]["longest_prompt"] == (394 if source == "text" else 200)
    assert result["dense_again"]["kl"]["max"] < 1e-6
    by_cell = {(entry["method"], entry["budget"]): entry for entry in result["cells"]}
    assert list(by_cell) == [("oracle", 64), ("locks", 64), ("oracle", 2048), ("locks", 2048)]
    for method in ("oracle", "locks"):
        assert by_cell[method, 2048]["kl"]["max"] < 1e-6
        assert by_cell[method, 2048]["top1"]["share"] == 1
        assert by_cell[method, 64]["kl"]["mean"] > 1e-4
