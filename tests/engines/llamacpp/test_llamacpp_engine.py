"""The llamacpp engine on the micro model, against the embedded one."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentbench_kv.engines.base import (
    Capability,
    Engine,
    EngineOptions,
    FinishReason,
    KVStats,
    Sampling,
)
from agentbench_kv.engines.core.block_engine import BlockEngine
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.llamacpp.engine import LlamaCppEngine
from agentbench_kv.errors import CapacityError, ContextLimitError, KVBenchError, UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.spans import Resident, Source, SpanMethod, TurnNotes
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RESIDENT = Resident(recent_queries=16)
RESIDENT_PLAIN = Resident()
PACKED = Resident(recent_queries=16, positions="cache")


@pytest.fixture(scope="module")
def engines(llamacpp_python: Path) -> Iterator[Callable[..., Engine]]:  # noqa: ARG001
    made: dict[Any, Engine] = {}

    def build(kind: type[Any], method: Method, **options: Any) -> Engine:
        key = (kind, method, *options.items())
        if key not in made:
            chosen = EngineOptions(model="micro", method=method, **{"concurrency": 4, **options})
            made[key] = kind.create(chosen)
        return made[key]

    yield build
    for engine in made.values():
        engine.shutdown()


def words(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 600) for _ in range(count)]


def turn(engine: Engine, name: str, prompt: list[int], tokens: int, **sampling: Any) -> list[int]:
    labels = TokenPhases()
    engine.extend(name, prompt, [labels.label(token) for token in prompt])
    return list(engine.generate(name, Sampling(max_tokens=tokens, **sampling)))


def played(engine: Engine, name: str, seed: int = 0) -> tuple[list[int], KVStats]:
    """Three turns of a session, with what it cost."""
    engine.open(name, TokenPhases())
    said = turn(engine, name, words(300, seed), 120)
    said += turn(engine, name, words(60, seed + 100), 120, temperature=0.8, top_p=0.9, seed=7)
    said += turn(engine, name, words(20, seed + 200), 60)
    return said, engine.close(name)


@pytest.mark.parametrize(
    ("method", "budget"),
    [("full", None), ("agentkv", 128), ("h2o", 128), ("rkv", 128), ("streamingllm@paper", 128)],
)
def test_tokens_events_and_accounting_are_the_embedded_engines(
    method: str, budget: int | None, engines: Callable[..., Engine]
) -> None:
    chosen = make_method(method, budget)
    ours = played(engines(LlamaCppEngine, chosen, max_live_tokens=4096), method)
    theirs = played(engines(EmbeddedEngine, chosen), method)
    assert ours[0] == theirs[0]
    for name in vars(theirs[1]):
        if name not in ("events", "rows_moved"):
            assert getattr(ours[1], name) == getattr(theirs[1], name), name
    events = [
        [(e.decoded, e.logical, e.live_before, e.live_after) for e in stats.events]
        for _, stats in (ours, theirs)
    ]
    assert events[0] == events[1]
    assert len(events[0]) == (0 if budget is None else 2)


def test_eight_sessions_in_a_cache_for_four_share_it_and_mix_nothing(
    engines: Callable[..., Engine],
) -> None:
    """A session holds up to 560 tokens; every prompt is its own."""
    full = make_method("full", None)
    engine = engines(LlamaCppEngine, full, max_live_tokens=2304)
    assert isinstance(engine, LlamaCppEngine)
    found: dict[int, tuple[list[int], KVStats]] = {}

    def play(seed: int) -> None:
        found[seed] = played(engine, f"s{seed}", seed)

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = engines(EmbeddedEngine, full)
    for seed in range(8):
        assert found[seed] == played(alone, f"s{seed}", seed)
    assert len({tuple(said) for said, _ in found.values()}) == 8
    pool = engine.pool()
    assert pool["parkings"] > 0
    assert pool["sessions"] == 0
    assert pool["free_blocks"] == pool["total_blocks"]


def test_a_prefill_that_is_cancelled_brings_no_token_and_the_session_goes_on(
    engines: Callable[..., Engine],
) -> None:
    method = make_method("full", None)
    engine, alone = (
        engines(LlamaCppEngine, method, max_live_tokens=4096),
        engines(EmbeddedEngine, method),
    )
    for each in (engine, alone):
        each.open("c", TokenPhases())
        turn(each, "c", words(30, 4), 5)
    prompt = words(2400, 5)
    engine.extend("c", prompt, [TokenPhases().label(token) for token in prompt])
    generation = engine.generate("c", Sampling(max_tokens=20))
    generation.cancel()
    assert list(generation) == []
    assert generation.finish_reason is FinishReason.CANCELLED
    said = list(engine.generate("c", Sampling(max_tokens=20)))
    assert said == turn(alone, "c", prompt, 20)
    ours, theirs = engine.close("c"), alone.close("c")
    assert (ours.live, ours.logical, ours.recomputed) == (theirs.live, theirs.logical, 0)


def test_a_killed_backend_is_started_again_and_nothing_is_lost(
    engines: Callable[..., Engine],
) -> None:
    method = make_method("full", None)
    engine = engines(LlamaCppEngine, method, max_live_tokens=4096)
    assert isinstance(engine, LlamaCppEngine)
    prompt = words(200, 3)
    alone = engines(EmbeddedEngine, method)
    alone.open("k", TokenPhases())
    wanted = turn(alone, "k", prompt, 200)
    before = engine.restarts
    engine.open("k", TokenPhases())
    engine.extend("k", prompt, [TokenPhases().label(token) for token in prompt])
    said = []
    for token in engine.generate("k", Sampling(max_tokens=200)):
        said.append(token)
        if len(said) == 5 and engine.backend_pid is not None:
            os.kill(engine.backend_pid, signal.SIGKILL)
    assert said == wanted
    assert engine.restarts == before + 1
    assert engine.close("k").recomputed >= 200
    alone.close("k")


@pytest.mark.parametrize("method", [RESIDENT, PACKED])
def test_spans_leave_and_come_back_as_in_the_embedded_engine(
    method: Method, engines: Callable[..., Engine]
) -> None:
    """Packed positions close the gap that a span leaves; otherwise it stays open."""
    ours = engines(LlamaCppEngine, method, max_live_tokens=4096)
    theirs = engines(EmbeddedEngine, method)
    found = []
    for engine in (ours, theirs):
        engine.open("b", TokenPhases())
        said = [turn(engine, "b", words(300, 1), 20)]
        attention = engine.span_attention("b", [(0, 100), (100, 300)], [-1], 0.95)
        block = engine.save_block("b", 100, 150)
        removed = engine.evict_spans("b", [(100, 150), (200, 220)])
        said.append(turn(engine, "b", words(30, 2), 20))
        engine.restore_block("b", block)
        said.append(turn(engine, "b", words(10, 3), 20))
        found.append((said, removed, block.at, attention, engine.close("b")))
    (said, removed, at, attention, stats), wanted = found
    assert (said, removed, at) == wanted[:3]
    assert attention == pytest.approx(wanted[3], abs=1e-5)
    for name in ("live", "peak_live", "evicted", "restored", "logical", "prefill_tokens"):
        assert getattr(stats, name) == getattr(wanted[4], name), name


def test_a_block_whose_last_token_came_behind_a_restored_one(
    engines: Callable[..., Engine],
) -> None:
    """An answer's last token is fed by the next turn; packed, its block was not saved."""
    found = []
    for kind in (LlamaCppEngine, EmbeddedEngine):
        engine = engines(
            kind, PACKED, **({"max_live_tokens": 4096} if kind is LlamaCppEngine else {})
        )
        engine.open("c", TokenPhases())
        turn(engine, "c", words(300, 1), 20)
        early = engine.save_block("c", 100, 150)
        engine.evict_spans("c", [(100, 150)])
        said = [turn(engine, "c", words(30, 2), 20)]  # tokens 350 to 369; the last is not fed yet
        engine.restore_block("c", early)
        said.append(turn(engine, "c", words(10, 3), 20))
        parted = engine.save_block("c", 355, 370)
        engine.evict_spans("c", [(355, 370)])
        said.append(turn(engine, "c", words(10, 4), 20))
        engine.restore_block("c", parted)
        said.append(turn(engine, "c", words(10, 5), 30))
        found.append((said, parted.at, engine.close("c").live))
    assert found[0] == found[1]


def test_a_block_re_anchored_behind_the_last_row(engines: Callable[..., Engine]) -> None:
    found = []
    for kind in (LlamaCppEngine, EmbeddedEngine):
        engine = engines(
            kind, RESIDENT, **({"max_live_tokens": 4096} if kind is LlamaCppEngine else {})
        )
        engine.open("a", TokenPhases())
        turn(engine, "a", words(300, 1), 20)
        block = engine.save_block("a", 40, 90)
        engine.evict_spans("a", [(40, 90)])
        engine.restore_block("a", block, at=400)
        found.append((turn(engine, "a", words(10, 3), 30), engine.close("a").live))
    assert found[0] == found[1]


def test_restoring_twice_or_what_was_never_seen_is_refused(engines: Callable[..., Engine]) -> None:
    engine = engines(LlamaCppEngine, RESIDENT, max_live_tokens=4096)
    engine.open("r", TokenPhases())
    with pytest.raises(UsageError, match="nothing in the cache"):
        engine.save_block("r", 0, 5)
    turn(engine, "r", words(50, 1), 5)
    block = engine.save_block("r", 10, 20)
    with pytest.raises(UsageError, match="are in the cache"):
        engine.restore_block("r", block)
    engine.evict_spans("r", [(10, 20)])
    with pytest.raises(UsageError, match="0 of 10"):
        engine.save_block("r", 10, 20)
    with pytest.raises(UsageError, match="taken"):
        engine.restore_block("r", block, at=30)
    engine.restore_block("r", block)
    engine.close("r")


def test_spans_are_refused_while_a_generation_runs(engines: Callable[..., Engine]) -> None:
    """It would end, short and without a word."""
    engine = engines(LlamaCppEngine, RESIDENT, max_live_tokens=4096)
    engine.open("g", TokenPhases())
    turn(engine, "g", words(100, 1), 5)
    engine.extend("g", words(20, 2), [TokenPhases().label(t) for t in words(20, 2)])
    generation = engine.generate("g", Sampling(max_tokens=300))
    tokens = iter(generation)
    said = [next(tokens) for _ in range(3)]
    asked: list[Callable[[], object]] = [
        lambda: engine.evict_spans("g", [(10, 20)]),
        lambda: engine.save_block("g", 10, 20),
        lambda: engine.span_attention("g", [(10, 20)], [-1], 1.0),
    ]
    for ask in asked:
        with pytest.raises(KVBenchError, match="session g is generating"):
            ask()
    assert len([*said, *tokens]) == 300
    assert generation.finish_reason is FinishReason.LENGTH
    assert engine.evict_spans("g", [(10, 20)]) == 10
    engine.close("g")


def test_a_span_method_goes_on_after_its_backend_was_killed_between_turns(
    engines: Callable[..., Engine],
) -> None:
    """Its first command finds nobody; all its blocks are resident again, and it evicts anew."""
    method = make_method("evoke", 128, {"block": "16", "margin": "0.0"})
    assert isinstance(method, SpanMethod)
    below = engines(LlamaCppEngine, method.below(), max_live_tokens=4096)
    assert isinstance(below, LlamaCppEngine)
    engine, before = BlockEngine(below, method), below.restarts
    engine.open("e", TokenPhases())
    engine.note("e", words(300, 1), TurnNotes([(300, Source.USER)]))
    turn(engine, "e", words(300, 1), 20)
    assert engine.stats("e").evicted > 0
    assert below.backend_pid is not None
    os.kill(below.backend_pid, signal.SIGKILL)
    engine.note("e", words(40, 2), TurnNotes([(40, Source.USER)]))
    assert len(turn(engine, "e", words(40, 2), 20)) == 20
    stats = engine.close("e")
    assert below.restarts == before + 1
    assert (stats.logical, len(stats.restarts), stats.recomputed) == (380, 1, 319)
    assert stats.live <= 128


@pytest.mark.parametrize("how", ["events", "spans"])
def test_attention_goes_over_what_is_left_of_long_prompts(
    how: str, engines: Callable[..., Engine]
) -> None:
    """Rows that stayed lay behind all that had gone, and every step went over that, too."""
    snapkv = make_method("snapkv", 128, {"trigger": "prefill+every"})
    method = snapkv if how == "events" else RESIDENT_PLAIN
    engine = engines(LlamaCppEngine, method, max_live_tokens=4096)
    names = [f"long{how}{seed}" for seed in range(3)]
    for seed, name in enumerate(names):
        engine.open(name, TokenPhases())
        turn(engine, name, words(1200, seed), 20)
    for name in names * (how == "spans"):
        engine.evict_spans(name, [(4, 1100)])
    pool = engine.pool()
    used = pool["total_blocks"] - pool["free_blocks"]
    assert 300 < used < 600
    assert pool["attended_blocks"] <= 256 * (used // 256 + 2)
    for name in names:
        engine.close(name)
    assert engine.pool()["attended_blocks"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_rewound_sessions_are_the_embedded_engines_wherever_their_rows_are(
    seed: int, engines: Callable[..., Engine]
) -> None:
    """Four sessions in a cache for three: parked, evicted from and rewound in any order."""
    both = [engines(LlamaCppEngine, RESIDENT_PLAIN, max_live_tokens=1280)]
    both.append(engines(EmbeddedEngine, RESIDENT_PLAIN))
    draw, names = random.Random(seed), [f"rewound{seed}{number}" for number in range(4)]
    parkings = both[0].pool()["parkings"]
    for engine in both:
        for name in names:
            engine.open(name, TokenPhases())
            turn(engine, name, words(380, seed), 20)
    for step in range(12):
        name = draw.choice(names)
        logical = both[1].stats(name).logical
        what, size = draw.choice("gerrr"), draw.randrange(1, 60)
        at = draw.randrange(max(1, logical - 120), logical) if what == "r" else logical - size
        found = []
        for engine in both:
            answer: list[int] = []
            if what == "g":
                answer = turn(engine, name, words(size, 10 * seed + step), 15)
            elif what == "e":
                engine.evict_spans(name, [(max(1, at), logical), (40 + step, 41 + step)])
            else:
                engine.rewind(name, at)
                answer = turn(engine, name, words(size, step), 10)
            stats = engine.stats(name)
            counted = (stats.live, stats.logical, stats.evicted, stats.decode_kv_sum)
            found.append((answer, counted, stats.prefill_tokens, stats.recomputed))
        assert found[0] == found[1], (step, what, size, at)
    assert both[0].pool()["parkings"] > parkings
    for engine in both:
        for name in names:
            engine.close(name)
    assert both[0].pool()["free_blocks"] == both[0].pool()["total_blocks"]


@pytest.mark.parametrize("seed", range(2))
def test_a_tree_of_forks_is_the_embedded_engines_wherever_its_rows_are(
    seed: int, engines: Callable[..., Engine]
) -> None:
    """Forks that share cells, parked, evicted from, restored to and rewound in any order."""
    both = [engines(LlamaCppEngine, RESIDENT_PLAIN, max_live_tokens=1280)]
    both.append(engines(EmbeddedEngine, RESIDENT_PLAIN))
    draw, names = random.Random(seed), [f"tree{seed}{root}" for root in "abc"]
    parkings = both[0].pool()["parkings"]
    for engine in both:
        for number, name in enumerate(names):
            engine.open(name, TokenPhases())
            turn(engine, name, words(380, 3 * seed + number), 20)
    for step in range(18):
        name = draw.choice(names)
        logical = both[1].stats(name).logical
        what = "f" if len(names) < 5 else draw.choice("fgesrb" if len(names) < 8 else "gesrbc")
        size, at = draw.randrange(1, 60), draw.randrange(logical - 120, logical - 20)
        found = []
        for engine in both:
            answer: list[int] = []
            if what == "f":
                engine.fork(name, f"tree{seed}-{step}", TokenPhases())
            elif what == "g":
                answer = turn(engine, name, words(size, 10 * seed + step), 15)
            elif what == "s":
                engine.extend(
                    name, words(size, step), [*map(TokenPhases().label, words(size, step))]
                )
                answer = list(engine.force(name, words(30, step + 1)))
            elif what == "e":
                engine.evict_spans(name, [(at, logical), (40 + step, 41 + step)])
            elif what == "b" and engine.stats(name).live == logical - 1:
                block = engine.save_block(name, at, logical - 1)
                engine.evict_spans(name, [(at, logical - 1)])
                engine.restore_block(name, block)
            elif what == "r":
                engine.rewind(name, at)
                answer = turn(engine, name, words(size, step), 10)
            elif what == "c":
                engine.close(name)
            if what != "c":
                stats = engine.stats(name)
                counted = (stats.live, stats.logical, stats.evicted, stats.decode_kv_sum)
                found.append((answer, counted, stats.prefill_tokens, stats.recomputed))
        assert found[:1] == found[1:], (step, what, name)
        if what == "f":
            names.append(f"tree{seed}-{step}")
        elif what == "c":
            names.remove(name)
    for name in names:
        last = [turn(engine, name, words(5, 9), 15) for engine in both]
        assert last[0] == last[1], name
    assert both[0].pool()["parkings"] > parkings
    for engine in both:
        for name in names:
            engine.close(name)
    assert both[0].pool()["free_blocks"] == both[0].pool()["total_blocks"]


def test_a_fork_needs_room_for_what_is_its_own_only(engines: Callable[..., Engine]) -> None:
    """Nobody is parked for it, as long as nothing that is shared can change."""
    engine = engines(LlamaCppEngine, RESIDENT_PLAIN, max_live_tokens=1280)
    assert isinstance(engine, LlamaCppEngine)
    before = engine.pool()
    engine.open("main", TokenPhases())
    turn(engine, "main", words(1000, 1), 20)
    for number in range(5):
        engine.fork("main", f"ask{number}", TokenPhases())
        turn(engine, f"ask{number}", words(20, number), 20)
        assert engine.pool()["free_blocks"] == 1280 - 1019 - 40
        engine.close(f"ask{number}")
    assert engine.pool()["parkings"] == before["parkings"]
    assert engine.stats("main").live == 1019
    engine.close("main")
    assert engine.pool() == before


@pytest.mark.parametrize(("method", "budget"), [("full", None), ("agentkv", 128)])
def test_what_would_have_been_drawn_instead_is_the_embedded_engines(
    method: str, budget: int | None, engines: Callable[..., Engine]
) -> None:
    chosen = make_method(method, budget)
    found = []
    for kind, options in ((LlamaCppEngine, {"max_live_tokens": 4096}), (EmbeddedEngine, {})):
        engine, best = engines(kind, chosen, **options), list[int]()
        engine.open("predicted", TokenPhases())
        for seed, answer in enumerate((words(150, 8), words(1, 9), words(170, 10))):
            prompt, labels = words(200, seed), TokenPhases()
            engine.extend("predicted", prompt, [labels.label(token) for token in prompt])
            generation = engine.force("predicted", answer, predict=True)
            assert list(generation) == answer
            assert len(generation.best) == len(answer)
            best += generation.best
        # A greedy answer is its own best one, across stretches and events.
        said = turn(engine, "predicted", words(40, 20), 140)
        engine.close("predicted")
        found.append((best, said))
    assert found[0] == found[1]


def test_a_greedy_answer_is_its_own_best(engines: Callable[..., Engine]) -> None:
    chosen = make_method("agentkv", 128)
    for kind, options in ((LlamaCppEngine, {"max_live_tokens": 4096}), (EmbeddedEngine, {})):
        engine = engines(kind, chosen, **options)
        engine.open("drawn", TokenPhases())
        said = turn(engine, "drawn", words(300, 1), 200)
        engine.close("drawn")
        engine.open("again", TokenPhases())
        prompt, labels = words(300, 1), TokenPhases()
        engine.extend("again", prompt, [labels.label(token) for token in prompt])
        generation = engine.force("again", said, predict=True)
        assert list(generation) == list(generation.best) == said
        assert engine.close("again").events


def test_what_cannot_be_forced_or_forked_is_refused(engines: Callable[..., Engine]) -> None:
    engine = engines(LlamaCppEngine, RESIDENT_PLAIN, max_live_tokens=1280)
    assert {Capability.FORCE, Capability.FORK} <= engine.info.capabilities
    engine.open("s", TokenPhases())
    engine.fork("s", "empty", TokenPhases())
    for name in ("s", "empty"):
        assert len(turn(engine, name, words(20, 1), 5)) == 5
    with pytest.raises(UsageError, match="no tokens to force"):
        engine.force("s", [])
    with pytest.raises(UsageError, match="token ids"):
        engine.force("s", [1, 1 << 20])
    with pytest.raises(ContextLimitError):
        engine.force("s", [20] * engine.info.context_limit)
    with pytest.raises(KVBenchError, match="open already"):
        engine.fork("s", "empty", TokenPhases())
    with pytest.raises(KeyError):
        engine.fork("nobody", "new", TokenPhases())
    generation = engine.generate("s", Sampling(max_tokens=200))
    next(iter(generation))
    with pytest.raises(KVBenchError, match="session s is generating"):
        engine.fork("s", "new", TokenPhases())
    generation.cancel()
    for _ in generation:
        pass
    for name in ("s", "empty"):
        engine.close(name)


def test_both_sides_of_a_fork_outlive_a_backend(engines: Callable[..., Engine]) -> None:
    """One is killed between two turns, and another one within an answer that is given."""
    engine = engines(LlamaCppEngine, RESIDENT_PLAIN, max_live_tokens=1280)
    alone = engines(EmbeddedEngine, RESIDENT_PLAIN)
    assert isinstance(engine, LlamaCppEngine)
    said: list[list[Any]] = []
    for each in (engine, alone):
        each.open("m", TokenPhases())
        said.append([turn(each, "m", words(200, 3), 20)])
        each.fork("m", "f", TokenPhases())
        if isinstance(each, LlamaCppEngine):
            kill(each)
        said[-1].append(turn(each, "f", words(10, 4), 20))
        each.extend("m", words(9, 5), [*map(TokenPhases().label, words(9, 5))])
        given = []
        for token in each.force("m", words(300, 6)):
            given.append(token)
            if len(given) == 5 and isinstance(each, LlamaCppEngine):
                kill(each)
        assert given == words(300, 6)
        said[-1] += [turn(each, "m", words(4, 7), 20), turn(each, "f", words(4, 8), 20)]
    assert said[0] == said[1]
    for each in (engine, alone):
        assert [each.close(name).logical for name in ("m", "f")] == [553, 274]


def kill(engine: LlamaCppEngine) -> None:
    assert engine.backend_pid is not None
    os.kill(engine.backend_pid, signal.SIGKILL)


def test_methods_whose_heads_differ_have_no_spans(engines: Callable[..., Engine]) -> None:
    engine = engines(LlamaCppEngine, make_method("agentkv", 128), max_live_tokens=4096)
    engine.open("h", TokenPhases())
    turn(engine, "h", words(50, 1), 5)
    with pytest.raises(UsageError, match="whole tokens"):
        engine.evict_spans("h", [(0, 10)])
    engine.close("h")


def test_a_caller_that_stops_or_cancels_leaves_nothing_behind(
    engines: Callable[..., Engine],
) -> None:
    engine = engines(LlamaCppEngine, RESIDENT, max_live_tokens=4096)
    alone = engines(EmbeddedEngine, RESIDENT)
    found = []
    for each in (engine, alone):
        each.open("c", TokenPhases())
        said: list[int] = []
        stopped = turn(each, "c", words(40, 1), 50, stop=lambda token, said=said: bool(
            said.append(token) or len(said) == 7
        ))  # fmt: skip
        found.append((stopped, turn(each, "c", words(5, 2), 10), each.close("c")))
    assert found[0][:2] == found[1][:2]
    assert len(found[0][0]) == 7
    assert found[0][2].logical == found[1][2].logical
    engine.open("c", TokenPhases())
    engine.extend("c", words(40, 1), [TokenPhases().label(t) for t in words(40, 1)])
    generation = engine.generate("c", Sampling(max_tokens=400))
    seen = []
    for token in generation:
        seen.append(token)
        if len(seen) == 3:
            generation.cancel()
    assert generation.finish_reason is FinishReason.CANCELLED
    # What follows is what an engine says that never went further than the caller.
    alone.open("c", TokenPhases())
    alone.extend("c", [*words(40, 1)], [TokenPhases().label(t) for t in words(40, 1)])
    assert list(alone.generate("c", Sampling(max_tokens=len(seen)))) == seen
    assert turn(engine, "c", words(5, 2), 10) == turn(alone, "c", words(5, 2), 10)
    for each in (engine, alone):
        each.close("c")


def test_a_session_larger_than_the_cache_is_refused_in_words(
    engines: Callable[..., Engine],
) -> None:
    engine = engines(LlamaCppEngine, make_method("full", None), max_live_tokens=2304)
    engine.open("big", TokenPhases())
    with pytest.raises(CapacityError, match="holds 2304 tokens"):
        turn(engine, "big", words(2300, 1), 100)
    engine.close("big")
    assert played(engine, "after")[1].logical == 680


def test_embeddings_are_the_models(engines: Callable[..., Engine]) -> None:
    ours = engines(LlamaCppEngine, RESIDENT, max_live_tokens=4096).embed_tokens([5, 9, 5])
    theirs = engines(EmbeddedEngine, RESIDENT).embed_tokens([5, 9, 5])
    assert np.abs(ours - theirs).max() <= 1e-6
    assert np.array_equal(ours[0], ours[2])


def test_another_method_without_another_start(engines: Callable[..., Engine]) -> None:
    """Queries are kept or not, positions are packed or not, as the new method wants it."""
    engine = engines(LlamaCppEngine, make_method("full", None), max_live_tokens=4096, concurrency=2)
    assert isinstance(engine, LlamaCppEngine)
    first, restarts = engine.backend_pid, engine.restarts
    for name, budget in (("agentkv", 128), ("streamingllm@paper", 128), ("full", None)):
        method = make_method(name, budget)
        engine.reconfigure(method)
        assert played(engine, name)[0] == played(engines(EmbeddedEngine, method), name)[0]
    engine.open("open", TokenPhases())
    turn(engine, "open", words(20, 1), 5)
    with pytest.raises(KVBenchError, match="1 sessions are open"):
        engine.reconfigure(make_method("h2o", 128))
    engine.close("open")
    assert (engine.backend_pid, engine.restarts) == (first, restarts)


def test_a_backend_that_died_comes_back_with_the_method_it_had(
    engines: Callable[..., Engine],
) -> None:
    method = make_method("agentkv", 128)
    engine = engines(LlamaCppEngine, make_method("full", None), max_live_tokens=4096, concurrency=2)
    assert isinstance(engine, LlamaCppEngine)
    engine.reconfigure(method)
    assert engine.backend_pid is not None
    os.kill(engine.backend_pid, signal.SIGKILL)
    said, stats = played(engine, "after")
    assert (said, len(stats.events)) == (played(engines(EmbeddedEngine, method), "after")[0], 2)
