"""Traces, timelines and audits: files, and cases worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from agentbench_kv.analysis.audit import audit, phase_timeline, trace_timeline
from agentbench_kv.analysis.captures import write_archive
from agentbench_kv.analysis.traces import ScoredEvent, Trace
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Selection

NAN, INF = float("nan"), float("inf")


def event(logical, positions, kept, scores):
    """One layer; an entry per head, where `kept` marks positions."""
    return scored(logical, torch.tensor([positions]), torch.tensor([kept]), torch.tensor([scores]))


def scored(logical, positions, kept, scores):
    chosen = positions[kept.bool()].view(*positions.shape[:2], -1)
    return ScoredEvent(logical, chosen, positions, scores)


def two_events():
    """Two heads, budget 3. Position 0 is always kept in the first event."""
    first = event(
        5,
        [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]],
        [[1, 0, 1, 0, 1], [1, 1, 1, 0, 0]],
        [[NAN, 0.1, 0.4, 0.1, 0.3], [NAN, 0.5, 0.2, 0.2, 0.1]],
    )
    second = event(
        7,
        [[0, 2, 4, 5, 6], [0, 1, 2, 5, 6]],
        [[0, 1, 1, 0, 1], [1, 0, 0, 1, 1]],
        [[0.0, 0.9, 0.8, 0.1, 0.7], [0.5, 0.3, 0.1, 0.5, 0.4]],
    )
    return [first, second]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_what_is_saved_is_loaded(tmp_path, suffix):
    path = tmp_path / f"trace{suffix}"
    trace = Trace(two_events(), torch.tensor([3, 3, 0, 1, 2, 2, 0]), {"method": "h2o"})
    trace.save(path)
    again = Trace.load(path)
    assert again.meta == {"method": "h2o"}
    assert again.phases.tolist() == [3, 3, 0, 1, 2, 2, 0]
    for got, expected in zip(again.events, trace.events, strict=True):
        assert got.logical == expected.logical
        assert torch.equal(got.positions, expected.positions)
        assert torch.equal(got.kept, expected.kept)
        assert torch.equal(got.scores.nan_to_num(9), expected.scores.nan_to_num(9))


def test_an_observers_view_in_cache_order():
    """Rows lie in the order of the cache, scores by position: positions are sorted."""
    positions = torch.tensor([[[4, 0, 9, 2], [7, 1, 0, 3]]])
    selection = Selection(
        kept=torch.tensor([[[0, 3], [1, 2]]]),
        values=torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]]]),
    )
    found = ScoredEvent.from_selection(10, positions, selection)
    assert found.positions.tolist() == [[[0, 2, 4, 9], [0, 1, 3, 7]]]
    assert found.survived.tolist() == [[[False, True, True, False], [True, True, False, False]]]
    assert found.scores.tolist() == selection.scores.tolist()
    assert found.kept.tolist() == [[[4, 2], [1, 0]]]
    assert (found.live, found.budget) == (4, 2)
    # An engine's tensors change with the next step.
    positions.zero_()
    selection.kept.zero_()
    selection.scores.zero_()
    assert found.kept.tolist() == [[[4, 2], [1, 0]]]
    assert found.scores[0, 1, 3] == pytest.approx(0.8)


def trace_arrays():
    one, two = two_events()
    return {
        "logical": torch.tensor([5, 7]),
        "live": torch.tensor([5, 5]),
        "positions": torch.cat([one.positions, two.positions], -1).int(),
        "kept": torch.cat([one.survived, two.survived], -1),
        "score": torch.cat([one.scores, two.scores], -1),
        "phase": torch.tensor([3, 3, 0, 1, 2, 2, 0]),
    }


WRONG = {
    "missing": ("score", None, "missing array 'score'; expected a trace with logical, live"),
    "no events": ("logical", torch.zeros(0).long(), "logical and live: expected two lists"),
    "lengths": ("live", torch.tensor([5]), "logical and live: expected two lists"),
    "sizes": (
        "live",
        torch.tensor([5, 6]),
        r"'positions' has shape \[1, 2, 10\], expected \[1, 2, 11",
    ),
    "axes": ("kept", torch.ones(2, 10), r"'kept' has shape \[2, 10\]"),
    "order": ("positions", trace_arrays()["positions"].flip(-1), "event 0: positions are not asc"),
    "range": ("logical", torch.tensor([4, 7]), r"event 0: a position is not in \[0, 4\)"),
    "uneven": ("kept", trace_arrays()["positions"] > 2, "event 0: heads keep different|event 1"),
    "none": ("kept", torch.zeros(1, 2, 10).bool(), "event 0: heads keep different numbers"),
    "phases": ("phase", torch.tensor([3, 3]), r"phase has shape \[2\], expected at least 7"),
    "phase": ("phase", torch.full((7,), 5), "phase: expected 0 .think., 1 .act."),
    "negative": ("live", torch.tensor([-1, 11]), "logical and live|live"),
    "fractions": ("live", torch.tensor([5.0, 5.0]), "live"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_trace_is_named(tmp_path, case):
    name, value, message = WRONG[case]
    arrays = trace_arrays()
    del arrays[name]
    if value is not None:
        arrays[name] = value
    path = tmp_path / "trace.npz"
    write_archive(path, arrays, {})
    with pytest.raises(UsageError, match=message) as caught:
        Trace.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_trace_cannot_be_saved(tmp_path):
    with pytest.raises(UsageError, match="the trace has no event"):
        Trace([]).save(tmp_path / "trace.npz")


def test_timeline_by_hand():
    found = phase_timeline(two_events(), torch.tensor([3, 3, 0, 1, 2, 2, 0]))
    assert (found.logical, found.live) == ([5, 7], [5, 5])
    # Think, act, tool, others among positions 0-4, then 0-6.
    assert found.seen.tolist() == [[1, 1, 1, 2], [2, 1, 2, 2]]
    assert found.before.tolist() == [[[[1, 1, 1, 2], [1, 1, 1, 2]]], [[[2, 0, 2, 1], [2, 0, 1, 2]]]]
    # Head 0 keeps 0, 2, 4 and then 2, 4, 6; head 1 keeps 0, 1, 2 and then 0, 5, 6.
    assert found.kept.tolist() == [[[[1, 0, 1, 1], [1, 0, 0, 2]]], [[[2, 0, 1, 0], [1, 0, 1, 1]]]]
    document = found.document()
    assert document["events"][0]["mean_kept"] == [1, 0, 0.5, 1.5]
    assert document["events"][1]["mean_before"] == [2, 0, 1.5, 1.5]
    json.dumps(document, allow_nan=False)


def test_timeline_needs_phases_and_events():
    with pytest.raises(UsageError, match="the trace has no array 'phase'"):
        trace_timeline(Trace(two_events()))
    with pytest.raises(UsageError, match="had no event"):
        trace_timeline(Trace([], torch.zeros(4).long()))


def test_audit_by_hand():
    three, one, five, zero = (audit(two_events(), [p])[0] for p in (3, 1, 5, 0))
    # Position 3 loses everywhere at once. In head 0 it ties with 1 for third of four places of two;
    # in head 1 with 2, which is earlier and stays.
    (lost,) = three.evictions
    assert (lost.event, lost.logical, lost.heads.tolist()) == (0, 5, [[0, 0], [0, 1]])
    assert (lost.ranks.tolist(), lost.places.tolist(), lost.competed.tolist()) == (
        [4, 3], [2, 2], [4, 4],
    )  # fmt: skip
    np.testing.assert_allclose(lost.margins, [-0.2, 0.0], atol=1e-6)
    assert (three.held, three.heads) == (0, 2)
    # Position 1: third in head 0 of the first event, fourth in head 1 of the second.
    assert [(e.event, e.heads.tolist(), e.ranks.tolist()) for e in one.evictions] == [
        (0, [[0, 0]], [3]),
        (1, [[0, 1]], [4]),
    ]
    np.testing.assert_allclose(one.evictions[1].margins, [-0.1], atol=1e-6)
    assert one.evictions[1].places.tolist() == [3]
    # Position 5 was only there in the second event; head 1 still holds it.
    assert (five.held, [e.event for e in five.evictions]) == (1, [1])
    # Position 0 could not be evicted in the first event and lost head 0 in the second.
    assert [(e.event, e.ranks.tolist()) for e in zero.evictions] == [(1, [5])]
    json.dumps([found.document() for found in (three, one, five, zero)], allow_nan=False)


def test_audit_of_what_was_never_evicted():
    kept, never = audit(two_events(), [99, 2])
    assert (kept.position, kept.held, [e.event for e in kept.evictions]) == (2, 1, [1])
    assert (never.position, never.held, never.evictions) == (99, 2, [])
    assert audit([], [3])[0].heads == 0


def test_audit_where_all_places_were_taken():
    """Nothing that competed was kept, so there is no threshold."""
    full = event(3, [[0, 1, 2]], [[0, 1, 1]], [[0.5, NAN, NAN]])
    (found,) = audit([full], [0])
    (lost,) = found.evictions
    assert (lost.ranks.tolist(), lost.places.tolist(), lost.competed.tolist()) == ([1], [0], [1])
    assert lost.document()["margins"] == [None]


@pytest.mark.parametrize("seed", range(5))
def test_audit_ranks_say_who_is_evicted(seed):
    """Whatever the scores, ties and infinities included: evicted means a rank past the places."""
    rng = np.random.default_rng(seed)
    scores = rng.choice([-INF, 0.0, 1.0, 2.0, INF], (2, 3, 20)).astype("f4")
    always = rng.random((2, 3, 20)) < 0.2
    order = np.lexsort((np.broadcast_to(np.arange(20), scores.shape), -scores, ~always))
    kept = np.zeros((2, 3, 20), bool)
    np.put_along_axis(kept, order[..., :12], True, -1)
    traced = scored(
        20,
        torch.arange(20).expand(2, 3, -1),
        torch.as_tensor(kept),
        torch.as_tensor(np.where(always, NAN, scores)),
    )
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(1, 21) + 0 * order, -1)
    for found in audit([traced], range(20)):
        for lost in found.evictions:
            for (layer, head), rank, places in zip(
                lost.heads.tolist(), lost.ranks.tolist(), lost.places.tolist(), strict=True
            ):
                assert rank == ranks[layer, head, found.position] - always[layer, head].sum()
                assert rank > places
        assert found.held == kept[:, :, found.position].sum()
