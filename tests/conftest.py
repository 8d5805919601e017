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


@pytest.fixture(scope="session")
def model_path() -> str:
    """Folder of SmolLM2-135M-Instruct: TEST_MODEL_PATH, or fetched once into build/models."""
    given = os.environ.get("TEST_MODEL_PATH")
    if given:
        return given
    from locks_sglang.models import fetch

    return str(fetch("smollm2", Path(__file__).resolve().parent.parent / "build" / "models"))
