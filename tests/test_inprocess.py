"""The backend inside a real SGLang scheduler with the real model: truth against dense, sparsity, reuse, page life cycle."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scenarios
from safetensors.torch import load_file, save_file
from worker import Worker

pytestmark = pytest.mark.server

BUDGET = {"LOCKS_BUDGET_TOKENS": "512"}
SMALL_POOL: dict[str, Any] = {"attention_backend": "locks", "max_total_tokens": 5120, "chunked_prefill_size": 512}


@pytest.fixture(scope="module")
def sparse(model_path: str) -> Iterator[Worker]:
    """Budget 512, chunks of 512 tokens, mixed batches, a pool of 5,120 tokens."""
    with Worker(model_path, BUDGET, **SMALL_POOL, enable_mixed_chunk=True) as worker:
        yield worker


def test_sparse_reads_only_selected(sparse: Worker) -> None:
    counts = sparse.call(scenarios.sparse_reads_only_selected)
    assert counts["share"] < 0.15, counts


def test_reuse_is_exact(sparse: Worker) -> None:
    sparse.call(scenarios.reuse_is_exact)


def test_split_keeps_summaries(sparse: Worker) -> None:
    sparse.call(scenarios.split_keeps_summaries)


def test_eviction_keeps_summaries(sparse: Worker) -> None:
    sparse.call(scenarios.eviction_keeps_summaries)


def test_abort_keeps_summaries(sparse: Worker) -> None:
    sparse.call(scenarios.abort_keeps_summaries)


def test_audit_finds_what_does_not_fit(sparse: Worker) -> None:
    sparse.call(scenarios.audit_finds_what_does_not_fit)


def test_audit_covers_running_requests(sparse: Worker) -> None:
    sparse.call(scenarios.audit_covers_running_requests)


def test_idle_audit_finds_what_does_not_fit(sparse: Worker) -> None:
    sparse.call(scenarios.idle_audit_finds_what_does_not_fit)


def test_retraction_keeps_summaries(sparse: Worker) -> None:
    sparse.call(scenarios.retraction_keeps_summaries)


def test_flush_forgets(sparse: Worker) -> None:
    sparse.call(scenarios.flush_forgets)


def test_weight_update_keeps_summaries(sparse: Worker, model_path: str, tmp_path: Path) -> None:
    """The changed weights: every layer's key projection turned around."""
    for file in Path(model_path).iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
            continue
        tensors = load_file(file)
        changed = {name: -tensor if ".k_proj." in name else tensor for name, tensor in tensors.items()}
        assert sum(".k_proj." in name for name in tensors) == 30
        save_file(changed, tmp_path / file.name, metadata={"format": "pt"})
    sparse.call(scenarios.weight_update_keeps_summaries, str(tmp_path), model_path)


def test_mixed_rows_are_counted(sparse: Worker) -> None:
    sparse.call(scenarios.mixed_rows_are_counted)


def test_short_batches_run_dense(sparse: Worker) -> None:
    sparse.call(scenarios.short_batches_run_dense)


def test_memory_is_counted(sparse: Worker, model_path: str) -> None:
    sparse.call(scenarios.memory_is_counted)


def test_no_radix_cache(model_path: str) -> None:
    with Worker(model_path, BUDGET, **SMALL_POOL, disable_radix_cache=True) as worker:
        worker.call(scenarios.no_radix_cache)


@pytest.mark.one_version
@pytest.mark.parametrize("page_size", [128, 256])
def test_large_pages(model_path: str, page_size: int) -> None:
    with Worker(model_path, BUDGET, **SMALL_POOL, page_size=page_size) as worker:
        worker.call(scenarios.page_size_keeps_reuse)
