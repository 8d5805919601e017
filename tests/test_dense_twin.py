"""Dense twin: with a budget above the length, greedy tokens on a real scheduler equal those of SGLang's own backend."""

from pathlib import Path

import pytest
import scenarios
from worker import Worker

from locks_sglang.dense_cpu import dense_environment

pytestmark = pytest.mark.server

LENGTHS = [1, 17, 300, 1500, 6000]
NEW_TOKENS = 64
ALL_FIT = {"LOCKS_BUDGET_TOKENS": "8192"}


@pytest.fixture(scope="module")
def dense_tokens(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[list[int]]]:
    """Greedy tokens of SGLang's own torch_native backend, prompts one by one and in one batch."""
    environment = dense_environment(Path(tmp_path_factory.mktemp("dense")))
    worker = Worker(
        model_path,
        {"PYTHONPATH": environment["PYTHONPATH"]},
        attention_backend="torch_native",
        max_total_tokens=12288,
        chunked_prefill_size=2048,
    )
    try:
        return {
            together: worker.call(scenarios.greedy, lengths, NEW_TOKENS, together)
            for together, lengths in ((False, LENGTHS), (True, LENGTHS[:4]))
        }
    finally:
        worker.close()


def check_twin(model_path: str, dense: dict[bool, list[list[int]]], page_size: int, chunk: int) -> None:
    worker = Worker(
        model_path,
        ALL_FIT,
        attention_backend="locks",
        page_size=page_size,
        max_total_tokens=12288,
        chunked_prefill_size=chunk,
        # Without chunks SGLang sets more memory aside than a machine of 24 GiB has.
        mem_fraction_static=0.5,
    )
    try:
        alone = worker.call(scenarios.twin, LENGTHS, NEW_TOKENS, False)
        together = worker.call(scenarios.twin, LENGTHS[:4], NEW_TOKENS, True)
    finally:
        worker.close()
    assert alone == dense[False]
    assert together == dense[True]


def test_dense_twin(model_path: str, dense_tokens: dict[bool, list[list[int]]]) -> None:
    """Default page size, chunked prefill, batch 1 and 4."""
    check_twin(model_path, dense_tokens, 16, 512)


@pytest.mark.one_version
@pytest.mark.parametrize(("page_size", "chunk"), [(16, -1), (64, 512), (64, -1)])
def test_dense_twin_matrix(model_path: str, dense_tokens: dict[bool, list[list[int]]], page_size: int, chunk: int) -> None:
    """The other page size, and both without chunks."""
    check_twin(model_path, dense_tokens, page_size, chunk)
