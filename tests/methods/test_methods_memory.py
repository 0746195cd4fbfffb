"""MemArt's index and choice against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.conformance.methods import method_suite
from agentbench_kv.engines.core import memory
from agentbench_kv.engines.core.memory import SessionMemory
from agentbench_kv.kernels import aabb, aabb_score, rope_rotate
from agentbench_kv.methods.full import Full
from agentbench_kv.methods.memory.bank import MemoryBank
from agentbench_kv.methods.memory.memart import MemArt
from agentbench_kv.methods.memory.plain import PlainMemory
from agentbench_kv.registry import make_method

LAYERS, HEADS, WIDTH = 3, 2, 8


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    shape = (LAYERS, HEADS, count, WIDTH)
    return torch.randn(shape, generator=source), torch.randn(shape, generator=source).half()


def filled(sizes: list[int], block: int) -> MemoryBank:
    bank = MemoryBank(block)
    for number, size in enumerate(sizes):
        bank.append(*rows(size, number))
    return bank


def test_no_key_beats_its_box() -> None:
    """A million pairs of query and block: the score is the definition's, and bounds every key."""
    source = np.random.default_rng(0)
    keys = source.normal(size=(1, 1000 * 16, 16)).astype(np.float32)
    queries = source.normal(size=(1, 1000, 16)).astype(np.float32)
    lows, highs = aabb(torch.from_numpy(keys), 16)
    scores = aabb_score(torch.from_numpy(queries), lows, highs)[0].numpy()
    assert scores.size == 1_000_000
    blocks = keys[0].reshape(1000, 16, 16).astype(np.float64)
    low, high = blocks.min(1), blocks.max(1)
    for query, found in zip(queries[0].astype(np.float64), scores, strict=True):
        defined = np.maximum(query * high, query * low).sum(-1)
        np.testing.assert_allclose(found, defined, rtol=1e-5, atol=1e-5)
        assert (found >= (blocks @ query).max(1) - 1e-4).all()


@given(
    st.lists(st.integers(0, 13), min_size=1, max_size=8).filter(any),
    st.integers(1, 9),
    st.integers(0, 255),
    st.integers(0, 11),
)
@settings(max_examples=200)
def test_appended_turn_by_turn_is_as_at_once(
    turns: list[int], block: int, looks: int, others: int
) -> None:
    """Behind another session, and whoever looks between: what they saw stays as it was."""
    keys, values = rows(sum(turns), 50)
    at_once, by_turns = (filled([others, 0][: 1 + (others > 0)], block) for _ in range(2))
    mark, start, seen = object(), 0, []
    at_once.append(keys, values, object())
    for number, count in enumerate(turns):
        if looks >> number & 1 and by_turns.rows:
            index = by_turns.index()
            parts = (index.lows, index.highs, index.starts, index.sizes)
            seen.append((parts, [part.clone() for part in parts]))
        end = start + count
        found = by_turns.append(keys[:, :, start:end], values[:, :, start:end], mark, start)
        if count:
            own = by_turns.starts[found.start], by_turns.starts[found.stop - 1]
            first = others + start
            assert own[0] <= first < own[0] + block
            assert own[1] <= first + count - 1 < own[1] + block
        start = end
    for wanted, got in zip(
        vars(at_once.index()).values(), vars(by_turns.index()).values(), strict=True
    ):
        assert torch.equal(wanted, got)
    every = torch.arange(at_once.rows)
    for layer in range(LAYERS):
        for wanted, got in zip(
            at_once.gather(layer, every), by_turns.gather(layer, every), strict=True
        ):
            assert torch.equal(wanted, got)
    for parts, copies in seen:
        assert all(torch.equal(part, copy) for part, copy in zip(parts, copies, strict=True))


def test_what_is_another_session_s_begins_a_block() -> None:
    bank, mine, other = MemoryBank(8), object(), object()
    keys, values = rows(9, 1)
    part = (keys[:, :, :3], values[:, :, :3])
    for session, start in (
        (mine, 0),
        (mine, 3),
        (other, 6),
        (mine, 6),
        (mine, 12),
        (None, 0),
        (None, 3),
    ):
        bank.append(*part, session, start)
    assert bank.sizes.tolist() == [6, 3, 3, 3, 3, 3]
    left = bank.index().without({0, 4, 99})
    assert left.starts.tolist() == [6, 9, 12, 18]
    assert torch.equal(left.lows, bank.lows[:, :, [1, 2, 3, 5]])


def test_keys_turn_back_and_forth() -> None:
    keys, _ = rows(64, 0)
    there, frequencies = torch.arange(64) * 997, 10000.0 ** -torch.linspace(0, 1, WIDTH // 2)
    turned = keys.clone()
    rope_rotate(turned, -there, frequencies)
    rope_rotate(turned, there, frequencies)
    torch.testing.assert_close(turned, keys, rtol=1e-5, atol=1e-5)


@given(
    st.lists(st.integers(0, 21), min_size=1, max_size=6).filter(any),
    st.integers(1, 9),
    st.integers(1, 8),
    st.integers(0, 99),
)
@settings(max_examples=200)
def test_choice_by_brute_force(sizes: list[int], block: int, topk: int, seed: int) -> None:
    bank = filled(sizes, block)
    method = MemArt(topk=topk, block=block)
    # Few values, so that blocks tie.
    scores = torch.randint(0, 4, (bank.blocks,), generator=torch.Generator().manual_seed(seed))
    count = method.rows_of(bank)
    assert count == min(topk * block, sum(sizes))
    blocks: list[list[int]] = []
    first = 0
    for size in sizes:
        blocks += [
            list(range(first, first + size))[at : at + block] for at in range(0, size, block)
        ]
        first += size
    wanted: list[int] = []
    for number in sorted(range(len(blocks)), key=lambda n: (-int(scores[n]), n)):
        wanted += blocks[number][: count - len(wanted)]
    assert method.choose(scores.float(), bank.index(), count).tolist() == sorted(wanted)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any), st.integers(1, 9))
@settings(max_examples=100)
def test_a_bank_is_its_sessions_in_order(sizes: list[int], block: int) -> None:
    bank = filled(sizes, block)
    parts = [rows(size, number) for number, size in enumerate(sizes)]
    whole = torch.cat([keys for keys, _ in parts], 2)
    values = torch.cat([values for _, values in parts], 2)
    assert bank.rows == whole.shape[2]
    assert bank.nbytes == whole.nbytes + values.nbytes
    some = torch.randperm(bank.rows, generator=torch.Generator().manual_seed(block))[:9].sort()[0]
    for layer in range(LAYERS):
        for chosen in (torch.arange(bank.rows), some):
            found = bank.gather(layer, chosen)
            assert torch.equal(found[0], whole[layer][:, chosen])
            assert torch.equal(found[1], values[layer][:, chosen])
    for number, (start, size) in enumerate(zip(bank.starts, bank.sizes, strict=True)):
        own = whole[:, :, start : start + size]
        torch.testing.assert_close(bank.lows[:, :, number], own.amin(2))
        torch.testing.assert_close(bank.highs[:, :, number], own.amax(2))
    assert bank.index_nbytes == 2 * LAYERS * HEADS * WIDTH * 4 * bank.blocks


@given(st.lists(st.integers(80, 400), min_size=1, max_size=40))
@settings(max_examples=100)
def test_the_index_is_at_most_an_eighth_of_the_bank(sizes: list[int]) -> None:
    """At the paper's 16 tokens a block, with what is held for blocks to come, in real bytes."""
    bank = MemoryBank(16)
    for number, size in enumerate(sizes):
        keys, values = rows(size, number)
        bank.append(keys, values.bfloat16())
    assert bank.nbytes == sum(sizes) * LAYERS * HEADS * WIDTH * (4 + 2)
    assert bank.index_nbytes == bank.lows.nbytes + bank.highs.nbytes
    held = sum(each.untyped_storage().nbytes() for each in (bank.lows, bank.highs))
    assert bank.index_nbytes <= held <= bank.nbytes / 8


def test_settings_of_the_paper() -> None:
    names = ("topk", "normalise", "aggregate", "block")
    for label, wanted in {
        "memart": (128, "softmax", "max", 16),
        "memart@qwen": (256, "rr", "max", 16),
    }.items():
        found = make_method(label, None, {}).settings()
        assert tuple(found[name] for name in names) == wanted


@pytest.mark.parametrize(
    ("label", "topk"),
    [("mem0", 100), ("mem0@llama", 100), ("mem0@qwen", 150),
     ("graphiti", 20), ("graphiti@llama", 20), ("graphiti@qwen", 25)],
)  # fmt: skip
def test_presets_of_plain_memories(label: str, topk: int) -> None:
    """MemArt's baselines: as many texts as the paper put before each model."""
    found = make_method(label, None, {}).settings()
    assert found == make_method(label.partition("@")[0], None, {"topk": str(topk)}).settings()
    assert found["topk"] == topk


@pytest.mark.parametrize("name", ["mem0", "graphiti"])
def test_what_a_package_says_first_may_be_read_once(name: str) -> None:
    plain, shared = make_method(name, None), make_method(name, None, {"prefix": "shared"})
    assert isinstance(shared, PlainMemory)
    assert shared.below() == Full(prefix="shared")
    assert (shared.needs, shared.asks_for_system) == ({"share_prefix"}, True)
    assert shared.settings() == {**plain.settings(), "prefix": "shared"}
    assert "prefix" not in plain.settings()


def test_one_set_is_a_setting_of_new_runs_only() -> None:
    assert "sets" not in make_method("memart", None, {}).settings()
    assert make_method("memart", None, {"sets": "shared"}).settings()["sets"] == "shared"


@pytest.mark.parametrize("aggregate", ["max", "sum"])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_mean_over_layers(aggregate: str, parts: int) -> None:
    """Of layers and of parts of a prompt, against numpy over all tokens at once."""
    bank, source = filled([30, 17], 4), torch.Generator().manual_seed(parts)
    queries = torch.randn((LAYERS, 2 * HEADS, 3 * parts, WIDTH), generator=source)
    method = MemArt(block=4, sets="shared", aggregate=aggregate)
    found = [
        [method.relevance(part, bank.lows[layer], bank.highs[layer]) for part in own.split(3, 1)]
        for layer, own in enumerate(queries)
    ]
    lows, highs = (each.double().numpy().repeat(2, 1) for each in (bank.lows, bank.highs))
    asked = queries.double().numpy()[:, :, :, None]
    scores = np.maximum(asked * lows[:, :, None], asked * highs[:, :, None]).sum(-1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares = (shares / shares.sum(-1, keepdims=True)).mean(1)
    whole = shares.max(1) if aggregate == "max" else shares.sum(1)
    np.testing.assert_allclose(method.mean_relevance(found), whole.mean(0), rtol=1e-5)


@pytest.mark.parametrize("sets", ["layer", "shared"])
@pytest.mark.parametrize("lost", ["splice", "turn"])
def test_the_suite_misses_no_broken_memory(
    lost: str, sets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memart = make_method("memart", None, {"sets": sets})
    whole = method_suite(memart)
    assert all(result.ok for results in whole.values() for result in results), whole
    if lost == "splice":
        monkeypatch.setattr(SessionMemory, "front", lambda *_: (torch.zeros(1), torch.zeros(1)))
    else:
        monkeypatch.setattr(memory, "rope_rotate", lambda *_, **__: None)
    broken = method_suite(memart)
    assert not all(result.ok for results in broken.values() for result in results)
