"""Every test of an operation runs on every backend of this machine, with poisoned memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.kernels import use_backend

sys.path.insert(0, str(Path(__file__).parent))
"""Where the numpy formulations and the engines' memory layouts are imported from."""


def pytest_runtest_setup(item):
    """Skip from one place, which the summary shows as one line."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no CUDA device")


@pytest.fixture(params=["torch", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def backend(request):
    """Run with one backend, and go back to the automatic choice."""
    try:
        use_backend(request.param)
    except PrerequisiteError as error:
        pytest.skip(str(error))
    yield request.param
    use_backend("auto")


@pytest.fixture
def device(backend):
    """Where the tensors of a test lie."""
    return "cuda" if backend == "cuda" else "cpu"


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """Memory that nobody has written to holds NaN, or -1: no result may depend on it."""
    unwritten = torch.empty

    def poisoned(*args, **kwargs):
        tensor = unwritten(*args, **kwargs)
        tensor.view(-1).view(torch.uint8).fill_(0xFF)
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)
