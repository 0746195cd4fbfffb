"""Many small events: against plain numpy, and against the engine that really evicts."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.analysis import replay as attention
from agentbench_kv.analysis.captures import Capture
from agentbench_kv.analysis.replay import event_points, replay, replay_trace, select_capture
from agentbench_kv.analysis.traces import EventTrace
from agentbench_kv.conformance.reference import Turn, tiny_model
from agentbench_kv.engines.base import EngineOptions, Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.errors import UsageError
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method

POINTS = [30, 41, 55, 70, 90]


@pytest.mark.parametrize(
    ("spec", "options", "size"),
    [
        ("agentkv@paper", {"representatives": 8}, 2),
        ("snapkv", {"window": 8}, 8),
        ("streamingllm", {}, 4),
    ],
)
@pytest.mark.parametrize("layers", [None, 2])
def test_small_events_are_the_replay_of_the_specification(
    capture, numeric, spec, options, size, layers
):
    made = capture(90, layers=layers)
    events = replay(made, make_method(spec, 24, options), POINTS)
    score = numeric.method_scores(spec.split("@")[0], made.phases.numpy(), size)
    for layer in range(layers or 1):
        q, k = made.q[layer].numpy(), made.k[layer].numpy()
        expected = numeric.replayed(score, q, k, POINTS, 24)
        assert [event.kept_positions[layer].tolist() for event in events] == expected
    assert [event.logical for event in events] == POINTS
    assert [event.live for event in events] == [30, 35, 38, 39, 44]


@pytest.mark.parametrize("block_bytes", [600, 1 << 25])
def test_evicted_tokens_forget_their_sums(capture, numeric, monkeypatch, block_bytes):
    monkeypatch.setattr(attention, "BLOCK_BYTES", block_bytes)
    made = capture(70)
    events = replay(made, make_method("h2o", 16), [20, 33, 50, 69])
    q, k = made.q[0].numpy(), made.k[0].numpy()
    expected = numeric.replayed_h2o(q, k, [20, 33, 50, 69], 16)
    assert [event.kept_positions[0].tolist() for event in events] == expected


@pytest.mark.parametrize("spec", ["agentkv", "h2o", "rkv@code", "oracle", "snapkv@original"])
def test_one_event_is_a_selection(capture, spec):
    """Shared code, but two ways to it: the first event of a replay, and `kvbench select`."""
    made = capture(90, layers=2).at(60)
    method = make_method(spec, 40)
    (event,) = replay(made, method, [60])
    outcome = select_capture(made, method)
    assert torch.equal(event.kept_positions, outcome.kept.long())
    assert torch.equal(event.scores.nan_to_num(9), outcome.score[..., :60].nan_to_num(9))


def test_the_oracle_of_a_later_event_knows_the_same_future(capture, numeric):
    made = capture(80)
    first, second = replay(made, make_method("oracle", 20), [40, 60])
    for head in range(2):
        utility = numeric.utility(made.q[0].numpy(), made.k[0].numpy(), np.arange(80), 60)[head]
        live = np.array([*first.kept_positions[0, head].tolist(), *range(40, 60)])
        expected = live[numeric.top(utility[live], 20)]
        assert second.kept_positions[0, head].tolist() == expected.tolist()


@settings(max_examples=25, deadline=None)
@given(
    points=st.sets(st.integers(1, 60), min_size=1, max_size=6).map(sorted),
    budget=st.integers(9, 40),
    spec=st.sampled_from(["agentkv", "h2o", "random", "streamingllm"]),
)
def test_what_is_kept_was_live_and_nothing_returns(capture, points, budget, spec):
    events = replay(capture(60), make_method(spec, budget), points)
    held, start = [set(), set()], 0
    assert [event.logical for event in events] == [
        now for i, now in enumerate(points) if _live_at(points[: i + 1], budget) > budget
    ]
    for event in events:
        for head in range(2):
            live = held[head] | set(range(start, event.logical))
            assert set(event.positions[0, head].tolist()) == live
            held[head] = set(event.kept_positions[0, head].tolist())
            assert held[head] <= live
            assert len(held[head]) == budget
        start = event.logical


def _live_at(points, budget):
    """Tokens live before the last of some events."""
    live = 0
    for before, now in zip([0, *points], points, strict=False):
        live = min(live, budget) + now - before
    return live


@pytest.mark.parametrize("points", [[40, 30], [20, 20], [0], [61]])
def test_events_must_be_in_order_and_inside(capture, points):
    with pytest.raises(UsageError, match="expected ascending logical lengths up to 60"):
        replay(capture(60), make_method("random", 10), points)


def test_positions_of_the_cache_cannot_be_replayed(capture):
    with pytest.raises(UsageError, match="a capture logical ones; add --set positions=logical"):
        replay(capture(60), make_method("streamingllm@paper", 10), [30])


def test_no_event_is_said(capture):
    with pytest.raises(UsageError, match="agentkv would have had no event: the capture has 60"):
        replay_trace(capture(60), make_method("agentkv", 40))


def points_of(capture, decoded, **options):
    made = capture(len(decoded), extra={"decoded": np.array(decoded, dtype=bool)})
    return event_points(made, make_method("random", 6, options))


def test_event_points_by_hand(capture):
    """Two prompts of 5 and 4 tokens, 8 and 5 generated ones, budget 6, a count of 4."""
    decoded = [0] * 5 + [1] * 8 + [0] * 4 + [1] * 5
    # The 4th generated token is sampled with 8 tokens fed, the 8th with 12, the 12th with 20.
    assert points_of(capture, decoded, interval=4) == [8, 12, 20]
    # The turn ends when its 8th token is sampled; of the second turn no end is known.
    assert points_of(capture, decoded, trigger="turn") == [12]
    # Prompts end at 5, below the budget, and at 17.
    assert points_of(capture, decoded, interval=4, trigger="prefill+every") == [8, 12, 17, 20]
    # Budget + 4 rows are live at 10; then 6 are left, and 4 more at 14, met at 17 where it decodes.
    assert points_of(capture, decoded, interval=4, trigger="slack") == [10, 17, 21]


def test_without_marks_everything_after_the_prompt_is_generated(capture):
    made = capture(40, extra={"prompt": np.array(10)})
    assert event_points(made, make_method("random", 6, {"interval": 8})) == [17, 25, 33]


class Watch(Observer):
    """Keeps everything of a single session."""

    def __init__(self, layers):
        self.rows = [[] for _ in range(layers)]
        self.tokens, self.phases, self.events = [], [], []

    def on_rows(self, rows):
        assert rows.position == len(self.tokens)
        self.tokens += rows.tokens
        self.phases += rows.phases

    def on_attention(self, layer, query, key, value):
        self.rows[layer].append([rows.clone() for rows in (query, key, value)])

    def on_selection(self, _session, logical, positions, selection):
        self.events.append(EventTrace.from_selection(logical, positions, selection))

    def capture(self, prompt, decoded):
        named = {
            name: torch.stack([torch.cat([r[i] for r in rows], 1) for rows in self.rows])
            for i, name in enumerate("qkv")
        }
        named |= {"phase": torch.tensor(self.phases), "tokens": torch.tensor(self.tokens)}
        return Capture.from_arrays(
            named | {"prompt": torch.tensor(prompt), "decoded": torch.tensor(decoded)}
        )


def watched(method, turns):
    """Drive the embedded engine through turns; return the watch and which tokens it generated."""
    model = tiny_model(q_heads=4, kv_heads=2, layers=2)
    watch, decoded = Watch(2), []
    options = EngineOptions(model="in-memory", method=method, device="cpu", max_live_tokens=10**5)
    engine = EmbeddedEngine.create(options, model=copy.deepcopy(model), recorder=watch)
    label = TokenPhases().label
    try:
        engine.open("s", TokenPhases())
        for number, turn in enumerate(turns):
            engine.extend("s", turn.prompt, [label(token) for token in turn.prompt])
            decoded += [False] * len(turn.prompt)
            sampling = Sampling(max_tokens=turn.decode, temperature=1.0, seed=number)
            decoded += [True for _ in engine.generate("s", sampling)]
    finally:
        engine.shutdown()
    return watch, decoded[: len(watch.tokens)]


ENGINE_CASES = [
    ("agentkv", {}),
    ("agentkv", {"trigger": "prefill+every", "kept_set": "shared"}),
    ("snapkv", {"window": 8, "trigger": "turn"}),
    ("snapkv@original", {"window": 8}),
    ("rkv@code", {"trigger": "slack"}),
    ("h2o", {}),
    ("random", {"trigger": "turn"}),
]


@pytest.mark.parametrize(("spec", "options"), ENGINE_CASES)
def test_a_replay_keeps_what_the_engine_kept(spec, options):
    """The engine evicts for real; its own queries and keys, replayed, give the same kept sets."""
    method = make_method(spec, 40, {"interval": 16, **options})
    generator = torch.Generator().manual_seed(0)
    lengths = ((30, 50), (25, 37), (60, 20))
    turns = [Turn(torch.randint(64, (n,), generator=generator).tolist(), d) for n, d in lengths]
    watch, decoded = watched(method, turns)
    made = watch.capture(30, decoded)
    assert len(watch.events) >= 2
    points = [event.logical for event in watch.events]
    assert event_points(made, method) == [now for now in points if now < made.length]
    events = replay(made, method, points)
    assert [event.logical for event in events] == points
    for got, expected in zip(events, watch.events, strict=True):
        assert torch.equal(got.positions, expected.positions)
        assert torch.equal(got.kept, expected.kept)
        assert torch.equal(got.scores.isnan(), expected.scores.isnan())
        torch.testing.assert_close(got.scores.nan_to_num(0), expected.scores.nan_to_num(0))
