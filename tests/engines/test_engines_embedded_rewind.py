"""Rewound sessions of the embedded engine against sessions that never had what they forgot."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.conformance.driver import TraceRecorder, in_memory_engine, pool_of, settled
from agentbench_kv.conformance.families import WINDOW, build_family
from agentbench_kv.conformance.reference import tiny_model as peaked_model
from agentbench_kv.engines.base import Capability, EngineOptions, Sampling
from agentbench_kv.engines.core.block_engine import BlockEngine
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.spans import Resident
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method

FULL = make_method("full", None, {})
RNG = random.Random(17)


def ids(count: int) -> list[int]:
    return [RNG.randrange(1, 64) for _ in range(count)]


def extend(engine: Any, name: str, tokens: list[int]) -> None:
    engine.extend(name, tokens, [Phase(token % 4) for token in tokens])


def decode(engine: Any, name: str, prompt: list[int], answer: int) -> list[int]:
    extend(engine, name, prompt)
    return list(engine.generate(name, Sampling(answer)))


def rows(engine: Any, name: str) -> tuple[list[int], torch.Tensor]:
    """Logical positions [live] of a session's rows, and their keys and values."""
    cache = engine._scheduler.get(name).cache
    live = slice(0, cache.length)
    if not cache.length:
        return [], torch.zeros(0)
    both = torch.stack([cache.keys[:, :, live], cache.values[:, :, live]])
    return cache.positions[0, 0, live].tolist(), both


@dataclass
class Log:
    """What a session is by the contract: its tokens, and what was evicted when so many were fed."""

    tokens: list[int] = field(default_factory=list)
    fed: int = 0
    evicted: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    prefilled: int = 0
    decoded: int = 0
    drawn: int = 0  # 1 if the token behind those that were fed was generated

    def copy(self) -> Log:
        """Return the log of a fork, whose account starts anew."""
        twin = Log(self.tokens.copy(), self.fed, self.evicted.copy())
        twin.drawn = self.drawn
        return twin

    def rewind(self, length: int) -> None:
        del self.tokens[length:]
        self.drawn *= length > self.fed
        self.fed = min(self.fed, length)
        self.evicted = [
            (min(at, length), (start, min(end, length)))
            for at, (start, end) in self.evicted
            if start < length
        ]

    @property
    def held(self) -> list[int]:
        gone = {position for _, span in self.evicted for position in range(*span)}
        return [position for position in range(self.fed) if position not in gone]

    def answered(self, answer: list[int]) -> None:
        self.prefilled += len(self.tokens) - self.fed - self.drawn
        self.decoded += len(answer)
        self.tokens += answer
        self.fed, self.drawn = len(self.tokens) - 1, 1

    def replay(self, engine: Any, name: str) -> None:
        """Open a session that comes to the same in one go, all but its next generation."""
        engine.open(name, TokenPhases())
        done = 0
        for at in sorted({at for at, _ in self.evicted if at}):
            if at >= len(self.tokens):
                raise AssertionError("nothing to go on with")
            extend(engine, name, self.tokens[done:at])
            list(engine.force(name, [self.tokens[at]]))
            engine.evict_spans(name, [span for when, span in self.evicted if when == at])
            done = at + 1
        if done < len(self.tokens):
            extend(engine, name, self.tokens[done:])


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Any, Any]]:
    network = peaked_model(layers=2)
    both = tuple(in_memory_engine(network, FULL, TraceRecorder()) for _ in range(2))
    yield both
    for engine in both:
        engine.shutdown()


STEPS = st.tuples(
    st.sampled_from("xgggeffrrrrc"),
    st.integers(0, 5),
    st.integers(1, 25),
    st.floats(0, 1),
)


@settings(max_examples=110, deadline=None, derandomize=True)
@given(steps=st.lists(STEPS, min_size=3, max_size=16))
def test_any_history_is_that_of_a_fresh_session(
    engines: tuple[Any, Any], steps: list[tuple[str, int, int, float]]
) -> None:
    subject, before = engines[0], pool_of(engines[0])
    logs = {"0": Log()}
    try:
        subject.open("0", TokenPhases())
        for number, step in enumerate(steps):
            _step(*engines, logs, step, str(number + 1))
            for name, log in logs.items():
                _check_lengths(subject, name, log)
        for name, log in logs.items():
            _generate(*engines, name, log, 2, 6)
            stats = subject.stats(name)
            assert (stats.prefill_tokens, stats.decode_tokens) == (log.prefilled, log.decoded)
    finally:
        for name in logs:
            subject.close(name)
    assert settled(subject, before or {}) == before


def _step(subject: Any, plain: Any, logs: dict[str, Log], step: Any, new: str) -> None:
    what, which, size, share = step
    name = sorted(logs)[which % len(logs)]
    log = logs[name]
    if what == "x":  # pending, perhaps rewound before it is fed
        log.tokens += (added := ids(size))
        extend(subject, name, added)
    elif what == "g":
        _generate(subject, plain, name, log, size, 1 + size // 4)
    elif what == "e":
        start = int(share * log.fed)
        subject.evict_spans(name, [(start, start + size)])
        end = min(start + size, log.fed)
        log.evicted += [(log.fed, (start, end))] if start < end else []
    elif what == "f" and len(logs) < 5:
        subject.fork(name, new, TokenPhases())
        logs[new] = log.copy()
    elif what == "r":
        length = round(share * len(log.tokens))
        subject.rewind(name, length)
        log.rewind(length)
    elif what == "c" and len(logs) > 1:
        subject.close(name)
        del logs[name]


def _generate(subject: Any, plain: Any, name: str, log: Log, fed: int, count: int) -> None:
    """Generate in a session and in a fresh one that got there directly; compare rows and answer."""
    log.tokens += (added := ids(fed))
    extend(subject, name, added)
    log.replay(plain, "replayed")
    try:
        expected = list(plain.generate("replayed", Sampling(count)))
        found = list(subject.generate(name, Sampling(count)))
        assert found == expected
        (labels, own), (wanted, direct) = rows(subject, name), rows(plain, "replayed")
        assert labels == wanted
        torch.testing.assert_close(own, direct, rtol=1e-3, atol=1e-4)
    finally:
        plain.close("replayed")
    log.answered(found)


def _check_lengths(engine: Any, name: str, log: Log) -> None:
    stats = engine.stats(name)
    assert (stats.logical, stats.live) == (len(log.tokens), len(log.held))
    assert rows(engine, name)[0] == log.held
    assert stats.recomputed == 0


def test_a_rewind_forgets_and_counts_nothing(make_engine: Any) -> None:
    engine = make_engine()
    assert Capability.REWIND in engine.info.capabilities
    engine.open("s", TokenPhases())
    decode(engine, "s", ids(90), 11)
    before = engine.stats("s")
    engine.rewind("s", 101)
    assert engine.stats("s") == before
    engine.rewind("s", 40)
    after = engine.stats("s")
    assert (after.logical, after.live) == (40, 40)
    for figure in ("peak_live", "prefill_tokens", "decode_tokens", "decode_kv_sum", "bytes_read"):
        assert getattr(after, figure) == getattr(before, figure)
    assert (after.evicted, after.events) == (0, [])
    engine.rewind("s", 0)
    assert (engine.stats("s").logical, engine.stats("s").live) == (0, 0)
    with pytest.raises(KVBenchError, match="no tokens to start from"):
        engine.generate("s", Sampling(1))
    assert len(decode(engine, "s", ids(5), 3)) == 3


def test_memory_follows_a_rewind_unless_a_fork_needs_it(make_engine: Any) -> None:
    engine = make_engine()
    for name in ("alone", "shared"):
        engine.open(name, TokenPhases())
        decode(engine, name, ids(1500), 2)
    large = engine.allocated_bytes("alone")
    engine.fork("shared", "fork", TokenPhases())
    held = rows(engine, "fork")[1].clone()
    for name in ("alone", "shared"):
        engine.rewind(name, 100)
    assert engine.allocated_bytes("alone") * 4 <= large
    assert engine._scheduler.get("shared").cache.slot == engine._scheduler.get("fork").cache.slot
    decode(engine, "shared", ids(30), 5)
    assert torch.equal(rows(engine, "fork")[1], held)
    assert engine._scheduler.get("shared").cache.others == []


def test_whoever_went_back_leaves_the_rows_behind_to_a_fork(make_engine: Any) -> None:
    engine = make_engine()
    engine.open("s", TokenPhases())
    decode(engine, "s", ids(90), 11)
    engine.fork("s", "fork", TokenPhases())
    decode(engine, "s", ids(20), 11)
    engine.rewind("s", 50)
    caches = [engine._scheduler.get(name).cache for name in ("s", "fork")]
    decode(engine, "fork", ids(20), 11)  # nobody's rows lie there any more: nothing is copied
    assert caches[0].slot == caches[1].slot
    assert [cache.length for cache in caches] == [50, 131]


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss"])
def test_a_window_goes_back_while_nothing_of_it_is_lost(family: str) -> None:
    network = build_family(family)
    engine = in_memory_engine(network, FULL, TraceRecorder())
    engine.open("s", TokenPhases())
    prompt = ids(WINDOW - 8)
    decode(engine, "s", prompt, 8)
    engine.fork("s", "fork", TokenPhases())
    after = ids(2 * WINDOW)
    engine.rewind("s", 20)
    found = decode(engine, "s", after, 20)
    engine.open("fresh", TokenPhases())
    assert found == decode(engine, "fresh", prompt[:20] + after, 20)
    said = decode(engine, "fork", after, 20)
    engine.open("long", TokenPhases())
    first = decode(engine, "long", prompt, 8)
    assert said == decode(engine, "long", after, 20)
    assert len(first) == 8
    before = engine.stats("s")
    with pytest.raises(UsageError, match=f"outgrown its model's windows of {WINDOW} tokens"):
        engine.rewind("s", before.logical - 5)
    extend(engine, "s", [1, 2, 3])
    engine.rewind("s", before.logical + 1)  # nothing of that was fed
    assert engine.stats("s").logical == before.logical + 1
    engine.shutdown()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("length", [30, 12])
def test_a_block_that_came_back_elsewhere_stays_there(family: str, length: int) -> None:
    """And the session goes on behind it, whichever was fed last."""
    network = peaked_model() if family == "qwen3" else build_family(family)
    engine = in_memory_engine(network, Resident(), TraceRecorder())
    prompt, after = ids(40), ids(9)
    for name, fed in (("rewound", 40), ("direct", length)):
        engine.open(name, TokenPhases())
        extend(engine, name, prompt[:fed])
        list(engine.force(name, [7]))
        block = engine.save_block(name, 5, 10)
        engine.evict_spans(name, [(5, 10)])
        engine.restore_block(name, block, at=fed)
        if name == "rewound":
            decode(engine, name, ids(3), 4)
        engine.rewind(name, length)
    found = [engine._scheduler.get(name) for name in ("rewound", "direct")]
    assert [each._next for each in found] == [45, length + 5]
    assert [rows(engine, each.name)[0] for each in found] == [
        [*range(5), *range(10, length), *range(5, 10)]
    ] * 2
    assert found[0].rope[5:10] == [*range(40, 45)]
    if found[0].window is not None:
        # A window's rows lie right before what comes next, wherever that is.
        with torch.inference_mode():
            found[1]._turn_window(40 - length)
        turned = [each.window.keys[:, :, :length] for each in found]
        torch.testing.assert_close(*turned, rtol=1e-4, atol=1e-4)
    for each in found:
        decode(engine, each.name, after, 5)
        assert each.cache.length == length + len(after) + 4
    engine.shutdown()


@pytest.mark.parametrize(
    ("method", "budget"),
    [("agentkv", 48), ("h2o", 64), ("streamingllm", 40), ("streamingllm@paper", 40)],
)
def test_methods_that_keep_more_than_rows_are_refused(
    method: str, budget: int, make_engine: Any
) -> None:
    engine = make_engine(None, method, budget, {"interval": "16"})
    engine.open("s", TokenPhases())
    decode(engine, "s", ids(90), 5)
    with pytest.raises(UsageError, match=f"cannot be rewound under {method.split('@')[0]}"):
        engine.rewind("s", 10)
    assert len(decode(engine, "s", ids(9), 5)) == 5


@pytest.mark.parametrize("settings", [{"recent_queries": 8}, {"positions": "cache"}])
def test_a_resident_cache_with_more_than_rows_is_refused(
    settings: dict[str, Any], tiny_model: Any
) -> None:
    options = EngineOptions("tiny", Resident(**settings), device="cpu")
    engine = EmbeddedEngine.create(options, model=tiny_model("qwen3"))
    engine.open("s", TokenPhases())
    with pytest.raises(UsageError, match="cannot be rewound under"):
        engine.rewind("s", 0)
    engine.shutdown()


def test_what_cannot_be_rewound_is_refused_and_nothing_changes(make_engine: Any) -> None:
    engine = make_engine()
    engine.open("s", TokenPhases())
    decode(engine, "s", ids(20), 4)
    before = engine.stats("s")
    for length in (-1, 25):
        with pytest.raises(UsageError, match=f"24 tokens and cannot be rewound to {length}"):
            engine.rewind("s", length)
    with pytest.raises(KeyError):
        engine.rewind("nobody", 0)
    extend(engine, "s", [5])
    generation = engine.generate("s", Sampling(400))
    tokens = iter(generation)
    next(tokens)
    with pytest.raises(KVBenchError, match="is generating"):
        engine.rewind("s", 3)
    generation.cancel()
    list(tokens)
    assert engine.stats("s").logical > before.logical
    engine._scheduler.get("s").broken = ValueError("odd")
    with pytest.raises(KVBenchError, match="broke earlier: odd"):
        engine.rewind("s", 3)


def test_a_span_level_method_does_not_go_back() -> None:
    method = make_method("evoke", 400, {})
    below = in_memory_engine(peaked_model(), method.below(), TraceRecorder())  # type: ignore[attr-defined]
    engine = BlockEngine(below, method)  # type: ignore[arg-type]
    assert Capability.REWIND not in engine.info.capabilities
    with pytest.raises(UsageError, match="has no rewind"):
        engine.rewind("s", 0)
    engine.shutdown()
