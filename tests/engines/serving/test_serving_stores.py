"""Rows of a session in different layouts: whatever the layout, the same rows are left."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentbench_kv.engines.core.rows import PagedStore, RowStore
from agentbench_kv.engines.vllm.plugin import blocks
from agentbench_kv.engines.vllm.plugin.blocks import (
    PackedStore,
    pack_tiles,
    paged_rows,
    paged_store,
    unpack_tiles,
)
from agentbench_kv.kernels.layout import PagedRows

LAYERS, HEADS, DIM, BLOCKS = 2, 3, 16, 9


def scene(live: int, keep: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random keys, values [layers, heads, live, dim] and kept rows [layers, heads, keep]."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, LAYERS, HEADS, live, DIM, generator=g)
    kept = torch.stack(
        [torch.randperm(live, generator=g)[:keep].sort().values for _ in range(LAYERS * HEADS)]
    ).reshape(LAYERS, HEADS, keep)
    return rows[0], rows[1], kept


def rows_by_position(keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Keys and values beside each other, in the order of their positions."""
    order = positions.argsort(-1)[..., None].expand(-1, -1, -1, 2 * keys.shape[-1])
    return torch.cat([keys, values], -1).gather(2, order)


def expected(keys: Tensor, values: Tensor, kept: Tensor) -> Tensor:
    index = kept[..., None].expand(-1, -1, -1, 2 * keys.shape[-1])
    return torch.cat([keys, values], -1).gather(2, index)


def blocks_of(keys: Tensor, values: Tensor, table: list[int], size: int) -> list[Tensor]:
    """vLLM's GPU layout: one [blocks, heads, size, 2 dim] per layer, garbage elsewhere."""
    caches = [torch.full((BLOCKS, HEADS, size, 2 * DIM), torch.nan) for _ in range(LAYERS)]
    for layer, cache in enumerate(caches):
        for row in range(keys.shape[2]):
            block = table[row // size]
            cache[block, :, row % size] = torch.cat([keys[layer], values[layer]], -1)[:, row]
    return caches


def store_of(caches: list[Tensor], table: list[int], live: int, isa: str) -> RowStore:
    if isa == "gpu":
        return paged_store(*paged_rows(caches), table, live)
    return PackedStore(caches, table, live, isa)


def read_all(store: RowStore) -> tuple[Tensor, Tensor]:
    """Keys and values of all layers."""
    layers = range(LAYERS)
    return torch.stack([store.keys(i) for i in layers]), torch.stack(
        [store.values(i) for i in layers]
    )


@settings(max_examples=30, deadline=None)
@given(data=st.data(), sort=st.booleans(), isa=st.sampled_from(["gpu", "vec", "amx"]))
def test_stores_keep_the_same_rows(data: st.DataObject, sort: bool, isa: str) -> None:
    size = 32
    live = data.draw(st.integers(1, 5 * size))
    keep = data.draw(st.integers(1, live))
    keys, values, kept = scene(live, keep, data.draw(st.integers(0, 999)))
    table = data.draw(st.permutations(range(BLOCKS)))[:5]
    caches = blocks_of(keys, values, table, size)
    if isa != "gpu":
        caches = [pack_tiles(c[..., :DIM], c[..., DIM:], isa) for c in caches]
    store = store_of(caches, table, live, isa)
    read = read_all(store)
    assert torch.equal(read[0], keys)
    assert torch.equal(read[1], values)

    positions = torch.arange(live).expand(LAYERS, HEADS, live).clone()
    extra = positions.float() * 2
    moved = store.keep(kept, positions, [extra], sort=sort)
    new_keys, new_values = read_all(store_of(caches, table, keep, isa))
    assert torch.equal(
        rows_by_position(new_keys, new_values, positions[..., :keep]),
        expected(keys, values, kept),
    )
    assert torch.equal(positions[..., :keep].sort(-1).values, kept)
    assert torch.equal(extra[..., :keep], positions[..., :keep] * 2.0)
    if sort:
        assert torch.equal(positions[..., :keep], kept)
    else:
        past_the_end = int((kept >= keep).sum())
        assert int(moved) == past_the_end


@pytest.mark.parametrize(("stay", "written"), [(64, 1), (63, 2), (40, 2), (31, 3), (0, 3)])
def test_blocks_whose_rows_all_stay_are_not_written(
    stay: int, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, keep = 120, 90
    keys, values, _ = scene(live, keep, 4)
    caches = blocks_of(keys, values, [2, 5, 1, 7], 32)
    caches = [pack_tiles(cache[..., :DIM], cache[..., DIM:], "vec") for cache in caches]
    kept = torch.cat([torch.arange(stay), torch.arange(live - keep + stay, live)])
    packed = []

    def packing(keys: Tensor, values: Tensor, isa: str) -> Tensor:
        packed.append(len(keys))
        return pack_tiles(keys, values, isa)

    monkeypatch.setattr(blocks, "pack_tiles", packing)
    positions = torch.arange(live).expand(LAYERS, HEADS, live).clone()
    everywhere = kept.expand(LAYERS, HEADS, keep)
    PackedStore(caches, [2, 5, 1, 7], live, "vec").keep(everywhere, positions, [], sort=True)
    assert packed == [written] * LAYERS
    read = PackedStore(caches, [2, 5, 1], keep, "vec").keys(1)
    assert torch.equal(read, keys[1][:, kept])


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_packing_undoes_unpacking(isa: str) -> None:
    cache = torch.randn(3, 2, 32, 2 * DIM, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack_tiles(*unpack_tiles(cache, isa), isa), cache)


def test_vec_tiles_hold_keys_transposed_then_values() -> None:
    keys = torch.arange(32.0 * DIM).reshape(1, 1, 32, DIM)
    packed = pack_tiles(keys, -keys, "vec").flatten()
    assert packed[:3].tolist() == [0.0, DIM, 2.0 * DIM]
    assert packed[32 * DIM :][:3].tolist() == [0.0, -1.0, -2.0]


def test_keys_turn_where_they_lie() -> None:
    live, size = 20, 4
    keys, values, _ = scene(live, live, 1)
    frequencies = 1.0 / 10 ** torch.arange(0, 1, 2 / DIM)
    shifts = torch.randint(-50, 50, (LAYERS, HEADS, live))
    pages = [torch.zeros(BLOCKS, HEADS, size, 2 * DIM) for _ in range(LAYERS)]
    table = [7, 1, 3, 0, 8]
    for layer, cache in enumerate(pages):
        for row in range(live):
            cache[table[row // size], :, row % size] = torch.cat([keys[layer], values[layer]], -1)[
                :, row
            ]
    wide = blocks_of(keys, values, [3, 1], 32)
    tiles = [pack_tiles(c[..., :DIM], c[..., DIM:], "vec") for c in wide]
    stores = (PackedStore(tiles, [3, 1], live, "vec"), paged_store(*paged_rows(pages), table, live))
    for store in stores:
        store.rotate(shifts, frequencies)
    angle = shifts[..., None].double() * frequencies.double()
    first, second = keys.double().chunk(2, -1)
    turned = torch.cat(
        [
            first * angle.cos() - second * angle.sin(),
            first * angle.sin() + second * angle.cos(),
        ],
        -1,
    )
    for store in stores:
        read = read_all(store)
        assert float((read[0] - turned).abs().max()) < 1e-5
        assert torch.equal(read[1], values)


def test_slots_of_one_row_are_pages_too() -> None:
    keys, values, kept = scene(12, 5, 3)
    slots = torch.randperm(40)[:12]
    k_buffer = [torch.zeros(40, HEADS, DIM) for _ in range(LAYERS)]
    v_buffer = [torch.zeros(40, HEADS, DIM) for _ in range(LAYERS)]
    for layer in range(LAYERS):
        k_buffer[layer][slots] = keys[layer].transpose(0, 1)
        v_buffer[layer][slots] = values[layer].transpose(0, 1)
    rows = [PagedRows.of([b[:, None] for b in side], "brhd") for side in (k_buffer, v_buffer)]
    store = PagedStore(rows[0], rows[1], slots.int(), 12)
    positions = torch.arange(12).expand(LAYERS, HEADS, 12).clone()
    store.keep(kept, positions, [], sort=False)
    left = read_all(PagedStore(rows[0], rows[1], slots.int(), 5))
    assert torch.equal(
        rows_by_position(left[0], left[1], positions[..., :5]), expected(keys, values, kept)
    )
