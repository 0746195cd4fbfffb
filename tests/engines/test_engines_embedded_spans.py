"""Blocks of the embedded engine: saved, evicted and restored, against plain arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agentbench_kv.engines.base import EngineOptions, Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.errors import CapacityError, KVBenchError, UsageError
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.spans import Block, Resident

SPAN = (100, 200)


class Logits(Observer):
    """Keeps the logits of every session by the position they predict."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], torch.Tensor] = {}

    def on_logits(self, session: str, logical: int, logits: torch.Tensor) -> None:
        self.seen[session, logical] = logits.clone()

    def difference(self, first: str, second: str, after: int = 0) -> float:
        """Largest difference of two sessions' logits that predict positions from `after` on."""
        both = [p for name, p in self.seen if name == second and p >= after]
        assert both
        gaps = [(self.seen[first, p] - self.seen[second, p]).abs().max() for p in both]
        return float(max(gaps))


@pytest.fixture
def resident(tiny_model: Any) -> Any:
    """Build engines that keep all rows; shut down afterwards."""
    made: list[EmbeddedEngine] = []

    def build(network: Any = None, recorder: Any = None, **options: Any):
        method = Resident(
            positions=options.pop("positions", "logical"), recent_queries=options.pop("queries", 0)
        )
        chosen = EngineOptions(model="tiny", method=method, device="cpu", **options)
        network = tiny_model("qwen3") if network is None else network
        engine = EmbeddedEngine.create(chosen, model=network, recorder=recorder)
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.shutdown()


def ids(seed: int, length: int) -> list[int]:
    return torch.randint(1, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def add(engine: EmbeddedEngine, name: str, tokens: list[int]) -> None:
    engine.extend(name, tokens, [Phase(token % 4) for token in tokens])


def ask(engine: EmbeddedEngine, name: str, tokens: list[int], count: int = 4) -> list[int]:
    add(engine, name, tokens)
    return list(engine.generate(name, Sampling(max_tokens=count)))


def rows(engine: EmbeddedEngine, name: str) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Keys and values [layers, heads, live, head_dim] as float64, and logical positions."""
    cache = engine._scheduler.get(name).cache
    live = slice(0, cache.length)
    keys, values = (t[:, :, live].double().numpy() for t in (cache.keys, cache.values))
    return keys.copy(), values.copy(), cache.positions[0, 0, live].tolist()


def turned(keys: np.ndarray, shifts: Any, frequencies: torch.Tensor) -> np.ndarray:
    """Rotate half-split pairs of keys [..., tokens, d] in float64."""
    angles = np.asarray(shifts, np.float64)[:, None] * frequencies.double().numpy()
    first, second = np.split(keys, 2, -1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def frequencies(engine: EmbeddedEngine) -> torch.Tensor:
    return engine._scheduler.get("a").frequencies


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_a_block_back_in_its_place_leaves_no_trace(
    family: str, resident: Any, tiny_model: Any
) -> None:
    seen = Logits()
    engine = resident(tiny_model(family), seen)
    prompt, more = ids(1, 400), ids(2, 40)
    for name in ("untouched", "restored", "evicted"):
        engine.open(name, _Modulo())
        ask(engine, name, prompt)
    block = engine.save_block("restored", *SPAN)
    assert engine.evict_spans("restored", [SPAN]) == 100
    engine.restore_block("restored", block)
    engine.evict_spans("evicted", [SPAN])
    for name in ("untouched", "restored", "evicted"):
        ask(engine, name, more, 12)
    assert seen.difference("untouched", "restored") == 0.0
    assert seen.difference("untouched", "evicted", after=404) > 0.1


def test_a_block_restored_in_other_cells_changes_rounding_only(resident: Any) -> None:
    seen = Logits()
    engine = resident(recorder=seen)
    prompt, more = ids(1, 230), ids(2, 40)
    for name in ("untouched", "restored"):
        engine.open(name, _Modulo())
        ask(engine, name, prompt)
    block = engine.save_block("restored", 50, 150)
    engine.evict_spans("restored", [(50, 220)])
    kept = engine.save_block("untouched", 150, 220)
    # The slot is now a larger one, and a longer session decodes beside this one.
    engine.restore_block("restored", Block(150, 220, kept.at, kept.data))
    engine.restore_block("restored", block)
    engine.open("company", _Modulo())
    ask(engine, "company", ids(3, 500))
    ask(engine, "untouched", more, 20)
    add(engine, "restored", more)
    add(engine, "company", more)
    both = [engine.generate(name, Sampling(max_tokens=20)) for name in ("restored", "company")]
    for generation in both:
        list(generation)
    assert seen.difference("untouched", "restored") <= 1e-5


def test_a_block_at_another_position_has_turned_keys_and_the_same_values(resident: Any) -> None:
    engine = resident()
    engine.open("a", _Modulo())
    ask(engine, "a", ids(1, 300))
    keys, values, _ = rows(engine, "a")
    block = engine.save_block("a", *SPAN)
    engine.evict_spans("a", [SPAN])
    engine.restore_block("a", block, at=1000)
    after, after_values, labels = rows(engine, "a")
    at = labels.index(100)
    expected = turned(keys[:, :, 100:200], [900] * 100, frequencies(engine))
    assert np.abs(after[:, :, at : at + 100] - expected).max() <= 1e-5
    assert (after_values[:, :, at : at + 100] == values[:, :, 100:200]).all()
    assert (np.delete(after, np.s_[at : at + 100], 2) == np.delete(keys, np.s_[100:200], 2)).all()
    ask(engine, "a", ids(2, 10))
    again = engine.save_block("a", 303, 310)
    assert again.at == 1100


def test_compact_positions_close_and_blocks_come_back_at_the_end(resident: Any) -> None:
    engine = resident(positions="cache")
    engine.open("a", _Modulo())
    ask(engine, "a", ids(1, 300))
    keys, _, _ = rows(engine, "a")
    block = engine.save_block("a", *SPAN)
    engine.evict_spans("a", [SPAN])
    after, _, labels = rows(engine, "a")
    assert labels == [*range(100), *range(200, 303)]
    moved = turned(keys[:, :, 200:], [-100] * 103, frequencies(engine))
    assert np.abs(after[:, :, 100:] - moved).max() <= 1e-5
    engine.restore_block("a", block)
    after, _, labels = rows(engine, "a")
    assert labels == [*range(100), *range(200, 303), *range(100, 200)]
    back = turned(keys[:, :, 100:200], [103] * 100, frequencies(engine))
    assert np.abs(after[:, :, 203:] - back).max() <= 1e-5
    engine.evict_spans("a", [SPAN])
    with pytest.raises(UsageError, match="come back at its end"):
        engine.restore_block("a", block, at=0)


def test_half_precision_blocks_come_back_bit_for_bit(resident: Any, tiny_model: Any) -> None:
    engine = resident(tiny_model("qwen3").bfloat16())
    engine.open("a", _Modulo())
    ask(engine, "a", ids(1, 300))
    keys, values, labels = rows(engine, "a")
    block = engine.save_block("a", *SPAN)
    engine.evict_spans("a", [(0, 90), SPAN])
    engine.restore_block("a", block)
    after, after_values, left = rows(engine, "a")
    assert left == labels[90:]
    assert (after == keys[:, :, 90:]).all()
    assert (after_values == values[:, :, 90:]).all()


def test_accounting_follows_the_blocks(resident: Any) -> None:
    engine = resident()
    engine.open("a", _Modulo())
    ask(engine, "a", ids(1, 300))
    block = engine.save_block("a", *SPAN)
    assert engine.evict_spans("a", [SPAN, (150, 210), (900, 950)]) == 110
    engine.restore_block("a", block)
    stats = engine.stats("a")
    assert (stats.logical, stats.live, stats.evicted, stats.restored) == (304, 293, 110, 100)
    assert stats.peak_live == 303
    event = stats.events[0]
    assert (event.live_before, event.live_after, event.logical) == (303, 193, 303)
    assert engine.evict_spans("a", [(900, 950)]) == 0
    assert len(engine.stats("a").events) == 1


def test_everything_may_leave_and_the_session_goes_on(resident: Any) -> None:
    engine = resident()
    engine.open("a", _Modulo())
    ask(engine, "a", ids(1, 300))
    assert engine.evict_spans("a", [(0, 303)]) == 303
    assert len(ask(engine, "a", ids(2, 5), 3)) == 3
    assert engine.stats("a").live == 1 + 5 + 2


@pytest.mark.parametrize("layers", [(), (1,), (-2, 1)])
def test_attention_of_spans_is_that_of_the_kept_queries(resident: Any, layers: Any) -> None:
    queries = _Queries()
    engine = resident(recorder=queries, queries=8)
    engine.open("a", _Modulo())
    ask(engine, "a", ids(1, 120), 12)
    engine.evict_spans("a", [(20, 50)])
    spans = [(0, 20), (50, 90), (90, 131)]
    found = engine.span_attention("a", spans, layers, 0.9)
    keys, _, labels = rows(engine, "a")
    expected = np.zeros(3)
    for layer in layers or (0, 1):
        expected += queries.mass(layer % 2, keys[layer], labels, spans, 8, 0.9)
    assert found == pytest.approx(expected / len(layers or (0, 1)), abs=1e-6)
    assert sum(found) == pytest.approx(1.0, abs=1e-6)


def test_embeddings_have_no_common_part(resident: Any, tiny_model: Any) -> None:
    network = tiny_model("qwen3")
    table = network.get_input_embeddings().weight.detach().double().numpy()
    engine = resident(network)
    expected = table[[5, 9]] - table.mean(0)
    assert np.abs(engine.embed_tokens([5, 9]) - expected).max() <= 1e-5


def test_what_cannot_be_done_is_refused(resident: Any, make_engine: Any) -> None:
    engine = resident()
    engine.open("a", _Modulo())
    ask(engine, "a", ids(1, 300))
    block = engine.save_block("a", *SPAN)
    with pytest.raises(UsageError, match="they are in the cache"):
        engine.restore_block("a", block)
    engine.evict_spans("a", [(150, 160)])
    with pytest.raises(UsageError, match="90 of 100 are in the cache"):
        engine.save_block("a", *SPAN)
    engine.evict_spans("a", [SPAN])
    with pytest.raises(UsageError, match="are taken"):
        engine.restore_block("a", block, at=250)
    with pytest.raises(UsageError, match="another model"):
        engine.restore_block("a", Block(100, 200, 100, block.data[:-8].copy()))
    with pytest.raises(UsageError, match="layer 7: the model has 2"):
        engine.span_attention("a", [SPAN], [7], 0.9)
    with pytest.raises(KeyError):
        engine.save_block("nobody", 0, 1)
    compressing = make_engine(None, "agentkv", 64)
    compressing.open("a", _Modulo())
    ask(compressing, "a", ids(1, 30))
    with pytest.raises(UsageError, match="keep whole tokens only"):
        compressing.evict_spans("a", [(0, 10)])


def test_a_generating_session_is_left_alone(resident: Any) -> None:
    engine = resident()
    engine.open("a", _Modulo())
    add(engine, "a", ids(1, 60))
    generation = engine.generate("a", Sampling(max_tokens=4000))
    stream = iter(generation)
    next(stream)
    with pytest.raises(KVBenchError, match="is generating"):
        engine.evict_spans("a", [(0, 10)])
    generation.cancel()
    list(stream)
    assert engine.evict_spans("a", [(0, 10)]) == 10


def test_a_block_without_room_stays_away(resident: Any) -> None:
    engine = resident(max_live_tokens=320)
    engine.open("a", _Modulo())
    ask(engine, "a", ids(1, 200))
    block = engine.save_block("a", *SPAN)
    engine.evict_spans("a", [SPAN])
    engine.open("b", _Modulo())
    ask(engine, "b", ids(1, 200))
    with pytest.raises(CapacityError, match="no room for 100 more"):
        engine.restore_block("a", block)
    engine.close("b")
    engine.restore_block("a", block)
    assert engine.stats("a").live == 203


class _Modulo:
    def label(self, token: int) -> Phase:
        return Phase(token % 4)


class _Queries(Observer):
    """Keeps every query, and computes what it attends to in float64."""

    def __init__(self) -> None:
        self.rows: dict[int, list[np.ndarray]] = {}

    def on_attention(self, layer: int, query: Any, key: Any, value: Any) -> None:  # noqa: ARG002
        self.rows.setdefault(layer, []).append(query.double().numpy().copy())

    def mass(
        self, layer: int, keys: np.ndarray, labels: Any, spans: Any, last: int, decay: float
    ) -> np.ndarray:
        """Return per span the weighted mean attention of the last queries of a layer."""
        queries = np.concatenate(self.rows[layer], 1)[:, -last:]
        positions = np.arange(np.concatenate(self.rows[layer], 1).shape[1])[-last:]
        total, weights = np.zeros(len(spans)), 0.0
        for number, position in enumerate(positions):
            weight = decay ** (last - 1 - number)
            weights += weight
            for head in range(queries.shape[0]):
                own = keys[head // (queries.shape[0] // keys.shape[0])]
                logits = own @ queries[head, number] / np.sqrt(own.shape[-1])
                logits = np.where(np.asarray(labels) > position, -np.inf, logits)
                probabilities = np.exp(logits - logits.max())
                probabilities /= probabilities.sum()
                for i, (start, end) in enumerate(spans):
                    inside = [start <= label < end for label in labels]
                    total[i] += weight * probabilities[inside].sum() / queries.shape[0]
        return total / weights
