"""Properties of selection, over random caches; and the conformance suite's own ability to fail."""

# ruff: noqa: ARG002  plug-in methods below have the contract's arguments

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.conformance.methods import Scene, check_method, make_scene
from agentbench_kv.methods.base import LayerView, Method, Queries
from agentbench_kv.registry import load_method, make_method, names

SPECS = [
    f"{name}@{preset}" if preset else name
    for name in names("method")
    for preset in (load_method(name).presets or {"": {}})
]
COMPRESSING = [spec for spec in SPECS if load_method(spec.partition("@")[0]).compresses]
SMALL = {
    "agentkv@default": {"keep_recent": "2"},
    "agentkv@paper": {},
    "snapkv@rkv": {"window": "4"},
    "snapkv@kvpress": {"window": "4"},
    "streamingllm@logical": {"sinks": "2"},
}


def small(spec, budget, **settings):
    return make_method(spec, budget, {**SMALL[spec], **settings})


def kept_sets(scene, method):
    kept = scene.positions(scene.select(method)).flatten(0, 1).tolist()
    return [set(head) for head in kept]


@pytest.mark.parametrize("spec", SPECS)
def test_registered_method_passes_the_conformance_suite(spec):
    failed = [result for result in check_method(spec) if not result.ok]
    assert failed == []


@pytest.mark.parametrize("spec", COMPRESSING)
@settings(max_examples=10, deadline=None)
@given(extra=st.integers(1, 30), budget=st.integers(8, 40), seed=st.integers(0, 10**6))
def test_every_head_keeps_the_budget_and_the_always_kept(spec, extra, budget, seed):
    method = small(spec, budget)
    scene = make_scene(method, budget + extra, seed=seed)
    must = {*range(method.sinks), *range(scene.now - method.recent_kept(), scene.now)}
    held = torch.stack([view.positions for view in scene.layers]).flatten(0, 1).tolist()
    for kept, cached in zip(kept_sets(scene, method), held, strict=True):
        assert len(kept) == budget
        assert must <= kept <= set(cached)


@pytest.mark.parametrize("spec", COMPRESSING)
@settings(max_examples=10, deadline=None)
@given(tokens=st.integers(1, 40), spare=st.integers(0, 10), seed=st.integers(0, 10**6))
def test_a_budget_of_at_least_the_tokens_keeps_everything(spec, tokens, spare, seed):
    """Also with fewer tokens than the observation window."""
    method = small(spec, max(tokens + spare, 8))
    scene = make_scene(method, tokens, seed=seed)
    held = torch.stack([view.positions for view in scene.layers]).flatten(0, 1).tolist()
    assert kept_sets(scene, method) == [set(cached) for cached in held]


@pytest.mark.parametrize("spec", ["agentkv@default", "agentkv@paper", "snapkv@rkv"])
@pytest.mark.parametrize("value", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("tokens", [31, 64, 97])
def test_equal_keys_keep_the_lowest_positions(spec, value, tokens):
    """All scores tie, whatever the order of rows; only position decides."""
    method = small(spec, 20)
    scene = make_scene(method, tokens, seed=tokens)
    scene = scene.with_keys(lambda keys: torch.full_like(keys, value))
    held = torch.stack([view.positions for view in scene.layers]).flatten(0, 1).sort(-1).values
    recent = method.recent_kept()
    for kept, cached in zip(kept_sets(scene, method), held.tolist(), strict=True):
        assert kept == {*cached[: 20 - recent], *cached[len(cached) - recent :]}


@pytest.mark.parametrize("spec", COMPRESSING)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_extreme_keys_never_give_nan_or_a_short_set(spec, seed):
    generator = torch.Generator().manual_seed(seed)
    method = small(spec, 16)
    scene = make_scene(method, 40, seed=seed)
    scales = torch.tensor([0.0, 1e-20, 1.0, 1e4, -1e4])

    def mixed(keys):
        return keys * scales[torch.randint(5, keys.shape[:2], generator=generator)][..., None]

    selection = scene.with_keys(mixed).select(method)
    always = make_always(scene, method)
    assert not selection.scores[~always].isnan().any()
    assert selection.kept.shape[-1] == 16


def make_always(scene, method):
    places = torch.stack([view.positions for view in scene.layers]).sort(-1).values
    return (places < method.sinks) | (places >= scene.now - method.recent_kept())


@pytest.mark.parametrize("spec", ["agentkv@default", "agentkv@paper"])
@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(4)), seed=st.integers(0, 10**6))
def test_agentkv_relabelling_phases_leaves_the_union_alone(spec, order, seed):
    method = small(spec, 16)
    scene = make_scene(method, 40, seed=seed)
    table = torch.tensor(order)
    relabelled = replace(scene, queries=[replace(q, phases=table[q.phases]) for q in scene.queries])
    assert kept_sets(scene, method) == kept_sets(relabelled, method)


@pytest.mark.parametrize("spec", ["agentkv@default", "agentkv@paper"])
def test_agentkv_does_not_depend_on_the_order_of_queries(spec):
    method = small(spec, 16)
    scene = make_scene(method, 40, seed=1)
    queries = [
        Queries(q.vectors.flip(1), q.positions.flip(0), q.phases.flip(0)) for q in scene.queries
    ]
    assert kept_sets(scene, method) == kept_sets(replace(scene, queries=queries), method)


@pytest.mark.parametrize("spec", COMPRESSING)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_kept_set_modes_merge_as_defined(spec, seed):
    """per_kv_head: mean over layers. shared: mean over KV heads, sum over layers."""
    shared = small(spec, 16, kept_set="shared")
    scene = make_scene(shared, 40, seed=seed)
    own = scene.select(small(spec, 16)).scores
    always = make_always(scene, shared)
    for method, merged in (
        (shared, own.mean(1).sum(0).expand_as(own)),
        (small(spec, 16, kept_set="per_kv_head"), own.mean(0, keepdim=True).expand_as(own)),
    ):
        got = scene.select(method).scores
        assert torch.equal(got.isnan(), always)
        torch.testing.assert_close(got[~always], merged[~always])


@pytest.mark.parametrize("kept_set", ["per_head", "per_kv_head", "shared"])
def test_streamingllm_set_is_the_same_everywhere(kept_set):
    """One set for all heads and layers, whatever the granularity, if heads hold the same tokens."""
    method = make_method("streamingllm", 16, {"kept_set": kept_set})
    scene = make_scene(replace(method, kept_set="shared"), 40)
    assert len({frozenset(kept) for kept in kept_sets(scene, method)}) == 1


# -- the suite must be able to fail


@dataclass(frozen=True, kw_only=True)
class ByPosition(Method):
    """A correct little method, to be broken below."""

    name: ClassVar[str] = "by-position"

    def score(self, queries, keys, context):
        return context.positions.float()


class WrongShape(ByPosition):
    def score(self, queries, keys, context):
        return context.positions.float()[:, :-1]


class GivesNaN(ByPosition):
    def score(self, queries, keys, context):
        return keys.sum(-1) / keys.std(1, correction=0).sum(-1, keepdim=True)


class MixesHeads(ByPosition):
    def score(self, queries, keys, context):
        return keys.sum(-1) * torch.arange(1, 3)[:, None] - 3 * keys[:1, :, 0]


class DependsOnCacheOrder(ByPosition):
    ordered: ClassVar[bool] = False

    def score(self, queries, keys, context):
        return torch.arange(keys.shape[1]).float().expand(keys.shape[:2])


class Remembers(ByPosition):
    calls: ClassVar[list[int]] = []

    def score(self, queries, keys, context):
        self.calls.append(1)
        return torch.sin(context.positions * float(len(self.calls)))


class WritesKeys(ByPosition):
    ordered: ClassVar[bool] = False

    def score(self, queries, keys, context):
        return keys.add_(1.0).sum(-1)


class KeepsTooMany(ByPosition):
    def select(self, layers, queries, now):
        return replace(self, budget=self.budget + 1)._plain(layers, queries, now)

    def _plain(self, layers, queries, now):
        return Method.select(self, layers, queries, now)


class ForgetsRecent(ByPosition):
    def score(self, queries, keys, context):
        return -context.positions.float()

    def _always(self, positions, now):
        return torch.zeros_like(positions, dtype=torch.bool)


class Raises(ByPosition):
    def score(self, queries, keys, context):
        raise ZeroDivisionError("boom")


def test_conformance_accepts_a_correct_class():
    assert [result for result in check_method(ByPosition) if not result.ok] == []


@pytest.mark.parametrize(
    ("cls", "check"),
    [
        (WrongShape, "scores fit the cache"),
        (GivesNaN, "constant, zero and huge keys"),
        (MixesHeads, "follows a permutation of KV heads"),
        (DependsOnCacheOrder, "ignores the order of cache rows"),
        (Remembers, "has no memory and changes nothing"),
        (WritesKeys, "has no memory and changes nothing"),
        (KeepsTooMany, "keeps exactly the budget"),
        (Raises, "scores fit the cache"),
    ],
)
def test_conformance_finds_a_broken_method(cls, check):
    results = {result.name: result for result in check_method(cls, 16)}
    assert not results[check].ok
    assert results[check].detail


def test_conformance_finds_an_evicted_recent_token():
    method = ForgetsRecent(budget=16, keep_recent=4)
    results = {result.name: result for result in check_method(method)}
    assert not results["keeps what is always kept"].ok


def test_scene_holds_what_a_method_always_keeps():
    method = make_method("snapkv@rkv", 64, {"sinks": 2})
    scene = make_scene(method, 80, seed=3)
    assert isinstance(scene, Scene)
    for view in scene.layers:
        assert isinstance(view, LayerView)
        for head in view.positions.tolist():
            assert {0, 1, *range(scene.now - 32, scene.now)} <= set(head)
            assert len(set(head)) == 80
            assert head != sorted(head)
