"""Sessions inside the process: the token log, extensions, resets, accounting."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentbench_kv.engines.base import FinishReason, Generation, KVStats
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.errors import UsageError
from agentbench_kv.gateway import (
    ChatResult,
    Delta,
    Gateway,
    Options,
    SessionBusyError,
    SessionLimitError,
    UnknownSessionError,
)
from agentbench_kv.gateway.client import InProcessClient
from agentbench_kv.gateway.turn import cached
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases.machine import PhaseMachine

GatewayOf = Callable[..., Gateway]

CALL = (
    "<think>\nwhere?\n</think>\n\nLooking.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city":   "Paris"}}\n</tool_call>'
)
USER = [{"role": "user", "content": "Weather?"}]
TOOL = {"role": "tool", "tool_call_id": "x", "content": "sunny"}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]


def assert_log_exact(gateway: Gateway, session: str) -> None:
    """The log is what the engine holds, and its phases are those of one pass over it."""
    engine = gateway.engine
    assert isinstance(engine, ScriptedEngine)
    tokens, phases = gateway.token_log(session)
    assert tokens == engine.token_log(session)
    assert phases == engine.phase_log(session)
    assert phases == [int(p) for p in PhaseMachine(gateway.table).label_many(tokens)]


def test_a_session_extends_and_keeps_its_thoughts(gateway_of: GatewayOf) -> None:
    gateway = gateway_of(CALL, "It is <b>sunny</b>.", "Bye")
    with InProcessClient(gateway, "s") as client:
        history: list[dict[str, Any]] = list(USER)
        first = client.chat(history, TOOLS)
        assert first.finish_reason == "tool_calls"
        assert first.raw == CALL
        history += [first.message, TOOL]
        second = client.chat(history, TOOLS)
        assert (second.content, second.finish_reason) == ("It is <b>sunny</b>.", "stop")
        # The next user message makes the template drop the first thought; the log keeps it.
        client.chat([*history, second.message, {"role": "user", "content": "Thanks"}], TOOLS)
        tokens, _ = gateway.token_log("s")
        text = gateway.codec.decode(tokens)
        assert CALL + "<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny" in text
        assert "<|im_end|><|im_end|>" not in text
        assert_log_exact(gateway, "s")
        assert client.report.resets == 0
    turns = client.report.turns
    assert [turn.turn for turn in turns] == [0, 1, 2]
    assert turns[1].cached_tokens == turns[0].prompt_tokens + turns[0].output_tokens
    assert turns[1].phases["tool"] > 0 < turns[0].phases["act"]
    assert turns[0].phases["think"] > 0
    assert sum(sum(turn.phases.values()) for turn in turns) == client.report.stats.logical
    assert sum(turn.prefill_tokens for turn in turns) == client.report.stats.prefill_tokens
    assert client.report.usage["requests"] == 3
    assert client.report.prompt_sha is not None
    assert len(client.report.prompt_sha) == 64


def test_echoes_are_compared_by_meaning(gateway_of: GatewayOf) -> None:
    gateway = gateway_of(CALL, "ok")
    gateway.chat("s", USER)
    echo = {
        "role": "assistant",
        "content": [{"type": "text", "text": "Looking.\n"}],
        "tool_calls": [
            {"id": "z", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
        ],
    }
    result = gateway.chat("s", [*USER, echo, TOOL])
    assert result.report.resets == 0
    assert_log_exact(gateway, "s")


@pytest.mark.parametrize("change", ["content", "tools", "shorter", "call"])
def test_rewritten_history_is_one_counted_reset(gateway_of: GatewayOf, change: str) -> None:
    gateway = gateway_of(CALL, "answer", "more")
    first = gateway.chat("s", USER)
    before = gateway.stats("s")
    history: list[dict[str, Any]] = [*USER, first.message, TOOL]
    tools = None
    if change == "content":
        history[0] = {"role": "user", "content": "Time?"}
    elif change == "tools":
        tools = TOOLS
    elif change == "shorter":
        history = [USER[0]]
    else:
        function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
        history[1] = {**first.message, "tool_calls": [{"id": "a", "function": function}]}
    second = gateway.chat("s", history, tools)
    assert second.content == "answer"
    assert (second.turn.reset, second.report.resets) == (True, 1)
    assert second.turn.cached_tokens == 0
    assert second.turn.live_before == 0
    stats = gateway.stats("s")
    assert stats.decode_tokens == before.decode_tokens + second.turn.output_tokens
    assert stats.prefill_tokens == before.prefill_tokens + second.turn.prompt_tokens
    assert stats.logical == second.turn.prompt_tokens + second.turn.output_tokens
    assert_log_exact(gateway, "s")
    third = gateway.chat("s", [*history, second.message, *USER], tools)
    assert third.report.resets == 1


def test_accounting_outlives_every_reset(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("one", "two", "three")
    results = [gateway.chat("s", [{"role": "user", "content": "x" * size}]) for size in (9, 40, 2)]
    final = gateway.close_report("s")
    assert final.resets == 2
    turns = [result.turn for result in results]
    assert final.stats.decode_tokens == sum(turn.output_tokens for turn in turns)
    assert final.stats.prefill_tokens == sum(turn.prompt_tokens for turn in turns)
    assert final.stats.longest_prefill == turns[1].prompt_tokens
    assert final.stats.logical == turns[2].prompt_tokens + turns[2].output_tokens


def test_a_cut_answer_gets_its_turn_end(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("one two three four", "ok")
    first = gateway.chat("s", USER, options=Options(max_tokens=3))
    assert first.finish_reason == "length"
    assert len(first.token_ids) == 3
    gateway.chat("s", [*USER, first.message, *USER])
    text = gateway.codec.decode(gateway.token_log("s")[0])
    assert first.raw + "<|im_end|>\n<|im_start|>user" in text
    assert_log_exact(gateway, "s")


def test_stop_strings_span_tokens_and_are_cut(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("alpha beta STOP gamma", "ok")
    options = Options(stop=("TOPS", " STO", "zzz"))
    deltas = list(gateway.stream("s", USER, options=options))
    result = deltas[-1]
    assert isinstance(result, ChatResult)
    assert (result.content, result.raw, result.finish_reason) == ("alpha beta",) * 2 + ("stop",)
    streamed = [delta.text for delta in deltas[:-1] if isinstance(delta, Delta)]
    assert "".join(streamed) == "alpha beta"
    tokens, _ = gateway.token_log("s")
    assert gateway.codec.decode(tokens).endswith(("STO", "STOP"))
    assert gateway.codec.decode(result.token_ids).startswith("alpha beta STO")
    gateway.chat("s", [*USER, result.message, *USER])
    assert gateway.report("s").resets == 0
    assert_log_exact(gateway, "s")


def test_characters_split_over_tokens_stay_whole(gateway_of: GatewayOf) -> None:
    text = "Grüße 🌦️ 你好 👩‍🚀 end"
    gateway = gateway_of(text, text)
    pieces = [d.text for d in gateway.stream("s", USER) if isinstance(d, Delta)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    cut = gateway.chat(None, USER, options=Options(max_tokens=8))
    assert text.startswith(cut.content.rstrip("\ufffd"))


def test_raw_completions_extend_the_text(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("<think>\na</think>x", "yy", "z")
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    first = gateway.complete("s", prompt)
    assert first.content == "<think>\na</think>x"
    prompt += first.content + "<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    second = gateway.complete("s", prompt)
    assert second.report.resets == 0
    assert gateway.codec.decode(gateway.token_log("s")[0]) == prompt + "yy<|im_end|>"
    assert_log_exact(gateway, "s")
    # Without the stop that is in the log it is another text.
    third = gateway.complete("s", prompt + "yy and on")
    assert third.report.resets == 1


def test_raw_completions_add_stop_strings_once(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("value: 7; rest", "ok")
    first = gateway.complete("s", "Q", Options(stop=(";",)))
    assert first.content == "value: 7"
    gateway.complete("s", "Qvalue: 7; next")
    assert gateway.report("s").resets == 0
    ids, _ = gateway.token_log("s")
    assert gateway.codec.decode(ids).replace("<|im_end|>", "") == "Qvalue: 7; nextok"
    special = gateway.complete(None, "Q", Options(stop=("<|im_end|>",)))
    assert special.finish_reason == "stop"


def test_raw_ids_extend_the_log(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("x", "y", "z")
    first = gateway.complete("s", [5, 6, 7])
    log, _ = gateway.token_log("s")
    assert log == [5, 6, 7, *first.token_ids]
    second = gateway.complete("s", [*log, 8])
    assert (second.turn.cached_tokens, second.report.resets) == (len(log), 0)
    third = gateway.complete("s", [5, 9])
    assert third.report.resets == 1
    assert_log_exact(gateway, "s")


def test_context_limit(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("a long answer " * 20, "more", context_limit=60)
    first = gateway.chat("s", USER)
    assert first.finish_reason == "context_limit"
    assert first.turn.prompt_tokens + first.turn.output_tokens == 60
    second = gateway.chat("s", [*USER, first.message, *USER])
    assert (second.finish_reason, second.content, second.token_ids) == ("context_limit", "", [])
    assert second.report.resets == 0
    assert_log_exact(gateway, "s")


def test_closing_a_stream_early_leaves_an_exact_log(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("one two three four five six", "ok")
    stream = gateway.stream("s", USER)
    next(iter(stream))
    with pytest.raises(SessionBusyError):
        gateway.chat("s", USER)
    stream.close()
    assert gateway.report("s").turns[0].finish_reason == "cancelled"
    assert_log_exact(gateway, "s")
    # Who never saw the answer sends the question again: another history.
    assert gateway.chat("s", USER).report.resets == 1


def test_tokens_in_flight_at_a_cancel_are_logged(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("one two three four five six", "ok")
    generate = gateway.engine.generate

    class Ahead(Generation):
        """Has already made the next token when it hands out one."""

        def __init__(self, inner: Generation) -> None:
            self.inner = inner

        def __iter__(self) -> Iterator[int]:
            made: list[int] = []
            for token in self.inner:
                made.append(token)
                if len(made) > 2:
                    yield made.pop(0)
            yield from made

        def cancel(self) -> None:
            self.inner.cancel()

    gateway.engine.generate = lambda *args: Ahead(generate(*args))
    stream = gateway.stream("s", USER)
    next(iter(stream))
    stream.close()
    assert gateway.report("s").turns[0].output_tokens > 2
    assert_log_exact(gateway, "s")


def test_sessions_end(gateway_of: GatewayOf) -> None:
    closed = []
    gateway = gateway_of("x", max_sessions=2, on_close=closed.append)
    gateway.chat(None, USER)
    assert gateway.sessions() == []
    for name in "ab":
        gateway.chat(name, USER)
    with pytest.raises(SessionLimitError, match="2 sessions"):
        gateway.chat("c", USER)
    stats = gateway.close_report("a").stats
    assert stats.logical == stats.live > 0
    gateway.chat("c", USER)
    with pytest.raises(UnknownSessionError):
        gateway.close_report("a")
    assert gateway.report("a").stats == stats
    for name in gateway.sessions():
        gateway.close_report(name)
    assert gateway.sessions() == []
    assert [report.session for report in closed][1:] == ["a", "b", "c"]


def test_a_client_keeps_its_report_whoever_closes(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("x")
    client = InProcessClient(gateway, "s")
    assert client.report.turns == ()
    client.chat(USER)
    gateway.close_report("s")
    assert len(client.close().turns) == 1
    assert len(client.close().turns) == 1


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ([{"content": "x"}], "needs a role"),
        ([{"role": "user", "content": 3}], "must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url' is not text"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "name"),
        ([{"role": "assistant", "tool_calls": 5}], "tool_calls must be a list, not int"),
        ([{"role": "assistant", "tool_calls": [5]}], "name"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": 5}]}], "not int"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[" * 5000}]}],
            "deeper than 100",
        ),
        ([{"role": "robot", "content": ""}], "no role 'robot'"),
        ([{"role": "user", "content": "", "forbidden": True}], "not this message"),
    ],
)
def test_messages_the_template_cannot_take(
    gateway_of: GatewayOf, messages: list[dict[str, Any]], words: str
) -> None:
    gateway = gateway_of("x")
    with pytest.raises(UsageError, match=words):
        gateway.chat("s", messages)
    assert gateway.sessions() == []


def test_a_developer_is_the_system(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("one", "two")
    first = gateway.chat("s", [{"role": "developer", "content": "Be short."}, *USER])
    history = [{"role": "system", "content": "Be short."}, *USER, first.message, *USER]
    assert gateway.chat("s", history).turn.reset is False
    text = gateway.codec.decode(gateway.token_log("s")[0])
    assert text.startswith("<|im_start|>system\nBe short.")


def test_ids_of_no_token_are_refused(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("x")
    for ids in ([10**9], [0, -1]):
        with pytest.raises(UsageError, match="token ids of this model"):
            gateway.complete("s", ids)
    assert gateway.sessions() == []


def test_no_engine_reserves_more_than_the_context(gateway_of: GatewayOf) -> None:
    gateway, asked = gateway_of("x", context_limit=500), []
    generate = gateway.engine.generate

    def spy(session: str, sampling: Any) -> Any:
        asked.append(sampling.max_tokens)
        return generate(session, sampling)

    gateway.engine.generate = spy
    for limit in (2**31 - 1, 7):
        gateway.chat(None, USER, options=Options(max_tokens=limit))
    assert asked == [500, 7]


def test_options_are_checked() -> None:
    for wrong in ({"max_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"top_k": -1}):
        with pytest.raises(UsageError):
            Options(**wrong)


def test_turn_seeds_differ_and_repeat(gateway_of: GatewayOf) -> None:
    gateway, seeds = gateway_of("x", "y", "z"), []
    generate = gateway.engine.generate

    def spy(session: str, sampling: Any) -> Any:
        seeds.append(sampling.seed)
        return generate(session, sampling)

    gateway.engine.generate = spy
    for session in "ab":
        for seed in (0, 0, 1):
            gateway.chat(session, USER, options=Options(seed=seed))
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3


def test_an_engine_that_breaks_makes_the_session_start_over(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("x", "y")
    generate = gateway.engine.generate

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    gateway.engine.generate = broken
    with pytest.raises(RuntimeError):
        gateway.chat("s", USER)
    gateway.engine.generate = generate
    result = gateway.chat("s", USER)
    assert (result.content, result.report.resets) == ("x", 1)
    assert_log_exact(gateway, "s")


def test_many_sessions_from_many_threads(gateway_of: GatewayOf) -> None:
    gateway = gateway_of(CALL, "Grüße 🌦️", "done")
    failures: list[BaseException] = []

    def drive(name: str) -> None:
        try:
            history: list[dict[str, Any]] = list(USER)
            for _ in range(3):
                result = gateway.chat(name, history)
                history += [result.message, *USER]
            assert gateway.report(name).resets == 0
            assert_log_exact(gateway, name)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=drive, args=(f"s{n}",)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(gateway.sessions()) == 16


class Endless(Generation):
    """Says one word, then nothing until it is cancelled."""

    def __init__(self, inner: Generation) -> None:
        self.inner = inner
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[int]:
        yield next(iter(self.inner))
        # Only a broken test waits so long.
        assert self.cancelled.wait(30)
        self.finish_reason = FinishReason.CANCELLED

    def cancel(self) -> None:
        self.cancelled.set()


def test_closing_a_session_ends_its_request(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("word " * 400)
    generate = gateway.engine.generate
    gateway.engine.generate = lambda *args: Endless(generate(*args))
    started = threading.Event()
    results: list[Delta | ChatResult] = []

    def drive() -> None:
        for item in gateway.stream("s", USER):
            results.append(item)
            started.set()

    thread = threading.Thread(target=drive)
    thread.start()
    started.wait(30)
    gateway.close_report("s")
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(results[-1], ChatResult)
    assert results[-1].finish_reason == "cancelled"
    assert gateway.sessions() == []


def test_a_cancelled_session_answers_nothing_until_it_is_closed(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("one two three", "one two three", "one two three")
    stream = gateway.stream("s", USER)
    next(stream)
    gateway.cancel("s")
    *_, cut = stream
    assert isinstance(cut, ChatResult)
    assert cut.finish_reason == "cancelled"
    assert len(cut.token_ids) < 4
    later = gateway.chat("s", [*USER, cut.message, *USER])
    assert (later.finish_reason, later.token_ids) == ("cancelled", [])
    assert_log_exact(gateway, "s")
    assert len(gateway.close_report("s").turns) == 2
    assert gateway.chat("s", USER).content == "one two three"


def test_a_session_can_be_cancelled_before_it_is_opened(gateway_of: GatewayOf) -> None:
    gateway = gateway_of("one", "two")
    gateway.cancel("s")
    assert gateway.sessions() == []
    assert gateway.chat("other", USER).finish_reason == "stop"
    assert gateway.chat("s", USER).finish_reason == "cancelled"
    gateway.close_report("s")
    gateway.cancel("t")
    with pytest.raises(UnknownSessionError):
        gateway.close_report("t")
    assert gateway.chat("t", USER).finish_reason == "stop"


def test_closing_and_asking_at_once_leaks_nothing(gateway_of: GatewayOf) -> None:
    gateway = gateway_of(*["x"] * 4000)
    failures: list[BaseException] = []

    def hammer() -> None:
        for _ in range(150):
            for act in (lambda: gateway.chat("s", USER), lambda: gateway.close_report("s")):
                try:
                    act()
                except (SessionBusyError, UnknownSessionError):
                    continue
                except BaseException as error:  # noqa: BLE001
                    failures.append(error)

    threads = [threading.Thread(target=hammer) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in gateway.sessions():
        gateway.close_report(name)
    assert not failures
    assert gateway.sessions() == []
    assert isinstance(gateway.engine, ScriptedEngine)
    assert gateway.engine.sessions() == []


TEXT = st.lists(
    st.sampled_from([*"ab \n<>{}", "é", "🌦", "<think>", "</think>", "<tool_call>"]), max_size=12
).map("".join)
TURN = st.tuples(TEXT, TEXT.filter(str.strip), st.booleans(), st.integers(0, 9))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(turns=st.lists(TURN, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_the_log_is_what_the_engine_was_given_and_generated(
    tokenizer_path: Any, tokenizer: Any, turns: list[tuple[str, str, bool, int]], seed: int
) -> None:
    texts = [text for text, *_ in turns]
    engine = ScriptedEngine(lambda _: texts, tokenizer_path=tokenizer_path)
    given_ids: list[int] = []
    extend = engine.extend

    def spy(session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        given_ids.extend(tokens)
        extend(session, tokens, phases)

    engine.extend = spy
    gateway = Gateway(engine, tokenizer=tokenizer)
    rng, history = random.Random(seed), []
    for turn, (_, said, as_tool, limit) in enumerate(turns):
        role = "tool" if as_tool and history else "user"
        history.append({"role": role, "content": said})
        rewrite = turn > 0 and rng.random() < 0.2
        if rewrite:
            history[0] = {"role": "user", "content": f"{history[0]['content']}!"}
            given_ids.clear()
        result = gateway.chat("s", history, options=Options(max_tokens=limit + 1))
        given_ids.extend(result.token_ids)
        assert gateway.token_log("s")[0] == given_ids
        assert result.turn.reset == rewrite
        assert_log_exact(gateway, "s")
        history.append(result.message)


def test_a_server_says_itself_what_it_had_cached(
    gateway_of: GatewayOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other sessions, too, and of this one only what it still had."""
    gateway = gateway_of("one", "two", "three")
    generate, told = gateway.engine.generate, iter([3, 2, 10**6])

    def saying(*given: Any) -> Generation:
        generation = generate(*given)
        generation.cached_tokens = next(told)
        return generation

    monkeypatch.setattr(gateway.engine, "generate", saying)
    history: list[dict[str, Any]] = list(USER)
    found = []
    for _ in range(3):
        result = gateway.chat("s", history)
        found.append(result.turn.cached_tokens)
        history += [result.message, USER[0]]
    assert found == [3, 2, result.turn.prompt_tokens]


def test_cached_tokens_are_those_that_nobody_had_to_compute() -> None:
    """Of a server whose pool is full its cache has dropped some, and `prefix hits` counted them."""
    before = KVStats(recomputed=5)

    def found(held: int, again: int = 0, **more: int) -> int:
        return cached(held, before, replace(before, recomputed=5 + again, **more))

    assert found(100) == 100
    assert found(100, 60) == 40
    assert found(100, 300) == 0
    assert found(0, cached_tokens=64) == 64
    assert found(100, 60, cached_tokens=16) == 56
    # Read again as the history was written anew, or twice by a memory: nothing that was held.
    assert found(30, 60, rewrites=1) == 30
    assert found(100, 60, restored=8) == 100
