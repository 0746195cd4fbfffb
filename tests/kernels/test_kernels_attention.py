"""attention against float64 numpy, on every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_reference import attention as reference
from kernels_reference import doubles

from agentbench_kv.kernels import RowsBefore, SeenRows, attention, use_backend

ATOL = {torch.float32: 2.0**-18, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Of a weighted mean, relative to the largest value: the output's rounding and the weights'."""

DTYPES = list(ATOL)
SHAPES = [  # sessions, KV heads, group, queries, rows, head_dim
    (1, 1, 1, 1, 1, 64),
    (3, 2, 7, 1, 513, 64),  # decodes of one, two and three vectors of rows
    (2, 1, 24, 1, 129, 128),
    (2, 1, 40, 1, 130, 16),
    (1, 2, 7, 150, 400, 64),  # prefills of several strips and blocks
    (1, 1, 3, 100, 333, 80),
    (1, 2, 1, 5, 5, 7),
    (2, 1, 5, 33, 134, 66),
    (1, 1, 8, 130, 260, 256),
    (2, 1, 9, 1, 145, 32),  # one and three steps of a tile, with keys and channels left over
    (1, 2, 3, 70, 290, 96),
    (2, 2, 8, 1, 300, 96),  # few rows, whose lanes are keys in bf16
    (3, 1, 2, 3, 140, 32),
    (1, 3, 1, 2, 31, 128),
]


def draw(shape, dtype, device, capacity=None, seed=0):
    """Return queries laid out as a model gives them, keys and values with room behind."""
    sessions, kv_heads, group, n, rows, dim = shape
    rng = np.random.default_rng(seed)
    queries = torch.from_numpy(rng.normal(size=(sessions, n, kv_heads * group, dim)))
    held = (sessions, kv_heads, capacity or rows, dim)
    keys, values = (torch.from_numpy(rng.normal(size=held)) for _ in range(2))
    queries, keys, values = (each.to(dtype).to(device) for each in (queries, keys, values))
    return queries.transpose(1, 2), keys, values


def lengths_of(shape, device="cpu"):
    sessions, _, _, n, rows, _ = shape
    lengths = [max(n, rows - 131 * session) for session in range(sessions)]
    return SeenRows(torch.tensor(lengths, device=device), rows, n)


def close(found, wanted, values):
    bound = ATOL[found.dtype] * np.nanmax(np.abs(doubles(values)))
    assert np.abs(doubles(found) - wanted).max() <= bound


def references(queries, keys, values, seen, scaling, sinks=None):
    own = None if sinks is None else doubles(sinks)
    each = [
        reference(
            *(doubles(queries[s]), doubles(keys[s, :, :rows]), doubles(values[s, :, :rows])),
            *(scaling, seen.window, own),
        )
        for s, rows in enumerate(seen.lengths.tolist())
    ]
    return np.stack(each)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_matches_numpy(shape, dtype, device):
    queries, keys, values = draw(shape, dtype, device, capacity=shape[4] + 9)
    seen = lengths_of(shape, device)
    found = attention(queries, keys, values, seen, 0.2)
    assert found.dtype == dtype
    close(found, references(queries, keys, values, seen, 0.2), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 50, 128, 1000])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("n", [2, 60])
def test_windows_and_sinks(window, beside, n, dtype, device):
    shape = (2, 2, 3, n, 300, 64)
    queries, keys, values = draw(shape, dtype, device)
    sinks = torch.linspace(-4, 6, 6, device=device) if beside else None
    seen = SeenRows(torch.tensor([300, 169], device=device), 300, n, window)
    found = attention(queries, keys, values, seen, 0.3, sinks)
    close(found, references(queries, keys, values, seen, 0.3, sinks), values)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape(data):
    n = data.draw(st.integers(1, 70) | st.integers(1, 3))
    rows = data.draw(st.integers(n, 300))
    shape = (1, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 9)), n, rows)
    shape = (*shape, data.draw(st.integers(1, 100) | st.sampled_from([32, 64, 96])))
    dtype, window = data.draw(st.sampled_from(DTYPES)), data.draw(st.none() | st.integers(1, 320))
    queries, keys, values = draw(shape, dtype, "cpu", seed=rows)
    seen = SeenRows(torch.tensor([rows]), rows, n, window)
    found = attention(queries, keys, values, seen, 0.25)
    close(found, references(queries, keys, values, seen, 0.25), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_any_size(dtype, device):
    """An exponential may overflow neither in a tile nor when the maximum moves between tiles."""
    queries, keys, values = draw((1, 1, 2, 1, 600, 32), dtype, device)
    keys[:, :, ::150] *= 300
    seen = SeenRows(torch.tensor([600], device=device), 600, 1)
    for scaling in (5.0, 1e-4):
        found = attention(queries, keys, values, seen, scaling)
        close(found, references(queries, keys, values, seen, scaling), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 4, 40])
def test_what_is_no_number_is_not_hidden(n, dtype, device):
    """Who sees a damaged key gets NaN, so that the engine ends that session; no other does."""
    queries, keys, values = draw((2, 1, 2, n, 200, 64), dtype, device)
    keys[1, 0, 180, 3] = torch.nan
    seen = SeenRows(torch.tensor([200, 200], device=device), 200, n)
    broken = attention(queries, keys, values, seen, 0.2).isnan()
    assert broken[1, -20:].all()
    assert not broken[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [16, 17, 31, 129])
def test_an_infinite_value_is_no_nan(rows, dtype, device):
    """Its weight is above 0; rows that fill up a tile have weights of 0."""
    queries, keys, values = draw((1, 1, 4, 1, rows, 32), dtype, device)
    values[0, 0, -1, 5] = torch.inf
    seen = SeenRows(torch.tensor([rows], device=device), rows, 1)
    assert (attention(queries, keys, values, seen, 0.2)[..., 5] == torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_queries_have_no_outputs(dtype, device):
    queries, keys, values = draw((2, 2, 7, 1, 40, 64), dtype, device)
    seen = SeenRows(torch.tensor([40, 40], device=device), 40, 0)
    assert attention(queries[:, :, :0], keys, values, seen, 0.2).shape == (2, 0, 14, 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_behind_a_session_are_not_read(dtype, backend, device):
    if backend != "cpu":
        pytest.skip("PyTorch multiplies them by 0: they have to be numbers")
    # Odd numbers: values are taken by pairs of rows.
    queries, keys, values = draw((2, 2, 4, 3, 200, 64), dtype, device, capacity=260)
    seen = SeenRows(torch.tensor([199, 71]), 199, 3)
    wanted = attention(queries, keys, values, seen, 0.2)
    for session, rows in enumerate((199, 71)):
        keys[session, :, rows:] = values[session, :, rows:] = torch.nan
    assert torch.equal(attention(queries, keys, values, seen, 0.2), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 90])
@pytest.mark.parametrize("window", [None, 100])
def test_a_session_depends_on_nobody_and_on_no_number_of_threads(n, window, dtype, backend):
    if backend != "cpu":
        pytest.skip("PyTorch's blocks may depend on the batch")
    shape = (5, 2, 7, n, 700, 64)
    queries, keys, values = draw(shape, dtype, "cpu")
    lengths = torch.tensor([700, 300, 551, 128, 699])
    seen = SeenRows(lengths, 700, n, window)
    together = attention(queries, keys, values, seen, 0.2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(attention(queries, keys, values, seen, 0.2), together)
    finally:
        torch.set_num_threads(before)
    for s, rows in enumerate(lengths.tolist()):
        alone = SeenRows(lengths[s : s + 1], rows, n, window)
        own = (each[s : s + 1] for each in (queries, keys, values))
        assert torch.equal(attention(*own, alone, 0.2)[0], together[s])


def test_dtypes_that_the_kernels_do_not_read_are_left_to_pytorch():
    queries, keys, values = draw((1, 1, 2, 4, 20, 8), torch.float64, "cpu")
    seen = SeenRows(torch.tensor([20]), 20, 4)
    use_backend("auto")
    found = attention(queries, keys, values, seen, 0.2)
    wanted = references(queries, keys, values, seen, 0.2)
    assert np.abs(doubles(found) - wanted).max() < 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (3, 2, 7, 1, 513, 64),
        (3, 1, 2, 3, 150, 32),
        (3, 2, 3, 40, 333, 66),
        (3, 1, 5, 33, 400, 7),
        (3, 1, 5, 33, 400, 64),
    ],
)
def test_rows_that_lie_elsewhere_change_no_bit(shape, beside, dtype, device):
    """Each session has other rows before its own, one has none; the numbers are as if together."""
    sessions, kv_heads, group, _, rows, _ = shape
    queries, keys, values = draw(shape, dtype, device, capacity=rows + 9)
    seen = lengths_of(shape, device)
    sinks = torch.linspace(-2, 3, kv_heads * group, device=device) if beside else None
    wanted = attention(queries, keys, values, seen, 0.2, sinks)
    first = [0, 1, 129]  # rows of each session that lie elsewhere
    own_keys, own_values = torch.full_like(keys, 7.0), torch.full_like(values, 7.0)
    before = []
    for s, count in enumerate(first):
        own_keys[s, :, : rows + 9 - count] = keys[s, :, count:]
        own_values[s, :, : rows + 9 - count] = values[s, :, count:]
        room = torch.full((2, kv_heads, count + 5, shape[5]), 9.0, dtype=dtype, device=device)
        room[0, :, :count], room[1, :, :count] = keys[s, :, :count], values[s, :, :count]
        before.append(RowsBefore(*room[:, :, :count]) if count else None)
    assert sessions == len(before)
    found = attention(queries, own_keys, own_values, seen, 0.2, sinks, before)
    assert torch.equal(found, wanted)
    close(found, references(queries, keys, values, seen, 0.2, sinks), values)


def test_rows_before_lie_one_behind_the_other():
    rows = torch.zeros(2, 8, 4)
    for keys, values in (
        (rows[:, ::2], rows[:, ::2]),
        (rows, rows[..., :2]),
        (rows[:1], rows[:1].mT),
    ):
        with pytest.raises(ValueError, match="one behind the other"):
            RowsBefore(keys, values)
