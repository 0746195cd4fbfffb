"""Exact calls of a running engine, against fidelity's own play of the same sessions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.budget import Budget
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.errors import KVBenchError, PrerequisiteError
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.spans import Source, TurnNotes
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
    assert {name for name, (right, asked) in found.behind.items() if asked} <= found.parts.keys()
    if name == "full":
        assert found.behind == {}
        assert found.right == by_fidelity["agentkv"]["calls_exact_full_right"]
    else:
        assert found.events > 0
        assert sum(asked for _, asked in found.behind.values()) > 0


def test_damage_is_seen(by_fidelity: dict[str, dict[str, float]]) -> None:
    """Random rows of a small part of a session cost calls, or the figure shows nothing."""
    assert by_fidelity["random"]["calls_exact_right"] < by_fidelity["full"]["calls_exact_right"]


@pytest.mark.parametrize(("budget", "late"), [("96", True), ("4000", False)])
def test_calls_in_front_of_an_event_are_not_behind_one(
    budget: str, late: bool, recordings: list[Recording]
) -> None:
    """They are the full cache's, whatever the method does later."""
    method = make_method("random", Budget.parse(budget), {"interval": "16"})
    engine = start_engine("embedded", EngineOptions("micro", method, device="cpu"))
    events: dict[str, int] = {}
    asked = {False: 0, True: 0}
    force = engine.force

    def counted(session: str, tokens: Any, **words: Any) -> Any:
        events[session] = len(engine.stats(session).events)
        asked[events[session] > 0] += 1
        return force(session, tokens, **words)

    engine.force = counted  # type: ignore[method-assign]
    try:
        found = exact_calls(engine, recordings)
    finally:
        engine.shutdown()
    assert (asked[True] > 0) is late
    assert asked[False] > 0
    behind = sum(each for _, each in found.behind.values())
    assert 0 < behind < found.asked if late else behind == 0


def test_an_answer_whose_own_prompt_was_compressed_is_behind_an_event(
    recordings: list[Recording],
) -> None:
    """Only its first token saw the whole cache; with one answer a session there is no other."""
    alone = []
    for each in recordings:
        whole = next(t for t in reversed(each.turns) if any(p is Phase.ACT for _, p in t.answer))
        past = each.turns[: each.turns.index(whole)]
        prompt = tuple(token for turn in past for token in (*turn.prompt, *turn.answer))
        alone.append(replace(each, turns=(replace(whole, prompt=prompt + whole.prompt),)))
    method = make_method("random", Budget.parse("64"), EVERY)
    engine = start_engine("embedded", EngineOptions("micro", method, device="cpu"))
    try:
        found = exact_calls(engine, alone)
    finally:
        engine.shutdown()
    assert found.events >= len(alone)
    assert found.behind == found.parts
    assert len(found.parts) == len(alone)


def test_a_method_of_spans_is_told_who_wrote_what(
    recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay that called a session one document never brought anything back for EVOKE."""
    method = make_method("evoke", Budget.parse("600"))
    engine = start_engine("embedded", EngineOptions("micro", method, device="cpu"))
    told: list[TurnNotes] = []
    note = engine.note

    def noted(session: str, tokens: Any, notes: TurnNotes) -> None:
        assert sum(size for size, _ in notes.parts) == len(tokens)
        told.append(notes)
        note(session, tokens, notes)

    monkeypatch.setattr(engine, "note", noted)
    try:
        exact_calls(engine, recordings[:1])
    finally:
        engine.shutdown()
    first, *later = told
    assert {source for _, source in first.parts} >= {Source.DOCUMENT, Source.USER}
    assert later
    assert first.system > 0
    assert not any(each.system for each in later)


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
