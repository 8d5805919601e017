"""`locks-sglang bench decode`: its arguments, shapes, synthetic keys and arithmetic, and one run of it on CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from starts import clean_environment, model_folder

from locks_sglang.benchmarks import decode
from locks_sglang.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt2"], "invalid choice: 'gpt2'"),
        (["--contexts", "4097"], "must be a multiple of 16 tokens, got '4097'"),
        (["--contexts", "8388608"], "must be a whole number from 16 to 4194304"),
        (["--batches", "0"], "must be a whole number from 1 to 256, got '0'"),
        (["--backends", "locks", "vllm"], "invalid choice: 'vllm'"),
        (["--backends", "locks", "locks"], "--backends names one twice"),
        (["--steps", "50"], "--steps must be 200 or more, got 50"),
        (["--budget", "100"], "--budget must be a multiple of 16 tokens, got 100"),
        (["--rank", "3"], "invalid choice: 3"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "decode", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "decode", "--out", str(tmp_path / "decode.jsonl")]) == 2
    assert capsys.readouterr().err.strip().count("\n") == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "shape", "token_bytes"),
    [
        ("glm4-9b-1m", (40, 4, 8, 128), 81920),
        ("llama3.1-8b", (32, 8, 4, 128), 131072),
        ("qwen3-4b", (36, 8, 4, 128), 147456),
        ("qwen3-30b-a3b", (48, 4, 8, 128), 98304),
    ],
)
def test_shapes_are_the_published_ones(model: str, shape: tuple[int, ...], token_bytes: int) -> None:
    """As SGLang reads the files, too."""
    from sglang.srt.configs.model_config import ModelConfig

    assert model in decode.models()
    found = decode.shape_of(decode.MODELS / model)
    assert found == shape
    assert found.cache_bytes(1) == token_bytes
    read = ModelConfig(str(decode.MODELS / model))
    heads = read.get_num_kv_heads(1)
    assert (read.num_hidden_layers, heads, read.num_attention_heads // heads, read.head_dim) == shape


def test_keys_have_the_spectrum_of_real_ones() -> None:
    """Rank 8 holds most of a page's spread but not all, the outlier channels are constant, and pages far apart differ."""
    pages = torch.tensor([1, 2, 3, 40_000, 40_001])
    keys = decode.synthetic_keys(pages, 4, 128, 7, torch.Generator().manual_seed(0))
    assert keys.shape == (5, 16, 4, 128)
    spread = keys - keys.mean(1, keepdim=True)
    energy = torch.linalg.svdvals(spread.transpose(1, 2)).square()
    share = energy[..., :8].sum(-1) / energy.sum(-1)
    assert 0.90 < float(share.min()) <= float(share.max()) < 0.99
    assert 0.8 < float(spread.var()) < 1.0
    mean = keys.mean((0, 1))
    assert float(mean.abs().topk(decode.OUTLIER_CHANNELS, dim=1).values.min()) > 4 * float(spread.std())
    of_pages = keys.mean(1)
    assert float((of_pages[0] - of_pages[1]).norm()) < float((of_pages[0] - of_pages[3]).norm())


def test_pool_has_room_for_what_is_said_to_fit() -> None:
    assert decode.tokens_needed(4096, 1, 200) == 4352
    assert decode.tokens_needed(1048576, 2, 200) == 2 * 1048832
    for tokens, batch in ((4352, 1), (100_000, 3), (1_048_832, 1), (1_500_000, 4)):
        largest = decode.largest_context(tokens, batch, 200)
        assert decode.tokens_needed(largest, batch, 200) <= tokens
        assert decode.tokens_needed(largest + 16, batch, 200) > tokens
    assert decode.largest_context(200, 1, 200) == 0


def test_summary_takes_the_fastest_dense_backend() -> None:
    def row(backend: str, milliseconds: float, context: int = 4096) -> dict[str, object]:
        return {"context": context, "batch": 1, "backend": backend, "token_ms": {"p50": milliseconds}}

    rows = [row("fa3", 9.0), row("locks", 6.0), row("flashinfer", 8.0), row("none", 4.0), row("locks", 7.0, 16384)]
    assert decode.summary(rows) == [
        "context 4096 batch 1: dense 8.000 (flashinfer) locks 6.000 none 4.000 ratio 1.333 of attention saved 50.0%",
        "context 16384 batch 1: locks 7.000",
    ]
    assert decode.percentiles(range(1, 102)) == {"p50": 51, "p10": 11, "p90": 91, "p99": 100, "max": 101}


def test_measures_on_cpu(tmp_path: Path) -> None:
    """What runs on a GPU, without graphs: slots taken, cache filled and summarised, steps counted exactly, rows written; the
    smaller size is dense at first."""
    model, out = model_folder(tmp_path / "tiny", max_position_embeddings=512), tmp_path / "out.jsonl"
    run = {"model": model, "backend": "locks", "contexts": [512, 1024], "batches": [2], "steps": 20, "budget": 512, "rank": 8}
    run |= {"out": str(out), "command": "test", "device": "cpu", "dtype": "float32", "min_context": 520}
    command = [sys.executable, "-m", "locks_sglang.benchmarks.decode", json.dumps(run)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["context"], row["batch"], row["backend"]) for row in rows] == [(512, 2, "locks"), (1024, 2, "locks")]
    assert [row["attend"] for row in rows] == ["dense variant, then reference", "reference"]
    for row, short in zip(rows, (7, 0), strict=True):
        assert row["counted"]["dense_rows"] == ({"short": 2 * 2 * short} if short else {})
        assert row["counted"]["sparse_rows"] == 2 * 2 * (decode.WARM_UP + 20 - short)
        assert row["counted"]["pages_read"] == 32 * row["counted"]["sparse_rows"]
        assert row["counted"]["invalid_pages"] == 0
        assert 0 < row["token_ms"]["p10"] <= row["token_ms"]["p50"] <= row["token_ms"]["p99"]
        assert row["memory"]["cache"] > row["memory"]["summaries"] > 0
        assert row["shape"] == {"layers": 2, "heads": 2, "group": 2, "dim": 64}
