"""What the engine kept, replayed from the reference model's own queries and keys.

Twice: by the method itself on tensors from one unchunked pass (rings, sums, slots and compaction of
the engine are checked), and by the numpy formulations (the method is checked too).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import methods_reference as reference
import numpy as np
import pytest
import torch

from agentbench_kv.analysis.replay import held_queries
from agentbench_kv.conformance.driver import (
    TurnPlan,
    calibrated_for,
    default_turns,
    drive,
    short_turns,
)
from agentbench_kv.conformance.kept_sets import check_replay, reference_inputs
from agentbench_kv.conformance.reference import tiny_model
from agentbench_kv.engines.core import attention_sums, rings
from agentbench_kv.engines.embedded import attention, scheduler
from agentbench_kv.methods.base import Method, QueryKind, QueryPlan
from agentbench_kv.registry import load_method, make_method, names

SPECS = [
    f"{name}@{preset}" if preset else name
    for name in names("method")
    if load_method(name).compresses and not load_method(name).offline
    if not load_method(name).spans
    for preset in (load_method(name).presets or {"": {}})
]
BUDGETS = {"snapkv@kvpress": 96, "triattention@vllm": 160}
CASES = [
    *[(spec, {}) for spec in SPECS],
    *[
        (spec, {"positions": "cache"})
        for spec in ("agentkv", "h2o", "rkv", "snapkv@original", "triattention@sglang")
    ],
    *[("agentkv", {"sampler": sampler}) for sampler in ("multiscale", "weighted", "diverse")],
    ("agentkv", {"gqa": "max_logit", "drop_phase": "tool", "trigger": "prefill+every"}),
    ("agentkv", {"kept_set": "shared"}),
    ("h2o", {"recent_share": "0"}),
    ("h2o", {"kept_set": "per_kv_head", "trigger": "prefill+every"}),
    ("triattention", {"trigger": "prefill+every"}),
]


def build(spec, **settings):
    budget = BUDGETS.get(spec, 128 if spec.startswith("triattention") else 64)
    return make_method(spec, budget, {"interval": "16", **settings})


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", kv_heads=2, layers=2)


def traced(model, method, turns=None):
    return drive(model, method, {"only": turns or short_turns()})["only"]


@pytest.mark.parametrize(("spec", "settings"), CASES, ids=str)
def test_engine_keeps_what_the_method_keeps_on_plain_tensors(model, spec, settings):
    method = build(spec, **settings)
    trace = traced(model, method)
    result = check_replay("only", model, method, trace)
    assert result.ok, result.detail
    assert len(trace.events) >= 5


@pytest.mark.parametrize(
    ("spec", "settings"), [case for case in CASES if case[0] != "random"], ids=str
)
def test_engine_keeps_what_the_specification_keeps(model, spec, settings):
    """Independent of engine and methods: HF queries and keys, numpy scores, the same kept sets."""
    method = calibrated_for(model, build(spec, **settings))
    trace = traced(model, method)
    assert len(trace.events) >= 5
    inputs = reference_inputs(model, method, trace)
    for given, event in zip(inputs, trace.events, strict=True):
        scores, kept = reference.select(method, event_of(method, given, trace))
        assert_same_sets(event.kept.sort(-1).values.tolist(), kept, given.places, scores)


def event_of(method, given, trace):
    statistics = covariance = None
    if method.needs_calibration:
        made = method.calibration
        covariance = None if made.covariance is None else made.covariance.double().numpy()
        parts = (made.mean.numpy(), made.abs_mean.numpy(), made.frequencies.numpy())
        statistics = (*(part.astype(np.complex128) for part in parts), made.scale)
        statistics = (statistics[0], statistics[1].real, statistics[2].real, made.scale)
    return reference.Event(
        layers=[
            (
                *(v.keys.numpy(), v.positions.numpy()),
                *(None if v.sums is None else v.sums.numpy(), v.values.numpy()),
            )
            for v in given.layers
        ],
        queries=[(q.vectors.numpy(), q.positions.numpy(), q.phases.numpy()) for q in given.queries],
        now=given.now,
        prompt=len(short_turns()[0].prompt),
        phases=np.array(trace.phases[: given.now]),
        statistics=statistics,
        covariance=covariance,
        next_position=given.places.shape[-1] if method.positions == "cache" else given.now,
    )


def assert_same_sets(got, expected, places, scores):
    """Equal, or differing only in tokens whose scores are equal to float32's precision."""
    for layer, heads in enumerate(places.tolist()):
        for head, held in enumerate(heads):
            extra = set(got[layer][head]) ^ set(expected[layer][head])
            row = scores[layer, head]
            disputed = [row[held.index(position)] for position in extra]
            assert not disputed or np.ptp(disputed) <= 1e-4 * np.ptp(row), sorted(extra)


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("spec", ["agentkv", "h2o", "rkv@code", "streamingllm@paper"])
def test_many_small_events_equal_their_replay(model, spec, interval):
    """One token evicted at a time, over and over."""
    method = make_method(spec, 40, {"interval": str(interval)})
    trace = traced(model, method)
    assert len(trace.events) >= 205 // interval - 1
    result = check_replay("only", model, method, trace)
    assert result.ok, result.detail


@pytest.mark.parametrize("spec", ["agentkv", "h2o", "snapkv@original", "triattention@sglang"])
@pytest.mark.parametrize("percent", [7, 25, 60])
def test_shares_follow_the_logical_length(model, spec, percent):
    """Every event leaves ceil(share · tokens seen), or what is always kept and one more."""
    settings = {"interval": "16", "trigger": "prefill+every"}
    method = make_method(spec, f"{percent}%", settings)
    trace = traced(model, method)
    assert len(trace.events) >= 5
    for event in trace.events:
        size = -(-percent * event.logical // 100)
        while size <= method.sinks + method.recent_kept(size):
            size += 1
        assert event.kept.shape[-1] == size, event.logical
    result = check_replay("only", model, method, trace)
    assert result.ok, result.detail


@pytest.mark.parametrize(
    ("spec", "settings"),
    [("h2o", {"recent_share": "0"}), ("agentkv", {"positions": "cache"}), ("rkv@code", {})],
    ids=str,
)
def test_caches_that_grow_and_shrink_keep_what_belongs_to_rows(model, spec, settings):
    """600 tokens of prompt under a budget of 40: rows move to larger slots and back."""
    method = make_method(spec, 40, {"interval": "32", **settings})
    trace = traced(model, method, default_turns())
    assert len(trace.events) >= 5
    assert trace.stats.peak_live > 512
    result = check_replay("only", model, method, trace)
    assert result.ok, result.detail


@dataclass(frozen=True, kw_only=True)
class ByValue(Method):
    """Scores by values and phases, which no method of ours reads."""

    name: ClassVar[str] = "by-value"

    def score(self, queries, keys, context):  # noqa: ARG002
        return context.values.norm(dim=-1) + context.phases + (context.positions < context.prompt)


@pytest.mark.parametrize("settings", [{}, {"positions": "cache"}], ids=str)
def test_values_phases_and_prompt_come_from_the_session(model, settings):
    trace = traced(model, ByValue(budget=64, interval=16, **settings))
    assert len(trace.events) >= 5
    result = check_replay("only", model, ByValue(budget=64, interval=16, **settings), trace)
    assert result.ok, result.detail


@dataclass(frozen=True, kw_only=True)
class BySums(Method):
    """Scores by sums like h2o, but wants its rows by position."""

    name: ClassVar[str] = "by-sums"

    def query_plan(self):
        return QueryPlan(QueryKind.SUMS)

    def score(self, queries, keys, context):  # noqa: ARG002
        return context.sums


def test_sums_are_sorted_with_the_rows(model):
    method = BySums(budget=64, interval=16)
    trace = traced(model, method)
    assert len(trace.events) >= 5
    result = check_replay("only", model, method, trace)
    assert result.ok, result.detail


# -- sums of attention


@pytest.mark.parametrize("group", [1, 2, 4])
def test_h2o_sums_equal_those_of_the_reference_attention(group):
    """Every sum of every token at every event, from the masked reference's probabilities."""
    model = tiny_model("llama", q_heads=4, kv_heads=4 // group, layers=2, seed=group)
    method = make_method("h2o", 64, {"interval": "16", "recent_share": "0"})
    trace = traced(model, method)
    assert len(trace.events) >= 5
    inputs = reference_inputs(model, method, trace)
    for given, event in zip(inputs, trace.events, strict=True):
        expected = torch.stack([view.sums for view in given.layers])
        torch.testing.assert_close(event.scores, expected, rtol=1e-4, atol=1e-4)


def test_h2o_sums_add_up_to_the_queries_seen(model):
    """Before anything is evicted, the probabilities of n queries sum to n."""
    method = make_method("h2o", 64, {"interval": "16", "recent_share": "0"})
    event = traced(model, method).events[0]
    totals = event.scores.sum(-1)
    torch.testing.assert_close(totals, torch.full_like(totals, event.logical), rtol=1e-5, atol=0)


def test_h2o_forgets_the_sums_of_evicted_tokens(model):
    """Afterwards they sum to less: what evicted tokens had got is gone."""
    method = make_method("h2o", 64, {"interval": "16", "recent_share": "0"})
    last = traced(model, method).events[-1]
    assert (last.scores.sum(-1) < last.logical - 50).all()


# -- prefill in chunks


CHUNKED = ["agentkv", "h2o", "rkv", "snapkv@original", "streamingllm@paper", "triattention"]


@pytest.mark.parametrize("chunk", [1, 7, 64, 65, 1000])
@pytest.mark.parametrize("spec", CHUNKED)
def test_prefill_in_chunks_of_any_size_is_one_prefill(model, monkeypatch, spec, chunk):
    """Rings, sums and positions do not see where a prompt was cut."""
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(64, (n,), generator=draw).tolist() for n in (130, 70)]
    turns = [TurnPlan(prompts[0], 40), TurnPlan(prompts[1], 40)]
    monkeypatch.setattr(scheduler, "PREFILL_CHUNK", chunk)
    method = build(spec) if spec != "triattention" else make_method(spec, 140, {"interval": "16"})
    trace = traced(model, method, turns)
    assert len(trace.events) >= 3
    result = check_replay("only", model, method, trace)
    assert result.ok, result.detail


def test_blocks_of_the_prefill_sums_do_not_matter(model, monkeypatch):
    method = build("h2o", recent_share="0")
    monkeypatch.setattr(attention_sums, "MASS_BLOCK", 1)
    single = traced(model, method).events[0].scores
    monkeypatch.setattr(attention_sums, "MASS_BLOCK", 10**6)
    torch.testing.assert_close(single, traced(model, method).events[0].scores)


# -- the replay must be able to fail


def broken(model, method):
    return not check_replay("only", model, method, traced(model, method)).ok


def test_replay_finds_a_kept_token_exchanged(model):
    method = build("agentkv")
    trace = traced(model, method)
    event = trace.events[2]
    kept = event.kept.clone()
    missing = set(range(event.logical)) - set(kept[1, 0].tolist())
    kept[1, 0, 3] = max(missing)
    trace.events[2] = replace(event, kept=kept)
    trace.events[3:] = []
    assert not check_replay("only", model, method, trace).ok


def test_replay_finds_rings_that_miss_a_query(model, monkeypatch):
    plain = rings.QueryStore.place

    def late(self, phases, first_position, first_row):
        rows, slots = plain(self, phases, first_position, first_row)
        return (rows[:-1], slots[:-1]) if first_position == 120 else (rows, slots)

    monkeypatch.setattr(rings.QueryStore, "place", late)
    assert broken(model, build("agentkv"))


def test_replay_finds_sums_that_miss_a_prefill(model, monkeypatch):
    monkeypatch.setattr(attention, "add_attention", lambda *_: None)
    assert broken(model, build("h2o"))


def test_replay_finds_stored_queries_that_were_not_shifted(model, monkeypatch):
    monkeypatch.setattr(rings.QueryStore, "shift", lambda *_: None)
    assert broken(model, build("agentkv", positions="cache"))
    assert not broken(model, build("agentkv"))


def test_held_queries_are_those_of_the_plan():
    phases = torch.tensor([3, 3, 0, 1, 0, 2, 0, 3])
    per_phase = QueryPlan(QueryKind.PER_PHASE, 2)
    assert held_queries(QueryPlan(QueryKind.RECENT, 3), phases[:7]).tolist() == [4, 5, 6]
    assert held_queries(QueryPlan(QueryKind.RECENT, 9), phases[:3]).tolist() == [0, 1, 2]
    assert held_queries(per_phase, phases).tolist() == [1, 3, 4, 5, 6, 7]
    assert held_queries(per_phase, phases[:5]).tolist() == [0, 1, 2, 3, 4]
    assert held_queries(QueryPlan(), phases).tolist() == []
