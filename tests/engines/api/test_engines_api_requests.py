"""Requests and answers of the api engine, through the text gateway."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentbench_kv.engines.api import asking
from agentbench_kv.engines.api.asking import Asker, RetryPolicy
from agentbench_kv.engines.api.endpoints import Endpoint
from agentbench_kv.engines.api.engine import ApiEngine
from agentbench_kv.engines.api.spending import Prices, Spending
from agentbench_kv.engines.api.transports import EndpointAnswer
from agentbench_kv.errors import EndpointError, KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.gateway import Options, TextGateway, open_gateway

EngineFor = Callable[..., ApiEngine]
Chat = Callable[..., list[dict[str, Any]]]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def gateway_of(engine: ApiEngine) -> TextGateway:
    gateway = open_gateway(engine)
    assert isinstance(gateway, TextGateway)
    return gateway


def test_a_session_is_billed_and_accounted(server: Any, engine_for: EngineFor, chat: Chat) -> None:
    gateway = gateway_of(engine_for(prices=Prices(2.0, 10.0, 1.0)))
    server.usage = {
        "prompt_tokens": 100,
        "completion_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 60},
    }
    first = gateway.chat("s", chat("hi"), None, Options(max_tokens=7, temperature=0.5, seed=9))
    second = gateway.chat("s", chat("hi", first.content, "and now?"))
    assert (first.content, first.finish_reason) == ("hello", "stop")
    report = gateway.close_report("s")
    assert report.usage == {"prompt_tokens": 200, "completion_tokens": 20, "requests": 2}
    assert report.cost == pytest.approx(2 * (40 * 2 + 60 * 1 + 10 * 10) / 1e6)
    assert (report.resets, second.turn.cached_tokens, second.turn.live_after) == (0, 60, 110)
    stats = report.stats
    assert (stats.logical, stats.peak_live, stats.prefill_tokens) == (110, 110, 80)
    assert (stats.evicted, stats.events, stats.decode_tokens) == (0, [], 20)
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("fake", 7, 0.5)
    assert (body["seed"], "tools" in body, "stop" in body) == (9, False, False)


def test_another_history_is_counted_as_a_reset(engine_for: EngineFor, chat: Chat) -> None:
    gateway = gateway_of(engine_for())
    gateway.chat("s", chat("hi"))
    assert gateway.chat("s", chat("something else")).report.resets == 1
    assert gateway.chat("s", chat("something else", "hello", "more"), [TOOL]).report.resets == 2


def test_calls_and_thoughts(server: Any, engine_for: EngineFor, chat: Chat) -> None:
    gateway = gateway_of(engine_for())
    server.answers = lambda _: {
        "content": None,
        "reasoning_content": "I must look.",
        "tool_calls": [CALL],
    }
    result = gateway.chat("s", chat("look"), [TOOL])
    assert (result.content, result.reasoning) == ("", "I must look.")
    assert (result.finish_reason, result.tool_calls) == ("tool_calls", [CALL])
    history = [*chat("look"), result.message, {"role": "tool", "content": "y"}]
    server.answers = lambda _: {"content": "<think>Aha.</think>\n\nIt is y."}
    result = gateway.chat("s", history, [TOOL])
    assert (result.content, result.reasoning, result.report.resets) == ("It is y.", "Aha.", 0)
    sent = server.bodies[1]["messages"][1]
    assert "reasoning_content" not in sent
    assert sent["tool_calls"] == [CALL]


@pytest.mark.parametrize(
    ("function", "unparsable"),
    [
        ({"name": "look", "arguments": ""}, False),
        ({"name": "look", "arguments": {"at": 1}}, False),
        ({"name": "look", "arguments": "{at"}, True),
        ({"arguments": "{}"}, True),
        ("look", True),
    ],
)
def test_calls_that_are_none_are_text(
    function: Any, unparsable: bool, server: Any, engine_for: EngineFor, chat: Chat
) -> None:
    server.answers = lambda _: {"content": "so:", "tool_calls": [{"function": function}]}
    result = gateway_of(engine_for()).chat(None, chat("look"), [TOOL])
    assert (result.unparsable, bool(result.tool_calls)) == (unparsable, not unparsable)
    assert result.content.startswith("so:")
    assert ("function" in result.content) == unparsable


@pytest.mark.parametrize("fault", [429, 500, 503, "rubbish", {"choices": []}, {"error": "x"}])
def test_what_passes_is_tried_again(
    fault: Any, server: Any, engine_for: EngineFor, chat: Chat
) -> None:
    server.faults = [fault, fault]
    server.headers = {"Retry-After": "0"}
    result = gateway_of(engine_for()).chat("s", chat("hi"))
    assert (result.content, len(server.bodies)) == ("hello", 3)
    assert result.report.usage["requests"] == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [(429, "HTTP 429"), ("rubbish", "no chat completion"), ("hang", "no answer within 1 s")],
)
def test_what_does_not_pass_is_one_line_and_no_answer(
    fault: Any, said: str, server: Any, engine_for: EngineFor, chat: Chat
) -> None:
    seconds = 1.0 if fault == "hang" else 60.0
    gateway = gateway_of(engine_for(RetryPolicy(retries=1, timeout_s=seconds, first_pause_s=0.01)))
    server.always = fault
    with pytest.raises(EndpointError, match=said) as caught:
        gateway.chat("s", chat("hi"))
    assert "\n" not in str(caught.value)
    assert "(2 attempts)" in str(caught.value)
    assert gateway.report("s").endpoint_failed
    gateway.check()
    server.always = None
    assert gateway.chat("s", chat("hi")).content == "hello"
    assert not gateway.report("s").endpoint_failed


def test_an_endpoint_that_only_fails_ends_the_run(
    server: Any, engine_for: EngineFor, chat: Chat
) -> None:
    gateway = gateway_of(engine_for(RetryPolicy(retries=0, first_pause_s=0.0)))
    server.always = 500
    for _ in range(3):
        with pytest.raises(EndpointError):
            gateway.chat("s", chat("hi"))
    for _ in range(2):
        with pytest.raises(PrerequisiteError, match="same command goes on"):
            gateway.chat("s", chat("hi"))
    with pytest.raises(PrerequisiteError):
        gateway.check()
    assert len(server.bodies) == 4


def test_a_long_wait_is_not_waited_for(server: Any, engine_for: EngineFor, chat: Chat) -> None:
    server.always, server.headers = 429, {"Retry-After": "3600"}
    with pytest.raises(EndpointError, match="1 attempts"):
        gateway_of(engine_for()).chat("s", chat("hi"))


@pytest.mark.parametrize(("status", "said"), [(401, "KVBENCH_API_KEY"), (404, "no such model")])
def test_a_wrong_setup_ends_the_run_at_once(
    status: int, said: str, server: Any, engine_for: EngineFor, chat: Chat
) -> None:
    gateway = gateway_of(engine_for())
    server.always = status
    with pytest.raises(PrerequisiteError, match=said):
        gateway.chat("s", chat("hi"))
    with pytest.raises(PrerequisiteError, match=said):
        gateway.check()
    assert len(server.bodies) == 1


@pytest.mark.parametrize("ends_run", [True, False])
def test_a_clients_raw_completion_ends_a_run_and_no_server(
    ends_run: bool, engine_for: EngineFor, chat: Chat
) -> None:
    gateway = gateway_of(engine_for())
    gateway.ends_run = ends_run
    with pytest.raises(UsageError, match="chat messages only"):
        gateway.complete("s", "Once upon")
    if ends_run:
        with pytest.raises(UsageError):
            gateway.check()
    else:
        gateway.check()
        gateway.chat("t", chat("hi"))


def test_a_bad_request_is_the_trials_own_once_others_were_right(
    server: Any, engine_for: EngineFor, chat: Chat
) -> None:
    server.faults = [(400, "no such parameter")]
    with pytest.raises(PrerequisiteError, match="no such parameter"):
        gateway_of(engine_for()).chat("s", chat("hi"))
    gateway = gateway_of(engine_for())
    gateway.chat("s", chat("hi"))
    server.faults = [(400, "content policy")]
    with pytest.raises(KVBenchError, match="content policy"):
        gateway.chat("s", chat("hi"))
    gateway.check()


def test_the_models_context_is_a_limit_and_no_error(
    server: Any, engine_for: EngineFor, chat: Chat
) -> None:
    server.faults = [(400, '{"error": {"code": "context_length_exceeded"}}')]
    result = gateway_of(engine_for()).chat("s", chat("hi"))
    assert (result.finish_reason, result.report.at_context_limit) == ("context_limit", True)


def test_money_ends_the_run(server: Any, engine_for: EngineFor, chat: Chat) -> None:
    gateway = gateway_of(engine_for(prices=Prices(1e4, 0, 1e4), limit=1.5))
    gateway.chat("s", chat("hi"))
    gateway.chat("s", chat("hi"))
    with pytest.raises(PrerequisiteError, match=r"--max-cost 1.5 is reached: 2 spent on 2 requ"):
        gateway.chat("s", chat("hi"))
    with pytest.raises(PrerequisiteError, match="max-cost"):
        gateway.check()
    assert len(server.bodies) == 2


def test_a_cancelled_request_ends_soon(server: Any, engine_for: EngineFor, chat: Chat) -> None:
    gateway = gateway_of(engine_for())
    server.always = "hang"
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(gateway.chat("s", chat("hi"))))
    thread.start()
    while not server.bodies:
        thread.join(0.01)
    gateway.cancel("s")
    thread.join(20)
    assert found[0].finish_reason == "cancelled"


def test_usage_is_needed_and_raw_prompts_are_refused(
    server: Any, engine_for: EngineFor, chat: Chat
) -> None:
    gateway = gateway_of(engine_for(RetryPolicy(retries=0)))
    server.usage = None
    with pytest.raises(EndpointError, match="no usage"):
        gateway.chat("s", chat("hi"))
    with pytest.raises(UsageError, match="chat messages only"):
        gateway.complete("s", "once upon")
    with pytest.raises(UsageError, match="chat messages only"):
        gateway.check()


def test_requests_keep_their_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asking.asyncio, "sleep", note)
    monkeypatch.setattr(asking.time, "monotonic", lambda: 0.0)
    transport: Any = None
    policy = RetryPolicy(per_minute=60)
    asker = Asker(Endpoint("http://x", "m"), transport, policy, None, Spending())
    for _ in range(3):
        asyncio.run(asker._wait_for_turn())
    assert waits == [1.0, 2.0]


def test_pauses_grow_to_a_limit_and_do_what_the_server_asks() -> None:
    policy = RetryPolicy(retries=9, first_pause_s=1.0, longest_pause_s=4.0)
    plain = EndpointAnswer(500, "")
    assert [policy.pause(n, plain, 0.0) for n in range(4)] == [1.0, 2.0, 4.0, 4.0]
    assert policy.pause(1, plain, 0.5) == 1.5
    assert policy.pause(0, EndpointAnswer(429, "", None, {"retry-after": "3"}), 0.0) == 3.0
    assert policy.pause(0, EndpointAnswer(429, "", None, {"retry-after": "soon"}), 0.0) == 1.0
    past = {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}
    assert policy.pause(0, EndpointAnswer(429, "", None, past), 0.0) == 1.0
    assert policy.pause(9, plain, 0.0) is None
