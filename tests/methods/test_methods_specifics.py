"""What single methods promise besides their formulas: presets, query plans, special cases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from agentbench_kv.analysis.replay import MethodInput
from agentbench_kv.conformance.methods import calibrated
from agentbench_kv.conformance.scenes import CacheShape, made_up_calibration, make_scene
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.methods import base
from agentbench_kv.methods.base import (
    LayerView,
    Method,
    Queries,
    QueryKind,
    QueryPlan,
    ScoreContext,
)
from agentbench_kv.registry import make_method


def agentkv_scene(method, *, phases=(0, 1, 2, 3), group=2):
    shape = CacheShape(layers=2, kv_heads=2, group=group, head_dim=16)
    return make_scene(method, 90, shape=shape, phases=phases)


def test_agentkv_gqa_modes_coincide_without_groups():
    methods = [
        make_method("agentkv", 40, {"gqa": gqa}) for gqa in ("mean_prob", "max_prob", "max_logit")
    ]
    scene = agentkv_scene(methods[0], group=1)
    sets = [scene.select(method).kept for method in methods]
    assert torch.equal(sets[0], sets[1])
    assert torch.equal(sets[0], sets[2])


def test_streamingllm_keeps_first_and_last_by_position():
    method = make_method("streamingllm", 20)
    scene = make_scene(method, 60, seed=5)
    kept = scene.positions(scene.select(method))
    for layer, view in enumerate(scene.layers):
        for head, held in enumerate(view.positions.sort(-1).values.tolist()):
            assert kept[layer, head].tolist() == held[:4] + held[-16:]


def test_agentkv_scores_are_a_distribution():
    method = make_method("agentkv@paper", 40)
    totals = agentkv_scene(method).select(method).scores.sum(-1)
    np.testing.assert_allclose(totals.numpy(), 1, rtol=1e-5)


def test_agentkv_has_no_mask_between_old_queries_and_newer_keys():
    """A key newer than every query still gets its attention mass."""
    method = make_method("agentkv@paper", 4)
    keys = torch.randn(1, 9, 8, generator=torch.Generator().manual_seed(0))
    query = Queries(keys[:, 8:9] * 4, torch.tensor([1]), torch.tensor([0]))
    view = LayerView(keys, keys, torch.arange(9)[None])
    scene = MethodInput([view], [query], 9, 0, torch.zeros(9, dtype=torch.int64))
    selection = scene.select(method)
    assert 8 in scene.positions(selection)[0, 0].tolist()
    expected = (keys[0] @ keys[0, 8] * 4 / 8**0.5).softmax(0)
    torch.testing.assert_close(selection.scores[0, 0], expected)


@pytest.mark.parametrize("sampler", ["last", "multiscale", "weighted", "diverse"])
def test_agentkv_drop_phase_equals_not_having_those_queries(sampler):
    dropped = make_method("agentkv", 40, {"drop_phase": "tool", "sampler": sampler})
    plain = make_method("agentkv", 40, {"sampler": sampler})
    scene = agentkv_scene(dropped)
    without = []
    for q in scene.queries:
        rows = q.phases != 2
        without.append(Queries(q.vectors[:, rows], q.positions[rows], q.phases[rows]))
    other = MethodInput(scene.layers, without, scene.now, scene.prompt, scene.phases)
    assert torch.equal(scene.select(dropped).kept, other.select(plain).kept)
    assert not torch.equal(scene.select(dropped).scores, scene.select(plain).scores)


@pytest.mark.parametrize("sampler", ["last", "multiscale", "weighted", "diverse"])
def test_agentkv_drop_phase_of_the_only_phase_seen_keeps_a_full_set(sampler):
    """All queries dropped: no information, so ties, so the lowest positions; not a crash."""
    method = make_method("agentkv@paper", 40, {"drop_phase": "others", "sampler": sampler})
    scene = agentkv_scene(method, phases=(3,))
    kept = scene.positions(scene.select(method))
    assert torch.equal(kept, scene.places[..., :40])


def test_agentkv_declares_four_rings_of_a_quarter_each():
    plan = make_method("agentkv", 40).query_plan()
    assert (str(plan.kind), plan.size) == ("per_phase", 8)
    assert make_method("agentkv", 40, {"representatives": 64}).query_plan().size == 16


@pytest.mark.parametrize(
    ("spec", "window"),
    [
        ("snapkv@rkv", 32),
        ("snapkv@kvpress", 64),
        ("snapkv@original", 32),
        ("rkv@agentkv", 32),
        ("rkv@code", 8),
    ],
)
def test_window_methods_declare_and_keep_their_window(spec, window):
    method = make_method(spec, 100)
    assert (str(method.query_plan().kind), method.query_plan().size) == ("recent", window)
    assert method.recent_kept(method.budget) == window


@pytest.mark.parametrize(("spec", "kind"), [("h2o", "sums"), ("oracle", "future")])
def test_methods_of_attention_mass_declare_which(spec, kind):
    assert str(make_method(spec, 100).query_plan().kind) == kind


@pytest.mark.parametrize(
    ("spec", "own"), [("snapkv@original", True), ("snapkv@rkv", False), ("agentkv", False)]
)
def test_only_snapkv_original_copies_keys_for_every_query_head(spec, own):
    assert make_method(spec, 100).per_query_head is own


@dataclass(frozen=True, kw_only=True)
class Consistent(Method):
    """Its score is NaN unless keys, values, sums and phases belong to the positions given."""

    name: ClassVar[str] = "consistent"

    def query_plan(self):
        return QueryPlan(QueryKind.SUMS)

    def score(self, queries, keys, context):  # noqa: ARG002
        where = context.positions
        rows = [keys[..., 0], context.values[..., 0] - 1, context.sums - 2, context.phases - 3]
        right = torch.stack([row == where for row in rows]).all(0)
        return torch.where(right, where.float(), torch.nan)


class ConsistentInAnyOrder(Consistent):
    ordered: ClassVar[bool] = False


@pytest.mark.parametrize("cls", [Consistent, ConsistentInAnyOrder])
def test_score_gets_everything_that_belongs_to_a_row(cls):
    method = cls(budget=20)
    scene = make_scene(method, 50, seed=4)
    layers = []
    for view in scene.layers:
        where = view.positions.float()
        rows = where[..., None].expand_as(view.keys)
        layers.append(LayerView(rows, rows + 1, view.positions, where + 2))
    scene = replace(scene, layers=layers, phases=torch.arange(scene.now) + 3)
    selection = scene.select(method)
    torch.testing.assert_close(selection.scores, scene.places.float())
    assert torch.equal(scene.positions(selection), scene.places[..., -20:])


@pytest.mark.parametrize("spec", ["streamingllm", "triattention", "random"])
def test_methods_without_queries_keep_none(spec):
    assert str(make_method(spec, 300).query_plan().kind) == "none"


def settings_of(spec):
    return make_method(spec, 300).settings()


def assert_settings(spec, **expected):
    found = settings_of(spec)
    assert {key: found[key] for key in expected} == expected


def test_presets_of_snapkv_and_agentkv_are_those_of_the_specification():
    assert make_method("snapkv@rkv", 100) == make_method("snapkv", 100)
    window = {"window": 32, "kernel": 7, "pool": "max", "gqa": "max_logit", "columns": "past"}
    assert_settings("snapkv", **window, aggregate="mean", cache_heads="kv")
    kvpress = {"window": 64, "kernel": 5, "pool": "avg", "gqa": "mean_prob", "columns": "all"}
    assert_settings("snapkv@kvpress", **kvpress, aggregate="mean", cache_heads="kv")
    assert_settings(
        "snapkv@original", **{**kvpress, "window": 32}, aggregate="sum", cache_heads="query"
    )
    assert_settings("agentkv", keep_recent=8)
    assert_settings("agentkv@paper", keep_recent=0)
    for spec in ("agentkv", "agentkv@paper"):
        assert_settings(spec, representatives=32, interval=128, gqa="mean_prob")
        assert_settings(spec, kept_set="per_head", trigger="every", sampler="last")
        assert_settings(spec, drop_phase="none", positions="logical", sinks=0)


def test_presets_of_rkv_are_those_of_the_specification():
    importance = {"kernel": 7, "pool": "max", "gqa": "max_logit", "columns": "past"}
    for preset, lam, window in (("agentkv", 0.07, 32), ("code", 0.07, 8), ("paper", 0.1, 8)):
        assert_settings(f"rkv@{preset}", lam=lam, window=window, kept_set="per_head", **importance)
    assert_settings("rkv@serving", lam=0.1, window=8, kept_set="shared", **importance)
    assert make_method("rkv", 100) == make_method("rkv@agentkv", 100)
    assert_settings("rkv", threshold=0.5, interval=128, trigger="every")


def test_presets_of_triattention_are_those_of_the_specification():
    hf = {"kept_set": "per_kv_head", "aggregate": "mean", "normalise": "generated"}
    shared = {"trigger": "slack", "interval": 128, "offset_max": 65536, "offset_merge": "mean"}
    shared |= {"norm_term": "excess", "trig_term": "on", "sinks": 0}
    expected = {
        "hf": {**hf, "keep_prompt": "on", "keep_recent": 0},
        "vllm": {**hf, "keep_prompt": "off", "keep_recent": 128, "normalise": "query_head"},
        "sglang": {
            **hf,
            "keep_prompt": "off",
            "keep_recent": 0,
            "normalise": "kv_head",
            "aggregate": "max",
        },
        "per_layer": {**hf, "kept_set": "per_head", "keep_prompt": "on"},
        "global": {**hf, "kept_set": "shared", "aggregate": "max", "keep_prompt": "on"},
    }
    for preset, settings in expected.items():
        assert_settings(f"triattention@{preset}", **shared, **settings)
    assert make_method("triattention", 300) == make_method("triattention@hf", 300)


def test_presets_of_h2o_and_streamingllm_are_those_of_the_specification():
    assert_settings("h2o", recent_share=0.5, normalise="none", kept_set="per_head")
    assert_settings("h2o@kvpress", recent_share=0.0, normalise="seen")
    assert_settings("streamingllm", sinks=4, positions="logical")
    assert_settings("streamingllm@paper", sinks=4, positions="cache")


@pytest.mark.parametrize(("budget", "recent"), [(4, 2), (5, 2), (100, 50), (101, 50)])
def test_h2o_keeps_half_of_the_budget_as_recent(budget, recent):
    assert make_method("h2o", budget).recent_kept(budget) == recent


def test_triattention_without_a_calibration_says_how_to_get_one():
    method = make_method("triattention", 64)
    scene = make_scene(method, 100)
    with pytest.raises(PrerequisiteError, match="kvbench calibrate"):
        scene.select(method)


def test_triattention_per_query_head_statistics_are_used():
    """Other statistics for one query head change its KV head's scores and no other's."""
    method = calibrated(make_method("triattention@per_layer", 64))
    scene = make_scene(method, 100)
    made = method.calibration
    mean = made.mean.clone()
    mean[1, 2] *= -2
    other = method.with_calibration(type(made)(mean, made.abs_mean, made.frequencies))
    same = (scene.select(method).scores == scene.select(other).scores) | scene.select(
        method
    ).scores.isnan()
    assert same.all(-1).tolist() == [[True, True], [True, False]]


# -- methods that compute in float64


def float64_scene(spec, settings):
    shape = CacheShape(layers=1, kv_heads=3, group=2, head_dim=16)
    method = make_method(spec, 40, settings)
    made = made_up_calibration(1, shape.q_heads, 1e4 ** -torch.linspace(0, 1, 8))
    return method.with_calibration(made), make_scene(method, 131, shape=shape)


@pytest.mark.parametrize("block", [1, 131 * 16, 2 * 131 * 16])
@pytest.mark.parametrize(("spec", "settings"), [("keydiff", {}), ("lagkv", {"lag": 16})])
def test_some_heads_at_a_time_score_as_all_of_them(spec, settings, block, monkeypatch):
    method, scene = float64_scene(spec, settings)
    whole = scene.select(method)
    monkeypatch.setattr(base, "BLOCK_DOUBLES", block)
    parts = scene.select(method)
    assert torch.equal(parts.scores.nan_to_num(), whole.scores.nan_to_num())
    assert torch.equal(parts.kept, whole.kept)


@pytest.mark.parametrize("block", [1, 700, 7000, 1 << 21])
@pytest.mark.parametrize("settings", [{}, {"spread": "off"}, {"values": "off"}])
def test_expected_attention_of_some_rows_at_a_time(settings, block, monkeypatch):
    """As in float64 over all rows at once, keys and their products with every covariance."""
    monkeypatch.setattr(base, "BLOCK_DOUBLES", block)
    method, scene = float64_scene("expected-attention", settings)
    (view,), (queries,) = scene.layers, scene.queries
    context = ScoreContext(
        positions=view.positions, cached=view, now=scene.now, budget=40, layer=0,
        next_position=scene.now,
    )  # fmt: skip
    found = method.score(queries, view.keys, context)

    known, keys = method.calibration, view.keys.double()[:, None] / 16**0.5
    turn = method._mean_turn(known, scene.now)
    means = torch.cat((known.mean[0].real, known.mean[0].imag), -1).double() @ turn.T
    logits = (keys @ means.reshape(3, 2, 16, 1))[..., 0]
    if method.spread == "on":
        spread = (turn @ known.covariance[0].double() @ turn.T).reshape(3, 2, 16, 16)
        logits += ((keys @ spread) * keys).sum(-1) / 2
    logits = logits.masked_fill(view.positions[:, None] < method.sinks, -torch.inf)
    expected = logits.softmax(-1).mean(1)
    if method.values == "on":
        expected = expected * view.values.double().norm(dim=-1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


# -- random


def random_sets(scene, **settings):
    method = make_method("random", 40, settings)
    return scene.positions(scene.select(method))


@pytest.fixture
def plain_scene():
    """All heads hold tokens 0..99 of 200, so that only the draw tells them apart."""
    method = make_method("random", 40, {"kept_set": "shared"})
    return make_scene(method, 100)


def test_random_repeats_with_its_seed_and_changes_with_it(plain_scene):
    first = random_sets(plain_scene, seed=3)
    assert torch.equal(first, random_sets(plain_scene, seed=3))
    assert not torch.equal(first, random_sets(plain_scene, seed=4))


def test_random_draws_apart_for_layers_heads_and_events(plain_scene):
    kept = random_sets(plain_scene)
    sets = {tuple(head) for head in kept.flatten(0, 1).tolist()}
    assert len(sets) == 4
    later = MethodInput(
        plain_scene.layers, plain_scene.queries, plain_scene.now + 1, 0, plain_scene.phases
    )
    assert not torch.equal(kept, random_sets(later))


def test_random_does_not_look_at_keys(plain_scene):
    changed = plain_scene.with_keys(lambda keys: keys * -3 + 1)
    assert torch.equal(random_sets(plain_scene), random_sets(changed))


def test_random_is_even_over_positions_and_heads_are_independent():
    """400 events x 4 heads: kept shares of old and new tokens within 4 standard errors of 0.4."""
    method = make_method("random", 40, {"kept_set": "shared"})
    scene = make_scene(method, 100)
    counts = torch.zeros(100)
    both = 0.0
    for seed in range(400):
        kept = random_sets(scene, seed=seed)
        ranks = torch.searchsorted(scene.places[0, 0], kept)
        counts += torch.bincount(ranks.flatten(), minlength=100)
        both += len(set(ranks[0, 0].tolist()) & set(ranks[0, 1].tolist()))
    share = counts / 1600
    assert (share - 0.4).abs().max() < 4.5 * (0.4 * 0.6 / 1600) ** 0.5
    # Two independent draws of 40 from 100 share 16 tokens, with deviation 3.1 (hypergeometric).
    assert abs(both / 400 - 16) < 4 * 3.1 / 20
