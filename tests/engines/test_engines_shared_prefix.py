"""Sessions that share their system message's rows, against sessions that each compute their own."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.conformance.driver import TraceRecorder, calibrated_for, in_memory_engine
from agentbench_kv.conformance.families import build_family
from agentbench_kv.conformance.reference import tiny_model as build_tiny
from agentbench_kv.engines.base import Capability, EngineOptions, KVStats, Sampling
from agentbench_kv.engines.core import prefixes
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.observer import QkvRecorder
from agentbench_kv.engines.embedded.slots import SMALLEST
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.methods.base import Method, Phase
from agentbench_kv.methods.spans import TurnNotes
from agentbench_kv.registry import load_method, make_method, names

EVERY = {"interval": "8"}
SYSTEM = 40  # tokens of the system message
TURNS = ((70, 20), (20, 20), (1, 1))  # prompt tokens, answered tokens


def ranking_methods() -> list[str]:
    found = []
    for name in names("method"):
        cls = load_method(name)
        if cls.compresses and not (cls.spans or cls.messages or cls.remembers or cls.offline):
            found.append(name)
    return found


ARMS = [
    *((name, protect) for name in ranking_methods() for protect in ("none", "system")),
    ("streamingllm@paper", "system"),
    ("snapkv@original", "system"),
    ("agentkv", "prompt"),
    ("agentkv", "60"),
]


class ByNumber:
    """Labels tokens by their ids, so that every ring is written."""

    def label(self, token: int) -> Phase:
        return Phase(token % 4)


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 64) for _ in range(count)]


def method_of(name: str, protect: str, prefix: str, **more: str) -> Method:
    chosen = {**EVERY, "protect": protect, **more}
    return make_method(name, 130 if protect == "prompt" else 100, {**chosen, "prefix": prefix})


def full(prefix: str) -> Method:
    return make_method("full", None, {"prefix": prefix})


@contextmanager
def started(network: Any, method: Method, **options: Any) -> Iterator[tuple[Any, TraceRecorder]]:
    seen = TraceRecorder()
    if options:
        asked = EngineOptions(model="in-memory", method=method, device="cpu", **options)
        engine = EmbeddedEngine.create(asked, model=network, recorder=seen)
    else:
        engine = in_memory_engine(network, calibrated_for(network, method), seen)
    try:
        yield engine, seen
    finally:
        engine.shutdown()


def begin(engine: Any, name: str, system: list[int], prompt: list[int]) -> None:
    """Open a session whose first prompt begins with a system message."""
    engine.open(name, ByNumber())
    engine.note(name, system + prompt, TurnNotes([], system=len(system)))
    extend(engine, name, system + prompt)


def extend(engine: Any, name: str, tokens: list[int]) -> None:
    engine.extend(name, tokens, [ByNumber().label(token) for token in tokens])


def answer(engine: Any, name: str, count: int) -> list[int]:
    return list(engine.generate(name, Sampling(max_tokens=count)))


def play(engine: Any, name: str, system: list[int], seed: int) -> list[list[int]]:
    rng, said = random.Random(seed), []
    for number, (prompt, count) in enumerate(TURNS):
        if number:
            extend(engine, name, ids(rng, prompt))
        else:
            begin(engine, name, system, ids(rng, prompt))
        said.append(answer(engine, name, count))
    return said


def figures(stats: KVStats) -> dict[str, Any]:
    """All of an account but what says that a prefix is shared."""
    return {**vars(stats), "cached_tokens": 0, "shared": 0}


def same_play(names: list[str], one: TraceRecorder, other: TraceRecorder) -> None:
    for name in names:
        kept = [
            [each.sort(-1).values.tolist() for each in seen.kept([name])] for seen in (one, other)
        ]
        assert kept[0] == kept[1], name
        assert one.logits[name].keys() == other.logits[name].keys()
        for position, found in one.logits[name].items():
            wanted = other.logits[name][position]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_tokens_events_and_kept_sets_are_those_of_sessions_alone(arm: Any) -> None:
    network, rng = build_tiny(layers=2), random.Random(8)
    system = ids(rng, SYSTEM)
    other = [*system[:-1], system[-1] % 63 + 1]  # differs in its last token
    opened = {"computes": system, "other": other, "finds": system, "none": []}
    with started(network, method_of(*arm, "own")) as (alone, expected):
        wanted = {n: play(alone, n, first, i) for i, (n, first) in enumerate(opened.items())}
        accounts = {name: figures(alone.stats(name)) for name in opened}
    with started(network, method_of(*arm, "shared")) as (engine, seen):
        found = {n: play(engine, n, first, i) for i, (n, first) in enumerate(opened.items())}
        assert found == wanted
        cached = {name: engine.stats(name).cached_tokens for name in opened}
        assert cached == {"computes": 0, "other": 0, "finds": 40, "none": 0}
        assert {name: figures(engine.stats(name)) for name in opened} == accounts
        assert all(accounts[name]["events"] for name in ("computes", "other", "finds"))
        same_play(list(opened), seen, expected)


@pytest.mark.parametrize("name", ["agentkv", "snapkv", "h2o", "tova"])
def test_what_a_method_keeps_of_queries_comes_with_the_prefix(name: str) -> None:
    """At the first event most queries in the rings and sums are still the prefix's."""
    network, rng = build_tiny(layers=2), random.Random(15)
    system, plays = ids(rng, 120), []
    for kind in ("own", "shared"):
        method = make_method(name, 64, {**EVERY, "prefix": kind})
        with started(network, method) as (engine, seen):
            for session in "ab":
                begin(engine, session, system, [5, 6, 7])
                answer(engine, session, 12)
                assert len(engine.stats(session).events) == 1
            assert engine.stats("b").cached_tokens == (120 if kind == "shared" else 0)
            plays.append(seen)
    same_play(["a", "b"], plays[1], plays[0])


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss"])
@pytest.mark.parametrize("prefix", ["agentkv", "full"])
def test_layers_with_windows_follow(family: str, prefix: str) -> None:
    network, rng = build_family(family), random.Random(3)
    system = ids(rng, 150)
    methods = [
        full(kind)
        if prefix == "full"
        else make_method("agentkv", 180, {**EVERY, "protect": "system", "prefix": kind})
        for kind in ("own", "shared")
    ]
    plays = []
    for method in methods:
        with started(network, method) as (engine, seen):
            said = [play(engine, name, system, i) for i, name in enumerate("ab")]
            plays.append((said, [figures(engine.stats(name)) for name in "ab"], seen))
    (wanted, accounts, expected), (found, others, seen) = plays
    assert (found, others) == (wanted, accounts)
    same_play(["a", "b"], seen, expected)


def test_a_session_is_the_same_to_the_last_bit_whether_it_finds_or_computes() -> None:
    """Also where a prefix is longer than a chunk of prefill and no multiple of anything."""
    network, rng = build_tiny(layers=2), random.Random(4)
    system = ids(rng, 700)
    for method in (
        full("shared"),
        make_method("agentkv", 800, {**EVERY, "protect": "system", "prefix": "shared"}),
    ):
        with started(network, method) as (engine, seen):
            for name in ("computes", "finds"):
                assert play(engine, name, system, 1)
            assert engine.stats("finds").cached_tokens == 700
            for position, wanted in seen.logits["computes"].items():
                assert torch.equal(seen.logits["finds"][position], wanted)


def slot_rows(engine: Any) -> int:
    """Rows of all slots that somebody uses."""
    pools = engine._scheduler.pools.full._pools.values()
    return sum(pool.capacity * len(pool._users) for pool in pools)


def test_a_prefix_is_held_once_and_stays_through_events() -> None:
    network, rng = build_tiny(layers=2), random.Random(5)
    system = ids(rng, 900)
    settled = {**EVERY, "protect": "system"}
    rows = {}
    for kind in ("own", "shared"):
        with started(network, make_method("agentkv", 964, {**settled, "prefix": kind})) as (
            engine,
            _,
        ):
            for number in range(8):
                begin(engine, str(number), system, ids(rng, 30))
                answer(engine, str(number), 80)
                stats = engine.stats(str(number))
                assert stats.events
                assert stats.shared == (900 if kind == "shared" else 0)
                assert stats.live >= 900
            rows[kind] = slot_rows(engine)
    assert rows == {"own": 8 * 1024, "shared": 1024 + 8 * SMALLEST}


def test_without_protection_an_event_copies_what_it_changes() -> None:
    network, rng = build_tiny(layers=2), random.Random(5)
    system = ids(rng, 300)
    with started(network, make_method("agentkv", 128, {"interval": "16", "prefix": "shared"})) as (
        engine,
        _,
    ):
        begin(engine, "a", system, ids(rng, 5))
        answer(engine, "a", 10)
        begin(engine, "b", system, ids(rng, 5))
        answer(engine, "b", 1)
        held = engine._scheduler.get("b").cache.row_positions()
        assert engine._scheduler.get("a").cache.shared == 300
        extend(engine, "a", [3])
        answer(engine, "a", 10)
        assert engine.stats("a").events
        assert engine._scheduler.get("a").cache.shared == 0
        cache = engine._scheduler.get("b").cache
        assert cache.shared == 300
        assert torch.equal(cache.row_positions(), held)


def test_sessions_that_come_together_compute_it_once() -> None:
    network, rng = build_tiny(layers=2), random.Random(6)
    system = ids(rng, 1200)
    tails = [ids(rng, 10 + number) for number in range(12)]
    with started(network, full("own")) as (alone, _):
        wanted = []
        for number, tail in enumerate(tails):
            begin(alone, str(number), system, tail)
            wanted.append(answer(alone, str(number), 8))
    with started(network, full("shared")) as (engine, _):
        found: dict[int, list[int]] = {}

        def run(number: int) -> None:
            found[number] = answer(engine, str(number), 8)

        for number, tail in enumerate(tails):
            begin(engine, str(number), system, tail)
        threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[number] for number in range(12)] == wanted
        stats = [engine.stats(str(number)) for number in range(12)]
        assert sorted(each.cached_tokens for each in stats) == [0, *[1200] * 11]
        prompts = [each.prefill_tokens for each in stats]
        assert prompts == [1200 + len(tail) for tail in tails]


def test_who_waits_goes_on_when_the_computing_session_breaks() -> None:
    network, rng = build_tiny(layers=2), random.Random(7)
    system = ids(rng, 1200)
    with started(network, full("shared")) as (engine, _):
        begin(engine, "breaks", system, ids(rng, 4))
        begin(engine, "waits", system, ids(rng, 4))
        state = engine._scheduler.get("breaks")

        def fails(rows: int) -> None:
            raise ValueError(f"after {rows}")

        state.fed_rows = fails
        first = engine.generate("breaks", Sampling(max_tokens=3))
        second = engine.generate("waits", Sampling(max_tokens=3))
        with pytest.raises(KVBenchError, match="after 512"):
            list(first)
        assert len(list(second)) == 3
        stats = engine.stats("waits")
        assert (stats.prefill_tokens, stats.cached_tokens) == (1204, 0)
        begin(engine, "after", system, ids(rng, 4))
        answer(engine, "after", 3)
        assert engine.stats("after").cached_tokens == 1200


def test_memory_is_counted_once_and_unused_prefixes_make_room() -> None:
    network, rng = build_tiny(layers=2), random.Random(9)
    first, second = ids(rng, 500), ids(rng, 500)
    with started(network, full("shared"), max_live_tokens=700) as (engine, _):
        store = engine._scheduler.prefixes
        for name in "abcd":  # 4 · 520 rows would not fit
            begin(engine, name, first, ids(rng, 10))
            answer(engine, name, 10)
        assert store.rows == 500
        begin(engine, "e", second, ids(rng, 10))
        waiting = engine.generate("e", Sampling(max_tokens=10))
        begin(engine, "f", first, ids(rng, 10))
        assert len(engine._scheduler._waiting) == 1
        others = engine._scheduler._held_by_others(engine._scheduler.get("a"))
        assert others == 500 + 3 * 19  # what waits holds nothing
        for name in "abcd":  # nobody reads the first prefix any more: it makes room
            engine.close(name)
        assert len(list(waiting)) == 10
        assert store.rows == 500
        engine.close("e")
        answer(engine, "f", 10)
        assert (engine.stats("f").cached_tokens, store.rows) == (0, 500)
        engine.close("f")
        begin(engine, "g", first, ids(rng, 190))
        answer(engine, "g", 10)  # it fills the cache with its prefix, which therefore stays
        assert engine.stats("g").cached_tokens == 500


def test_the_least_recently_used_prefix_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    network, rng = build_tiny(layers=2), random.Random(10)
    with started(network, full("shared")) as (engine, _):
        store = engine._scheduler.prefixes
        monkeypatch.setattr(store._table, "_limit", 2)
        first, second, third = (ids(rng, 300) for _ in range(3))
        for number, system in enumerate((first, second, first, third, first, second)):
            begin(engine, str(number), system, [5])
            answer(engine, str(number), 2)
        cached = [engine.stats(str(number)).cached_tokens for number in range(6)]
        assert cached == [0, 0, 300, 0, 300, 0]
        assert store.rows == 1200  # what was dropped is still read
        for number in (1, 3):
            engine.close(str(number))
        begin(engine, "last", second, [5])
        answer(engine, "last", 2)
        assert store.rows == 600
        for name in ("0", "2", "4", "5", "last"):
            engine.close(name)


def test_nothing_is_left_when_all_is_closed_and_dropped() -> None:
    network, rng = build_tiny(layers=2), random.Random(11)
    for name in ("agentkv", "h2o"):
        method = method_of(name, "system", "shared")
        with started(network, method) as (engine, _):
            system = ids(rng, 40)
            for number in range(4):
                play(engine, str(number), system, number)
            for number in (2, 0, 1, 3):
                engine.close(str(number))
            store, pools = engine._scheduler.prefixes, engine._scheduler.pools
            engine.drop_prefixes()
            assert store.rows == 0
            assert slot_rows(engine) == 0
            buffer = pools.queries
            assert len(buffer._free) == buffer.places


def test_forks_and_rewinds_of_a_session_behind_a_prefix() -> None:
    network, rng = build_tiny(layers=2), random.Random(12)
    system, tail = ids(rng, 100), ids(rng, 20)
    said = []
    for kind in ("own", "shared"):
        with started(network, full(kind)) as (engine, _):
            begin(engine, "first", system, tail)
            answer(engine, "first", 5)
            begin(engine, "main", system, tail)
            lines = [answer(engine, "main", 30)]
            engine.fork("main", "fork", ByNumber())
            for name in ("fork", "main", "fork"):
                extend(engine, name, tail[:7])
                lines.append(answer(engine, name, 25))
            for length in (130, 60, 0):  # behind the prefix, into it, all of it
                engine.rewind("main", length)
                begun = [] if length else system
                if begun:
                    engine.note("main", begun + tail, TurnNotes([], system=100))
                extend(engine, "main", begun + tail[:9])
                lines.append(answer(engine, "main", 15))
                engine.rewind("fork", length + 1)
                extend(engine, "fork", tail[:9])
                lines.append(answer(engine, "fork", 15))
            said.append((lines, engine.stats("main").live, engine.stats("fork").live))
    assert said[0] == said[1]


def test_spans_of_a_session_behind_a_prefix() -> None:
    network, rng = build_tiny(layers=2), random.Random(13)
    system, tail = ids(rng, 100), ids(rng, 20)
    said = []
    for kind in ("own", "shared"):
        with started(network, full(kind)) as (engine, _):
            lines = []
            for name in ("first", "main"):
                begin(engine, name, system, tail)
                lines.append(answer(engine, name, 5))
            block = engine.save_block("main", 90, 110)
            engine.evict_spans("main", [(90, 110)])
            extend(engine, "main", [7])
            lines.append(answer(engine, "main", 9))
            engine.restore_block("main", block)
            extend(engine, "main", [7])
            lines.append(answer(engine, "main", 9))
            extend(engine, "first", [7])
            lines.append(answer(engine, "first", 9))
            said.append(lines)
    assert said[0] == said[1]


@pytest.mark.parametrize("kv_dtype", ["int8", "kivi2"])
def test_rows_of_lower_precision(kv_dtype: str) -> None:
    network, rng = build_tiny(layers=2), random.Random(14)
    system = ids(rng, 300)
    said = []
    for kind in ("own", "shared"):
        with started(network, full(kind), kv_dtype=kv_dtype) as (engine, _):
            said.append([play(engine, name, system, i) for i, name in enumerate("abc")])
    assert said[0] == said[1]


def test_who_watches_every_row_gets_every_row() -> None:
    network = build_tiny(layers=2)
    watcher = QkvRecorder([0], [0], torch.float32)
    asked = EngineOptions(model="in-memory", method=full("shared"), device="cpu")
    engine = EmbeddedEngine.create(asked, model=network, recorder=watcher)
    for name in "ab":
        begin(engine, name, [3] * 50, [4])
        answer(engine, name, 2)
        assert watcher.arrays()[0].shape[2] == len(watcher.tokens) == 52
        engine.close(name)
    engine.shutdown()


def test_who_may_share() -> None:
    assert Capability.SHARE_PREFIX in EmbeddedEngine.capabilities
    assert "share_prefix" in full("shared").needs
    assert make_method("full@prefix", None, {}).settings() == {"prefix": "shared"}
    assert make_method("full", None, {}).settings() == {}
    assert "prefix" not in make_method("agentkv", 64, {}).settings()
    with pytest.raises(UsageError, match="prefix"):
        make_method("evoke", 512, {"prefix": "shared"})


def settled(so: Callable[[], bool]) -> bool:
    """Whether something comes true: what a session held goes on the engine's own thread."""
    for _ in range(500):
        if so():
            return True
        time.sleep(0.02)
    return False


STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from("oootttc"), st.integers(0, 3), st.integers(1, 30)),
    max_size=16,
)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(steps=STEPS, name=st.sampled_from(["agentkv", "h2o", "full"]), limit=st.integers(1, 3))
def test_any_order_of_sessions(steps: list[Any], name: str, limit: int) -> None:
    """Sessions open with one of a few prefixes, some alike to all but one token, and close."""
    network, rng = build_tiny(layers=2), random.Random(1)
    whole = ids(rng, 60)
    systems = [whole, whole[:40], [*whole[:-1], whole[-1] % 63 + 1], []]
    methods = [
        full(kind) if name == "full" else method_of(name, "system", kind)
        for kind in ("own", "shared")
    ]
    with started(network, methods[0]) as (alone, _), started(network, methods[1]) as (engine, _):
        engine._scheduler.prefixes._table._limit = limit
        names: list[str] = []
        for number, (which, what, system, size) in enumerate(steps):
            said = []
            tokens = ids(random.Random(size), size)
            for each in (alone, engine):
                if what == "o":
                    begin(each, str(number), systems[system], tokens)
                    said.append(answer(each, str(number), size))
                elif names and what == "t":
                    chosen = names[which % len(names)]
                    extend(each, chosen, tokens)
                    said.append(answer(each, chosen, 40))
                elif names and what == "c":
                    said.append(figures(each.close(names[which % len(names)])))
            assert len(said) in (0, 2)
            assert said[:1] == said[1:]
            if what == "o":
                names.append(str(number))
            elif names and what == "c":
                del names[which % len(names)]
        for each in names:
            assert figures(engine.close(each)) == figures(alone.close(each))
        assert settled(lambda: engine._scheduler.prefixes.rows <= limit * 60)
    assert prefixes.PREFIXES == 16
