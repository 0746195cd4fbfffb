"""Forced answers against decodes, and forks against sessions that were never forked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.conformance.driver import TraceRecorder
from agentbench_kv.conformance.families import build_family
from agentbench_kv.engines.base import Capability, FinishReason, KVStats, Sampling
from agentbench_kv.engines.embedded.forced import ForcedPlay
from agentbench_kv.engines.embedded.model import wrap_model
from agentbench_kv.errors import CapacityError, ContextLimitError, KVBenchError, UsageError
from agentbench_kv.methods.base import Phase
from agentbench_kv.registry import make_method

EVERY = {"interval": "16"}
ARMS: list[tuple[str, int | None, dict[str, str]]] = [
    ("agentkv", 48, EVERY),
    ("agentkv", 48, {**EVERY, "trigger": "prefill+every"}),
    ("agentkv", 60, {**EVERY, "trigger": "turn"}),
    ("snapkv", 48, {**EVERY, "trigger": "slack"}),
    ("rkv", 64, EVERY),
    ("h2o", 64, EVERY),
    ("streamingllm@paper", 40, EVERY),
    ("full", None, {}),
]
TURNS = ((90, 70), (20, 45), (0, 1), (33, 60))  # prompt tokens, answered tokens


class ByNumber:
    """Labels tokens by their ids, so that every ring is written."""

    def label(self, token: int) -> Phase:
        return Phase(token % 4)


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 64) for _ in range(count)]


def extend(engine: Any, name: str, tokens: list[int]) -> None:
    engine.extend(name, tokens, [ByNumber().label(token) for token in tokens])


def decode(engine: Any, name: str, prompt: list[int], answer: int) -> list[int]:
    extend(engine, name, prompt)
    return list(engine.generate(name, Sampling(max_tokens=answer)))


def force(engine: Any, name: str, prompt: list[int], answer: list[int]) -> None:
    extend(engine, name, prompt)
    generation = engine.force(name, answer)
    assert list(generation) == answer
    assert generation.finish_reason is FinishReason.LENGTH


def figures(stats: KVStats) -> dict[str, Any]:
    """Everything but what starts anew with a fork."""
    events = [(each.logical, each.live_before, each.live_after) for each in stats.events]
    return {**vars(stats), "rows_moved": bool(stats.rows_moved), "events": events}


@pytest.mark.parametrize("family", ["qwen3"])
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_a_forced_answer_is_a_decode_of_its_tokens(
    family: str, arm: Any, tiny_model: Any, make_engine: Any
) -> None:
    seen = TraceRecorder()
    engine = make_engine(tiny_model(family), *arm, recorder=seen)
    rng, turns = random.Random(3), []
    engine.open("decoded", ByNumber())
    for prompt, answer in TURNS:
        asked = ids(rng, prompt)
        turns.append((asked, decode(engine, "decoded", asked, answer)))
    engine.open("forced", ByNumber())
    for asked, answered in turns:
        force(engine, "forced", asked, answered)
    after = ids(rng, 7)
    # Free again behind what was forced, the session says what it would have said.
    assert decode(engine, "forced", after, 30) == decode(engine, "decoded", after, 30)
    assert figures(engine.close("forced")) == figures(engine.close("decoded"))
    logits = seen.logits["forced"]
    assert len(TURNS) + 30 <= len(logits) < len(seen.logits["decoded"])
    for position, found in logits.items():
        wanted = seen.logits["decoded"][position]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    kept = [
        [each.sort(-1).values.tolist() for each in seen.kept([n])] for n in ("forced", "decoded")
    ]
    assert kept[0] == kept[1]
    assert bool(kept[0]) == (arm[1] is not None)
    engine.shutdown()


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_forced_play_and_forced_answers_agree(arm: Any, tiny_model: Any, make_engine: Any) -> None:
    network, rng = tiny_model("qwen3"), random.Random(11)
    seen = TraceRecorder()
    engine = make_engine(network, *arm, recorder=seen)
    model = wrap_model(network, Path(), "in-memory")
    play = ForcedPlay(model, [make_method(*arm)])
    engine.open("s", ByNumber())
    position = 0
    for prompt, answer in TURNS:
        asked, said = ids(rng, prompt), ids(rng, answer)
        force(engine, "s", asked, said)
        both = ([(token, ByNumber().label(token)) for token in part] for part in (asked, said))
        position += prompt
        for stretch in play.turn(*both):
            logits = stretch.full if stretch.of_methods[0] is None else stretch.of_methods[0]
            for row, wanted in enumerate(logits):
                found = seen.logits["s"].get(position + stretch.first + row)
                if found is not None:
                    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        position += answer
    (expected,) = play.stats()
    stats = engine.close("s")
    assert stats.events == expected.events
    assert (stats.decode_tokens, stats.bytes_read) == (expected.decode_tokens, expected.bytes_read)
    play.close()
    engine.shutdown()


def test_what_cannot_be_forced_is_refused(tiny_model: Any, make_engine: Any) -> None:
    engine = make_engine(tiny_model("qwen3"), "full", None, {})
    engine.open("s", ByNumber())
    extend(engine, "s", [1, 2, 3])
    with pytest.raises(UsageError, match="no tokens to force"):
        engine.force("s", [])
    with pytest.raises(UsageError, match="token ids"):
        engine.force("s", [1, 1 << 20])
    limit = engine.info.context_limit
    with pytest.raises(ContextLimitError):
        engine.force("s", [1] * (limit - 2))
    assert len(list(engine.force("s", [1] * (limit - 3)))) == limit - 3
    assert engine.stats("s").logical == limit
    engine.shutdown()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_both_sides_of_a_fork_are_as_if_never_forked(
    family: str, arm: Any, tiny_model: Any, make_engine: Any
) -> None:
    if family != "qwen3" and arm[0] not in ("agentkv", "streamingllm@paper", "full"):
        pytest.skip("windows: three arms are enough")
    seen, rng = TraceRecorder(), random.Random(5)
    network = tiny_model(family) if family == "qwen3" else build_family(family)
    engine = make_engine(network, *arm, recorder=seen)
    first, own, aside = ids(rng, 90), ids(rng, 12), ids(rng, 25)
    alone = {}
    for name, then in (("own", own), ("aside", aside)):
        engine.open(name, ByNumber())
        begun = decode(engine, name, first, 70)
        alone[name] = (decode(engine, name, then, 60), decode(engine, name, first[:9], 30))
    engine.open("main", ByNumber())
    assert decode(engine, "main", first, 70) == begun
    before = engine.stats("main")
    engine.fork("main", "fork", ByNumber())
    assert engine.stats("fork").live == before.live
    # By turns, so that each goes on behind the other's writes.
    said = decode(engine, "fork", aside, 60)
    went_on = decode(engine, "main", own, 60)
    assert (said, decode(engine, "fork", first[:9], 30)) == alone["aside"]
    assert (went_on, decode(engine, "main", first[:9], 30)) == alone["own"]
    for name, twin in (("main", "own"), ("fork", "aside")):
        for position, found in seen.logits[name].items():
            wanted = seen.logits[twin][position]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    whole = before.followed_by(engine.close("fork"))
    assert figures(whole) == figures(engine.close("aside"))
    assert figures(engine.close("main")) == figures(engine.close("own"))
    engine.shutdown()


def test_a_fork_that_never_fits_beside_its_source_waits_for_nobody(
    tiny_model: Any, make_engine: Any
) -> None:
    """Its source's caller waits for what it says, so the source will free nothing."""
    engine = make_engine(tiny_model("qwen3"), "full", None, {}, max_live_tokens=200)
    rng = random.Random(1)
    engine.open("main", ByNumber())
    decode(engine, "main", ids(rng, 100), 10)
    engine.fork("main", "fork", ByNumber())
    engine.fork("fork", "another", ByNumber())
    engine.close("fork")
    with pytest.raises(CapacityError, match="holds 200 tokens, session another needs"):
        decode(engine, "another", ids(rng, 20), 50)
    engine.close("another")
    assert len(decode(engine, "main", ids(rng, 5), 10)) == 10
    engine.shutdown()


def slots(engine: Any, *names: str) -> list[tuple[int, int]]:
    caches = [engine._scheduler.get(name).cache for name in names]
    return [(cache.pool.capacity, cache.slot) for cache in caches]


def test_nothing_is_copied_where_a_fork_only_appends(tiny_model: Any, make_engine: Any) -> None:
    engine = make_engine(tiny_model("qwen3"), "full", None, {})
    rng = random.Random(1)
    engine.open("main", ByNumber())
    decode(engine, "main", ids(rng, 90), 10)
    allocated = engine.pool_bytes
    for number in range(5):
        name = f"fork{number}"
        engine.fork("main", name, ByNumber())
        decode(engine, name, ids(rng, 20), 10)
        (main,), (fork,) = slots(engine, "main"), slots(engine, name)
        assert main == fork
        assert engine.pool_bytes == allocated
        assert (engine.stats("main").live, engine.stats(name).live) == (99, 129)
        engine.close(name)
    engine.fork("main", "one", ByNumber())
    engine.fork("main", "two", ByNumber())
    decode(engine, "one", ids(rng, 20), 10)
    assert len(set(slots(engine, "main", "one", "two"))) == 1
    decode(engine, "two", ids(rng, 20), 10)  # would be written over what `one` holds
    main, one, two = slots(engine, "main", "one", "two")
    assert main == one != two
    decode(engine, "main", ids(rng, 20), 10)
    assert len(set(slots(engine, "main", "one", "two"))) == 3
    engine.shutdown()


def test_an_event_changes_no_row_of_the_other_side(tiny_model: Any, make_engine: Any) -> None:
    engine = make_engine(tiny_model("qwen3"), "agentkv", 48, {"interval": "64"})
    rng = random.Random(2)
    engine.open("main", ByNumber())
    decode(engine, "main", ids(rng, 90), 10)
    cache = engine._scheduler.get("main").cache
    held = cache.keys[:, :, : cache.length].clone()
    engine.fork("main", "fork", ByNumber())
    decode(engine, "fork", ids(rng, 5), 60)
    assert len(engine.stats("fork").events) == 1
    assert torch.equal(cache.keys[:, :, : cache.length], held)
    assert len(set(slots(engine, "main", "fork"))) == 2
    engine.shutdown()


def test_memory_of_a_fork_is_counted_once_and_comes_back(tiny_model: Any, make_engine: Any) -> None:
    engine = make_engine(tiny_model("qwen3"), "full", None, {}, max_live_tokens=400)
    rng = random.Random(4)
    engine.open("main", ByNumber())
    decode(engine, "main", ids(rng, 90), 10)
    for number in range(20):  # at rest they hold the same hundred rows
        engine.fork("main", f"fork{number}", ByNumber())
    assert engine._scheduler._held_by_others(engine._scheduler.get("fork3")) == 99
    decode(engine, "fork3", ids(rng, 20), 10)
    engine.close("main")
    assert len(decode(engine, "fork7", ids(rng, 20), 10)) == 10
    for number in range(20):
        engine.close(f"fork{number}")
    engine.open("last", ByNumber())
    decode(engine, "last", [1], 1)
    engine.close("last")
    engine.shutdown()
    assert engine._scheduler.pools.full.nbytes <= engine.bytes_per_token * 2 * 256


def test_a_fork_needs_a_free_name_and_a_session_at_rest(tiny_model: Any, make_engine: Any) -> None:
    engine = make_engine(tiny_model("qwen3"), "full", None, {})
    assert {Capability.FORK, Capability.FORCE} <= engine.info.capabilities
    engine.open("main", ByNumber())
    engine.fork("main", "empty", ByNumber())
    assert decode(engine, "empty", [5, 6], 3) == decode(engine, "main", [5, 6], 3)
    with pytest.raises(KVBenchError, match="open already"):
        engine.fork("main", "empty", ByNumber())
    with pytest.raises(KeyError):
        engine.fork("nobody", "new", ByNumber())
    engine.shutdown()


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from("fdfcs"), st.integers(1, 40)), max_size=14
    )
)
def test_any_tree_of_forks_is_exact(steps: list[tuple[int, str, int]]) -> None:
    """Forks, decodes, closes and forced answers in any order, against a replay of each leaf."""
    from agentbench_kv.conformance.reference import tiny_model as build

    network = build(layers=2)
    engines = [_engine(network), _engine(network)]
    tree, plain = engines
    tree.open("0", ByNumber())
    logs: dict[str, list[tuple[list[int], list[int]]]] = {"0": []}
    rng, count = random.Random(7), 1
    for which, what, size in steps:
        if not logs:
            break
        name = sorted(logs)[which % len(logs)]
        if what == "f":
            tree.fork(name, str(count), ByNumber())
            logs[str(count)] = logs[name].copy()
            count += 1
        elif what == "c" and len(logs) > 1:
            tree.close(name)
            del logs[name]
        elif what == "s":
            asked, said = ids(rng, size), ids(rng, 2 * size)
            force(tree, name, asked, said)
            logs[name].append((asked, said))
        elif what == "d":
            asked = ids(rng, size)
            logs[name].append((asked, decode(tree, name, asked, size)))
    for name, turns in logs.items():
        plain.open(name, ByNumber())
        for asked, said in turns:
            force(plain, name, asked, said)
        assert decode(tree, name, [3, 4], 20) == decode(plain, name, [3, 4], 20), (name, steps)
        assert tree.stats(name).live == plain.stats(name).live
    for engine in engines:
        engine.shutdown()


def _engine(network: Any) -> Any:
    from agentbench_kv.conformance.driver import in_memory_engine

    method = make_method("agentkv", 48, EVERY)
    return in_memory_engine(network, method, TraceRecorder())
