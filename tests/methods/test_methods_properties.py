"""Properties of selection, over random caches of every method and preset."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.conformance.methods import calibrated, check_method
from agentbench_kv.conformance.scenes import CacheShape, always_kept, make_scene
from agentbench_kv.methods.base import Queries
from agentbench_kv.registry import load_method, make_method, names

SPECS = [
    f"{name}@{preset}" if preset else name
    for name in names("method")
    if not load_method(name).spans
    for preset in (load_method(name).presets or {"": {}})
]
COMPRESSING = [spec for spec in SPECS if load_method(spec.partition("@")[0]).compresses]
SMALL = {
    "agentkv": {"keep_recent": "2"},
    "agentkv@paper": {},
    "snapkv": {"window": "4"},
    "rkv": {"window": "4"},
    "streamingllm": {"sinks": "2"},
    "triattention@vllm": {"keep_recent": "3"},
}
SOFTMAX = [
    ("agentkv@paper", {}),
    ("agentkv@paper", {"gqa": "max_prob", "sampler": "multiscale"}),
    ("agentkv@paper", {"gqa": "max_logit"}),
    ("snapkv@rkv", {}),
    ("snapkv@kvpress", {}),
    ("snapkv@original", {}),
    ("rkv@code", {"lam": "1"}),
]
SEEDS = st.integers(0, 10**6)


def small(spec, budget, **settings):
    """The method with windows that leave room for other tokens at a small budget."""
    chosen = SMALL.get(spec, SMALL.get(spec.partition("@")[0], {}))
    if spec == "agentkv@paper":
        chosen = {}
    return calibrated(make_method(spec, budget, {**chosen, **settings}))


def held_sets(scene):
    return [set(head) for head in scene.places.flatten(0, 1).tolist()]


def kept_sets(scene, method):
    kept = scene.positions(scene.select(method)).flatten(0, 1).tolist()
    return [set(head) for head in kept]


def always_of(scene, method):
    """Entries [layers, kv_heads, tokens] by ascending position that no event may evict."""
    return always_kept(method, scene.now, scene.prompt)[scene.places]


@pytest.mark.parametrize("spec", SPECS)
def test_registered_method_passes_the_conformance_suite(spec):
    assert [result for result in check_method(spec) if not result.ok] == []


@pytest.mark.parametrize("spec", COMPRESSING)
@settings(max_examples=10, deadline=None)
@given(extra=st.integers(1, 30), budget=st.integers(8, 40), seed=SEEDS)
def test_every_head_keeps_the_budget_and_the_always_kept(spec, extra, budget, seed):
    method = small(spec, budget)
    scene = make_scene(method, budget + extra, seed=seed)
    must = set(always_kept(method, scene.now, scene.prompt).nonzero()[:, 0].tolist())
    assert {*range(method.sinks)} <= must
    assert {*range(scene.now - method.recent_kept(budget), scene.now)} <= must
    for kept, cached in zip(kept_sets(scene, method), held_sets(scene), strict=True):
        assert len(kept) == budget
        assert must <= kept <= cached


@pytest.mark.parametrize("spec", COMPRESSING)
@settings(max_examples=6, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 3),
    seed=SEEDS,
)
def test_every_head_keeps_the_budget_whatever_the_shape(spec, kv_heads, group, layers, seed):
    shape = CacheShape(layers, kv_heads, group, 4)
    method = calibrated(small(spec, 12), shape)
    scene = make_scene(method, 31, seed=seed, shape=shape)
    heads = kv_heads * group if method.per_query_head else kv_heads
    assert [len(kept) for kept in kept_sets(scene, method)] == [12] * layers * heads


@pytest.mark.parametrize("spec", COMPRESSING)
@settings(max_examples=8, deadline=None)
@given(percent=st.integers(5, 100), tokens=st.integers(20, 60), seed=SEEDS)
def test_a_share_keeps_that_share_of_the_logical_length(spec, percent, tokens, seed):
    """Rounded up, but never below what is always kept and one token more."""
    method = small(spec, f"{percent}%")
    scene = make_scene(method, tokens, seed=seed)
    size = max(1, -(-percent * scene.now // 100))
    while size <= method.sinks + method.recent_kept(size):
        size += 1
    assert {len(kept) for kept in kept_sets(scene, method)} == {min(size, tokens)}


@pytest.mark.parametrize("spec", COMPRESSING)
@settings(max_examples=10, deadline=None)
@given(tokens=st.integers(1, 40), spare=st.integers(0, 10), seed=SEEDS)
def test_a_budget_of_at_least_the_tokens_keeps_everything(spec, tokens, spare, seed):
    """Also with fewer tokens than the observation window."""
    method = small(spec, max(tokens + spare, 8))
    scene = make_scene(method, tokens, seed=seed)
    assert kept_sets(scene, method) == held_sets(scene)
    assert scene.select(method).scores.isnan().all()


TIES = [s for s in COMPRESSING if s.startswith(("agentkv", "snapkv", "triattention@global"))]


@pytest.mark.parametrize("spec", TIES)
@pytest.mark.parametrize("value", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("tokens", [31, 64, 97])
def test_equal_scores_keep_the_lowest_positions(spec, value, tokens):
    """All keys alike: scores tie, whatever the order of rows; only position decides."""
    free = {"pool": "none"} if spec.startswith("snapkv") else {}
    free |= {"trig_term": "off"} if spec.startswith("triattention") else {}
    method = small(spec, 20, **free)
    scene = make_scene(method, tokens, seed=tokens)
    scene = scene.with_keys(lambda keys: torch.full_like(keys, value))
    assert_lowest_kept(scene, method)


def assert_lowest_kept(scene, method):
    always = always_kept(method, scene.now, scene.prompt)
    for kept, held in zip(
        kept_sets(scene, method), scene.places.flatten(0, 1).tolist(), strict=True
    ):
        must = [p for p in held if always[p]]
        others = [p for p in held if not always[p]]
        assert kept == {*must, *others[: 20 - len(must)]}


@pytest.mark.parametrize("spec", ["h2o@sums", "oracle"])
def test_equal_sums_keep_the_lowest_positions(spec):
    method = make_method(spec, 20)
    scene = make_scene(method, 64, seed=2)
    layers = [replace(view, sums=torch.full_like(view.sums, 0.1)) for view in scene.layers]
    assert_lowest_kept(replace(scene, layers=layers), method)


@pytest.mark.parametrize("spec", COMPRESSING)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_extreme_keys_never_give_nan_or_a_short_set(spec, seed):
    generator = torch.Generator().manual_seed(seed)
    method = small(spec, 16)
    scene = make_scene(method, 40, seed=seed)
    scales = torch.tensor([0.0, 1e-20, 1.0, 1e4, -1e4])

    def mixed(keys):
        return keys * scales[torch.randint(5, keys.shape[:2], generator=generator)][..., None]

    selection = scene.with_keys(mixed).select(method)
    assert torch.equal(selection.scores.isnan(), always_of(scene, method))
    assert selection.scores[~always_of(scene, method)].isfinite().all()
    assert selection.kept.shape[-1] == 16


# -- what must not matter, and what must


@pytest.mark.parametrize(("spec", "changes"), SOFTMAX, ids=str)
@settings(max_examples=8, deadline=None)
@given(shift=st.floats(-30, 30), seed=SEEDS)
def test_a_constant_added_to_all_logits_changes_nothing(spec, changes, shift, seed):
    """Queries end in 1, so that adding to the keys' last entry adds the same to every logit."""
    method = small(spec, 16, **changes)
    scene = make_scene(method, 40, seed=seed)
    ones = []
    for q in scene.queries:
        vectors = q.vectors.clone()
        vectors[..., -1] = 1.0
        ones.append(replace(q, vectors=vectors))
    scene = replace(scene, queries=ones)
    offset = torch.zeros(8)
    offset[-1] = shift
    before = scene.select(method).scores
    after = scene.with_keys(lambda keys: keys + offset).select(method).scores
    if spec.startswith("rkv"):
        before, after = (scores[..., :-8] for scores in (before, after))
    torch.testing.assert_close(before, after, equal_nan=True, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", ["agentkv@paper", "snapkv@rkv", "rkv@code", "triattention@hf"])
def test_scaling_keys_is_not_adding_a_constant(spec):
    """The check above could not fail if scores did not depend on keys at all."""
    method = small(spec, 16)
    scene = make_scene(method, 40, seed=3)
    noise = torch.randn(8, generator=torch.Generator().manual_seed(0)) * 3
    moved = scene.with_keys(lambda keys: keys * noise)
    assert kept_sets(scene, method) != kept_sets(moved, method)


@pytest.mark.parametrize("sampler", ["last", "multiscale", "weighted", "diverse"])
@settings(max_examples=6, deadline=None)
@given(order=st.permutations(range(4)), seed=SEEDS)
def test_agentkv_relabelling_phases_leaves_the_union_alone(sampler, order, seed):
    """Queries and keys renamed alike: the same four groups under other names."""
    method = make_method("agentkv@paper", 16, {"sampler": sampler, "representatives": 8})
    scene = make_scene(method, 60, seed=seed)
    table = torch.tensor(order)
    relabelled = replace(
        scene,
        queries=[replace(q, phases=table[q.phases]) for q in scene.queries],
        phases=table[scene.phases],
    )
    before, after = scene.select(method).scores, relabelled.select(method).scores
    torch.testing.assert_close(before, after)


@settings(max_examples=6, deadline=None)
@given(seed=SEEDS)
def test_agentkv_relabelling_moves_what_drop_phase_drops(seed):
    """Dropping tool after renaming act to tool equals dropping act before."""
    act, tool = (
        make_method("agentkv@paper", 16, {"drop_phase": phase}) for phase in ("act", "tool")
    )
    scene = make_scene(act, 60, seed=seed)
    table = torch.tensor([0, 2, 1, 3])
    swapped = replace(scene, queries=[replace(q, phases=table[q.phases]) for q in scene.queries])
    torch.testing.assert_close(scene.select(act).scores, swapped.select(tool).scores)
    assert not torch.equal(scene.select(act).scores, scene.select(tool).scores)


@pytest.mark.parametrize("spec", [s for s in COMPRESSING if not s.startswith("agentkv")])
def test_other_methods_do_not_look_at_phases(spec):
    method = small(spec, 16)
    scene = make_scene(method, 40, seed=2)
    flat = replace(
        scene,
        queries=[replace(q, phases=torch.zeros_like(q.phases)) for q in scene.queries],
        phases=torch.zeros_like(scene.phases),
    )
    assert kept_sets(scene, method) == kept_sets(flat, method)


@pytest.mark.parametrize("spec", ["agentkv@default", "agentkv@paper"])
def test_agentkv_does_not_depend_on_the_order_of_queries(spec):
    method = small(spec, 16)
    scene = make_scene(method, 40, seed=1)
    queries = [
        Queries(q.vectors.flip(1), q.positions.flip(0), q.phases.flip(0)) for q in scene.queries
    ]
    assert kept_sets(scene, method) == kept_sets(replace(scene, queries=queries), method)


@pytest.mark.parametrize("spec", COMPRESSING)
def test_values_do_not_matter(spec):
    """No method of ours reads values; one that did would have to say so."""
    method = small(spec, 16)
    scene = make_scene(method, 40, seed=6)
    layers = [replace(view, values=view.values * -5 + 2) for view in scene.layers]
    assert kept_sets(scene, method) == kept_sets(replace(scene, layers=layers), method)


@pytest.mark.parametrize("spec", COMPRESSING)
@settings(max_examples=6, deadline=None)
@given(seed=SEEDS)
def test_kept_set_modes_merge_as_defined(spec, seed):
    """per_kv_head: mean over layers. shared: mean over KV heads, sum over layers; or maxima."""
    shared = small(spec, 16, kept_set="shared")
    scene = make_scene(shared, 40, seed=seed)
    own = scene.select(small(spec, 16, kept_set="per_head")).scores
    largest = shared.settings().get("aggregate") == "max"
    whole = own.amax((0, 1)) if largest else own.mean(1).sum(0)
    by_head = own.amax(0, keepdim=True) if largest else own.mean(0, keepdim=True)
    always = always_of(scene, shared)
    for method, merged in (
        (shared, whole.expand_as(own)),
        (small(spec, 16, kept_set="per_kv_head"), by_head.expand_as(own)),
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
