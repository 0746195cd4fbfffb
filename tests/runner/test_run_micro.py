"""The shipped model plays its task, and the proof of the budget is in the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.results.store import RunStore
from agentbench_kv.results.validity import RunState
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve


def quiet(*_: Any) -> None:
    """Report no progress."""


def spec(method: str, budget: int | None, settings: dict[str, str], **changes: Any) -> RunSpec:
    values = {
        "engine": "embedded",
        "model": "micro",
        "method": method,
        "budget": budget,
        "task": "micro/recall-1k",
        "limit": 16,
        **changes,
    }
    return resolve(RunSpec(**values), settings)


@pytest.mark.slow
def test_the_shipped_model_solves_its_task_with_a_full_cache(tmp_path: Path) -> None:
    summary = run_one(spec("full", None, {}), tmp_path, quiet)
    assert summary.score is not None
    assert summary.score.point >= 14 / 16
    assert summary.session_resets == 0
    assert not summary.failures


@pytest.mark.slow
@pytest.mark.parametrize("method", ["agentkv", "snapkv", "streamingllm"])
def test_a_compressed_run_is_valid_and_proved(method: str, tmp_path: Path) -> None:
    one = spec(method, 256, {"interval": "64"}, limit=4)
    summary = run_one(one, tmp_path, quiet)
    assert summary.validity.state is RunState.VALID
    for record in RunStore(tmp_path).find(one.id).trials():
        kv = record.kv
        assert kv.events > 0
        assert kv.evicted > 0
        assert kv.peak_live <= 256 + 64 + kv.longest_prefill
        assert kv.logical > kv.peak_live
        assert record.prompt_sha is not None
    turns = RunStore(tmp_path).find(one.id).turns()
    assert sum(turn.evicted for turn in turns) == summary.kv.evicted if summary.kv else False


@pytest.mark.slow
def test_the_model_runs_far_beyond_its_trained_length() -> None:
    from agentbench_kv.engines.base import EngineOptions, Sampling
    from agentbench_kv.methods.base import Phase
    from agentbench_kv.registry import make_method
    from agentbench_kv.run.engines import start_engine

    class Others:
        def label(self, token: int) -> Phase:  # noqa: ARG002
            return Phase.OTHERS

    method = make_method("streamingllm", 512, {"trigger": "prefill+every"})
    engine = start_engine("embedded", EngineOptions("micro", method))
    try:
        engine.open("long", Others())
        ids = [5 + i % 200 for i in range(2000)]
        for _ in range(15):
            engine.extend("long", ids, [Phase.OTHERS] * len(ids))
            assert len(list(engine.generate("long", Sampling(max_tokens=2)))) == 2
        assert engine.stats("long").logical == 15 * 2002
        assert engine.info.context_limit >= 32768
    finally:
        engine.shutdown()
