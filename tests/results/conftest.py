from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentbench_kv.results.records import TrialRecord

SCORED = {"status": "scored", "score": 1.0}


def _trial(sample: str = "s0", trial: int = 0, **fields: Any) -> TrialRecord:
    """Build a record; scored 1.0 unless told otherwise, KV figures as `kv={...}`."""
    base: dict[str, Any] = {"sample_id": sample, "trial": trial, "seed": 7}
    outcome = {} if "status" in fields else SCORED
    return TrialRecord.model_validate(base | outcome | fields)


@pytest.fixture(scope="session")
def make_trial() -> Callable[..., TrialRecord]:
    return _trial


@pytest.fixture(scope="session")
def spec() -> dict[str, Any]:
    return {
        "task": "micro/recall-1k",
        "method": "agentkv",
        "budget": 256,
        "interval": 128,
        "engine": "embedded",
        "model": "models/micro",
        "seed": 3,
    }
