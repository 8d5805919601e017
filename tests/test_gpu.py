"""The same scenarios on a CUDA GPU, run by hand there (`pytest -m gpu tests/test_gpu.py`). The dense backend is SGLang's Triton
one, which needs no compiler at first use; bf16, as users serve."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import scenarios
import torch
from worker import Worker

from locks_sglang.counters import LateCount

pytestmark = pytest.mark.gpu

GPU = {
    "device": "cuda",
    "dtype": "bfloat16",
    "mem_fraction_static": 0.5,
    "cuda_graph_backend_prefill": "disabled",
    "cuda_graph_max_bs_decode": 8,  # a few sizes capture sooner
}
EAGER = {"cuda_graph_backend_decode": "disabled"}
SHORT = {"LOCKS_MIN_CONTEXT_TOKENS": "256"}
LENGTHS = [17, 300, 6000]
NEW_TOKENS = 32


def start(model_path: str, environment: dict[str, str] | None = None, **arguments: Any) -> Worker:
    return Worker(
        model_path,
        {"LOCKS_BUDGET_TOKENS": "512", "LOCKS_DENSE_BACKEND": "triton", **(environment or {})},
        **{
            "attention_backend": "locks",
            "max_total_tokens": 5120,
            "chunked_prefill_size": 512,
            "enable_mixed_chunk": True,
            **GPU,
            **arguments,
        },
    )


@pytest.fixture(scope="module", params=[{}, EAGER], ids=["graph", "eager"])
def sparse(request: pytest.FixtureRequest, model_path: str) -> Iterator[Worker]:
    worker = start(model_path, **request.param)
    yield worker
    worker.close()


@pytest.mark.parametrize(
    "name",
    [
        "memory_is_counted",
        "reuse_is_exact",
        "split_keeps_summaries",
        "eviction_keeps_summaries",
        "abort_keeps_summaries",
        "mixed_rows_are_counted",
        "audit_covers_running_requests",
        "idle_audit_finds_what_does_not_fit",
    ],
)
def test_scenario(sparse: Worker, name: str) -> None:
    sparse.call(getattr(scenarios, name))


@pytest.mark.parametrize("decode", [{}, EAGER], ids=["graph", "eager"])
def test_short_batches_run_dense(model_path: str, decode: dict[str, str]) -> None:
    worker = start(model_path, SHORT, **decode)
    try:
        worker.call(scenarios.short_batches_run_dense)
    finally:
        worker.close()


DENSE = "triton", "flashinfer", "fa3"
GRAPHS = {"cuda_graph_bs_decode": [2, 4, 16], "cuda_graph_max_bs_decode": 16}
"""None of 1, 3 and 8 is a captured size."""


@pytest.fixture(scope="module", params=DENSE)
def short(request: pytest.FixtureRequest, model_path: str) -> Iterator[tuple[str, Worker]]:
    """Requests below 256 tokens decode in the dense graph of this backend."""
    environment = {**SHORT, "LOCKS_BUDGET_TOKENS": "64", "LOCKS_DENSE_BACKEND": request.param}
    worker = start(model_path, environment, **GRAPHS)
    yield request.param, worker
    worker.close()


@pytest.fixture(scope="module")
def alone(model_path: str) -> Iterator[Callable[..., Any]]:
    """Call a scenario on a dense backend without locks; the last one that was asked for stays."""
    running: dict[str, Worker] = {}

    def call(backend: str, *arguments: Any) -> Any:
        if backend not in running:
            while running:
                running.popitem()[1].close()
            running[backend] = start(model_path, attention_backend=backend, page_size=16, **GRAPHS)
        return running[backend].call(*arguments)

    yield call
    for worker in running.values():
        worker.close()


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_dense_graph_equals_eager(short: tuple[str, Worker], alone: Callable[..., Any], rows: int) -> None:
    """To what SGLang's own graph of that backend differs from an eager step: a padded batch may meet other matrix kernels, and
    fa3 splits by the longest context that a graph allows."""
    backend, worker = short
    ours = max(difference for _, difference in worker.call(scenarios.dense_graph_against_eager, rows, 40))
    theirs = max(difference for _, difference in alone(backend, scenarios.graph_against_eager, rows, 40))
    print(f"largest difference of logits, relative to their length: {ours:.2e}; without locks {theirs:.2e}")
    assert ours <= max(1e-2, 1.5 * theirs)


def test_growing_out_of_the_dense_graph(short: tuple[str, Worker]) -> None:
    short[1].call(scenarios.grows_out_of_the_dense_graph)


def test_sparse_reads_only_selected(model_path: str) -> None:
    """Eagerly, since it looks into the step."""
    worker = start(model_path, **EAGER)
    try:
        worker.call(scenarios.sparse_reads_only_selected)
    finally:
        worker.close()


ULP = 0.125
"""One unit of bf16, in which SGLang computes logits here, at logits between 16 and 32: two candidates nearer than that may
change places with the order of additions."""


@pytest.mark.parametrize("decode", [{}, EAGER], ids=["graph", "eager"])
def test_dense_twin(model_path: str, decode: dict[str, str]) -> None:
    """Budget above the length: greedy tokens equal those of SGLang's Triton backend, or first differ at a tie of its logits."""
    common = {**GPU, "max_total_tokens": 12288, "chunked_prefill_size": 2048, "page_size": 16}
    runs = []
    for environment, backend in (({}, "triton"), ({"LOCKS_BUDGET_TOKENS": "8192", "LOCKS_DENSE_BACKEND": "triton"}, "locks")):
        worker = Worker(model_path, environment, attention_backend=backend, **decode, **common)
        try:
            runs.append(worker.call(scenarios.greedy_with_gaps, LENGTHS, NEW_TOKENS))
        finally:
            worker.close()
    for (dense, gaps), (locks, _) in zip(*runs, strict=True):
        first = next((i for i, (a, b) in enumerate(zip(dense, locks, strict=True)) if a != b), None)
        print(f"first difference: {first}, gap: {None if first is None else gaps[first]}")
        assert first is None or gaps[first] <= ULP


def test_prefill_graph_capture_leaves_no_trace(model_path: str) -> None:
    """With SGLang's default prefill graph: capture and warm-up batches fix no centre and build nothing."""
    worker = Worker(
        model_path,
        {"LOCKS_BUDGET_TOKENS": "512", "LOCKS_DENSE_BACKEND": "triton"},
        attention_backend="locks",
        max_total_tokens=8192,
        **{**GPU, "cuda_graph_backend_prefill": "breakable", "cuda_graph_max_bs_prefill": 512},
    )
    try:
        worker.call(scenarios.untouched)
        worker.call(scenarios.reuse_is_exact)
    finally:
        worker.close()


def test_a_device_counter_is_read_without_waiting() -> None:
    """While the stream is busy nothing waits for it, and what it counts is told once it is there."""
    count = torch.zeros(1, dtype=torch.int64, device="cuda")
    late = LateCount(count)
    count.add_(1)  # loads what a first use loads
    late.ask()
    torch.cuda.synchronize()
    assert late.value() == 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1 << 33)  # cycles, about four seconds: other tests may use the device and the processor too
        count.add_(4)
        late.ask()
        assert late.value() == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert late.value() == 5
