"""Every method against its float64 numpy formulation, on caches with holes in scrambled order."""

from __future__ import annotations

import methods_reference as reference
import numpy as np
import pytest
import torch

from agentbench_kv.conformance.methods import calibrated
from agentbench_kv.conformance.scenes import CacheShape, make_scene
from agentbench_kv.registry import load_method, make_method, names

AGENTKV = [
    ("agentkv", {}),
    ("agentkv@paper", {}),
    ("agentkv", {"gqa": "max_prob"}),
    ("agentkv", {"gqa": "max_logit"}),
    ("agentkv", {"kept_set": "per_kv_head"}),
    ("agentkv", {"kept_set": "shared"}),
    ("agentkv", {"representatives": 8, "sinks": 4, "keep_recent": 3}),
    *[("agentkv", {"drop_phase": phase}) for phase in ("think", "act", "tool", "others")],
]
SAMPLERS = [
    *[("agentkv", {"sampler": s}) for s in ("multiscale", "weighted", "diverse")],
    *[("agentkv", {"sampler": s, "representatives": 24}) for s in ("multiscale", "weighted")],
    *[("agentkv", {"sampler": s}) for s in ("recent", "own")],
    ("agentkv", {"pool": "max"}),
    ("agentkv", {"pool": "avg", "kernel": 5}),
    ("agentkv@paper", {"pool": "max", "kernel": 3, "kept_set": "shared", "drop_phase": "act"}),
    ("agentkv@paper", {"sampler": "diverse", "representatives": 8, "gqa": "max_logit"}),
    ("agentkv@paper", {"sampler": "weighted", "drop_phase": "tool", "kept_set": "shared"}),
    ("agentkv", {"sampler": "multiscale", "drop_phase": "act", "gqa": "max_prob"}),
]
WINDOW = [
    ("snapkv", {}),
    ("snapkv@rkv", {"window": 8}),
    ("snapkv@rkv", {"window": 8, "kernel": 1, "sinks": 3}),
    ("snapkv@rkv", {"kept_set": "shared"}),
    ("snapkv@rkv", {"keep_recent": 40}),
    ("snapkv@rkv", {"columns": "all", "aggregate": "sum"}),
    ("snapkv@kvpress", {}),
    ("snapkv@kvpress", {"window": 8, "kernel": 7}),
    ("snapkv@kvpress", {"kept_set": "per_kv_head"}),
    ("snapkv@kvpress", {"pool": "none", "gqa": "max_prob"}),
    ("snapkv@kvpress", {"columns": "past", "gqa": "max_prob", "pool": "max"}),
    ("snapkv@original", {}),
    ("snapkv@original", {"window": 8, "kept_set": "shared"}),
    ("snapkv@original", {"cache_heads": "kv", "gqa": "max_prob"}),
]
RKV = [
    ("rkv", {}),
    ("rkv@agentkv", {"kept_set": "per_kv_head"}),
    ("rkv@code", {}),
    ("rkv@paper", {}),
    ("rkv@serving", {}),
    ("rkv@paper", {"lam": 0}),
    ("rkv@paper", {"lam": 1}),
    ("rkv@paper", {"threshold": 0.9}),
    ("rkv@paper", {"threshold": -0.25, "gqa": "mean_prob", "pool": "avg", "kernel": 3}),
    ("rkv@code", {"columns": "all", "cache_heads": "query"}),
]
TRIATTENTION = [
    *[("triattention@" + preset, {}) for preset in ("hf", "sglang", "per_layer", "global")],
    ("triattention@vllm", {"keep_recent": 30}),
    ("triattention", {"aggregate": "max"}),
    ("triattention", {"kept_set": "shared"}),
    ("triattention", {"keep_prompt": "off", "sinks": 3, "keep_recent": 5}),
    ("triattention", {"sinks": 30, "keep_recent": 5}),
    ("triattention", {"normalise": "none"}),
    ("triattention", {"offset_merge": "max"}),
    ("triattention", {"norm_term": "mean"}),
    ("triattention", {"norm_term": "off"}),
    ("triattention", {"trig_term": "off"}),
    ("triattention@sglang", {"trig_term": "off", "norm_term": "mean"}),
    ("triattention", {"offset_max": 1}),
    ("triattention", {"offset_max": 100}),
    ("triattention", {"positions": "cache"}),
]
OTHERS = [
    ("streamingllm", {}),
    ("streamingllm@paper", {}),
    ("streamingllm", {"sinks": 2, "keep_recent": 5}),
    ("h2o", {}),
    ("h2o@kvpress", {}),
    ("h2o", {"recent_share": 0.25, "sinks": 3}),
    ("h2o", {"keep_recent": 50}),
    ("h2o", {"normalise": "seen", "kept_set": "shared"}),
    ("oracle", {}),
    ("keydiff", {}),
    ("keydiff", {"kept_set": "per_layer", "sinks": 2}),
    ("tova", {}),
    ("tova", {"kept_set": "per_head", "keep_recent": 4}),
    ("expected-attention", {}),
    ("expected-attention", {"kept_set": "shared", "epsilon": 0.02, "ahead": 16}),
    ("expected-attention", {"spread": "off", "values": "off", "sinks": 0}),
    ("expected-attention", {"positions": "cache", "keep_recent": 9}),
    ("lagkv", {"lag": 16}),
    ("lagkv", {"lag": 30, "sinks": 0, "keep_recent": 8}),
    ("agentkv", {"kept_set": "per_layer"}),
    ("triattention", {"kept_set": "per_layer", "aggregate": "max"}),
    ("agentkv", {"chunk": 5}),
    ("agentkv", {"chunk": 16, "kept_set": "per_layer"}),
    ("snapkv", {"chunk": 7}),
    ("streamingllm", {"chunk": 4}),
    ("h2o", {"chunk": 20, "kept_set": "shared"}),
]
PROTECTED = [
    *[(f"{name}@system", {}) for name in ("agentkv", "snapkv", "rkv", "h2o", "triattention")],
    *[(f"{name}@prompt", {}) for name in ("agentkv", "tova", "keydiff", "streamingllm")],
    ("lagkv", {"protect": 20, "lag": 16}),
    ("snapkv@kvpress", {"protect": "5", "window": 16}),
    ("h2o", {"protect": "30", "chunk": 8}),
    ("agentkv@paper", {"protect": "system", "sinks": 20, "kept_set": "shared"}),
    ("triattention@sglang", {"protect": "system"}),
]
CASES = [*AGENTKV, *SAMPLERS, *WINDOW, *RKV, *TRIATTENTION, *OTHERS, *PROTECTED]
BUDGET = 72
SHAPES = [
    CacheShape(layers=1, kv_heads=1, group=1, head_dim=4),
    CacheShape(layers=2, kv_heads=3, group=1, head_dim=16),
    CacheShape(layers=3, kv_heads=2, group=4, head_dim=6),
    CacheShape(layers=2, kv_heads=1, group=8, head_dim=2),
]
PRESETS = [
    f"{name}@{preset}" if preset else name
    for name in names("method")
    if load_method(name).compresses and not load_method(name).spans and name != "random"
    for preset in (load_method(name).presets or {"": {}})
]


def event_of(scene, method):
    """The scene as the formulations see it."""
    statistics = covariance = None
    if method.needs_calibration:
        made = method.calibration
        covariance = None if made.covariance is None else made.covariance.double().numpy()
        arrays = (made.mean, made.abs_mean, made.frequencies)
        statistics = (*(a.numpy().astype(np.complex128) for a in arrays), made.scale)
        statistics = (statistics[0], statistics[1].real, statistics[2].real, statistics[3])
    held = scene.places.shape[-1]
    return reference.Event(
        layers=[
            (
                *(v.keys.numpy(), v.positions.numpy()),
                *(None if v.sums is None else v.sums.numpy(), v.values.numpy()),
            )
            for v in scene.layers
        ],
        queries=[(q.vectors.numpy(), q.positions.numpy(), q.phases.numpy()) for q in scene.queries],
        now=scene.now,
        prompt=scene.prompt,
        phases=scene.phases.numpy(),
        statistics=statistics,
        covariance=covariance,
        next_position=held if method.positions == "cache" else scene.now,
    )


def compare(method, scene, tolerance=1e-5):
    """Scores to float32's precision; kept sets equal but for scores that precision cannot tell."""
    selection = scene.select(method)
    scores, kept = reference.select(method, event_of(scene, method))
    got = selection.scores.numpy()
    always = np.isin(scene.places.numpy(), sorted(always_of(method, scene)))
    assert np.array_equal(np.isnan(got), always)
    margin = tolerance * max(1e-30, np.abs(scores[~always]).max(initial=0.0))
    np.testing.assert_allclose(got[~always], scores[~always], rtol=tolerance, atol=margin)
    assert_same_sets(scene.positions(selection).tolist(), kept, scene.places, scores, margin)


def always_of(method, scene):
    return reference.always_kept(method, scene.now, scene.prompt)


def assert_same_sets(got, expected, places, scores, margin):
    for layer, heads in enumerate(places.tolist()):
        for head, held in enumerate(heads):
            extra = set(got[layer][head]) ^ set(expected[layer][head])
            disputed = [scores[layer, head][held.index(position)] for position in extra]
            assert not disputed or np.ptp(disputed) <= 2 * margin, sorted(extra)
            assert len(set(got[layer][head])) == len(expected[layer][head])


def tolerance_of(spec):
    """z-scores divide by a deviation that may be small: one digit less."""
    return 1e-4 if spec.startswith("triattention") else 1e-5


@pytest.mark.parametrize(("spec", "settings"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_method_matches_its_specification(spec, settings):
    method = calibrated(make_method(spec, BUDGET, settings))
    compare(method, make_scene(method, 131, seed=1), tolerance_of(spec))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", PRESETS)
def test_method_matches_its_specification_for_other_shapes(spec, shape):
    budget = 140 if spec == "triattention@vllm" else BUDGET
    method = calibrated(make_method(spec, budget), shape)
    compare(method, make_scene(method, budget + 21, seed=7, shape=shape), tolerance_of(spec))


@pytest.mark.parametrize("spec", PRESETS)
def test_method_matches_its_specification_with_one_token_too_many(spec):
    budget = 140 if spec == "triattention@vllm" else BUDGET
    method = calibrated(make_method(spec, budget))
    compare(method, make_scene(method, budget + 1, seed=3), tolerance_of(spec))


@pytest.mark.parametrize("spec", [s for s in PRESETS if s.startswith(("snapkv", "rkv"))])
def test_a_window_of_all_tokens_but_one(spec):
    """Budget = window + 1 and T = budget + 1: two tokens compete, pooling reaches past both."""
    method = make_method(spec, 9, {"window": 8})
    compare(method, make_scene(method, 10, seed=4))
    scores = make_scene(method, 10, seed=4).select(method).scores
    assert scores.isfinite().sum(-1).eq(2).all()


CHANGES = {
    "constant": torch.ones_like,
    "zero": torch.zeros_like,
    "two kinds": lambda keys: keys[:, :2].repeat(1, keys.shape[1], 1)[:, : keys.shape[1]],
    "one large": lambda keys: keys * (1 + 99 * (torch.arange(keys.shape[1]) == 5))[:, None],
    "huge": lambda keys: keys * 1e4,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("spec", PRESETS)
def test_method_matches_its_specification_on_extreme_keys(spec, change):
    """Constant keys have z-scores of rounding errors: there only ties and finiteness count."""
    budget = 140 if spec == "triattention@vllm" else BUDGET
    method = calibrated(make_method(spec, budget))
    scene = make_scene(method, budget + 30, seed=5).with_keys(CHANGES[change])
    if change in ("constant", "zero") and spec.startswith("triattention"):
        assert scene.select(method).kept.shape[-1] == budget
        return
    compare(method, scene, 1e-3 if change in ("huge", "one large") else tolerance_of(spec))


@pytest.mark.parametrize("spec", [s for s in PRESETS if s.startswith("triattention")])
@pytest.mark.parametrize("prompt", [0, 1, 139, 140, 141, 170])
def test_triattention_matches_its_specification_for_every_prompt(spec, prompt):
    """At 140 and above the prompt fills the budget: its first tokens stay and nothing else."""
    method = calibrated(make_method(spec, 140))
    scene = make_scene(method, 170, seed=prompt, prompt=prompt)
    compare(method, scene, 1e-4)
    if method.protect == "prompt" and prompt >= 140:
        for head in scene.positions(scene.select(method)).flatten(0, 1).tolist():
            assert head == list(range(140))


def test_triattention_keeps_as_many_recent_tokens_as_a_long_prompt_leaves_room_for():
    """A prompt of 135 of 140: five of the ten last tokens, and no other."""
    method = calibrated(make_method("triattention", 140, {"keep_recent": 10}))
    scene = make_scene(method, 170, seed=2, prompt=135)
    compare(method, scene, 1e-4)
    for head in scene.positions(scene.select(method)).flatten(0, 1).tolist():
        assert head == [*range(135), *range(scene.now - 5, scene.now)]
