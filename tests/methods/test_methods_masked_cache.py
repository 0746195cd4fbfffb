"""Masked-cache equality of every registered method, and proof that the check can fail."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentbench_kv.conformance.masked_cache import (
    Capture,
    Turn,
    check_masked_cache,
    check_trace,
    default_turns,
    drive,
    largest_difference,
    reference_logits,
    tiny_model,
    visible,
)
from agentbench_kv.engines.embedded import pool, scheduler
from agentbench_kv.engines.embedded.cache import SessionCache
from agentbench_kv.kernels.torch_backend import TorchBackend
from agentbench_kv.registry import load_method, make_method, names

BUDGETS = {"snapkv@rkv": 64, "snapkv@kvpress": 96}
SPECS = [
    f"{name}@{preset}" if preset else name
    for name in names("method")
    for preset in (load_method(name).presets or {"": {}})
]
CONFIGS = [
    *[(family, group, "agentkv") for family in ("qwen3", "llama") for group in (1, 2, 4)],
    *[("llama", group, "snapkv@rkv") for group in (1, 4)],
    ("qwen3", 4, "snapkv@kvpress"),
    ("qwen2", 2, "agentkv"),
    ("mistral", 2, "agentkv"),
]
VARIANTS = [
    ("agentkv", {"trigger": "prefill+every"}),
    ("agentkv", {"trigger": "turn"}),
    ("agentkv", {"trigger": "slack"}),
    ("agentkv@paper", {"kept_set": "shared"}),
    ("agentkv", {"gqa": "max_logit", "sinks": "2"}),
]


def build(spec, **settings):
    compresses = load_method(spec.partition("@")[0]).compresses
    return make_method(spec, BUDGETS.get(spec, 48) if compresses else None, settings)


def short_turns(seed=0):
    """Three turns, 205 decoded tokens."""
    draw = torch.Generator().manual_seed(seed)
    sizes = ((90, 70), (40, 65), (60, 70))
    return [Turn(torch.randint(64, (p,), generator=draw).tolist(), d) for p, d in sizes]


def assert_equal(method, model, **options):
    results = check_masked_cache(method, model, **options)
    assert [result for result in results if not result.ok] == []


@pytest.mark.parametrize("spec", SPECS)
def test_method_equals_the_masked_reference(spec):
    """Six turns, a prompt of more than one prefill chunk, two sessions at once."""
    assert_equal(build(spec), tiny_model("qwen3", kv_heads=2))


@pytest.mark.parametrize(("family", "group", "spec"), CONFIGS)
def test_method_equals_the_masked_reference_for_families_and_groups(family, group, spec):
    model = tiny_model(family, q_heads=4, kv_heads=4 // group, layers=2, seed=group)
    assert_equal(build(spec), model, turns=short_turns(group))


@pytest.mark.parametrize(("spec", "settings"), VARIANTS, ids=str)
def test_variants_equal_the_masked_reference(spec, settings):
    few = {"min_events": 3} if settings.get("trigger") == "turn" else {}
    assert_equal(build(spec, **settings), tiny_model(layers=2), turns=short_turns(), **few)


# -- the kept sets themselves, recomputed from the reference model's own queries and keys


def ring_positions(plan, phases, logical):
    """Positions of the queries a method holds after `logical` tokens."""
    if str(plan.kind) == "none":
        return []
    if str(plan.kind) == "recent":
        return list(range(max(0, logical - plan.size), logical))
    rings = [[p for p in range(logical) if phases[p] == phase] for phase in range(4)]
    return sorted(p for ring in rings for p in ring[-plan.size :])


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        ("streamingllm", {}),
        ("snapkv@rkv", {}),
        ("snapkv@kvpress", {}),
        ("agentkv", {}),
        ("agentkv@paper", {}),
        ("agentkv", {"gqa": "max_logit", "drop_phase": "tool", "trigger": "prefill+every"}),
        ("agentkv", {"kept_set": "shared"}),
    ],
    ids=str,
)
def test_engine_keeps_what_the_specification_keeps(reference, spec, settings):
    """Independent of engine and kernels: HF queries and keys, numpy scores, the same kept sets."""
    model = tiny_model("qwen3", kv_heads=2, layers=2)
    method = replace(build(spec, **settings), interval=32)
    trace = drive(model, method, {"only": short_turns()})["only"]
    capture = Capture([], [])
    reference_logits(model, trace.tokens[:-1], visible(trace, 2, 2), capture)
    cached = torch.empty(2, 2, 0, dtype=torch.int64)
    seen = 0
    assert len(trace.events) >= 5
    for event in trace.events:
        new = torch.arange(seen, event.logical).expand(2, 2, -1)
        cached = torch.cat([cached, new], -1)
        scores, kept = reference.select(
            method, *event_inputs(method, trace, capture, cached, event.logical), event.logical
        )
        assert_same_sets(event.kept.sort(-1).values.tolist(), kept, cached, scores)
        cached, seen = event.kept, event.logical


def event_inputs(method, trace, capture, cached, logical):
    held = np.array(ring_positions(method.query_plan(), trace.phases, logical), dtype=int)
    phases = np.array(trace.phases)[held] if len(held) else held
    layers, queries = [], []
    for layer in range(2):
        rows = capture.keys[layer]
        keys = torch.stack([rows[head][cached[layer, head]] for head in range(2)])
        layers.append((keys.numpy(), cached[layer].numpy()))
        queries.append((capture.queries[layer][:, held].numpy(), held, phases))
    return layers, queries


def assert_same_sets(got, expected, cached, scores):
    """Equal, or differing only in tokens whose scores are equal to float32's precision."""
    for layer in range(2):
        for head in range(2):
            extra = set(got[layer][head]) ^ set(expected[layer][head])
            places = cached[layer, head].sort().values.tolist()
            disputed = [scores[layer, head][places.index(position)] for position in extra]
            assert not disputed or np.ptp(disputed) <= 1e-5 * max(disputed), sorted(extra)


# -- the harness must be able to fail


@pytest.fixture(scope="module")
def recorded():
    model = tiny_model("qwen3", kv_heads=2, layers=2)
    method = replace(make_method("agentkv", 48), interval=32)
    return model, method, drive(model, method, {"only": short_turns()})["only"]


def changed(trace, number, **changes):
    events = list(trace.events)
    events[number] = replace(events[number], **changes)
    return replace(trace, events=events)


def failures(model, method, trace):
    return {
        r.name.removeprefix("only: ") for r in check_trace("only", model, method, trace) if not r.ok
    }


def test_recorded_trace_passes(recorded):
    assert failures(*recorded) == set()


def test_harness_reports_one_wrong_position_in_one_head(recorded):
    """One kept token of one head of the last layer exchanged for an evicted one."""
    model, _, trace = recorded
    event = trace.events[0]
    kept = event.kept.clone()
    evicted = set(range(event.logical)) - set(kept[1, 0].tolist())
    kept[1, 0, 5] = max(evicted)
    assert largest_difference(model, changed(trace, 0, kept=kept)) > 1e-3


@pytest.mark.parametrize("shift", [-1, 1])
def test_harness_reports_an_event_that_is_off_by_one_token(recorded, shift):
    model, method, trace = recorded
    event = trace.events[0]
    wrong = changed(trace, 0, logical=event.logical + shift)
    assert largest_difference(model, wrong) > 1e-3
    assert "accounting" in failures(model, method, wrong)


@pytest.mark.parametrize("shift", [-1, 1])
def test_harness_reports_shifted_positions(recorded, shift):
    model, _, trace = recorded
    kept = (trace.events[2].kept + shift).clamp(0, trace.events[2].logical - 1)
    assert largest_difference(model, changed(trace, 2, kept=kept)) > 1e-3


def test_harness_reports_a_missing_event(recorded):
    model, method, trace = recorded
    wrong = replace(trace, events=trace.events[:-1])
    assert largest_difference(model, wrong) > 1e-3
    assert "accounting" in failures(model, method, wrong)


def test_harness_reports_heads_that_are_swapped(recorded):
    model, _, trace = recorded
    wrong = changed(trace, 1, kept=trace.events[1].kept.flip(1))
    assert largest_difference(model, wrong) > 1e-3


def test_harness_reports_impossible_kept_sets(recorded):
    model, method, trace = recorded
    event = trace.events[1]
    twice = event.kept.clone()
    twice[0, 0, 0] = twice[0, 0, 1]
    back = event.kept.clone()
    gone = set(range(trace.events[0].logical)) - set(trace.events[0].kept[0, 0].tolist())
    back[0, 0, 0] = min(gone)
    future = event.kept.clone()
    future[0, 0, 0] = event.logical
    for kept in (twice, back, future, event.kept[..., :-1]):
        assert "kept sets" in failures(model, method, changed(trace, 1, kept=kept))


def test_harness_reports_lost_logits_and_too_few_events(recorded):
    model, method, trace = recorded
    fewer = dict(list(trace.logits.items())[:-1])
    assert "logits recorded" in failures(model, method, replace(trace, logits=fewer))
    names_of = {r.name for r in check_trace("only", model, method, trace, 99) if not r.ok}
    assert names_of == {"only: events"}


def equality_fails(model, method):
    trace = drive(model, method, {"only": short_turns()})["only"]
    return "masked-cache equality" in failures(model, method, trace)


def test_harness_finds_an_engine_that_loses_positions(recorded, monkeypatch):
    """Physical length in the place of logical position after an eviction."""
    model, method, _ = recorded
    plain = SessionCache.advance

    def physical(self, _first_position, rows):
        plain(self, self.length, rows)

    monkeypatch.setattr(SessionCache, "advance", physical)
    trace = drive(model, method, {"only": short_turns()})["only"]
    assert failures(model, method, trace) & {"masked-cache equality", "kept sets"}


@pytest.mark.parametrize("lost", ["keys", "values"])
def test_harness_finds_a_compaction_that_leaves_rows_behind(recorded, monkeypatch, lost):
    model, method, _ = recorded
    plain = TorchBackend.compact

    def partial(self, keys, values, positions, kept, length, sort):
        stays = {"keys": keys, "values": values}[lost]
        row = stays[0, 0].clone()
        moved = plain(self, keys, values, positions, kept, length, sort)
        stays[0, 0] = row
        return moved

    monkeypatch.setattr(TorchBackend, "compact", partial)
    assert equality_fails(model, method)


def test_harness_finds_an_eviction_that_is_one_row_short(recorded, monkeypatch):
    """The engine goes on seeing one evicted row."""
    model, method, _ = recorded
    plain = SessionCache.keep

    def generous(self, kept):
        moved = plain(self, kept)
        self.length += 1
        return moved

    monkeypatch.setattr(SessionCache, "keep", generous)
    trace = drive(model, method, {"only": short_turns()})["only"]
    assert failures(model, method, trace) & {"masked-cache equality", "kept sets"}


@pytest.mark.parametrize("offset", [-1, 1])
def test_harness_finds_rotary_positions_that_are_off_after_an_eviction(
    recorded, monkeypatch, offset
):
    """Right rows, right masks, but tokens after the first event rotated one position off."""
    model, method, _ = recorded
    plain = scheduler.pack

    def shifted(sessions, chunk, queries):
        packed = plain(sessions, chunk, queries)
        moved = any(session.stats().events for session in sessions)
        places = [place + offset * moved for place in packed.positions]
        return replace(packed, positions=places)

    monkeypatch.setattr(scheduler, "pack", shifted)
    assert equality_fails(model, method)


class PoisonedTorch:
    """The torch module, but uninitialised memory holds NaN (as any memory may)."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *shape, **options):
        made = torch.empty(*shape, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made.fill_(-1)

    def empty_like(self, other, **options):
        return self.empty(other.shape, dtype=other.dtype, device=other.device, **options)


@pytest.mark.parametrize("spec", ["full", "agentkv"])
def test_uninitialised_cache_memory_never_reaches_the_logits(monkeypatch, spec):
    """Two sessions of unequal length decode together; rows past the shorter are never read."""
    monkeypatch.setattr(pool, "torch", PoisonedTorch())
    assert_equal(build(spec), tiny_model(layers=2), turns=short_turns())


def test_default_turns_are_what_the_specification_asks():
    turns = default_turns()
    assert len(turns) >= 3
    assert sum(turn.decode for turn in turns) >= 200
    assert max(len(turn.prompt) for turn in turns) > 512
