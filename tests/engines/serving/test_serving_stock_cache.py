"""The prefix cache of a server as shipped: what it found there, and that it can be emptied."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentbench_kv.engines.base import Sampling
from agentbench_kv.engines.serving import wire
from agentbench_kv.errors import KVBenchError
from agentbench_kv.phases import TokenPhases

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import PROMPT, Build, extend, folder_of, kill


def test_a_server_as_shipped_says_what_it_had_cached_of_any_session(build: Build) -> None:
    engine = build({"cached": 7}, stock=True)
    engine.open("s", TokenPhases())
    extend(engine, "s", PROMPT)
    generation = engine.generate("s", Sampling(4))
    assert generation.cached_tokens is None
    assert len(list(generation)) == 4
    assert generation.cached_tokens == 7
    # The account is of what the session held itself, which was nothing.
    assert (engine.stats("s").cached_tokens, engine.stats("s").recomputed) == (0, 0)


def test_given_answers_and_plug_ins_leave_the_count_to_the_account(build: Build) -> None:
    for stock in (True, False):
        engine = build({"cached": 7}, stock=stock)
        engine.open("s", TokenPhases())
        extend(engine, "s", PROMPT)
        generation = engine.force("s", [3, 5]) if stock else engine.generate("s", Sampling(2))
        assert len(list(generation)) == 2
        assert generation.cached_tokens is None


def test_it_is_emptied_as_soon_as_nothing_holds_it(build: Build) -> None:
    engine = build({"keeps": 2}, stock=True)
    engine.drop_prefixes()
    asked = (folder_of(engine) / "emptied").read_text().splitlines()
    assert asked == ["/reset_prefix_cache"] * 3


def test_a_cache_that_stays_is_an_error(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_EMPTY_S", 0.0)
    engine = build({"keeps": 9}, stock=True)
    with pytest.raises(KVBenchError, match=r"it was kept \(200: .*false"):
        engine.drop_prefixes()


def test_a_dead_server_is_no_failure_of_its_cache(build: Build) -> None:
    engine = build(stock=True)
    kill(engine, "group")
    with pytest.raises(OSError, match="does not answer"):
        engine.drop_prefixes()


def test_a_plug_in_without_shared_prefixes_has_none_to_drop(build: Build) -> None:
    engine = build()
    engine.drop_prefixes()
    assert not (folder_of(engine) / "emptied").exists()
