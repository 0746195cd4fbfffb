"""Small cases worked out by hand, so that formulation and code cannot share a misreading."""

from __future__ import annotations

import math

import pytest
import torch

from agentbench_kv.analysis.replay import MethodInput
from agentbench_kv.conformance.scenes import CacheShape, make_scene
from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import torch_backend
from agentbench_kv.methods.agentkv import in_random_rings, sample
from agentbench_kv.methods.base import LayerView, Queries, ScoreContext
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.methods.rkv import redundancy
from agentbench_kv.registry import make_method


def scene_of(keys, queries=None, *, now=None, prompt=0, sums=None, positions=None):
    """One layer, one KV head; keys [T, d], queries [G, n, d] of phase 0 at the last positions."""
    tokens = len(keys)
    now = tokens if now is None else now
    places = torch.arange(tokens) if positions is None else torch.tensor(positions)
    vectors = torch.zeros(1, 0, keys.shape[1]) if queries is None else queries
    count = vectors.shape[1]
    held = Queries(vectors, torch.arange(now - count, now), torch.zeros(count, dtype=torch.int64))
    view = LayerView(keys[None], keys[None], places[None], None if sums is None else sums[None])
    return MethodInput([view], [held], now, prompt, torch.zeros(now, dtype=torch.int64))


def column(*values):
    return torch.tensor(values)[:, None]


def test_rkv_redundancy_of_four_keys():
    """Rows: a and b repeat each other (spared), c and d have no neighbour (column 0 is zeroed)."""
    keys = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]])
    expected = torch.tensor([0.0, -1 / 4, 0.0, -2 / 4]).softmax(0)
    torch.testing.assert_close(redundancy(keys, 0.5)[0], expected)


def test_rkv_spares_the_last_of_several_near_duplicates():
    """Four equal keys: rows 0..2 spare column 3, row 3 spares column 2."""
    keys = torch.ones(1, 4, 2)
    expected = torch.tensor([3 / 4, 3 / 4, 2 / 4, 0.0]).softmax(0)
    torch.testing.assert_close(redundancy(keys, 0.5)[0], expected)


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_rkv_similarities_in_blocks_are_those_of_one_block(monkeypatch, rows):
    keys = torch.randn(2, 20, 4, generator=torch.Generator().manual_seed(0))
    reference = torch_backend.TorchBackend()
    expected = reference.similarity_column_mean(keys, 0.5)
    monkeypatch.setitem(torch_backend.BLOCK_BYTES, "cpu", 4 * 2 * 20 * rows)
    torch.testing.assert_close(reference.similarity_column_mean(keys, 0.5), expected)


def test_rkv_threshold_is_strict():
    """cos 60° = 0.5 is not above 0.5: nothing is spared but column 0."""
    half = 0.5
    keys = torch.tensor([[[1.0, 0.0], [half, math.sqrt(1 - half**2)], [-1.0, 0.0]]])
    cosine = float((keys[0, 0] * keys[0, 1]).sum())
    assert cosine == half
    expected = torch.tensor([0.0, (half - half) / 3, (-1 - half) / 3]).softmax(0)
    torch.testing.assert_close(redundancy(keys, half)[0], expected)


def test_rkv_counts_window_keys_as_neighbours():
    """A key whose only near duplicate is in the window loses that cosine in its row."""
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [1.0, 0.0]])
    queries = torch.zeros(1, 1, 2)
    method = make_method("rkv@paper", 2, {"window": 1, "lam": 0})
    scores = scene_of(keys, queries).select(method).scores[0, 0]
    # C without diagonal: row 0 spares column 3, row 3 spares column 0, rows 1 and 2 column 0.
    expected = -torch.tensor([0.0, -1 / 4, -1 / 4, 0.0]).softmax(0)
    torch.testing.assert_close(scores[:3], expected[:3])


def test_h2o_keeps_the_last_half_and_the_highest_sums():
    sums = torch.tensor([5.0, 1.0, 4.0, 3.0, 9.0, 0.0])
    scene = scene_of(torch.zeros(6, 2), sums=sums)
    kept = scene.select(make_method("h2o", 4)).kept
    assert kept.tolist() == [[[0, 2, 4, 5]]]
    assert scene.select(make_method("h2o", 5)).kept.tolist() == [[[0, 2, 3, 4, 5]]]


def test_h2o_kvpress_divides_by_the_queries_that_could_see_the_token():
    """Token j of 4 was seen by 4 - j queries: means 1, 1.1, 0.9, 2 although token 0 has most."""
    sums = torch.tensor([4.0, 3.3, 1.8, 2.0])
    selection = scene_of(torch.zeros(4, 2), sums=sums).select(make_method("h2o@kvpress", 2))
    torch.testing.assert_close(selection.scores[0, 0], torch.tensor([1.0, 1.1, 0.9, 2.0]))
    assert selection.kept.tolist() == [[[1, 3]]]


def test_snapkv_kvpress_on_two_competing_tokens():
    """Window 1, kernel 3, zero padding counted: each pooled score is (p0 + p1) / 3."""
    keys = column(math.log(2.0), 0.0, 0.0)
    method = make_method("snapkv@kvpress", 2, {"window": 1, "kernel": 3})
    scores = scene_of(keys, torch.ones(1, 1, 1)).select(method).scores[0, 0]
    torch.testing.assert_close(scores[:2], torch.full((2,), (2 / 4 + 1 / 4) / 3))


def test_snapkv_rkv_takes_the_softmax_before_the_window_only():
    keys = column(math.log(3.0), 0.0, 50.0)
    method = make_method("snapkv@rkv", 2, {"window": 1, "kernel": 1})
    scores = scene_of(keys, torch.ones(1, 1, 1)).select(method).scores[0, 0]
    torch.testing.assert_close(scores[:2], torch.tensor([3 / 4, 1 / 4]))


def test_snapkv_rkv_takes_the_maximum_over_the_group_before_the_softmax():
    """Head 0 likes token 0, head 1 token 1, both as much: the softmax of the maxima is even."""
    keys = torch.eye(2)[[0, 1, 1]] * math.log(4.0) * math.sqrt(2)
    queries = torch.eye(2)[:, None]
    method = make_method("snapkv@rkv", 2, {"window": 1, "kernel": 1})
    scores = scene_of(keys, queries).select(method).scores[0, 0]
    torch.testing.assert_close(scores[:2], torch.tensor([0.5, 0.5]))


def test_snapkv_original_sums_rows():
    keys = column(math.log(2.0), 0.0, 0.0, 0.0)
    settings = {"window": 2, "pool": "none", "columns": "past"}
    method = make_method("snapkv@original", 3, settings)
    scores = scene_of(keys, torch.ones(1, 2, 1)).select(method).scores[0, 0]
    torch.testing.assert_close(scores[:2], torch.tensor([4 / 3, 2 / 3]))


def tri(budget, *, mean=1.0, size=2.0, frequency=0.5, scale=1.0, **settings):
    """One layer, one head, one frequency."""
    statistics = Calibration(
        torch.full((1, 1, 1), mean, dtype=torch.complex64),
        torch.full((1, 1, 1), size),
        torch.tensor([frequency]),
        scale,
    )
    plain = {"normalise": "none", "keep_prompt": "off", **settings}
    return make_method("triattention", budget, plain).with_calibration(statistics)


def rotated(*positions, frequency=0.5, size=1.0):
    """Keys that were (size, 0) before RoPE."""
    angles = frequency * torch.tensor(positions, dtype=torch.float64)
    return (size * torch.stack([angles.cos(), angles.sin()], -1)).float()


def test_triattention_of_one_frequency_is_a_cosine_of_the_distance():
    """t = 10 tokens seen; offset 1: distance 11 - p. Norm term: (2 - 1)·|k|."""
    keys = rotated(0, 4, 9)
    scene = scene_of(keys, now=10, positions=[0, 4, 9])
    scores = scene.select(tri(2, offset_max=1)).scores[0, 0]
    expected = [math.cos(0.5 * (11 - p)) + 1.0 for p in (0, 4, 9)]
    torch.testing.assert_close(scores, torch.tensor(expected))


def test_triattention_offsets_are_powers_of_two_up_to_the_maximum():
    scene = scene_of(rotated(0, 4, 9), now=10, positions=[0, 4, 9])
    for limit, offsets in (
        (1, [1]),
        (3, [1, 2]),
        (4, [1, 2, 4]),
        (65536, [1 << i for i in range(17)]),
    ):
        scores = scene.select(tri(2, offset_max=limit, norm_term="off")).scores[0, 0]
        expected = [
            sum(math.cos(0.5 * (10 + o - p)) for o in offsets) / len(offsets) for p in (0, 4, 9)
        ]
        torch.testing.assert_close(scores, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_triattention_takes_the_conjugate_of_the_key():
    """μ = i turns the cosine into -sin: a key at the other side would flip the sign."""
    scene = scene_of(rotated(0, 3), now=5, positions=[0, 3])
    method = tri(1, mean=1j, size=1.0, offset_max=1)
    scores = scene.select(method).scores[0, 0]
    expected = [-math.sin(0.5 * (6 - p)) for p in (0, 3)]
    torch.testing.assert_close(scores, torch.tensor(expected))


@pytest.mark.parametrize(("term", "weight"), [("excess", 1.5), ("mean", 2.0), ("off", 0.0)])
def test_triattention_norm_terms(term, weight):
    keys = rotated(0, 1, size=3.0)
    method = tri(1, mean=-0.5, size=2.0, norm_term=term, trig_term="off")
    scores = scene_of(keys).select(method).scores[0, 0]
    torch.testing.assert_close(scores, torch.full((2,), weight * 3.0))


def test_triattention_scales_both_terms_by_what_the_key_lacks_of_the_squared_factor():
    """The cached key carries the attention factor once already."""
    keys = rotated(0, 1, 2)
    plain = scene_of(keys).select(tri(2)).scores
    scaled = scene_of(keys * 1.5).select(tri(2, scale=1.5)).scores
    torch.testing.assert_close(scaled, plain * 1.5**2)


def test_triattention_z_scores_of_the_generated_tokens_only():
    """The prompt's token is far off, yet the others have mean 0 and population deviation 1."""
    keys = column(100.0, 1.0, 2.0, 3.0) * torch.tensor([1.0, 0.0])
    method = tri(3, normalise="generated", keep_prompt="on", trig_term="off")
    scores = scene_of(keys, prompt=1).select(method).scores[0, 0]
    assert scores[0].isnan()
    torch.testing.assert_close(scores[1:], torch.tensor([-1.0, 0.0, 1.0]) * math.sqrt(1.5))


def test_triattention_sglang_z_scores_use_the_sample_deviation():
    keys = column(1.0, 2.0, 3.0) * torch.tensor([1.0, 0.0])
    for normalise in ("query_head", "kv_head"):
        method = tri(2, normalise=normalise, trig_term="off")
        scores = scene_of(keys).select(method).scores[0, 0]
        torch.testing.assert_close(scores, torch.tensor([-1.0, 0.0, 1.0]))


def small_scores(size, **settings):
    """Scores of keys of norms 1, 2 and 3 times `size`, by the norm term alone."""
    keys = column(1.0, 2.0, 3.0) * torch.tensor([size, 0.0])
    return scene_of(keys).select(tri(2, trig_term="off", **settings)).scores[0, 0]


def test_triattention_deviations_have_a_floor():
    """Hugging Face divides by 1e-6 at least; SGLang and vLLM by 1 where it is below 1e-8."""
    steps = torch.tensor([-1.0, 0.0, 1.0])
    torch.testing.assert_close(small_scores(1e-7, normalise="generated"), steps * 0.1)
    torch.testing.assert_close(small_scores(1e-4, normalise="generated"), steps * math.sqrt(1.5))
    for normalise in ("query_head", "kv_head"):
        torch.testing.assert_close(small_scores(1e-4, normalise=normalise), steps)
        tiny = small_scores(1e-9, normalise=normalise)
        torch.testing.assert_close(tiny, steps * 1e-9, rtol=1e-4, atol=0)


# -- samplers


def chosen(name, queries, keys, count):
    return sample(name, queries, keys, count).tolist()


def test_multiscale_of_six_slots():
    """3 of the last 4; 2 of the 29 left of the last 32 (thirds 7, 21); the middle of 123 left."""
    queries = torch.zeros(1, 200, 1)
    expected = [133, 175, 189, 196, 198, 199]
    assert chosen("multiscale", queries, queries[0], 6) == expected


def test_multiscale_gives_what_rounding_leaves_to_the_nearest_window_and_then_to_the_newest():
    """Eight slots are 5:2:1, but only four queries are in the last 4: the fifth is the newest."""
    queries = torch.zeros(1, 200, 1)
    assert chosen("multiscale", queries, queries[0], 8) == [133, 175, 189, 195, 196, 197, 198, 199]


def test_multiscale_of_a_young_phase_stays_inside_it():
    """Ten queries, six slots: 3 of the last 4; 2 of the 7 others; 1 of the 5 left."""
    queries = torch.zeros(1, 10, 1)
    assert chosen("multiscale", queries, queries[0], 6) == [1, 3, 5, 6, 8, 9]


def test_weighted_without_a_key_of_the_phase_takes_the_last():
    queries = torch.randn(2, 20, 4, generator=torch.Generator().manual_seed(0))
    assert chosen("weighted", queries, queries[0, :0], 6) == [14, 15, 16, 17, 18, 19]


@pytest.mark.parametrize("name", ["last", "multiscale", "weighted", "diverse"])
def test_samplers_take_all_there_is_of_a_young_phase(name):
    queries = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    assert chosen(name, queries, queries[0], 5) == [0, 1, 2, 3, 4]
    assert chosen(name, queries, queries[0], 8) == [0, 1, 2, 3, 4]
    assert chosen(name, queries[:, :0], queries[0], 8) == []


@pytest.mark.parametrize("name", ["last", "multiscale", "weighted", "diverse"])
@pytest.mark.parametrize("count", [1, 2, 6, 8, 16])
def test_samplers_return_distinct_ascending_indices(name, count):
    queries = torch.randn(2, 128, 4, generator=torch.Generator().manual_seed(count))
    picked = chosen(name, queries, queries[0, :9], count)
    assert len(picked) == count
    assert picked == sorted(set(picked))


def test_weighted_prefers_the_query_that_serves_the_weighed_keys():
    """Weights of the last 8: [2, 4]. Alone, query 1 gives 2·3 + 4·6 = 30, query 0 only 10."""
    keys = column(1.0, 2.0)
    queries = column(1.0, 3.0, -2.0)[None]
    assert chosen("weighted", queries, keys, 1) == [1]


def test_weighted_adds_what_covers_keys_not_reached_yet():
    """Query 2 is nearly query 1; query 0 alone reaches the second key."""
    keys = torch.eye(2)
    queries = torch.tensor([[[0.0, 2.0], [5.0, 0.0], [4.9, 0.1]]])
    assert chosen("weighted", queries, keys, 2) == [0, 1]


def test_weighted_weighs_keys_by_the_last_eight_queries_alone():
    """Old queries like key 0, the last eight key 1: an anchor for key 1 is chosen."""
    old, new = torch.tensor([9.0, 0.0]), torch.tensor([0.0, 1.0])
    queries = torch.stack([old] * 9 + [new] * 8)[None]
    (picked,) = chosen("weighted", queries, torch.eye(2), 1)
    assert picked >= 9


def directions(*degrees):
    angles = torch.tensor(degrees).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], -1)[None]


def test_diverse_starts_at_the_newest_and_takes_the_farthest():
    queries = directions(10.0, 175.0, 80.0, 0.0)
    assert chosen("diverse", queries, queries[0], 2) == [1, 3]
    assert chosen("diverse", queries, queries[0], 3) == [1, 2, 3]


def test_diverse_does_not_look_at_lengths():
    """80° is farther from 0° than 60°, however short the query at 60°."""
    queries = directions(10.0, 60.0, 80.0, 0.0)
    longer = queries * torch.tensor([1.0, 0.01, 5.0, 1.0])[:, None]
    assert chosen("diverse", longer, queries[0], 2) == [2, 3]
    assert chosen("diverse", longer, queries[0], 3) == [1, 2, 3]


def test_samplers_look_back_as_far_as_the_paper_says():
    for name, size in (("last", 8), ("multiscale", 128), ("weighted", 64)):
        plan = make_method("agentkv", 64, {"sampler": name}).query_plan()
        assert (str(plan.kind), plan.size) == ("per_phase", size)
    assert (
        make_method("agentkv", 64, {"sampler": "weighted", "representatives": 512})
        .query_plan()
        .size
        == 128
    )


def test_without_phases_the_last_queries_of_any_are_kept():
    for name, size in (("recent", 32), ("shuffled", 768)):
        plan = make_method("agentkv", 64, {"sampler": name}).query_plan()
        assert (str(plan.kind), plan.size) == ("recent", size)
    plan = make_method("agentkv", 64, {"sampler": "own"}).query_plan()
    assert (str(plan.kind), plan.size) == ("per_phase", 8)


def test_own_hears_the_phase_under_way_alone():
    """The newest query is of phase 1 and likes key 1; all others like key 0."""
    likes = torch.tensor([[9.0, 0.0], [9.0, 0.0], [0.0, 9.0]])[None]
    held = Queries(likes, torch.tensor([3, 4, 5]), torch.tensor([0, 2, 1]))
    scores = {
        name: make_method("agentkv@paper", 1, {"sampler": name}).score(
            held, torch.eye(2)[None], ScoreContext(torch.arange(2)[None], None, 6, 1, 0)
        )
        for name in ("own", "last")
    }
    assert scores["own"].argmax() == 1
    assert scores["last"].argmax() == 0


def test_random_rings_are_the_last_of_labels_that_hold_for_stretches():
    """Whatever the labels: whole stretches share one, and each ring holds the end of its last."""
    positions = torch.arange(5000, 5768)
    held = positions[in_random_rings(positions, 8)]
    assert len(held) == 32
    ends = held.view(4, 8)
    assert bool((ends.diff(dim=1) == 1).all())  # eight in a row
    assert bool((ends[:-1, -1] % 64 == 63).all())  # to the end of a stretch, but the newest
    assert int(held[-1]) == 5767
    assert torch.equal(held, positions[1:][in_random_rings(positions[1:], 8)])


def test_random_rings_take_all_labels_alike():
    first = [
        int(in_random_rings(torch.arange(n - 128, n), 64).sum()) for n in range(128, 12928, 128)
    ]
    # Of two stretches one label is both in a quarter of the cases, and then the older is left out.
    assert 0.12 < first.count(64) / len(first) < 0.4
    assert set(first) == {64, 128}


def test_agentkv_pools_over_exact_neighbours_only_if_odd():
    with pytest.raises(UsageError, match="odd width"):
        make_method("agentkv", 64, {"pool": "max", "kernel": 4})


def test_no_phase_can_be_dropped_where_none_is_known():
    with pytest.raises(UsageError, match="knows no phase to drop"):
        make_method("agentkv", 64, {"sampler": "recent", "drop_phase": "tool"})


def test_weighted_uses_keys_of_the_phase_alone():
    """With other phases' keys changed, the same queries are chosen, so the same tokens score."""
    method = make_method("agentkv@paper", 40, {"sampler": "weighted", "representatives": 8})
    scene = make_scene(method, 300, seed=2, shape=CacheShape(layers=1, kv_heads=1, group=1))
    view, held = scene.layers[0], scene.queries[0]
    for phase in range(4):
        own = scene.phases[view.positions[0]] == phase
        mine = held.vectors[:, held.phases == phase]
        keys = view.keys[0]
        picks = chosen("weighted", mine, keys[own], 2)
        others = torch.where(own[:, None], keys, torch.zeros_like(keys))
        assert chosen("weighted", mine, others, 2) == picks
