"""A span-level method over an engine: generations in pieces, notes, text, cancelling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentbench_kv.engines.base import EngineOptions, FinishReason, Sampling
from agentbench_kv.engines.core.block_engine import BlockEngine
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.errors import ContextLimitError, UsageError
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.spans import Hints, Source, TurnNotes
from agentbench_kv.registry import make_method

Build = Callable[..., BlockEngine]
PROMPT = [1 + number % 90 for number in range(150)]


@pytest.fixture
def build(tiny_model: Any) -> Iterator[Build]:
    made: list[BlockEngine] = []

    def engine(budget: int, **settings: Any) -> BlockEngine:
        plain = {"block": 16, "encoder": "hash", **settings}
        method = make_method("evoke", budget, {key: str(value) for key, value in plain.items()})
        options = EngineOptions(model="tiny", method=method.below(), device="cpu")
        below = EmbeddedEngine.create(options, model=tiny_model("qwen3"))
        made.append(BlockEngine(below, method))
        return made[-1]

    yield engine
    for each in made:
        each.shutdown()


class Modulo:
    def label(self, token: int) -> Phase:
        return Phase(token % 4)


def start(engine: BlockEngine, tokens: list[int] = PROMPT) -> None:
    engine.open("s", Modulo())
    add(engine, tokens)


def add(engine: BlockEngine, tokens: list[int], **hints: Any) -> None:
    engine.note("s", tokens, TurnNotes([(len(tokens), Source.USER)], Hints(**hints)))
    engine.extend("s", tokens, [Phase(token % 4) for token in tokens])


def test_without_pressure_nothing_differs(build: Build, make_engine: Any) -> None:
    engine, plain = build(4000), make_engine()
    start(engine)
    plain.open("s", Modulo())
    plain.extend("s", PROMPT, [Phase(token % 4) for token in PROMPT])
    for seed in (0, 1):
        sampling = Sampling(max_tokens=30, temperature=0.8, seed=seed)
        assert list(engine.generate("s", sampling)) == list(plain.generate("s", sampling))
    stats, expected = engine.stats("s"), plain.stats("s")
    assert (stats.live, stats.bytes_read) == (expected.live, expected.bytes_read)
    assert (stats.budget, stats.evicted) == (4000, 0)


def test_a_long_answer_comes_in_pieces_and_is_one_answer(build: Build) -> None:
    engine = build(100)
    start(engine, PROMPT[:40])
    generation = engine.generate("s", Sampling(max_tokens=300, temperature=1.0, seed=3))
    tokens = list(generation)
    assert len(tokens) == 300
    assert generation.finish_reason is FinishReason.LENGTH
    assert 0 < generation.first_token_s < generation.last_token_s
    stats = engine.stats("s")
    assert stats.decode_tokens == 300
    assert stats.peak_live <= 95
    assert len(stats.events) > 5
    # Every decoded token but the first, which the prefill gave, read the whole cache.
    assert stats.bytes_read == (stats.decode_kv_sum - 40) * engine.below.bytes_per_token
    # No piece repeats the draws of another.
    assert len({tuple(tokens[i : i + 8]) for i in range(0, 296, 8)}) > 30


def test_a_stop_ends_it_in_any_piece(build: Build) -> None:
    engine = build(100)
    start(engine, PROMPT[:40])
    seen: list[int] = []

    def stop(token: int) -> bool:
        seen.append(token)
        return len(seen) == 77

    generation = engine.generate("s", Sampling(max_tokens=300, stop=stop))
    assert len(list(generation)) == 77
    assert generation.finish_reason is FinishReason.STOP


def test_cancelling_leaves_an_exact_session(build: Build) -> None:
    engine = build(100)
    start(engine, PROMPT[:40])
    generation = engine.generate("s", Sampling(max_tokens=4000))
    stream = iter(generation)
    got = [next(stream) for _ in range(90)]
    generation.cancel()
    got += list(stream)
    assert generation.finish_reason is FinishReason.CANCELLED
    stats = engine.stats("s")
    assert stats.logical == 40 + len(got)
    assert stats.live <= 100
    add(engine, PROMPT[:10])
    assert len(list(engine.generate("s", Sampling(max_tokens=5)))) == 5


def test_a_prompt_above_the_context_changes_nothing(build: Build) -> None:
    engine = build(100)
    start(engine, PROMPT[:40])
    list(engine.generate("s", Sampling(max_tokens=4)))
    with pytest.raises(ContextLimitError):
        add(engine, [1] * 5000)
    add(engine, PROMPT[:10])
    list(engine.generate("s", Sampling(max_tokens=4)))
    assert engine.stats("s").logical == 58


def test_what_is_refused_was_never_added(build: Build) -> None:
    engine = build(100)
    start(engine, PROMPT[:20])
    with pytest.raises(UsageError, match="pin less"):
        add(engine, PROMPT[:60], pinned=True)
    list(engine.generate("s", Sampling(max_tokens=4)))
    assert engine.stats("s").logical == 24


def test_a_closed_session_leaves_nothing_behind(build: Build) -> None:
    engine = build(100)
    start(engine)
    list(engine.generate("s", Sampling(max_tokens=60)))
    store = engine._sessions.store
    assert store.nbytes > 0
    final = engine.close("s")
    assert (final.budget, final.figures["held"]) == (100, final.figures["away"])
    assert store.nbytes == 0
    with pytest.raises(KeyError):
        engine.stats("s")


def test_text_comes_from_the_gateway_only(build: Build) -> None:
    engine = build(100)
    with pytest.raises(UsageError, match="needs a gateway"):
        engine.text([1, 2])
    engine.decode_with(lambda tokens: " ".join(map(str, tokens)))
    assert engine.text([1, 2]) == "1 2"


def test_tokens_without_notes_are_a_document(build: Build) -> None:
    engine = build(100)
    engine.open("s", Modulo())
    engine.extend("s", PROMPT[:20], [Phase.OTHERS] * 20)
    sources = {span.source for span in engine._managed["s"].spans}
    assert sources == {Source.DOCUMENT}
