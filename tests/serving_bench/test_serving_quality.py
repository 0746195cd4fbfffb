"""Exact calls of a running engine, against fidelity's own play of the same sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.budget import Budget
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.errors import KVBenchError, PrerequisiteError
from agentbench_kv.registry import make_method
from agentbench_kv.results.store import RunStore
from agentbench_kv.run.engines import start_engine
from agentbench_kv.run.exact_calls import exact_calls
from agentbench_kv.run.fidelity import fidelity_arms, play_fidelity
from agentbench_kv.run.recordings import Recording, record_gold

EVERY = {"interval": "16", "trigger": "prefill+every"}
ARMS = (("agentkv", "96"), ("random", "64"), ("full", None))


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    return record_gold("micro/recall-1k", "micro", 3, {})


@pytest.fixture(scope="module")
def by_fidelity(
    recordings: list[Recording], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, float]]:
    """Sums over the sessions, as `kvbench fidelity` records them."""
    out: Path = tmp_path_factory.mktemp("fidelity")
    found: dict[str, dict[str, float]] = {}
    for name, budget in ARMS:
        sizes = [] if budget is None else [Budget.parse(budget)]
        (arm,) = fidelity_arms([name], sizes, EVERY if budget else {})
        spec = arm.spec("micro", "micro/recall-1k/gold", "float32", "cpu")
        play_fidelity([spec], recordings, out, {})
        trials = RunStore(out).find(spec.id).trials()
        keys = ("calls_exact_right", "calls_exact_asked", "calls_exact_full_right")
        found[name] = {key: sum(float(t.metrics[key]) for t in trials) for key in keys}
        found[name]["events"] = sum(t.kv.events for t in trials)
    return found


@pytest.mark.parametrize(
    "engine_name",
    [
        "embedded",
        pytest.param("vllm", marks=(pytest.mark.engine, pytest.mark.slow)),
        pytest.param("sglang", marks=(pytest.mark.engine, pytest.mark.slow)),
    ],
)
@pytest.mark.parametrize(("name", "budget"), ARMS)
def test_they_are_fidelitys(
    engine_name: str,
    name: str,
    budget: str | None,
    recordings: list[Recording],
    by_fidelity: dict[str, Any],
) -> None:
    size = None if budget is None else Budget.parse(budget)
    method = make_method(name, size, EVERY if budget else {})
    try:
        engine = start_engine(engine_name, EngineOptions("micro", method, device="cpu"))
    except PrerequisiteError as error:
        pytest.skip(str(error))
    try:
        found = exact_calls(engine, recordings)
    finally:
        engine.shutdown()
    own = by_fidelity[name]
    assert (found.right, found.asked) == (own["calls_exact_right"], own["calls_exact_asked"])
    assert found.asked > 0
    assert found.events == own["events"]
    if name == "full":
        assert found.right == by_fidelity["agentkv"]["calls_exact_full_right"]
    else:
        assert found.events > 0


def test_damage_is_seen(by_fidelity: dict[str, dict[str, float]]) -> None:
    """Random rows of a small part of a session cost calls, or the figure shows nothing."""
    assert by_fidelity["random"]["calls_exact_right"] < by_fidelity["full"]["calls_exact_right"]


def test_an_engine_that_predicts_nothing_gives_no_figure(recordings: list[Recording]) -> None:
    options = EngineOptions("micro", make_method("full", None), device="cpu")
    engine = start_engine("embedded", options)
    force = engine.force
    engine.force = lambda session, tokens, **_: force(session, tokens)  # type: ignore[method-assign]
    try:
        with pytest.raises(KVBenchError, match="said what it would have drawn of 0 of"):
            exact_calls(engine, recordings[:1])
    finally:
        engine.shutdown()
