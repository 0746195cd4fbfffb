"""Memories: how much of a message came back, what stands before a question, vectors over HTTP."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parrot import Parrot, past

from agentbench_kv.encoders.words import HashedWords
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.gateway import Gateway, open_gateway
from agentbench_kv.gateway.client import InProcessClient
from agentbench_kv.gateway.http import BackgroundServer, Embedder, ServerSettings
from agentbench_kv.gateway.memory import ASIDE, shares
from agentbench_kv.gateway.recall import PlainMemories
from agentbench_kv.gateway.reports import TurnInfo
from agentbench_kv.registry import make_method

ROWS = st.lists(st.lists(st.integers(0, 40), min_size=5, max_size=5, unique=True), max_size=4)
PLACES = st.dictionaries(st.integers(1, 9), st.tuples(st.integers(0, 20), st.integers(1, 15)))


@given(ROWS, PLACES)
def test_shares_by_brute_force(rows: list[list[int]], places: dict[int, tuple[int, int]]) -> None:
    spans = {number: (start, start + size) for number, (start, size) in places.items()}
    layers = [sorted(layer) for layer in rows]
    found = shares(np.array(layers, np.int64).reshape(len(layers), 5), spans)
    for number, (start, end) in spans.items():
        held = [sum(start <= row < end for row in layer) for layer in layers]
        wanted = [count / (end - start) for count in held]
        assert (number in found) == any(held)
        assert [*found.get(number, wanted)] == pytest.approx(wanted)
        assert all(0.0 <= share <= 1.0 for share in wanted)


@pytest.fixture
def told() -> Iterator[tuple[Gateway, Parrot]]:
    method = make_method("mem0", None, {})
    engine = EmbeddedEngine.create(EngineOptions("micro", method.below(), device="cpu"))
    gateway = open_gateway(engine, method)
    assert isinstance(gateway, Gateway)
    store = Parrot(gateway)
    gateway.memories = PlainMemories(gateway, store)
    yield gateway, store
    engine.shutdown()


def shown(gateway: Gateway, session: str) -> str:
    return gateway.codec.decode(gateway.token_log(session)[0])


def asked(client: InProcessClient, *texts: str) -> Any:
    return client.chat([{"role": "user", "content": text} for text in texts], max_tokens=3)


def test_what_is_found_stands_before_the_message_that_asked(told: tuple[Gateway, Parrot]) -> None:
    gateway, store = told
    turns: list[TurnInfo] = []
    gateway.on_turn = lambda session, turn: turns.extend([turn] * session.startswith(ASIDE))
    with InProcessClient(gateway, "a") as client:
        client.remember(past("red apple", "green pear"))
        client.remember(past("blue apple", first=3))
        reply = asked(client, "which apple")
        assert reply.recalled.texts == ("red apple", "blue apple")
        assert reply.recalled.messages == {1: 1.0, 3: 1.0}
        text = shown(gateway, "a")
        assert text.index("- red apple") < text.index("- blue apple") < text.index("which apple")
        assert "pear" not in text
        # The next request still extends the log, and asks about its own message alone.
        history = [{"role": "user", "content": "which apple"}, reply.message]
        again = client.chat([*history, {"role": "user", "content": "and pear"}], max_tokens=3)
        assert again.recalled.texts == ("green pear",)
        assert client.report.resets == 0
        assert store.searched == ["which apple", "and pear"]
        assert shown(gateway, "a").count("red apple") == 1
        # The model's part in keeping it is on the ledger, and nowhere else.
        reading = client.reading
        assert reading is not None
        assert (reading.calls, reading.failed) == (3, 0)
        assert reading.tokens == sum(turn.prefill_tokens + turn.output_tokens for turn in turns)
        assert gateway.memories is not None
        assert gateway.memories.taken("a") == (2, reading.tokens)
        # What the requests of a past session have in common was read once.
        assert [turn.cached_tokens > 0 for turn in turns] == [False, True, False]
    assert store.banks == {}
    assert gateway.memories.taken("a") == (0, 0)
    assert gateway.sessions() == []


def test_what_a_past_session_has_taken_so_far_is_told_while_it_is_taken_in(
    told: tuple[Gateway, Parrot],
) -> None:
    gateway, _ = told
    memories, seen = gateway.memories, list[tuple[int, int]]()
    assert memories is not None
    gateway.memories = PlainMemories(
        gateway, Parrot(gateway, lambda _: seen.append(memories.taken("a")))
    )
    memories = gateway.memories
    with InProcessClient(gateway, "a") as client:
        client.remember(past("red apple", "green pear"))
        client.remember(past("blue apple", first=3))
        assert [sessions for sessions, _ in seen] == [0, 0, 0, 0, 1, 1]
        tokens = [tokens for _, tokens in seen]
        assert tokens[0] == 0 < tokens[1] == tokens[2] < tokens[3] == tokens[4] < tokens[5]
        assert memories.taken("a") == (2, tokens[5])


def test_a_search_is_on_the_clock_of_the_answer_it_was_made_for(
    told: tuple[Gateway, Parrot],
) -> None:
    gateway, store = told
    with InProcessClient(gateway, "a") as client:
        client.remember(past("red apple"))
        history: list[Any] = [{"role": "user", "content": "which apple"}]
        replies = []
        for number in range(3):
            replies.append(client.chat(history, max_tokens=3))
            result = {"role": "tool", "tool_call_id": str(number), "content": "{}"}
            history += [replies[-1].message, result]
        assert store.searched == ["which apple"]
        assert [reply.recalled.texts for reply in replies] == [("red apple",)] * 3
        assert [reply.recalled.seconds > 0 for reply in replies] == [True, False, False]
        turns = client.report.turns
        both = zip(client.answers, turns, strict=True)
        own = [spent.ttft_ms == turn.ttft_ms for spent, turn in both]
        assert own == [False, True, True]


def test_a_bank_is_its_own_sessions_alone(told: tuple[Gateway, Parrot]) -> None:
    gateway, store = told
    with InProcessClient(gateway, "a") as one, InProcessClient(gateway, "b") as other:
        one.remember(past("red apple"))
        other.remember(past("green pear"))
        beside = one.another()
        assert asked(beside, "apple pear").recalled.texts == ("red apple",)
        assert asked(other, "apple pear").recalled.texts == ("green pear",)
        assert asked(InProcessClient(gateway, "c"), "apple pear").recalled is None
        beside.close()
        assert set(store.banks) == {"a", "b"}


@pytest.fixture
def url() -> Iterator[str]:
    method = make_method("full", None, {})
    engine = EmbeddedEngine.create(EngineOptions("micro", method, device="cpu"))
    settings = ServerSettings(embedder=Embedder("hash", HashedWords().encode))
    with BackgroundServer(open_gateway(engine, method), settings=settings) as server:
        yield server.url
    engine.shutdown()


def test_vectors_over_http(url: str) -> None:
    texts = ["red apple", "green pear"]
    wanted = np.asarray(HashedWords().encode(texts), np.float32)
    plain = httpx.post(f"{url}/embeddings", json={"model": "hash", "input": texts}).json()
    assert np.array_equal(
        np.array([each["embedding"] for each in plain["data"]], np.float32), wanted
    )
    one = {"model": "hash", "input": texts[1], "encoding_format": "base64"}
    (coded,) = httpx.post(f"{url}/embeddings", json=one).json()["data"]
    found = np.frombuffer(base64.b64decode(coded["embedding"]), "<f4")
    assert np.array_equal(found, wanted[1])


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "other", "input": "a"}, 404, "there is 'hash'"),
        ({"model": "hash", "input": "a", "dimensions": 3}, 400, "dimensions"),
        ({"model": "hash", "input": 3}, 400, "input"),
        ({"model": "hash"}, 400, "input"),
    ],
)
def test_what_cannot_be_embedded_is_refused(
    url: str, body: dict[str, Any], status: int, said: str
) -> None:
    answer = httpx.post(f"{url}/embeddings", json=body)
    assert answer.status_code == status
    assert said in answer.text
