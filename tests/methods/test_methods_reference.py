"""Every method against its float64 numpy formulation, on caches with holes in scrambled order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentbench_kv.conformance.methods import Scene, make_scene
from agentbench_kv.methods.base import LayerView, Queries
from agentbench_kv.registry import make_method

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
CASES = [
    *AGENTKV,
    ("streamingllm", {}),
    ("streamingllm", {"sinks": 2, "keep_recent": 5}),
    ("snapkv", {}),
    ("snapkv@rkv", {"window": 8}),
    ("snapkv@rkv", {"window": 8, "kernel": 1, "sinks": 3}),
    ("snapkv@rkv", {"kept_set": "shared"}),
    ("snapkv@rkv", {"keep_recent": 40}),
    ("snapkv@kvpress", {}),
    ("snapkv@kvpress", {"window": 8, "kernel": 7}),
    ("snapkv@kvpress", {"kept_set": "per_kv_head"}),
]


def as_numpy(scene):
    layers = [(view.keys.numpy(), view.positions.numpy()) for view in scene.layers]
    queries = [(q.vectors.numpy(), q.positions.numpy(), q.phases.numpy()) for q in scene.queries]
    return layers, queries, scene.now


def compare(reference, method, scene):
    selection = scene.select(method)
    scores, kept = reference.select(method, *as_numpy(scene))
    got = selection.scores.numpy()
    competing = ~np.isnan(got)
    np.testing.assert_allclose(got[competing], scores[competing], rtol=1e-5)
    places = torch.stack([view.positions for view in scene.layers]).sort(-1).values.numpy()
    always = np.isin(places, sorted(reference.always_kept(method, scene.now)))
    assert np.array_equal(~competing, always)
    assert scene.positions(selection).tolist() == kept


@pytest.mark.parametrize(("spec", "settings"), CASES, ids=lambda v: str(v).replace(" ", ""))
@pytest.mark.parametrize("seed", [1])
def test_method_matches_its_specification(reference, spec, settings, seed):
    method = make_method(spec, 72, settings)
    compare(reference, method, make_scene(method, 130 + seed, seed=seed))


def custom_scene(q_heads, kv_heads, plan, tokens=90, now=150, seed=0):
    """A scene of other shapes: `plan` is (recent window, phases of the queries)."""
    rng = torch.Generator().manual_seed(seed)
    window, per_phase = plan
    recent = torch.arange(now - 70, now)
    layers, queries = [], []
    for _ in range(2):
        free = [torch.randperm(now - 70, generator=rng)[: tokens - 70] for _ in range(kv_heads)]
        places = torch.stack([torch.cat([f, recent]) for f in free])
        order = torch.stack([torch.randperm(tokens, generator=rng) for _ in range(kv_heads)])
        rows = torch.randn(2, kv_heads, tokens, 16, generator=rng)
        layers.append(LayerView(rows[0] * 3, rows[1], places.gather(-1, order)))
        positions = torch.arange(now - window, now) if window else torch.arange(now - 32, now)
        phases = torch.arange(len(positions)) % 4 if per_phase else torch.full_like(positions, 3)
        vectors = torch.randn(q_heads, len(positions), 16, generator=rng)
        queries.append(Queries(vectors, positions, phases))
    return Scene(layers, queries, now)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize(
    ("spec", "window"),
    [("agentkv", 0), ("snapkv@rkv", 32), ("snapkv@kvpress", 64), ("streamingllm", 0)],
)
def test_method_matches_its_specification_for_group_sizes(reference, spec, window, kv_heads, group):
    method = make_method(spec, 75)
    compare(reference, method, custom_scene(kv_heads * group, kv_heads, (window, True)))


@pytest.mark.parametrize("gqa", ["mean_prob", "max_prob", "max_logit"])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_agentkv_gqa_modes_for_group_sizes(reference, gqa, group):
    method = make_method("agentkv", 40, {"gqa": gqa})
    compare(reference, method, custom_scene(2 * group, 2, (0, True)))


def test_agentkv_gqa_modes_coincide_without_groups():
    scene = custom_scene(2, 2, (0, True))
    sets = [
        scene.select(make_method("agentkv", 40, {"gqa": gqa})).kept
        for gqa in ("mean_prob", "max_prob", "max_logit")
    ]
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
    scene = custom_scene(8, 2, (0, True))
    totals = scene.select(method).scores.sum(-1)
    np.testing.assert_allclose(totals.numpy(), 1, rtol=1e-5)


def test_agentkv_has_no_mask_between_old_queries_and_newer_keys(reference):
    """A key newer than every query still gets its attention mass."""
    method = make_method("agentkv@paper", 4)
    keys = torch.randn(1, 9, 8, generator=torch.Generator().manual_seed(0))
    query = Queries(keys[:, 8:9] * 4, torch.tensor([1]), torch.tensor([0]))
    scene = Scene([LayerView(keys, keys, torch.arange(9)[None])], [query], 9)
    compare(reference, method, scene)
    assert 8 in scene.positions(scene.select(method))[0, 0].tolist()


def test_agentkv_drop_phase_equals_not_having_those_queries():
    dropped = make_method("agentkv", 40, {"drop_phase": "tool"})
    plain = make_method("agentkv", 40)
    scene = custom_scene(4, 2, (0, True))
    without = []
    for q in scene.queries:
        rows = q.phases != 2
        without.append(Queries(q.vectors[:, rows], q.positions[rows], q.phases[rows]))
    other = Scene(scene.layers, without, scene.now)
    assert torch.equal(scene.select(dropped).kept, other.select(plain).kept)


def test_agentkv_drop_phase_of_the_only_phase_seen_keeps_a_full_set():
    """All queries dropped: no information, so ties, so the lowest positions; not a crash."""
    method = make_method("agentkv@paper", 40, {"drop_phase": "others"})
    scene = custom_scene(4, 2, (0, False))
    kept = scene.positions(scene.select(method))
    for layer, view in enumerate(scene.layers):
        assert kept[layer].tolist() == view.positions.sort(-1).values[:, :40].tolist()


def test_agentkv_declares_four_rings_of_a_quarter_each():
    plan = make_method("agentkv", 40).query_plan()
    assert (str(plan.kind), plan.size) == ("per_phase", 8)
    assert make_method("agentkv", 40, {"representatives": 64}).query_plan().size == 16


@pytest.mark.parametrize(("spec", "window"), [("snapkv@rkv", 32), ("snapkv@kvpress", 64)])
def test_snapkv_declares_its_window(spec, window):
    method = make_method(spec, 100)
    assert (str(method.query_plan().kind), method.query_plan().size) == ("recent", window)
    assert method.recent_kept() == window


def test_presets_are_those_of_the_specification():
    rkv, plain = make_method("snapkv@rkv", 100), make_method("snapkv", 100)
    assert rkv == plain
    assert (rkv.window, rkv.kernel, rkv.pool, rkv.gqa) == (32, 7, "max", "max_logit")
    kvpress = make_method("snapkv@kvpress", 100)
    assert (kvpress.window, kvpress.kernel, kvpress.pool) == (64, 5, "avg")
    default, paper = make_method("agentkv", 100), make_method("agentkv@paper", 100)
    assert (default.keep_recent, paper.keep_recent) == (8, 0)
    for method in (default, paper):
        assert method.representatives == 32
        assert method.interval == 128
        assert (method.gqa, method.kept_set, method.trigger) == ("mean_prob", "per_head", "every")
    assert make_method("streamingllm", 100).sinks == 4
