"""Settings of the whole test suite."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch

# The same examples on every run and machine, and no time limit an example: speed is not what these tests are about.
hypothesis.settings.register_profile("locks", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("locks")

# The tensors are tiny: a second thread gains nothing, and where the cores are busy it costs a hundredfold. Servers run in
# processes of their own and keep theirs.
torch.set_num_threads(1)


# Triton decides at import whether a kernel is compiled or interpreted, so interpreted kernels are tested in a run of their own.
KERNELS = "test_kernels.py"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Under TRITON_INTERPRET=1 the tests of kernels and nothing else; without it everything that this machine can run."""
    if collection_path.is_dir():
        return None
    kernels = collection_path.name == KERNELS
    left_out = not kernels if os.environ.get("TRITON_INTERPRET") == "1" else kernels and not torch.cuda.is_available()
    return left_out or None


@pytest.fixture(scope="session")
def model_path() -> str:
    """Folder of SmolLM2-135M-Instruct: TEST_MODEL_PATH, or fetched once into build/models."""
    given = os.environ.get("TEST_MODEL_PATH")
    if given:
        return given
    from locks_sglang.models import fetch

    return str(fetch("smollm2", Path(__file__).resolve().parent.parent / "build" / "models"))
