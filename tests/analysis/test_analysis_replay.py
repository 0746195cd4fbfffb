"""What a capture hands to a method, against plain numpy over whole attention matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.analysis import replay
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import QueryKind, QueryPlan
from agentbench_kv.registry import make_method

CASES = [
    ("agentkv@paper", {"representatives": 8}, 2),
    ("agentkv@paper", {}, 8),
    ("snapkv", {"window": 8}, 8),
    ("snapkv@rkv", {}, 32),
    ("streamingllm", {}, 4),
]
GAPS = np.r_[0:20, 30:50, 57:77]


def as_numpy(capture):
    return capture.q.numpy(), capture.k.numpy(), capture.positions.numpy()


@pytest.mark.parametrize("block_bytes", [1, 4000, 1 << 25])
def test_sums_do_not_depend_on_blocks(capture, numeric, monkeypatch, block_bytes):
    monkeypatch.setattr(replay, "BLOCK_BYTES", block_bytes)
    made = capture(40, kv_heads=2, q_heads=6)
    q, k, positions = (array[0] if array.ndim > 1 else array for array in as_numpy(made))
    got = replay.attention_sums(made.q[0], made.positions, made.k[0], made.positions)
    expected = numeric.past_sums(q, k, positions, 40)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(got.sum(-1).numpy(), 40, rtol=1e-5)


def test_sums_hide_later_keys_per_head(numeric):
    """Heads that hold different tokens, queries in the middle of them."""
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((4, 5, 8)), rng.standard_normal((2, 9, 8))
    places = np.stack([np.arange(9), np.arange(9) * 2])
    seen = np.arange(3, 8)
    got = replay.attention_sums(*map(torch.as_tensor, (q, seen, k, places)))
    probs = numeric.attention(q, k, seen, places).sum(1)
    np.testing.assert_allclose(got.numpy(), numeric.group_mean(probs, 2), rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    phases=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    size=st.integers(1, 12),
    data=st.data(),
)
def test_kept_queries_are_the_last_of_each_ring(capture, phases, size, data):
    count = data.draw(st.integers(1, len(phases)))
    made = capture(len(phases), layers=2, extra={"phase": np.array(phases)})
    per_phase = replay.kept_queries(made, QueryPlan(QueryKind.PER_PHASE, size), count)
    recent = replay.kept_queries(made, QueryPlan(QueryKind.RECENT, size), count)
    rows = list(range(count))
    rings = [row for p in range(4) for row in [r for r in rows if phases[r] == p][-size:]]
    for found, expected in ((per_phase, sorted(rings)), (recent, rows[-size:])):
        for layer, queries in enumerate(found):
            assert queries.positions.tolist() == expected
            assert queries.phases.tolist() == [phases[row] for row in expected]
            assert torch.equal(queries.vectors, made.q[layer][:, expected])


@pytest.mark.parametrize("positions", [np.arange(60), GAPS])
@pytest.mark.parametrize("now", [25, 41, 77])
def test_sums_of_the_past_and_of_the_future(capture, numeric, positions, now):
    made = capture(layers=2, extra={"positions": positions})
    q, k, _ = as_numpy(made)
    h2o, oracle = make_method("h2o", 16), make_method("oracle", 16)
    for method, expected in ((h2o, numeric.past_sums), (oracle, numeric.utility)):
        given = replay.input_at(made, method, now)
        for layer, view in enumerate(given.layers):
            want = expected(q[layer], k[layer], positions, now)
            np.testing.assert_allclose(view.sums.numpy(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("spec", "options", "size"), CASES)
@pytest.mark.parametrize("layers", [None, 3])
def test_selection_is_what_the_specification_says(capture, numeric, spec, options, size, layers):
    made = capture(90, layers=layers)
    outcome = replay.select_capture(made, make_method(spec, 40, options))
    assert outcome.kept.shape == (*(() if layers is None else (3,)), 2, 40)
    assert outcome.score.shape == (*outcome.kept.shape[:-1], 90)
    assert (str(outcome.kept.dtype), str(outcome.score.dtype)) == ("torch.int32", "torch.float32")
    score = numeric.method_scores(spec.split("@")[0], made.phases.numpy(), size)
    q, k, _ = as_numpy(made)
    for layer in range(layers or 1):
        for head in range(2):
            place = head if layers is None else (layer, head)
            queries = q[layer, 2 * head : 2 * head + 2]
            scores, always = score(queries, k[layer, head], np.arange(90))
            got = outcome.score[place].numpy()
            assert np.array_equal(np.isnan(got), always)
            np.testing.assert_allclose(got[~always], scores[~always], rtol=1e-4)
            expected = numeric.top(np.where(always, np.inf, scores), 40)
            assert outcome.kept[place].tolist() == expected.tolist()


@pytest.mark.parametrize("now", [30, 59])
def test_the_oracle_keeps_what_the_future_attends_to(capture, numeric, now):
    made = capture(layers=2).at(now)
    outcome = replay.select_capture(made, make_method("oracle", 10))
    q, k, positions = as_numpy(made)
    for layer in range(2):
        utility = numeric.utility(q[layer], k[layer], positions, now)
        for head in range(2):
            assert outcome.kept[layer, head].tolist() == numeric.top(utility[head], 10).tolist()
        assert torch.isneginf(outcome.score[layer, :, now:]).all()
        np.testing.assert_allclose(outcome.score[layer, :, :now], utility, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", ["agentkv", "snapkv", "h2o", "rkv", "random", "streamingllm"])
def test_what_comes_after_the_event_does_not_matter(arrays, capture, spec):
    named = arrays(90, layers=2)
    cut = {name: a[..., :64, :] if name in "qkv" else a for name, a in named.items()}
    cut["phase"] = named["phase"][:64]
    method = make_method(spec, 40)
    whole = replay.select_capture(capture(extra=named).at(64), method)
    short = replay.select_capture(capture(extra=cut), method)
    assert torch.equal(whole.kept, short.kept)
    assert torch.equal(whole.score[..., :64].nan_to_num(9), short.score.nan_to_num(9))
    assert torch.isneginf(whole.score[..., 64:]).all()


def test_a_cache_per_query_head(capture):
    """Each query head scores and keeps for itself, with its KV head's keys."""
    made = capture(60, q_heads=4, kv_heads=2)
    method = make_method("snapkv@original", 40)
    assert method.per_query_head
    outcome = replay.select_capture(made, method)
    assert outcome.kept.shape == (4, 40)
    assert outcome.meta["kept_per"] == "query_head"
    alone = [
        capture(
            60,
            q_heads=1,
            kv_heads=1,
            extra={
                "q": made.q[0, [head]],
                "k": made.k[0, [head // 2]],
                "v": made.v[0, [head // 2]],
            },
        )
        for head in range(4)
    ]
    for head, single in enumerate(alone):
        assert torch.equal(outcome.kept[head], replay.select_capture(single, method).kept[0])


def test_triattention_uses_the_statistics_of_the_capture(capture):
    rng = np.random.default_rng(0)
    shape = (4, 4)
    mean = rng.standard_normal(shape).astype("f4") + 1j * rng.standard_normal(shape).astype("f4")
    extra = {
        "q_mean_real": mean.real,
        "q_mean_imag": mean.imag,
        "q_abs_mean": np.abs(mean) + 0.5,
        "inv_freq": np.float32(10.0) ** -np.arange(4, dtype="f4"),
        "now": np.array(70),
        "prompt": np.array(0),
    }
    made = capture(60, extra=extra)
    method = make_method("triattention", 20, {"normalise": "none"})
    got = replay.select_capture(made, method).score.numpy()
    frequencies = extra["inv_freq"].astype(np.float64)
    for kv_head in range(2):
        rows = made.k[0, kv_head].double().numpy()
        keys = rows[:, :4] + 1j * rows[:, 4:]
        heads = []
        for head in (2 * kv_head, 2 * kv_head + 1):
            offsets = 2.0 ** np.arange(17)
            turns = np.exp(1j * frequencies * (70 + offsets)[:, None])
            cosines = np.real((mean[head] * turns)[:, None] * keys.conj()).sum(-1).mean(0)
            excess = (extra["q_abs_mean"] - np.abs(mean))[head]
            heads.append(cosines + np.abs(keys) @ excess)
        np.testing.assert_allclose(got[kv_head], np.max(heads, 0), rtol=1e-4, atol=1e-5)


def test_meta_says_what_was_computed(capture):
    made = capture(60, layers=2, extra={"now": np.array(50)})
    meta = replay.select_capture(made, make_method("rkv@paper", "50%")).meta
    assert (meta["method"], meta["preset"]) == ("rkv", "paper")
    assert (meta["budget"], meta["budget_share"]) == (25, 0.5)
    assert (meta["T"], meta["candidates"], meta["now"], meta["prompt"]) == (60, 50, 50, 12)
    assert (meta["layers"], meta["q_heads"], meta["kv_heads"], meta["head_dim"]) == (2, 4, 2, 8)
    assert meta["settings"]["window"] == 8


def test_budget_equal_to_the_tokens_keeps_everything(capture):
    outcome = replay.select_capture(capture(60), make_method("agentkv", 60))
    assert outcome.kept.tolist() == [list(range(60))] * 2
    assert outcome.score.isnan().all()


@pytest.mark.parametrize(
    ("spec", "budget", "message"),
    [
        ("agentkv", 61, "budget 61 is over the 60 tokens of the capture"),
        ("full", None, "full keeps every token"),
        ("oracle", 20, "oracle needs tokens after the event: .* give an earlier one with --now"),
        ("triattention", 20, "triattention needs the model's statistics"),
    ],
)
def test_what_cannot_be_selected(capture, spec, budget, message):
    with pytest.raises(UsageError, match=message):
        replay.select_capture(capture(60), make_method(spec, budget))


def test_phases_are_needed_where_they_matter(arrays, capture):
    named = arrays(60)
    del named["phase"]
    bare = capture(60).from_arrays({name: torch.as_tensor(a) for name, a in named.items()})
    with pytest.raises(UsageError, match="agentkv needs the phase of every token"):
        replay.select_capture(bare, make_method("agentkv", 20))
    assert replay.select_capture(bare, make_method("snapkv", 40)).kept.shape == (2, 40)


def test_phases_go_by_position(capture):
    """What a capture has no token for counts as others; what comes after the event is not there."""
    extra = {"positions": np.array([1, 2, 5, 7]), "phase": np.array([0, 1, 2, 0])}
    made = capture(4, extra=extra)
    given = replay.input_at(made, make_method("agentkv@paper", 2), 6)
    assert given.phases.tolist() == [3, 0, 1, 3, 3, 2]
    assert given.layers[0].positions.tolist() == [[1, 2, 5]] * 2
    assert given.queries[0].positions.tolist() == [1, 2, 5]


def test_an_event_before_the_first_token(capture):
    with pytest.raises(UsageError, match="now=0: expected a position after the capture's first"):
        capture(60).at(0)
