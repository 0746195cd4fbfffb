"""attention_mass on paged caches, and on sizes beyond one tile, against float64 numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels_layouts import KEYS, LAYOUTS, Size, make_cache, make_table, places
from kernels_reference import MASS_ATOL, MASS_RTOL, doubles
from kernels_reference import attention_mass as reference

from agentbench_kv.kernels import attention_mass, paged
from agentbench_kv.kernels.layout import PagedRows

GQA = ["mean_prob", "max_prob", "max_logit", "per_head"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def close(got, expected, rtol=MASS_RTOL):
    assert got.dtype == torch.float32
    assert tuple(got.shape) == expected.shape
    np.testing.assert_allclose(got.cpu().numpy(), expected, rtol=rtol, atol=MASS_ATOL)


def normal(rng, shape, dtype, device):
    return torch.from_numpy(rng.normal(size=shape)).to(dtype).to(device)


class Sessions:
    """Keys, positions and queries of some sessions, with NaN wherever no session has a row."""

    def __init__(self, layout, size, lengths, group=2, n=5, query_dtype=None, seed=0):
        rng = np.random.default_rng(seed)
        self.size, self.lengths = size, lengths
        self.cache = make_cache(layout, size, rng)
        for each in self.cache.storage:
            each.fill_(torch.nan)
        self.table = make_table(rng, lengths, size)
        shape = (size.layers, size.heads, size.blocks, size.block)
        self.positions = torch.full(shape, -1, device=size.device)
        dtype = query_dtype or size.dtype
        queries = (len(lengths), size.layers, size.heads * group, n, size.dim)
        self.queries = normal(rng, queries, dtype, size.device) * 2
        self.query_positions = rng.integers(0, max(lengths) + 2, (len(lengths), n))
        self.keys = {}
        for session, layer, head in np.ndindex(len(lengths), size.layers, size.heads):
            self.fill(rng, session, layer, head)

    def fill(self, rng, session, layer, head):
        length = self.lengths[session]
        keys = normal(rng, (length, self.size.dim), self.size.dtype, self.size.device)
        at = rng.permutation(length + 2)[:length]
        where = places(self.table, session, range(length), self.size)
        self.cache.write(self.cache.storage, KEYS, layer, head, *where, keys)
        self.positions[layer, head][where] = torch.from_numpy(at).to(self.size.device)
        self.keys[session, layer, head] = doubles(keys), at

    def run(self, gqa, causal=False, valid=None, **options):
        device = self.size.device
        placed = {
            "query_positions": torch.from_numpy(self.query_positions).to(device),
            "key_positions": PagedRows.of(self.positions, "lhbr"),
        }
        return paged.attention_mass(
            self.queries,
            self.cache.keys,
            torch.from_numpy(self.table).to(device),
            torch.tensor(self.lengths, device=device),
            longest=max(self.lengths),
            gqa=gqa,
            valid=None if valid is None else torch.from_numpy(valid).to(device),
            **(placed if causal else {}),
            **options,
        )

    def expected(self, gqa, causal=False, valid=None):
        queries = doubles(self.queries)
        sessions, layers, q_heads, _, _ = queries.shape
        group = q_heads // self.size.heads
        shape = (sessions, layers, self.size.heads, group, max(self.lengths))
        out = np.zeros(shape if gqa == "per_head" else (*shape[:3], shape[-1]))
        for (session, layer, head), (keys, at) in self.keys.items():
            mass = reference(
                queries[session, layer, head * group : (head + 1) * group],
                keys[None],
                gqa,
                self.query_positions[session] if causal else None,
                at[None] if causal else None,
                None if valid is None else valid[session],
            )
            out[session, layer, head, ..., : len(keys)] = mass[0]
        return out

    def check(self, gqa, causal=False, valid=None, rtol=MASS_RTOL):
        close(self.run(gqa, causal, valid), self.expected(gqa, causal, valid), rtol)


@pytest.mark.parametrize("gqa", GQA)
@pytest.mark.parametrize(("block", "dim"), [(1, 80), (16, 64), (32, 128)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mass_paged_of_every_layout(layout, block, dim, gqa, device):
    size = Size(blocks=160 // block + 6, block=block, dim=dim, dtype=torch.bfloat16, device=device)
    Sessions(layout, size, [37, 1, 64, 50]).check(gqa, causal=True)


@pytest.mark.parametrize("gqa", GQA)
@pytest.mark.parametrize("query_dtype", DTYPES)
@pytest.mark.parametrize("key_dtype", DTYPES)
def test_mass_paged_of_all_pairs_of_dtypes(key_dtype, query_dtype, gqa, device):
    size = Size(blocks=6, block=128, dim=80, dtype=key_dtype, device=device)
    work = Sessions("vllm", size, [130, 70], query_dtype=query_dtype)
    work.check(gqa)
    work.check(gqa, causal=True)


@pytest.mark.parametrize("gqa", GQA)
@pytest.mark.parametrize("group", [1, 2, 4, 5, 8])
def test_mass_paged_of_groups_whose_rows_fill_strips_unevenly(group, gqa, device):
    """1, 33 and 65 queries: a vector, a strip, a tile, and one more."""
    for n in (1, 33, 65):
        size = Size(layers=1, heads=2, dim=32, dtype=torch.float32, device=device)
        Sessions("split", size, [70, 33], group=group, n=n).check(gqa, causal=n > 1)


@pytest.mark.parametrize("gqa", GQA)
@pytest.mark.parametrize("causal", [False, True])
def test_mass_paged_counts_only_valid_queries(causal, gqa, device):
    valid = np.random.default_rng(5).random((4, 9)) < 0.5
    valid[1], valid[2], valid[3] = False, True, [True] + [False] * 8
    size = Size(blocks=14, device=device)
    work = Sessions("vllm", size, [37, 20, 64, 5], n=9)
    # What an empty slot of a ring holds must not matter.
    work.queries[:, :, :, :] = torch.where(
        torch.from_numpy(valid).to(device)[:, None, None, :, None], work.queries, torch.nan
    )
    got = work.run(gqa, causal, valid)
    close(got, work.expected(gqa, causal, valid))
    assert not got[1].any()


@pytest.mark.parametrize("gqa", GQA)
def test_mass_paged_is_zero_past_a_length(gqa, device):
    work = Sessions("sglang", Size(block=1, blocks=60, device=device), [3, 50, 1])
    got = work.run(gqa)
    for session, length in enumerate(work.lengths):
        assert not got[session, ..., length:].any()
        assert got[session, ..., :length].all()


@pytest.mark.parametrize("gqa", GQA)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 63, 65, 191, 193, 384, 1025, 3001])
def test_mass_of_keys_that_fit_no_tile(tokens, dtype, gqa, device):
    rng = np.random.default_rng(tokens)
    queries = normal(rng, (4, 7, 64), dtype, device)
    keys = normal(rng, (2, tokens, 64), dtype, device)
    close(attention_mass(queries, keys, gqa=gqa), reference(doubles(queries), doubles(keys), gqa))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 31, 32, 33, 64, 80, 128, 256])
def test_mass_of_every_head_dim(dim, dtype, device):
    rng = np.random.default_rng(dim)
    queries = normal(rng, (6, 9, dim), dtype, device)
    keys = normal(rng, (3, 100, dim), dtype, device)
    for gqa in GQA:
        expected = reference(doubles(queries), doubles(keys), gqa)
        close(attention_mass(queries, keys, gqa=gqa), expected)


@pytest.mark.parametrize("gqa", GQA)
@pytest.mark.parametrize("tokens", [193, 700, 2100])
def test_mass_when_whole_tiles_are_hidden(tokens, gqa, device):
    """Old queries see nothing of late tiles, or of early ones if keys lie in reverse."""
    rng = np.random.default_rng(tokens)
    queries = normal(rng, (4, 40, 32), torch.float32, device)
    keys = normal(rng, (2, tokens, 32), torch.float32, device)
    at = np.stack([np.arange(tokens), np.arange(tokens)[::-1]])
    query_at = rng.integers(0, tokens, 40)
    query_at[:3] = [0, -1, tokens]
    got = attention_mass(
        queries,
        keys,
        gqa=gqa,
        query_positions=torch.from_numpy(query_at).to(device),
        key_positions=torch.from_numpy(at.copy()).to(device),
    )
    close(got, reference(doubles(queries), doubles(keys), gqa, query_at, at))


@pytest.mark.parametrize("gqa", GQA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mass_of_huge_logits(dtype, gqa, device):
    """Logits of 1e4, where only the largest count; a float32 holds them to 1e-3, no better."""
    rng = np.random.default_rng(0)
    queries = normal(rng, (4, 6, 64), dtype, device) * 100
    keys = normal(rng, (2, 500, 64), dtype, device) * 100
    got = attention_mass(queries, keys, gqa=gqa).double().cpu().numpy()
    expected = reference(doubles(queries), doubles(keys), gqa)
    assert np.abs(doubles(queries) @ doubles(keys).repeat(2, 0).swapaxes(1, 2)).max() / 8 > 1e4
    np.testing.assert_allclose(got, expected, rtol=2e-2, atol=1e-9)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    data=st.data(),
    layout=st.sampled_from(sorted(LAYOUTS)),
    gqa=st.sampled_from(GQA),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_mass_paged_any_sizes(data, layout, gqa, causal, seed, device):
    size = Size(
        layers=data.draw(st.integers(1, 2)),
        heads=data.draw(st.integers(1, 3)),
        blocks=30,
        block=data.draw(st.integers(1, 5)),
        dim=data.draw(st.integers(2, 9)),
        dtype=data.draw(st.sampled_from(DTYPES)),
        device=device,
    )
    lengths = data.draw(st.lists(st.integers(0, 10 * size.block), min_size=1, max_size=3))
    if not any(lengths):
        return
    n = data.draw(st.integers(0, 6))
    work = Sessions(layout, size, lengths, data.draw(st.integers(1, 3)), n, seed=seed)
    valid = None
    if data.draw(st.booleans()):
        valid = np.random.default_rng(seed).random((len(lengths), n)) < 0.6
    work.check(gqa, causal, valid)


def test_mass_takes_strided_queries_keys_and_positions(device):
    rng = np.random.default_rng(1)
    queries = normal(rng, (5, 8, 32), torch.float32, device).transpose(0, 1)
    keys = normal(rng, (60, 2, 65), torch.bfloat16, device).transpose(0, 1)[:, 7:, 1:33]
    at = torch.arange(106, device=device)[::2].expand(2, -1)
    query_at = torch.arange(0, 200, 20, device=device)[::2]
    got = attention_mass(queries, keys, query_positions=query_at, key_positions=at)
    where = query_at.cpu().numpy(), at.cpu().numpy()
    close(got, reference(doubles(queries), doubles(keys), "mean_prob", *where))


def test_mass_paged_reads_tables_and_lengths_of_other_integers(device):
    work = Sessions("vllm", Size(device=device), [37, 20])
    expected = work.run("mean_prob")
    table = torch.from_numpy(work.table).to(device)
    wide = torch.full((2, 2 * table.shape[1]), -1, dtype=torch.int64, device=device)
    wide[:, ::2] = table
    got = paged.attention_mass(
        work.queries,
        work.cache.keys,
        wide[:, ::2],
        torch.tensor([37, 0, 20], dtype=torch.int32, device=device)[::2],
        longest=37,
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("gqa", GQA)
def test_mass_of_no_keys_and_of_no_queries(gqa, device):
    none = attention_mass(torch.ones(4, 3, 8, device=device), torch.ones(2, 0, 8, device=device))
    assert none.shape == (2, 0)
    work = Sessions("vllm", Size(device=device), [0, 20], n=0)
    assert not work.run(gqa).any()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rows_of_8_bits_are_scored_as_what_they_stand_for(dtype, device):
    rng = np.random.default_rng(0)
    layers = [normal(rng, (6, 4, 2, 16), dtype, device) for _ in range(2)]
    queries = normal(rng, (1, 2, 4, 3, 16), torch.float32, device)
    table = torch.tensor([[4, 0, 5, 2]], dtype=torch.int32, device=device)
    lengths = torch.tensor([15], device=device)
    got, expected = (
        paged.attention_mass(queries, PagedRows.of(each, "brhd"), table, lengths, longest=15)
        for each in (layers, [layer.float() for layer in layers])
    )
    assert float(expected.std()) > 0
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)
