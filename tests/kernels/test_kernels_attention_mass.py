"""attention_mass against float64 numpy loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from agentbench_kv.kernels import attention_mass, torch_backend
from agentbench_kv.kernels.torch_backend import TorchBackend


@pytest.fixture(autouse=True)
def _on_device(device):
    """Tensors lie where the backend computes."""
    with torch.device(device):
        yield


def softmax(row):
    finite = row[np.isfinite(row)]
    weights = np.exp(row - finite.max())
    return weights / weights.sum()


def brute_force(queries, keys, gqa, query_positions=None, key_positions=None):
    """One query, one head at a time. Returns [kv_heads, group or 1, tokens]."""
    q_heads, n, dim = queries.shape
    kv_heads, tokens, _ = keys.shape
    group = q_heads // kv_heads
    out = np.zeros((kv_heads, 1 if gqa == "max_logit" else group, tokens))
    for h in range(kv_heads):
        for i in range(n):
            rows = np.zeros((group, tokens))
            for g, j in itertools.product(range(group), range(tokens)):
                hidden = key_positions is not None and key_positions[h, j] > query_positions[i]
                dot = float(queries[h * group + g, i] @ keys[h, j]) / np.sqrt(dim)
                rows[g, j] = -np.inf if hidden else dot
            if gqa == "max_logit":
                rows = rows.max(0, keepdims=True)
            for g, row in enumerate(rows):
                out[h, g] += softmax(row) / n
    if gqa == "max_prob":
        return out.max(1)
    return out if gqa == "per_head" else out.mean(1)


def draw(q_heads, kv_heads, n, tokens, dim=8, scale=2.0):
    rng = np.random.default_rng(q_heads * 100 + kv_heads * 10 + n)
    return rng.normal(size=(q_heads, n, dim)) * scale, rng.normal(size=(kv_heads, tokens, dim))


@pytest.mark.parametrize("gqa", ["mean_prob", "max_prob", "max_logit", "per_head"])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_mass_matches_numpy(gqa, group, causal):
    queries, keys = draw(2 * group, 2, 5, 13)
    rng = np.random.default_rng(group)
    key_positions = np.stack([rng.permutation(20)[:13] for _ in range(2)]) if causal else None
    # every query sees at least one key of every head
    query_positions = rng.integers(12, 20, 5) if causal else None
    where = {}
    if causal:
        where = {
            "query_positions": torch.tensor(query_positions),
            "key_positions": torch.tensor(key_positions),
        }
    got = attention_mass(
        torch.tensor(queries, dtype=torch.float32),
        torch.tensor(keys, dtype=torch.float32),
        gqa=gqa,
        **where,
    )
    expected = brute_force(queries, keys, gqa, query_positions, key_positions)
    assert got.dtype == torch.float32
    assert got.shape == expected.shape
    np.testing.assert_allclose(got.cpu().numpy(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("gqa", ["mean_prob", "max_logit", "per_head"])
def test_attention_mass_sums_to_one(gqa):
    queries, keys = draw(4, 2, 7, 31)
    got = attention_mass(torch.tensor(queries), torch.tensor(keys), gqa=gqa)
    np.testing.assert_allclose(got.sum(-1).cpu().numpy(), 1, rtol=1e-5)


@pytest.mark.parametrize("gqa", ["mean_prob", "max_prob", "max_logit", "per_head"])
@pytest.mark.parametrize("value", [0.0, 1.0, 1e4, -1e4])
def test_attention_mass_has_no_nan_for_extreme_keys(gqa, value):
    got = attention_mass(torch.ones(4, 3, 8) * 100, torch.full((2, 9, 8), value), gqa=gqa)
    np.testing.assert_allclose(got.cpu().numpy(), 1 / 9, rtol=1e-5)


def test_attention_mass_without_queries_is_zero_not_nan():
    got = attention_mass(torch.zeros(4, 0, 8), torch.randn(2, 9, 8))
    assert torch.equal(got, torch.zeros(2, 9))


def test_attention_mass_of_half_precision_is_computed_in_float32():
    queries, keys = draw(4, 2, 3, 9)
    half_q, half_k = torch.tensor(queries).bfloat16(), torch.tensor(keys).bfloat16()
    expected = brute_force(
        half_q.double().cpu().numpy(), half_k.double().cpu().numpy(), "mean_prob"
    )
    np.testing.assert_allclose(attention_mass(half_q, half_k).cpu().numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("gqa", ["mean_prob", "max_prob", "max_logit", "per_head"])
@pytest.mark.parametrize("rows", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_mass_of_rows_of_8_bits_is_of_what_they_stand_for(dtype, rows, gqa):
    queries, keys = map(torch.tensor, draw(4, 2, 3, 40, dim=32))
    low_q, low_k = queries.to(dtype), keys.to(rows)
    assert not torch.equal(low_k.double(), keys)
    exact = (each.double().cpu().numpy() for each in (low_q, low_k))
    got = attention_mass(low_q, low_k, gqa=gqa)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.cpu().numpy(), brute_force(*exact, gqa), rtol=1e-5)


def test_attention_mass_one_position_vector_alone_hides_nothing():
    queries, keys = draw(4, 2, 3, 9)
    q, k = torch.tensor(queries), torch.tensor(keys)
    plain = attention_mass(q, k)
    assert torch.equal(plain, attention_mass(q, k, query_positions=torch.zeros(3)))


def test_attention_mass_reads_views_of_a_larger_cache():
    queries, keys = draw(4, 2, 3, 9)
    cache = torch.randn(2, 20, 8, dtype=torch.float64)
    cache[:, :9] = torch.tensor(keys)
    got = attention_mass(
        torch.tensor(queries).transpose(0, 1).contiguous().transpose(0, 1), cache[:, :9]
    )
    np.testing.assert_allclose(
        got.cpu().numpy(), brute_force(queries, keys, "mean_prob"), rtol=1e-5, atol=1e-9
    )


def test_attention_mass_query_that_sees_nothing_gives_no_nan():
    got = attention_mass(
        torch.ones(2, 1, 4),
        torch.ones(1, 3, 4),
        query_positions=torch.tensor([0]),
        key_positions=torch.tensor([[1, 2, 3]]),
    )
    assert not got.isnan().any()


@pytest.mark.parametrize("gqa", ["mean_prob", "max_prob", "max_logit", "per_head"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_mass_of_some_heads_at_a_time_is_that_of_all(gqa, causal, monkeypatch):
    """What PyTorch scores in parts, so that few logits exist, is what it scores at once."""
    queries, keys = map(torch.tensor, draw(12, 6, 5, 9))
    places = torch.stack([torch.randperm(9) for _ in keys])
    where = (torch.arange(2, 7), places) if causal else (None, None)
    whole = TorchBackend().attention_mass(queries, keys, gqa, *where)
    for most in (1, 180):  # logits: of one head, of two
        monkeypatch.setattr(torch_backend, "BLOCK_LOGITS", most)
        parts = TorchBackend().attention_mass(queries, keys, gqa, *where)
        torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("gqa", ["mean_prob", "max_prob", "max_logit", "per_head"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_mass_of_some_queries_at_a_time_is_that_of_all(gqa, causal, monkeypatch):
    queries, keys = (torch.tensor(each, dtype=torch.float32) for each in draw(8, 2, 7, 13))
    where = (torch.arange(6, 13), torch.arange(13).expand(2, 13)) if causal else (None, None)
    whole = TorchBackend().attention_mass(queries, keys, gqa, *where)
    made = []
    products = torch_backend._products

    def spy(*asked):
        made.append(products(*asked))
        return made[-1]

    monkeypatch.setattr(torch_backend, "_products", spy)
    monkeypatch.setattr(torch_backend, "BLOCK_LOGITS", 3 * 4 * 13)  # of three queries of one group
    parts = TorchBackend().attention_mass(queries, keys, gqa, *where)
    assert [each.shape[1] for each in made] == 2 * [12, 12, 4]  # four heads a group
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-7)
