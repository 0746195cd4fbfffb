"""Fixtures of the method tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
"""Where the numpy formulations (`methods_reference*.py`) are imported from."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny tensors on a shared machine: threads only cost time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
