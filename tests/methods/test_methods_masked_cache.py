"""Masked-cache equality of every method: an engine that evicts gives the logits of one that masks.

The reference masks per KV head; per query head where each has a cache of its own; and where
positions are the cache's it keeps keys before RoPE and rotates them by their index.
"""

from __future__ import annotations

import math

import pytest
import torch

from agentbench_kv.conformance.driver import default_turns, drive, short_turns
from agentbench_kv.conformance.masked import check_masked_cache
from agentbench_kv.conformance.reference import largest_difference, tiny_model
from agentbench_kv.engines.embedded import cache
from agentbench_kv.registry import load_method, make_method, names

BUDGETS = {
    "snapkv@rkv": 64,
    "snapkv@kvpress": 96,
    "triattention@vllm": 160,
    "triattention@hf": 130,
    "triattention@per_layer": 130,
    "triattention@global": 130,
}
SPECS = [
    f"{name}@{preset}" if preset else name
    for name in names("method")
    if not load_method(name).offline and not load_method(name).spans
    for preset in (load_method(name).presets or {"": {}})
]
FAMILIES = [(family, group) for family in ("qwen3", "llama") for group in (1, 2, 4)]
REPRESENTATIVES = [
    "agentkv",
    "h2o",
    "random",
    "rkv",
    "snapkv@original",
    "snapkv@rkv",
    "streamingllm@paper",
    "triattention@hf",
]
VARIANTS = [
    ("agentkv", {"trigger": "prefill+every"}),
    ("agentkv", {"trigger": "turn"}),
    ("agentkv", {"trigger": "slack"}),
    ("agentkv@paper", {"kept_set": "shared"}),
    ("agentkv", {"gqa": "max_logit", "sinks": "2"}),
    ("agentkv", {"sampler": "weighted"}),
    ("h2o", {"trigger": "prefill+every"}),
    ("snapkv@original", {"trigger": "prefill+every"}),
    ("snapkv@original", {"kept_set": "shared"}),
    ("triattention", {"trigger": "every", "protect": "none"}),
    *[(f"{name}@system", {}) for name in ("agentkv", "random", "lagkv")],
    ("h2o", {"protect": "25"}),
    ("snapkv@original", {"protect": "system", "window": 16}),
    ("streamingllm", {"protect": "system", "trigger": "prefill+every"}),
]
IN_CACHE = [
    ("agentkv", {}),
    ("agentkv@paper", {"trigger": "prefill+every", "sampler": "multiscale"}),
    ("h2o", {}),
    ("snapkv@original", {}),
    ("streamingllm", {"trigger": "turn"}),
    ("rkv", {"kept_set": "shared"}),
    ("triattention", {"protect": "none"}),
    ("agentkv", {"protect": "system"}),
]


def build(spec, budget=None, **settings):
    compresses = load_method(spec.partition("@")[0]).compresses
    size = BUDGETS.get(spec, 48) if budget is None else budget
    return make_method(spec, size if compresses else None, settings)


def assert_equal(method, model, **options):
    results = check_masked_cache(method, model, **options)
    assert [result for result in results if not result.ok] == []


@pytest.mark.parametrize("spec", SPECS)
def test_method_equals_the_masked_reference(spec):
    """Six turns, a prompt of more than one prefill chunk, two sessions at once."""
    assert_equal(build(spec), tiny_model("qwen3", kv_heads=2))


@pytest.mark.parametrize(("family", "group"), FAMILIES)
@pytest.mark.parametrize("spec", REPRESENTATIVES)
def test_method_equals_the_masked_reference_for_families_and_groups(spec, family, group):
    model = tiny_model(family, q_heads=4, kv_heads=4 // group, layers=2, seed=group)
    assert_equal(build(spec), model, turns=short_turns(seed=group), interval=16)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
@pytest.mark.parametrize("spec", ["agentkv", "streamingllm@paper"])
def test_other_families_equal_the_masked_reference(spec, family):
    assert_equal(build(spec), tiny_model(family, layers=2), turns=short_turns())


def few(settings):
    return {"min_events": 3} if settings.get("trigger") == "turn" else {}


@pytest.mark.parametrize(("spec", "settings"), VARIANTS, ids=str)
def test_variants_equal_the_masked_reference(spec, settings):
    method = build(spec, 64, **settings)
    assert_equal(method, tiny_model(layers=2), turns=short_turns(), **few(settings))


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(("spec", "settings"), IN_CACHE, ids=str)
def test_positions_in_the_cache_equal_a_reference_that_rotates_late(spec, settings, group):
    method = build(spec, 64, positions="cache", **settings)
    model = tiny_model("llama", q_heads=4, kv_heads=4 // group, layers=2, seed=group)
    assert_equal(method, model, turns=short_turns(seed=group), interval=16, **few(settings))


ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("spec", ["streamingllm@paper", "triattention@sglang"])
def test_scaled_rope_equals_the_masked_reference(spec, rope):
    """Other frequencies; yarn also has an attention factor, which no rotation may repeat."""
    method = build(spec, 64, positions="cache")
    model = tiny_model("llama", layers=2, rope=ROPES[rope])
    assert_equal(method, model, turns=short_turns(), interval=16)


def test_positions_in_the_cache_are_not_logical_positions():
    """The two references differ by far more than the tolerance, so each can fail."""
    model = tiny_model(layers=2)
    for spec, other in (("streamingllm@paper", "logical"), ("streamingllm@logical", "cache")):
        method = build(spec, 48, interval=16)
        trace = drive(model, method, {"only": short_turns()})["only"]
        assert largest_difference(model, trace, method.positions) < 1e-4
        assert largest_difference(model, trace, other) > 1e-2


def test_query_heads_of_a_group_keep_tokens_of_their_own():
    model = tiny_model(layers=2, q_heads=4, kv_heads=2)
    method = build("snapkv@original", 48, interval=16)
    trace = drive(model, method, {"only": short_turns()})["only"]
    kept = trace.events[-1].kept.sort(-1).values
    assert kept.shape[:2] == (2, 4)
    assert not torch.equal(kept[:, 0], kept[:, 1])
    assert not torch.equal(kept[:, 2], kept[:, 3])


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
    monkeypatch.setattr(cache, "torch", PoisonedTorch())
    assert_equal(build(spec), tiny_model(layers=2), turns=short_turns())


def test_default_turns_are_what_the_specification_asks():
    turns = default_turns()
    assert len(turns) >= 3
    assert sum(turn.max_tokens for turn in turns) >= 200
    assert max(len(turn.prompt) for turn in turns) > 512
