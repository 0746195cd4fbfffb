"""Sessions of llama.cpp that share their system message's rows, against those that do not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.engines.base import Engine, EngineOptions, KVStats, Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.llamacpp.engine import LlamaCppEngine
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.spans import TurnNotes
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WALK = Path(__file__).with_name("backend_prefixes.py")
TURNS = ((70, 30), (20, 30), (1, 40))  # prompt tokens, answered tokens
EVERY = {"interval": "16", "trigger": "prefill+every"}


@contextmanager
def started(kind: type[Any], method: Method, **options: Any) -> Iterator[Any]:
    engine = kind.create(
        EngineOptions(model="micro", method=method, **{"concurrency": 4, **options})
    )
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture
def shared(llamacpp_python: Path) -> Callable[..., Any]:  # noqa: ARG001
    """Return what starts llama.cpp under a method whose prefix is shared."""

    def start(name: str, budget: int | None = None, cells: int = 8192, **settings: str) -> Any:
        method = make_method(name, budget, {**settings, "prefix": "shared"})
        return started(LlamaCppEngine, method, max_live_tokens=cells)

    return start


def ids(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 600) for _ in range(count)]


def extend(engine: Engine, name: str, tokens: list[int]) -> None:
    label = TokenPhases().label
    engine.extend(name, tokens, [label(token) for token in tokens])


def begin(engine: Engine, name: str, system: list[int], prompt: list[int]) -> None:
    engine.open(name, TokenPhases())
    engine.note(name, system + prompt, TurnNotes([], system=len(system)))
    extend(engine, name, system + prompt)


def answer(engine: Engine, name: str, count: int) -> list[int]:
    return list(engine.generate(name, Sampling(max_tokens=count)))


def play(engine: Engine, name: str, system: list[int], seed: int) -> list[list[int]]:
    said = []
    for number, (prompt, count) in enumerate(TURNS):
        tokens = ids(10 * seed + number, prompt)
        begin(engine, name, system, tokens) if number == 0 else extend(engine, name, tokens)
        said.append(answer(engine, name, count))
    return said


def figures(stats: KVStats) -> dict[str, Any]:
    """All of an account but what says that a prefix is shared, and which rows moved."""
    events = [(each.decoded, each.live_before, each.live_after) for each in stats.events]
    left = {"cached_tokens": 0, "shared": 0, "rows_moved": 0}
    return {**vars(stats), **left, "events": events}


@pytest.mark.parametrize("plugin", ["on", "off"])
def test_whatever_sessions_behind_a_prefix_do_the_others_rows_stay(
    plugin: str,
    llamacpp_python: Path,
    backend_environment: Callable[[], Any],
    tmp_path: Path,
) -> None:
    with backend_environment() as environment:
        done = subprocess.run(
            (str(llamacpp_python), str(WALK), str(tmp_path), "0", "100"),
            env=environment | {"OMP_NUM_THREADS": "1", "KVBENCH_LLAMACPP_PLUGIN": plugin},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert min(json.loads(done.stdout).values()) > 3


@pytest.mark.parametrize(
    ("name", "budget", "settings", "stays"),
    [
        ("full", None, {}, True),
        ("agentkv", 180, {**EVERY, "protect": "system"}, True),
        ("agentkv", 128, EVERY, False),
        ("h2o", 280, {**EVERY, "protect": "system"}, True),
        ("snapkv", 128, EVERY, False),
        ("streamingllm@paper", 128, {"interval": "16"}, False),
    ],
)
def test_a_session_that_begins_with_a_prefix_is_as_one_that_computed_it(
    name: str, budget: int | None, settings: dict[str, str], stays: bool, shared: Callable[..., Any]
) -> None:
    system = ids(1, 130)
    other = [*system[:-1], system[-1] + 1]  # differs in its last token
    opened = {"computes": system, "other": other, "finds": system, "none": []}
    with started(EmbeddedEngine, make_method(name, budget, settings)) as alone:
        wanted = {n: play(alone, n, first, i) for i, (n, first) in enumerate(opened.items())}
        accounts = {n: figures(alone.stats(n)) for n in opened}
    with shared(name, budget, **settings) as engine:
        found = {n: play(engine, n, first, i) for i, (n, first) in enumerate(opened.items())}
        stats = {n: engine.stats(n) for n in opened}
    assert found == wanted
    assert {n: figures(each) for n, each in stats.items()} == accounts
    assert {n: each.cached_tokens for n, each in stats.items()} == {
        "computes": 0, "other": 0, "finds": 130, "none": 0
    }  # fmt: skip
    in_common = 130 if stays else 0
    assert [stats[n].shared for n in ("computes", "finds")] == [in_common, in_common]
    assert all(stats[n].events for n in ("computes", "finds")) is (budget is not None)


def run_together(engine: Engine, names: list[str], count: int) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {}

    def run(name: str) -> None:
        said[name] = answer(engine, name, count)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.parametrize("cells", [1536, 768])
def test_sessions_that_come_together_compute_it_once_and_hold_it_once(
    cells: int, shared: Callable[..., Any]
) -> None:
    """Ten of 640 tokens of which 600 are in common, where two or one of their own have room."""
    system, names = ids(2, 600), [str(number) for number in range(10)]
    with started(EmbeddedEngine, make_method("full", None)) as alone:
        wanted = {}
        for number, name in enumerate(names):
            begin(alone, name, system, ids(100 + number, 20))
            wanted[name] = answer(alone, name, 20)
    with shared("full", cells=cells) as engine:
        for number, name in enumerate(names):
            begin(engine, name, system, ids(100 + number, 20))
        assert run_together(engine, names, 20) == wanted
        cached = sorted(engine.stats(name).cached_tokens for name in names)
        assert cached == [0, *[600] * 9]
        pool = engine.pool()
        assert (pool["parkings"] > 0) is (cells < 1000)
        assert {engine.stats(name).shared for name in names} == {600}
        for name in names:
            engine.close(name)
        held = pool["total_blocks"] - engine.pool()["free_blocks"]
        engine.drop_prefixes()
        assert (held, engine.pool()["free_blocks"]) == (600, pool["total_blocks"])


@pytest.mark.parametrize(
    ("name", "settings"), [("agentkv", EVERY), ("streamingllm@paper", {"interval": "16"})]
)
def test_nothing_is_shared_that_would_be_copied_where_copies_have_no_room(
    name: str, settings: dict[str, str], shared: Callable[..., Any]
) -> None:
    system = ids(18, 600)
    with started(EmbeddedEngine, make_method(name, 640, settings)) as alone:
        wanted = [play(alone, each, system, i) for i, each in enumerate("ab")]
    with shared(name, 640, cells=768, **settings) as engine:
        assert [play(engine, each, system, i) for i, each in enumerate("ab")] == wanted
        assert engine.stats("b").cached_tokens == 0
        assert engine.stats("b").events


def test_a_prefix_makes_room_once_nobody_generates_behind_it(shared: Callable[..., Any]) -> None:
    """Sessions at rest that have it leave the cache with a copy, and are the same when back."""
    first, second = ids(3, 500), ids(4, 500)
    with started(EmbeddedEngine, make_method("full", None)) as alone:
        begun = {"a": first, "b": first, "c": second}
        wanted = [play(alone, n, each, i) for i, (n, each) in enumerate(begun.items())]
        extend(alone, "a", [5])
        wanted.append([answer(alone, "a", 30)])
    with shared("full", cells=768) as engine:
        found = [play(engine, "a", first, 0), play(engine, "b", first, 1)]
        found.append(play(engine, "c", second, 2))  # there is no room for both prefixes
        assert [engine.stats(name).shared for name in "abc"] == [0, 0, 500]
        extend(engine, "a", [5])
        found.append([answer(engine, "a", 30)])
        assert engine.stats("a").recomputed == 0
        begin(engine, "d", first, ids(9, 30))
        answer(engine, "d", 5)
        assert engine.stats("d").cached_tokens == 0
    assert found == wanted


def test_who_comes_back_from_host_memory_finds_its_prefix(shared: Callable[..., Any]) -> None:
    """What makes room for it is another session at rest, not the prefix that nobody else has."""
    system = ids(16, 300)
    with started(EmbeddedEngine, make_method("full", None)) as alone:
        wanted = [play(alone, "a", system, 1)]
        extend(alone, "a", [5])
        wanted.append([answer(alone, "a", 30)])
    with shared("full", cells=1024) as engine:
        found = [play(engine, "a", system, 1)]
        begin(engine, "large", [], ids(17, 680))
        answer(engine, "large", 20)
        assert engine.pool()["parked"] == 1
        held = engine.pool()["total_blocks"] - engine.pool()["free_blocks"]
        assert held == 300 + 699
        extend(engine, "a", [5])
        found.append([answer(engine, "a", 30)])
        assert engine.pool()["parked"] == 1
        stats = engine.stats("a")
        assert (stats.shared, stats.recomputed) == (300, 0)
    assert found == wanted


def test_more_prefixes_than_are_kept(shared: Callable[..., Any]) -> None:
    systems = [ids(50 + number, 60) for number in range(20)]
    with shared("full") as engine:
        for number, system in enumerate([*systems, systems[0], systems[19]]):
            begin(engine, str(number), system, [20, 21])
            answer(engine, str(number), 3)
        cached = [engine.stats(str(number)).cached_tokens for number in range(22)]
    assert cached == [0] * 21 + [60]


def test_who_waits_computes_it_when_the_other_goes(shared: Callable[..., Any]) -> None:
    system = ids(5, 2500)
    with shared("full") as engine:
        for name in ("goes", "waits", "after"):
            begin(engine, name, system, ids(6, 8))
        first = engine.generate("goes", Sampling(max_tokens=3))
        second = engine.generate("waits", Sampling(max_tokens=3))
        first.cancel()
        assert len(list(second)) == 3
        assert engine.stats("waits").cached_tokens == 0
        answer(engine, "after", 3)
        assert engine.stats("after").cached_tokens == 2500
        assert len(answer(engine, "goes", 3)) == 3  # behind what it had, or with the prefix


def test_forks_rewinds_and_spans_of_a_session_behind_a_prefix(shared: Callable[..., Any]) -> None:
    system, tail = ids(12, 100), ids(13, 20)

    def lines(engine: Any) -> list[list[int]]:
        for name in ("first", "main"):
            begin(engine, name, system, tail)
            answer(engine, name, 5)
        said = [answer(engine, "main", 30)]
        engine.fork("main", "fork", TokenPhases())
        for name in ("fork", "main", "fork"):
            extend(engine, name, tail[:7])
            said.append(answer(engine, name, 25))
        block = engine.save_block("fork", 90, 110)
        engine.evict_spans("fork", [(90, 110)])
        extend(engine, "fork", [17])
        said.append(answer(engine, "fork", 9))
        engine.restore_block("fork", block)
        for length in (130, 60, 0):  # behind the prefix, into it, all of it
            engine.rewind("main", length)
            begun = [] if length else system
            if begun:
                engine.note("main", begun + tail, TurnNotes([], system=100))
            extend(engine, "main", begun + tail[:9])
            said.append(answer(engine, "main", 15))
        for name in ("fork", "first"):
            extend(engine, name, [18])
            said.append(answer(engine, name, 9))
        return [*said, [engine.stats(name).live for name in ("first", "main", "fork")]]

    with started(EmbeddedEngine, make_method("full", None)) as alone:
        wanted = lines(alone)
    with shared("full") as engine:
        assert lines(engine) == wanted


def test_sessions_of_a_killed_backend_share_again(shared: Callable[..., Any]) -> None:
    system = ids(14, 300)
    with started(EmbeddedEngine, make_method("full", None)) as alone:
        wanted = {name: play(alone, name, system, i) for i, name in enumerate("ab")}
    with shared("full") as engine:
        found = {"a": play(engine, "a", system, 0)}
        os.kill(engine.backend_pid, signal.SIGKILL)
        found["b"] = play(engine, "b", system, 1)
        extend(engine, "a", [30])
        assert len(answer(engine, "a", 4)) == 4
        assert engine.stats("a").recomputed > 300
        assert engine.stats("a").cached_tokens == 300
    assert found == wanted


def test_another_method_begins_without_the_prefixes_of_the_one_before(
    shared: Callable[..., Any],
) -> None:
    system = ids(15, 200)
    with shared("full") as engine:
        begin(engine, "a", system, [20, 21])
        answer(engine, "a", 3)
        engine.close("a")
        engine.reconfigure(make_method("agentkv", 256, {"protect": "system", "prefix": "shared"}))
        assert engine.pool()["free_blocks"] == engine.pool()["total_blocks"]
        for name in "bc":
            begin(engine, name, system, [20, 21])
            answer(engine, name, 3)
        assert [engine.stats(name).cached_tokens for name in "bc"] == [0, 200]
