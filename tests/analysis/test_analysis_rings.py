"""How much of the rings the recency window holds, against counting by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.analysis.rings import ring_events, ring_overlap
from agentbench_kv.errors import UsageError
from agentbench_kv.registry import make_method

AGENTKV = make_method("agentkv", 64)  # eight queries a ring
THINK, ACT, TOOL, OTHERS = range(4)


def test_long_turns_leave_a_quarter_in_the_window():
    """40 tokens of each phase: the window of 32 is all of one, and three rings lie behind it."""
    phases = [OTHERS] * 40 + [TOOL] * 40 + [ACT] * 40 + [THINK] * 40
    (event,) = ring_events(AGENTKV, phases, [160])
    assert event.ages[THINK] == tuple(range(1, 9))
    assert event.ages[TOOL] == tuple(range(81, 89))
    assert event.within(32) == (8, 32)
    assert event.within(32, ACT) == (0, 8)
    found = ring_overlap({"a": [event]}, 32)
    assert found.floored == 1.0
    assert [(ring.phase, ring.newest, ring.oldest) for ring in found.reach] == [
        ("think", 1, 8), ("act", 41, 48), ("tool", 81, 88), ("others", 121, 128),
        ("all", None, None),
    ]  # fmt: skip
    assert found.reach[-1].inside.point == 0.25


def test_short_turns_put_the_rings_into_the_window():
    phases = [THINK, ACT, TOOL, OTHERS] * 40
    (event,) = ring_events(AGENTKV, phases, [160])
    assert event.within(32) == (32, 32)
    assert ring_overlap({"a": [event]}, 32).floored == 0.0


def test_what_comes_after_an_event_is_not_in_it():
    phases = [OTHERS] * 20 + [THINK] * 20
    early, late = ring_events(AGENTKV, phases, [20, 40])
    assert early.ages[THINK] == ()
    assert early.within(32) == (8, 8)
    assert late.within(32) == (16, 16)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), min_size=1, max_size=12))
def test_no_sessions_have_less_than_a_quarter_within(spans):
    """Counted again from the text's end, ring by ring."""
    phases = [phase for phase, length in spans for _ in range(length)]
    (event,) = ring_events(AGENTKV, phases, [len(phases)])
    inside, held = event.within(32)
    near = phases[-32:]
    assert inside == sum(min(8, near.count(phase)) for phase in range(4))
    assert held == sum(min(8, phases.count(phase)) for phase in range(4))
    assert inside >= min(8, len(phases))


def test_methods_without_rings_are_refused():
    for method in (make_method("snapkv", 64), make_method("agentkv", 64, {"sampler": "recent"})):
        with pytest.raises(UsageError, match="no ring of queries per phase"):
            ring_events(method, [0] * 9, [9])
    with pytest.raises(UsageError, match="no event"):
        ring_overlap({"a": []}, 32)
