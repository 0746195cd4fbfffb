"""Captures to analyse, and float64 numpy formulations to compare with."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from agentbench_kv.analysis.captures import Capture


@pytest.fixture(scope="session")
def numeric():
    """The numpy formulations in `analysis_reference.py`."""
    path = Path(__file__).with_name("analysis_reference.py")
    spec = importlib.util.spec_from_file_location("analysis_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_arrays(
    tokens=60, *, layers=None, q_heads=4, kv_heads=2, head_dim=8, dtype="float32", seed=0, runs=5
):
    """Arrays of a capture file; `layers=None` leaves the layer axis out."""
    rng = np.random.default_rng(seed)
    lead = () if layers is None else (layers,)
    rows = (tokens, head_dim)
    phases = np.repeat(rng.integers(0, 4, tokens), rng.integers(1, runs + 1, tokens))[:tokens]
    return {
        "q": (2 * rng.standard_normal((*lead, q_heads, *rows))).astype(dtype),
        "k": (2 * rng.standard_normal((*lead, kv_heads, *rows))).astype(dtype),
        "v": rng.standard_normal((*lead, kv_heads, *rows)).astype(dtype),
        "phase": phases.astype(np.int64),
        "prompt": np.array(12),
    }


@pytest.fixture(scope="session")
def arrays():
    """A function that makes the arrays of a capture file."""
    return random_arrays


@pytest.fixture(scope="session")
def capture():
    """A function that makes a capture: sizes as `arrays`, further arrays by keyword `extra`."""

    def make(*args, extra=None, **sizes):
        named = {**random_arrays(*args, **sizes), **(extra or {})}
        return Capture.from_arrays({name: torch.as_tensor(a) for name, a in named.items()})

    return make
