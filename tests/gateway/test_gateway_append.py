"""Finished turns go to a memory beside the agent: who finds them, when, and what goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentbench_kv.adapters.base import PastSession
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.errors import KVBenchError, MemoryLostError, UsageError
from agentbench_kv.gateway import AnyGateway, open_gateway
from agentbench_kv.gateway.client import InProcessClient
from agentbench_kv.registry import make_method

Make = Callable[..., AnyGateway]


@pytest.fixture
def make() -> Iterator[Make]:
    engines: list[EmbeddedEngine] = []

    def start(**settings: str) -> AnyGateway:
        method = make_method("memart", None, {"topk": "4", "block": "8", **settings})
        engines.append(EmbeddedEngine.create(EngineOptions("micro", method, device="cpu")))
        return open_gateway(engines[-1], method)

    yield start
    for engine in engines:
        engine.shutdown()


def past(text: str) -> PastSession:
    return PastSession([{"role": "user", "content": text}], [1])


def asked(client: InProcessClient, *texts: str) -> Any:
    messages: list[dict[str, Any]] = []
    reply = None
    for text in texts:
        messages.append({"role": "user", "content": text})
        reply = client.chat(messages, max_tokens=6)
        messages.append(reply.message)
    return reply


def bank_of(gateway: AnyGateway, name: str) -> Any:
    return gateway.engine._banks[name]  # type: ignore[attr-defined]


def slow(gateway: AnyGateway, seconds: float = 0.3) -> list[str]:
    """Have appends take a while; return whose ended, in order."""
    ended: list[str] = []
    memorise = gateway.engine.memorise

    def late(session: str, bank: str, tokens: int | None = None, start: int = 0) -> int:
        if tokens is None:
            time.sleep(seconds)
        rows = memorise(session, bank, tokens, start)
        if tokens is None:
            ended.append(session)
        return rows

    gateway.engine.memorise = late  # type: ignore[method-assign]
    return ended


def test_a_later_session_finds_what_an_earlier_one_said(make: Make) -> None:
    gateway = make(append="turns", topk="400")
    with InProcessClient(gateway, "a") as client:
        client.remember(past("the red key is in the blue box"))
        before = bank_of(gateway, "a").rows
        first = client.another()
        asked(first, "where is the key", "and the box")
        fed = gateway.engine.stats(first.session).logical - 1
        later = client.another()
        asked(later, "what did I ask")
        recalled = gateway.engine.recalled(later.session)
        assert recalled.shape[1] == before + fed  # all there is
        reading = client.reading
        assert reading is not None
        # Its own turn is there for the next one.
        assert reading.appended == bank_of(gateway, "a").rows - before
        assert reading.appended > fed
        assert reading.append_s > 0
        assert reading.calls == 1


def test_without_the_setting_nothing_is_added(make: Make) -> None:
    gateway = make()
    with InProcessClient(gateway, "a") as client:
        client.remember(past("the red key is in the blue box"))
        before = bank_of(gateway, "a").rows
        asked(client.another(), "where is the key")
        assert bank_of(gateway, "a").rows == before
        assert client.reading is not None
        assert client.reading.appended == 0


@pytest.mark.parametrize("sets", ["layer", "shared"])
def test_a_session_s_own_turns_do_not_come_back_to_it(make: Make, sets: str) -> None:
    """It has them in its cache: with as many rows from others it answers as if none were added."""
    said = []
    for append in ("off", "turns"):
        gateway = make(append=append, sets=sets)
        with InProcessClient(gateway, "a") as client:
            client.remember(past("the red key is in the blue box, the green one is lost"))
            reply = asked(client, "where is the key", "which key is lost", "thank you")
            rows = gateway.engine.recalled("a").tolist()
            said.append((reply.content, rows, gateway.stats("a").restored))
    assert said[0] == said[1]


def test_nor_to_a_fork_of_it(make: Make) -> None:
    gateway = make(append="turns")
    with InProcessClient(gateway, "a") as client:
        client.remember(past("the red key is in the blue box, the green one is lost"))
        own = bank_of(gateway, "a").rows
        said = asked(client, "where is the key").message
        side = client.fork()
        history = [{"role": "user", "content": "where is the key"}, said]
        side.chat([*history, {"role": "user", "content": "well"}], max_tokens=2)
        assert gateway.report(side.session).resets == 0
        assert gateway.engine.recalled(side.session).max() < own


def test_a_prompt_waits_for_what_it_hangs_on(make: Make) -> None:
    """However long it takes: answers, rows and the bank are the same."""
    found = []
    for wait in (0.0, 0.3):
        gateway = make(append="turns")
        ended = slow(gateway, wait)
        with InProcessClient(gateway, "a") as client:
            client.remember(past("the red key is in the blue box"))
            for text in ("where is the key", "where is the box"):
                started = time.perf_counter()
                side = client.another()
                asked(side, text)
                went_on = time.perf_counter() - started
            client.remember(past("the green key is lost"))  # behind what was said before
            last = client.another()
            reply = asked(last, "and now")
            rows = gateway.engine.recalled(last.session).tolist()
            assert client.reading is not None  # which waits
            bank = bank_of(gateway, "a")
            found.append((reply.content, rows, bank.starts.tolist(), bank.sizes.tolist()))
            assert len(ended) >= 2
            assert went_on < 60
    assert found[0] == found[1]


def test_the_agent_does_not_wait(make: Make) -> None:
    gateway = make(append="turns")
    held, memorise = threading.Event(), gateway.engine.memorise

    def late(session: str, bank: str, tokens: int | None = None, start: int = 0) -> int:
        if tokens is None:
            assert held.wait(60)
        return memorise(session, bank, tokens, start)

    gateway.engine.memorise = late  # type: ignore[method-assign]
    with InProcessClient(gateway, "a") as client:
        client.remember(past("the red key is in the blue box"))
        before = bank_of(gateway, "a").rows
        asked(client, "where is the key")  # is answered, though its rows are not there
        assert bank_of(gateway, "a").rows == before
        held.set()
        assert client.reading is not None
        assert bank_of(gateway, "a").rows == before + client.reading.appended > before


@pytest.mark.parametrize("what", [UsageError("no room"), ConnectionError("gone"), KeyError("x")])
def test_what_goes_wrong_is_said_to_the_next_prompt_and_at_the_end(
    make: Make, what: Exception
) -> None:
    gateway = make(append="turns")
    memorise = gateway.engine.memorise

    def broken(session: str, bank: str, tokens: int | None = None, start: int = 0) -> int:
        if tokens is None:
            raise what
        return memorise(session, bank, tokens, start)

    gateway.engine.memorise = broken  # type: ignore[method-assign]
    client = InProcessClient(gateway, "a")
    client.remember(past("the red key is in the blue box"))
    asked(client, "where is the key")
    with pytest.raises(KVBenchError, match="session a could not be added to its memory") as caught:
        asked(client.another(), "and now")
    assert isinstance(caught.value, MemoryLostError) == isinstance(what, OSError)
    assert client.reading is not None
    with pytest.raises(KVBenchError, match="could not be added"):
        client.close()
    assert gateway.sessions() == []
    client.close()  # all said
