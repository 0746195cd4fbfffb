"""Sessions that nobody asks for, and conversations that name none."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentbench_kv.engines.base import Generation, Sampling
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.gateway import (
    ChatResult,
    Gateway,
    SessionLimitError,
    UnknownSessionError,
)
from agentbench_kv.gateway.headerless import Conversations, Opening, SeenKeys
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.gateway.session import Known

GatewayOf = Callable[..., Gateway]
USER = {"role": "user", "content": "Weather?"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


class Clock:
    def __init__(self, gateway: Gateway) -> None:
        self.now = 100.0
        gateway.clock = lambda: self.now


def test_idle_sessions_expire_and_are_reported(
    gateway_of: GatewayOf, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[Any] = []
    gateway = gateway_of("one", "two", "three", idle_s=60, on_close=closed.append)
    clock = Clock(gateway)
    first = gateway.chat("old", [USER])
    clock.now += 59
    gateway.chat("new", [USER])
    assert gateway.expire() == []
    clock.now += 1
    with caplog.at_level(logging.INFO, "agentbench_kv"):
        assert [report.session for report in gateway.expire()] == ["old"]
    assert "session old expired" in caplog.text
    assert gateway.sessions() == ["new"]
    assert [(report.session, report.expired) for report in closed] == [("old", True)]
    assert gateway.report("old").turns == (first.turn,)
    # Whoever closes it late still gets the account, once.
    assert gateway.close_report("old").expired
    with pytest.raises(UnknownSessionError):
        gateway.close_report("old")


def test_a_session_that_expired_says_so_when_it_is_asked_again(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("one", "two", "three", idle_s=60)
    clock = Clock(gateway)
    first = gateway.chat("s", [USER])
    clock.now += 61
    gateway.expire()
    again = gateway.chat("s", [USER, first.message, USER])
    assert (again.turn.cached_tokens, again.report.resets) == (0, 1)
    assert "expired" in again.usage["kvbench"]["note"]
    later = gateway.chat("s", [USER, first.message, USER, again.message, USER])
    assert later.turn.cached_tokens > 0
    assert "note" not in later.usage["kvbench"]


def test_a_session_that_answers_does_not_expire(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("one two three", idle_s=60)
    clock = Clock(gateway)
    stream = gateway.stream("s", [USER])
    next(stream)
    clock.now += 1000
    assert gateway.expire() == []
    assert isinstance(list(stream)[-1], ChatResult)
    assert gateway.expire() == []
    clock.now += 60
    assert len(gateway.expire()) == 1


def test_a_request_that_waits_keeps_its_session(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("x", idle_s=60)
    clock = Clock(gateway)
    gateway.chat("s", [USER])
    clock.now += 59
    gateway.touch("s")
    gateway.touch("unknown")
    clock.now += 59
    assert gateway.expire() == []
    assert gateway.sessions() == ["s"]


def test_an_engine_that_cannot_close_one_session_closes_the_others(
    gateway_of: GatewayOf, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = gateway_of("x", idle_s=60)
    clock, close = Clock(gateway), gateway.engine.close
    for name in "ab":
        gateway.chat(name, [USER])

    def failing(session: str) -> Any:
        if session == "a":
            raise RuntimeError("broken")
        return close(session)

    gateway.engine.close = failing  # type: ignore[method-assign]
    clock.now += 60
    assert [report.session for report in gateway.expire()] == ["b"]
    assert gateway.sessions() == []
    assert "could not be closed" in caplog.text


def test_idle_sessions_take_no_place_from_one_shots(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("x", max_sessions=2)
    for name in "ab":
        gateway.chat(name, [USER])
    with pytest.raises(SessionLimitError):
        gateway.chat("c", [USER])
    assert [gateway.chat(None, [USER]).content for _ in range(5)] == ["x"] * 5
    assert gateway.sessions() == ["a", "b"]


def test_expiry_over_http(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("x", idle_s=0.2)
    body = {"model": "gold", "messages": [USER]}
    with BackgroundServer(gateway) as server:
        url = f"{server.url}/chat/completions"
        httpx.post(url, json=body, headers={"X-KVBench-Session": "s"})
        metrics = server.url.replace("/v1", "/metrics")
        for _ in range(2000):
            if "kvbench_sessions_expired_total 1" in (text := httpx.get(metrics).text):
                break
            threading.Event().wait(0.02)
        assert "kvbench_sessions_expired_total 1" in text
        assert "kvbench_sessions 0" in text
        gateway.idle_s = None  # or it expires again on a slow machine
        answer = httpx.post(url, json=body, headers={"X-KVBench-Session": "s"})
        assert "expired" in answer.headers["x-kvbench-note"]
        assert "expired" not in httpx.delete(f"{server.url}/sessions/s").json()


def chat_on(gateway: Gateway, turns: int, **options: Any) -> list[ChatResult]:
    history: list[Any] = [USER]
    results = []
    for _ in range(turns):
        results.append(gateway.chat(None, history, **options))
        history += [results[-1].message, USER]
    return results


def test_the_third_request_is_told_how_to_keep_its_cache_once(
    gateway_of: GatewayOf, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = gateway_of("x")
    for _ in range(5):
        gateway.chat(None, [USER])
    notes = [result.report.note for result in chat_on(gateway, 4)]
    assert ["X-KVBench-Session" in note for note in notes] == [False, False, True, False]
    assert {result.report.note for result in chat_on(gateway, 4)} == {""}
    assert caplog.text.count("--sessions auto") == 1
    assert gateway.sessions() == []


def test_the_hint_over_http(gateway_of: GatewayOf) -> None:
    with BackgroundServer(gateway_of("x")) as server:
        history: list[Any] = [USER]
        for turn in range(3):
            body = {"model": "gold", "messages": history}
            answer = httpx.post(f"{server.url}/chat/completions", json=body)
            assert ("x-kvbench-note" in answer.headers) == (turn == 2)
            history += [answer.json()["choices"][0]["message"], USER]


def test_a_conversation_without_a_header_keeps_its_cache(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("<think>\na\n</think>\n\none", "two", "three", conversations=4)
    results = chat_on(gateway, 3, tools=TOOLS)
    assert [result.content for result in results] == ["one", "two", "three"]
    assert [result.turn.turn for result in results] == [0, 1, 2]
    assert all(result.turn.cached_tokens > 0 for result in results[1:])
    assert results[-1].report.resets == 0
    assert len(gateway.sessions()) == 1


@pytest.mark.parametrize(
    "history",
    [
        [USER],  # the beginning again
        [USER, {"role": "assistant", "content": "one"}],  # nothing new
        [USER, {"role": "assistant", "content": "One"}, USER],
        [{**USER, "content": "weather?"}, {"role": "assistant", "content": "one"}, USER],
        [USER, {"role": "assistant", "content": "one"}, USER, {**USER, "role": "assistant"}, USER],
    ],
)
def test_what_does_not_extend_an_answer_is_a_new_conversation(
    gateway_of: GatewayOf, history: list[Any]
) -> None:
    gateway = gateway_of("one", "two", conversations=4)
    gateway.chat(None, [USER])
    assert gateway.chat(None, history).turn.cached_tokens == 0


def test_other_tools_are_another_conversation(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("one", "two", conversations=4)
    said = gateway.chat(None, [USER]).message
    assert gateway.chat(None, [USER, said, USER], TOOLS).turn.cached_tokens == 0


def test_the_oldest_conversations_are_given_up(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("one", "two", conversations=2)
    said = [
        gateway.chat(None, [{"role": "user", "content": str(number)}]).message
        for number in range(4)
    ]
    assert len(gateway.sessions()) == 2
    cached = [
        gateway.chat(None, [{"role": "user", "content": str(n)}, said[n], USER]).turn.cached_tokens
        for n in (0, 3)
    ]
    assert [tokens > 0 for tokens in cached] == [False, True]


def test_a_request_that_fails_leaves_no_session(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("one two three", "x", conversations=4)
    stream = gateway.stream(None, [USER])
    next(stream)
    stream.close()
    assert gateway.sessions() == []
    assert isinstance(gateway.engine, ScriptedEngine)
    assert gateway.engine.sessions() == []


def test_an_expired_conversation_is_answered_afresh(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("one", "two", conversations=4, idle_s=60)
    clock = Clock(gateway)
    said = gateway.chat(None, [USER]).message
    clock.now += 61
    assert len(gateway.expire()) == 1
    assert gateway.chat(None, [USER, said, USER]).turn.cached_tokens == 0
    assert len(gateway.sessions()) == 1


class Thinking(ScriptedEngine):
    """Has a thought of its own before each answer, and remembers which thoughts it saw."""

    def __init__(self, answers: tuple[str, ...], path: Path) -> None:
        super().__init__(self._said, tokenizer_path=path)
        self._answers = answers
        self.seen: dict[str, set[str]] = {}  # by the thought: those in the cache it came from

    def _said(self, session: str) -> list[str]:
        thoughts = [f"T{session.split()[-1]}x{turn}T" for turn in range(40)]
        return [
            f"<think>\n{thought}\n</think>\n\n{self._answers[turn % len(self._answers)]}"
            for turn, thought in enumerate(thoughts)
        ]

    def generate(self, session: str, sampling: Sampling) -> Generation:
        text = self._tokenizer.decode(self.token_log(session))
        turn = self._turns[session]
        thought = f"T{session.split()[-1]}x{turn}T"
        self.seen[thought] = set(re.findall(r"T\d+x\d+T", text))
        return super().generate(session, sampling)


# (client, what it says, how much of its history it drops first: a fork, or a fresh start)
STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.sampled_from([0, 0, 0, 1, 9])),
    max_size=25,
)


@pytest.mark.parametrize("examples", [80, pytest.param(3000, marks=pytest.mark.nightly)])
def test_no_client_ever_meets_the_cache_of_another(tokenizer_path: Path, examples: int) -> None:
    kept = []

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(steps=STEPS, answers=st.sampled_from([("x",), ("x", "y")]), keep=st.integers(1, 4))
    def check(steps: list[tuple[int, str, int]], answers: tuple[str, ...], keep: int) -> None:
        engine = Thinking(answers, tokenizer_path)
        gateway = Gateway(engine, conversations=keep, idle_s=10)
        clock = Clock(gateway)
        histories: list[list[Any]] = [[], [], []]
        thoughts: list[set[str]] = [set(), set(), set()]
        for client, text, dropped in steps:
            clock.now += 1 + 10 * (dropped == 9)
            gateway.expire()
            history = histories[client]
            del history[max(0, len(history) - 2 * dropped) :]
            history.append({"role": "user", "content": text})
            result = gateway.chat(None, history)
            seen = engine.seen[result.reasoning]
            assert seen <= thoughts[client], "a thought of another client was in the cache"
            kept.append(bool(seen))
            thoughts[client].add(result.reasoning)
            history.append({"role": "assistant", "content": result.content})
            assert len(gateway.sessions()) <= keep
            assert gateway.sessions() == engine.sessions()

    check()
    assert any(kept), "no cache was ever kept: the test shows nothing"


def test_clients_at_once_keep_apart(tokenizer_path: Path) -> None:
    engine = Thinking(("x",), tokenizer_path)
    gateway = Gateway(engine, conversations=8)
    failures: list[str] = []
    together = threading.Barrier(8, timeout=120)

    def drive(client: int) -> None:
        history: list[Any] = []
        thoughts: set[str] = set()
        for turn in range(12):
            together.wait()
            # All begin alike; from the third turn on each says its own.
            text = "same" if turn < 2 else f"client {client}"
            history.append({"role": "user", "content": text})
            result = gateway.chat(None, history)
            if not engine.seen[result.reasoning] <= thoughts:
                failures.append(result.reasoning)
            thoughts.add(result.reasoning)
            history.append(result.message)

    threads = [threading.Thread(target=drive, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert gateway.sessions() == engine.sessions()


def test_a_state_that_was_reached_twice_belongs_to_nobody() -> None:
    conversations = Conversations(keep=4)
    said = Known((("user", "a", ""), ("assistant", "b", "")))
    assert conversations.answered(said, Opening("one", 1)) == []
    assert conversations.answered(said, Opening("two", 1)) == ["two", "one"]
    more = Known((*said.messages, ("user", "c", "")))
    assert conversations.claim(more) == Opening()
    assert conversations.answered(said, Opening("three", 1)) == ["three"]


def test_seen_keys_never_forget() -> None:
    seen = SeenKeys()
    keys = [hashlib.sha256(bytes([number % 256, number // 256])).digest() for number in range(999)]
    assert sum(seen.add(key) for key in keys) < 5
    assert all(seen.add(key) for key in keys)
