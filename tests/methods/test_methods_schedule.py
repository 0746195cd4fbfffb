"""The trigger schedule against a replay written from the specification."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.methods.base import Schedule
from agentbench_kv.registry import make_method


def replay(trigger, budget, interval, turns):
    """Return the events as (kind, decoded so far, live before).

    Turns are (prompt, decode). A step feeds what is pending (the whole prompt, or the newest
    decoded token), samples one token, and then an event may fire.
    """
    events, live, decoded, pending = [], 0, 0, 0

    def fire(kind):
        nonlocal live
        events.append((kind, decoded, live))
        live = budget

    for prompt, decode in turns:
        for step in range(decode):
            live += pending + prompt if step == 0 else 1
            if step == 0 and trigger == "prefill+every" and live > budget:
                fire("prefill")
            decoded += 1
            due = decoded % interval == 0 and trigger in ("every", "prefill+every")
            if due and live > budget:
                fire("decode")
            if trigger == "slack" and live >= budget + interval:
                fire("decode")
        pending = 1
        if trigger == "turn" and live > budget:
            fire("turn")
    return events


def drive(trigger, budget, interval, turns):
    """The same through Schedule."""
    settings = {"trigger": trigger, "interval": interval}
    schedule = Schedule(make_method("agentkv@paper", budget, settings))
    events, live, decoded, pending = [], 0, 0, 0
    for prompt, decode in turns:
        for step in range(decode):
            live += pending + prompt if step == 0 else 1
            if step == 0 and schedule.after_prefill(live, live):
                events.append(("prefill", decoded, live))
                live = budget
            decoded += 1
            if schedule.after_decode(live, live):
                events.append(("decode", decoded, live))
                live = budget
        pending = 1
        if schedule.after_turn(live, live):
            events.append(("turn", decoded, live))
            live = budget
    return events


TURNS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6)


@pytest.mark.parametrize("trigger", ["every", "slack", "turn", "prefill+every"])
@settings(max_examples=80, deadline=None)
@given(budget=st.integers(1, 60), interval=st.integers(1, 20), turns=TURNS)
def test_schedule_matches_a_replay(trigger, budget, interval, turns):
    assert drive(trigger, budget, interval, turns) == replay(trigger, budget, interval, turns)


def test_every_is_due_at_multiples_of_the_interval_across_turns():
    assert drive("every", 10, 4, [(20, 3), (5, 6)]) == [("decode", 4, 28), ("decode", 8, 14)]


def test_every_waits_a_whole_interval_after_a_due_moment_under_budget():
    """Due at 4 with 8 live tokens: nothing. At 8 with 12: an event."""
    assert drive("every", 9, 4, [(5, 9)]) == [("decode", 8, 12)]


def test_an_event_at_exactly_the_budget_does_not_fire():
    assert drive("every", 8, 4, [(5, 4)]) == []
    assert drive("prefill+every", 8, 4, [(8, 1)]) == []
    assert drive("turn", 8, 4, [(8, 1)]) == []


def test_slack_fires_at_budget_plus_interval_and_not_before():
    assert drive("slack", 8, 4, [(11, 1)]) == []
    assert drive("slack", 8, 4, [(12, 1)]) == [("decode", 1, 12)]


def test_turn_fires_only_at_the_end_of_a_turn():
    assert drive("turn", 8, 4, [(20, 30), (1, 1)]) == [("turn", 30, 49), ("turn", 31, 10)]


def test_prefill_fires_before_the_first_decoded_token():
    assert drive("prefill+every", 8, 4, [(20, 1)]) == [("prefill", 0, 20)]
    for trigger in ("every", "slack", "turn"):
        assert not any(kind == "prefill" for kind, *_ in drive(trigger, 8, 4, [(20, 9)]))


@pytest.mark.parametrize("name", ["full", "full-constrained"])
@pytest.mark.parametrize("trigger", ["every", "slack", "turn", "prefill+every"])
def test_methods_that_do_not_compress_never_fire(name, trigger):
    schedule = Schedule(make_method(name, None, {"trigger": trigger, "interval": 1}))
    for live in (1, 10**6):
        assert not schedule.after_prefill(live, live)
        assert not schedule.after_decode(live, live)
        assert not schedule.after_turn(live, live)


def test_sessions_have_schedules_of_their_own():
    method = make_method("agentkv@paper", 4, {"interval": 3})
    first, second = Schedule(method), Schedule(method)
    assert [first.after_decode(9, 9) for _ in range(3)] == [False, False, True]
    assert [second.after_decode(9, 9) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(("live", "fires"), [(59, False), (60, True)])
def test_a_share_is_of_the_logical_length_not_of_what_is_live(live, fires):
    method = make_method("agentkv@paper", "50%", {"trigger": "slack", "interval": 10})
    assert Schedule(method).after_decode(live, 100) is fires


@pytest.mark.parametrize(("live", "fires"), [(50, False), (51, True)])
@pytest.mark.parametrize("trigger", ["every", "turn", "prefill+every"])
def test_shares_fire_above_their_size(trigger, live, fires):
    method = make_method("agentkv@paper", "50%", {"trigger": trigger, "interval": 1})
    schedule = Schedule(method)
    asks = {
        "every": schedule.after_decode,
        "turn": schedule.after_turn,
        "prefill+every": schedule.after_prefill,
    }
    assert asks[trigger](live, 100) is fires
