"""compact on paged caches: engines' layouts as bytes, checked row by row and outside the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels_layouts import KEYS, LAYOUTS, VALUES, Size, bits, make_cache, make_table, places

from agentbench_kv.kernels import paged
from agentbench_kv.kernels.layout import PagedRows


class Work:
    """A cache, its positions and scores, sessions in it, and what each keeps."""

    def __init__(self, layout, size, lengths, counts, seed=0):
        self.size, self.lengths, self.counts = size, lengths, counts
        rng = np.random.default_rng(seed)
        self.cache = make_cache(layout, size, rng)
        self.table = make_table(rng, lengths, size)
        rows = size.layers * size.heads * size.blocks * size.block
        shape = (size.layers, size.heads, size.blocks, size.block)
        # A position names its row, wherever it moves.
        self.positions = torch.from_numpy(rng.permutation(rows).reshape(shape)).to(size.device)
        extra = rng.normal(size=(size.layers, size.blocks, size.block, size.heads))
        self.extra = torch.from_numpy(extra.astype(np.float32)).to(size.device)
        self.kept = np.full((len(lengths), size.layers, size.heads, max(counts)), -9)
        for session, layer, head in np.ndindex(*self.kept.shape[:3]):
            chosen = rng.permutation(lengths[session])[: counts[session]]
            self.kept[session, layer, head, : counts[session]] = np.sort(chosen)

    def storages(self):
        return [*self.cache.storage, self.positions, self.extra]

    def run(self, sort=False, **options):
        device = self.size.device
        counts = torch.tensor(self.counts, device=device)
        same = len(set(self.counts)) == 1
        return paged.compact(
            [
                self.cache.keys,
                self.cache.values,
                PagedRows.of(self.positions, "lhbr"),
                PagedRows.of(self.extra, "lbrh"),
            ],
            torch.from_numpy(self.table).to(device),
            torch.from_numpy(self.kept).to(device),
            torch.tensor(self.lengths, device=device),
            sort=sort,
            counts=None if same else counts,
            **options,
        )

    def each(self):
        """Every session, layer and head, and its kept rows."""
        for session, layer, head in np.ndindex(*self.kept.shape[:3]):
            yield session, layer, head, self.kept[session, layer, head, : self.counts[session]]

    def moves(self, after, session, layer, head, kept, sort):
        """(source, target) rows of one place; those of filled holes are read off the positions."""
        rows = np.arange(len(kept))
        if sort:
            return [(source, target) for target, source in enumerate(kept) if source != target]
        before = self.positions_of(self.before[-2], session, layer, head, kept)
        now = self.positions_of(after, session, layer, head, rows)
        source = dict(zip(before, kept, strict=True))
        assert sorted(before) == sorted(now)
        return [(source[at], target) for target, at in enumerate(now) if source[at] != target]

    def positions_of(self, positions, session, layer, head, rows):
        block, row = places(self.table, session, rows, self.size)
        return positions[layer, head, block, row].tolist()

    def check(self, sort=False, **options):
        """Compact, then compare every bit of every tensor with the moves made one by one."""
        self.before = [bits(each) for each in self.storages()]
        moved = self.run(sort, **options)
        after = [bits(each) for each in self.storages()]
        expected = [each.clone() for each in self.before]
        made = 0
        for session, layer, head, kept in self.each():
            moves = self.moves(after[-2], session, layer, head, kept, sort)
            if not sort:
                # Only rows past the new end move, all of them, into rows nobody keeps.
                assert sorted(a for a, _ in moves) == [k for k in kept if k >= len(kept)]
                assert not {b for _, b in moves} & set(kept.tolist())
            made += len(moves)
            self.replay(expected, session, layer, head, moves)
        assert int(moved) == made
        for want, got in zip(expected, after, strict=True):
            assert torch.equal(want, got)
        return after

    def replay(self, expected, session, layer, head, moves):
        source = places(self.table, session, [a for a, _ in moves], self.size)
        target = places(self.table, session, [b for _, b in moves], self.size)
        place = (layer, head)
        for which in (KEYS, VALUES):
            rows = self.cache.read(self.before[:-2], which, *place, *source)
            self.cache.write(expected[:-2], which, *place, *target, rows)
        expected[-2][layer, head][target] = self.before[-2][layer, head][source]
        expected[-1][layer, :, :, head][target] = self.before[-1][layer, :, :, head][source]


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize(("block", "dim"), [(1, 80), (16, 64), (32, 128)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compact_paged_moves_rows_of_every_layout(layout, block, dim, sort, device):
    size = Size(blocks=160 // block + 6, block=block, dim=dim, dtype=torch.float16, device=device)
    Work(layout, size, lengths=[37, 1, 64, 50], counts=[20, 1, 64, 11]).check(sort)


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int8,
        torch.uint8,
    ],
)
def test_compact_paged_copies_bytes_of_every_dtype(dtype, sort, device):
    size = Size(blocks=4, block=128, dim=32, dtype=dtype, device=device)
    Work("vllm", size, lengths=[130, 200], counts=[60, 60]).check(sort)


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("dim", [1, 3, 256])
def test_compact_paged_rows_of_odd_and_of_many_bytes(dim, sort, device):
    size = Size(layers=3, heads=3, blocks=8, dim=dim, dtype=torch.uint8, device=device)
    Work("stacked", size, lengths=[33, 40], counts=[1, 39]).check(sort)


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("counts", [[0, 9], [0, 0], [48, 3]])
def test_compact_paged_sessions_that_keep_nothing_or_all(counts, sort, device):
    Work("split", Size(device=device), lengths=[48, 17], counts=counts).check(sort)


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), layout=st.sampled_from(sorted(LAYOUTS)), sort=st.booleans())
def test_compact_paged_any_sizes(data, layout, sort, device):
    size = Size(
        layers=data.draw(st.integers(1, 3)),
        heads=data.draw(st.integers(1, 3)),
        blocks=30,
        block=data.draw(st.integers(1, 5)),
        dim=data.draw(st.integers(2, 5)),
        device=device,
    )
    lengths = data.draw(st.lists(st.integers(1, 10 * size.block), min_size=1, max_size=3))
    counts = [data.draw(st.integers(0, length)) for length in lengths]
    if any(counts):
        Work(layout, size, lengths, counts, seed=data.draw(st.integers(0, 99))).check(sort)


@pytest.mark.parametrize("sort", [False, True])
def test_compact_paged_is_deterministic(sort, device):
    size = Size(layers=4, heads=4, blocks=40, dtype=torch.bfloat16, device=device)
    first, second = (
        Work("vllm", size, [300, 290], [100, 100], seed=3).check(sort) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("sort", [False, True])
def test_compact_paged_event_after_event(sort, device):
    """Lengths shrink, and each event starts from what the last one left."""
    work = Work("sglang", Size(block=1, blocks=90, device=device), [60, 25], [40, 20])
    work.check(sort)
    for counts in ([21, 20], [7, 1]):
        work.lengths, work.counts = work.counts, counts
        for session, layer, head in np.ndindex(*work.kept.shape[:3]):
            seed = (session, layer, head, counts[session])
            chosen = np.random.default_rng(seed).permutation(work.lengths[session])
            kept = np.sort(chosen[: counts[session]])
            work.kept[session, layer, head] = -9
            work.kept[session, layer, head, : len(kept)] = kept
        work.check(sort)


def test_compact_paged_reads_a_table_that_is_a_view_or_wider(device):
    work = Work("vllm", Size(device=device), [37, 20], [12, 12])
    table = torch.from_numpy(work.table).to(device)
    wide = torch.full((2, 2 * table.shape[1]), -1, dtype=torch.int64, device=device)
    wide[:, ::2] = table
    expected = [bits(each) for each in work.storages()]
    rows = [work.cache.keys, work.cache.values]
    kept = torch.from_numpy(work.kept).to(device)
    lengths = torch.tensor(work.lengths, device=device, dtype=torch.int32)
    moved = paged.compact(rows, wide[:, ::2], kept.to(torch.int32), lengths)
    again = Work("vllm", Size(device=device), [37, 20], [12, 12])
    again.check()
    got = [bits(each) for each in work.cache.storage]
    assert int(moved) > 0
    assert all(torch.equal(a, bits(b)) for a, b in zip(got, again.cache.storage, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(got, expected[:-2], strict=True))


def test_compact_paged_refuses_a_shared_block_and_names_it(device):
    work = Work("vllm", Size(device=device), [37, 20], [12, 12])
    work.table[1, 0] = work.table[0, 2]
    before = [bits(each) for each in work.storages()]
    with pytest.raises(ValueError, match=f"block {work.table[0, 2]} is used more than once"):
        work.run()
    assert all(torch.equal(a, bits(b)) for a, b in zip(before, work.storages(), strict=True))


def test_compact_paged_refuses_a_block_twice_in_one_session(device):
    work = Work("split", Size(device=device), [37], [12])
    work.table[0, 1] = work.table[0, 0]
    with pytest.raises(ValueError, match=f"block {work.table[0, 0]} is used more than once"):
        work.run()


def test_compact_paged_refuses_more_rows_than_blocks(device):
    work = Work("vllm", Size(device=device), [37, 20], [12, 12])
    work.table = work.table[:, :2]
    with pytest.raises(ValueError, match="more rows than 2 blocks of 16"):
        work.run()


def test_compact_paged_blocks_not_in_use_may_repeat(device):
    """Engines pad tables with whatever block they like."""
    work = Work("vllm", Size(device=device), [37, 20], [12, 12])
    work.table[:, -1] = work.table[0, 0]
    work.check()


def test_compact_paged_without_the_check_does_the_same(device):
    Work("vllm", Size(device=device), [37, 20], [12, 12]).check(check=False)


@pytest.mark.parametrize("sort", [False, True])
def test_compact_of_strided_contiguous_caches_of_every_dtype(sort, device):
    """`ops.compact` through the same comparison: a session of one block as long as the cache."""
    from agentbench_kv.kernels import compact

    for dtype in (torch.float16, torch.float8_e4m3fn, torch.uint8):
        size = Size(layers=3, blocks=1, block=50, dim=5, dtype=dtype, device=device)
        work = Work("stacked", size, [41], [17])
        work.table[:] = 0
        work.run = lambda sort, work=work: compact(
            *(half[:, 0] for half in work.cache.storage[0]),
            work.positions[:, :, 0],
            torch.from_numpy(work.kept[0]).to(device),
            41,
            extras=[work.extra[:, 0].transpose(1, 2)],
            sort=sort,
        )
        work.check(sort)


def uneven_layers(dim):
    """Caches of three layers in one storage, whose steps differ from layer to layer."""
    storage = torch.zeros(9, 4, 2, 3, dim)
    return [storage[at] for at in (0, 2, 7)]


def test_offsets_of_layers_are_copied_when_a_cache_is_described_not_in_a_step(monkeypatch):
    """A graph that is being captured may not copy from the host, and a step may not wait for it."""
    rows = PagedRows.of(uneven_layers(dim=8), "brhd")
    step = 4 * 2 * 3 * 8 * 4
    assert "layer_offsets" in vars(rows)
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("copied in a step"))
    for _ in range(2):
        assert rows.layer_offsets.tolist() == [0, 2 * step, 7 * step]
        assert rows.in_bytes[:2] == (rows.layers[0].data_ptr(), rows.layer_offsets.data_ptr())


def test_layers_at_even_steps_need_no_offsets():
    rows = PagedRows.of(uneven_layers(dim=8)[:2], "brhd")
    assert (rows.layer_offsets, rows.in_bytes[1]) == (None, None)
    assert rows.layer_step == 2 * 4 * 2 * 3 * 8 * 4
