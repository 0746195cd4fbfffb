"""Tokens that no event may evict, counted inside the budget, and budgets that leave no room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.accounting import KVStats
from agentbench_kv.analysis.replay import MethodInput
from agentbench_kv.conformance.methods import calibrated
from agentbench_kv.conformance.scenes import make_scene
from agentbench_kv.engines.core.ledger import SessionLedger
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import LayerView, Method
from agentbench_kv.registry import load_method, make_method, names
from agentbench_kv.run.spec import RunSpec, resolve

RANKING = [n for n in names("method") if load_method(n).compresses and not load_method(n).spans]


def room_for(method: Method, prompt: int) -> Method:
    """Return the method with the least budget that has room beside a protected prompt, plus 4."""
    # A prompt that fills TriAttention's budget is no reason for it to refuse.
    first, size = max(method.protected(prompt, prompt // 2), method.sinks), 1
    while first + method.recent_kept(size) >= size:
        size += 1
    return replace(method, budget=size + 4)


@pytest.mark.parametrize("name", RANKING)
@settings(max_examples=5, deadline=None)
@given(
    prompt=st.integers(1, 60),
    protect=st.sampled_from(["system", "prompt", "1", "17"]),
    extra=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_no_protected_row_leaves_and_the_budget_is_met(
    name: str, prompt: int, protect: str, extra: int, seed: int
) -> None:
    own = {"window": 8} if "window" in load_method(name).parameters() else {}
    method = calibrated(room_for(make_method(name, 4096, {"protect": protect, **own}), prompt))
    known = {"system": prompt // 2, "prompt": prompt}
    first = known[protect] if protect in known else int(protect)
    size = method.budget or 0
    scene = make_scene(method, max(size, 70) + extra, seed=seed, prompt=prompt)
    kept = scene.positions(scene.select(method))
    assert kept.shape[-1] == size
    assert torch.equal(kept[..., :first], torch.arange(first).expand(*kept.shape[:2], -1))
    assert bool((kept[..., 1:] > kept[..., :-1]).all())


def plain_scene(tokens: int, **opening: int) -> MethodInput:
    """One head whose keys say nothing, all tokens cached."""
    rows = torch.arange(tokens)[None]
    zeros = torch.zeros(1, tokens, 4)
    return MethodInput([LayerView(zeros, zeros, rows)], [None], tokens, **opening)  # type: ignore[list-item]


def test_protection_by_hand() -> None:
    """Twelve tokens, five stay: the last two by score, after the protected three."""
    for protect, opening in (
        ("3", {}),
        ("prompt", {"prompt": 3, "system": 1}),
        ("system", {"prompt": 9, "system": 3}),
    ):
        method = make_method("streamingllm", 5, {"sinks": 0, "protect": protect})
        scene = plain_scene(12, **opening)
        assert scene.positions(scene.select(method)).tolist() == [[[0, 1, 2, 10, 11]]]


def test_sinks_lie_inside_what_is_protected() -> None:
    method = make_method("streamingllm", 8, {"protect": "3"})
    assert (method.sinks, method.has_room(5, 3), method.has_room(4, 3)) == (4, True, False)


@pytest.mark.parametrize("value", ["0", "-1", "all", "1.5", "", "none ", str(2**64)])
def test_other_values_are_refused_in_a_line(value: str) -> None:
    with pytest.raises(UsageError, match="none, system, prompt, or a number of tokens >= 1") as got:
        make_method("agentkv", 64, {"protect": value})
    assert "\n" not in str(got.value)


def test_a_number_is_a_number_however_it_is_written() -> None:
    assert make_method("agentkv", 64, {"protect": 7}) == make_method(
        "agentkv", 64, {"protect": "07"}
    )


def test_a_number_that_fills_the_budget_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"budget 64 .* 64 tokens .*protected 56 \+ recent 8"):
        make_method("agentkv", 64, {"protect": "56"})
    assert make_method("agentkv", 65, {"protect": "56"}).budget == 65


def test_select_never_raises_a_budget_in_silence() -> None:
    method = make_method("agentkv@prompt", 64)
    with pytest.raises(UsageError, match=r"protected 56 \+ recent 8 >= budget 64"):
        plain_scene(80, prompt=56).select(method)


def test_every_ranking_method_has_the_presets_made_by_rule() -> None:
    for name in RANKING:
        for preset in ("prompt", "system"):
            method = make_method(f"{name}@{preset}", 4096)
            default = make_method(name, 4096)
            assert method.protect == preset
            assert method.label == f"{name}@{preset}"
            without = {k: v for k, v in method.settings().items() if k not in ("protect",)}
            plain = {k: v for k, v in default.settings().items() if k not in ("protect",)}
            without.pop("keep_prompt", None), plain.pop("keep_prompt", None)
            assert without == plain, name
    for name in ("full", "evoke"):
        with pytest.raises(UsageError, match="preset"):
            make_method(f"{name}@prompt", None)


@pytest.mark.parametrize("name", RANKING)
def test_a_preset_by_rule_with_another_protection_is_rebuilt_from_its_record(name: str) -> None:
    for protect in ("none", "system", "9"):
        method = make_method(f"{name}@prompt", 4096, {"protect": protect})
        assert method.protect == protect
        assert make_method(method.label, 4096, method.settings()) == method
        changed = method.changed_settings()
        assert {*changed.items()} & {("protect", protect), ("keep_prompt", "off")}, name
    assert make_method(f"{name}@prompt", 4096).changed_settings() == {}


def test_a_preset_by_rule_rests_on_the_default_one() -> None:
    assert make_method("agentkv@system", 64).keep_recent == 8
    assert make_method("rkv@prompt", 64).settings()["lam"] == 0.07


def test_ids_of_runs_without_protection_are_unchanged() -> None:
    def spec(method: str, **params: Any) -> RunSpec:
        return resolve(RunSpec("embedded", "micro", method, 256, "micro/recall-1k"), params)

    assert "protect" not in spec("agentkv").params
    assert "kernel" not in spec("agentkv").params
    assert spec("triattention").params["keep_prompt"] == "on"
    assert spec("triattention@vllm").params["keep_prompt"] == "off"
    assert "protect" not in spec("triattention").params
    assert spec("triattention", protect="system").params["protect"] == "system"
    assert spec("agentkv@prompt").id != spec("agentkv").id


@pytest.mark.parametrize(("old", "new"), [("on", "prompt"), ("off", "none")])
def test_records_that_say_keep_prompt_still_build_the_method(old: str, new: str) -> None:
    method = make_method("triattention", 300, {"keep_prompt": old})
    assert method.protect == new
    assert make_method("triattention", 300, method.settings()) == method
    with pytest.raises(UsageError, match="keep_prompt=maybe: expected one of"):
        make_method("triattention", 300, {"keep_prompt": "maybe"})


def test_only_a_method_that_asks_for_it_needs_the_system_message() -> None:
    assert "protect_system" in make_method("agentkv@system", 64).needs
    assert make_method("agentkv@prompt", 64).needs == {"compress"}


Turns = list[tuple[int, int]]


def played(method: Method, turns: Turns, system: int = 0) -> tuple[KVStats, list[int]]:
    """Return a session's account, and at every turn's beginning the rows it might come to hold."""
    ledger, waiting, needed = SessionLedger(method, 1), 0, []
    ledger.opens_with(system=system)
    for prompt, decode in turns:
        needed.append(ledger.rows_needed(prompt + waiting, decode))
        ledger.begin_turn(prompt)
        for number in range(decode):
            ledger.forward(1 if number else prompt + waiting)
            ledger.sampled()
        ledger.end_turn()
        waiting = 1
    return ledger.snapshot(), needed


def events_by_hand(method: Method, turns: Turns, first: int) -> tuple[list[int], int]:
    """Return the lengths at which events fire, and how many were due without room."""
    seen, live, decoded, fired, refused = 0, 0, 0, [], 0
    waiting = 0
    for prompt, decode in turns:
        for number in range(decode):
            new = 1 if number else prompt + waiting
            seen, live, decoded = seen + new, live + new, decoded + 1
            if decoded % method.interval or live <= (method.budget or 0):
                continue
            if max(first, method.sinks) + method.keep_recent >= (method.budget or 0):
                refused += 1
                continue
            fired.append(seen)
            live = method.budget or 0
        waiting = 1
    return fired, refused


@settings(max_examples=100, deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=4),
    budget=st.integers(10, 60),
    system=st.integers(1, 30),
    protect=st.sampled_from(["none", "prompt", "system"]),
    sinks=st.integers(0, 3),
)
def test_a_session_without_room_has_no_event_and_says_so(
    turns: Turns, budget: int, system: int, protect: str, sinks: int
) -> None:
    settings_ = {"protect": protect, "sinks": sinks, "keep_recent": 5, "interval": 8}
    method = make_method("agentkv@paper", budget, settings_)
    stats, needed = played(method, turns, system)
    first = {"none": 0, "prompt": turns[0][0], "system": system}[protect]
    fired, refused = events_by_hand(method, turns, first)
    assert [event.logical for event in stats.events] == fired
    assert (stats.protected, stats.refused) == (first, refused)
    if refused:
        assert (stats.refused_recent, stats.refused_budget) == (5, budget)
        assert max(stats.protected, sinks) + 5 >= budget
    # What a scheduler keeps free is enough, whether events fire or not.
    assert stats.peak_live <= max(needed)


def test_a_trigger_that_waits_for_room_counts_one_refusal_an_interval() -> None:
    method = make_method("agentkv@prompt", 40, {"trigger": "slack", "interval": 16})
    stats, _ = played(method, [(40, 48)])
    assert (stats.events, stats.refused) == ([], 2)


def test_a_loss_protects_the_same_tokens_where_it_is_told_how_the_session_began() -> None:
    method = make_method("agentkv@prompt", 64, {"interval": 8})
    ledger = SessionLedger(method, 1)
    for lost in (False, True):
        if lost:
            ledger.lose()
        ledger.opens_with(prompt=20, system=5)
        ledger.begin_turn(90 if lost else 20)
        ledger.forward(90)
        ledger.sampled()
        assert ledger.snapshot().protected == 20
    assert ledger.fork().evict(64).prompt == 20
