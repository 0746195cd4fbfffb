"""Fixtures of the method tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def reference():
    """The numpy formulation in `methods_reference.py`."""
    path = Path(__file__).with_name("methods_reference.py")
    spec = importlib.util.spec_from_file_location("methods_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny tensors on a shared machine: threads only cost time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
