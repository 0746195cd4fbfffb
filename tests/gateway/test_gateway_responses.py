"""`/v1/responses`: the OpenAI client on scripted texts, sessions by response id, rough requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.errors import UsageError
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.gateway.responses import KEPT_SESSIONS, as_messages

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"day": 1}}\n</tool_call>'
THOUGHT = f"<think>\nhm é\n</think>\n\nLet me see 🌦️\n{CALL}"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"day": {"type": "integer"}}},
}


@contextmanager
def served(
    path: Path, *texts: str, **limits: Any
) -> Iterator[tuple[Gateway, ScriptedEngine, openai.OpenAI]]:
    engine = ScriptedEngine(lambda _: texts, tokenizer_path=path)
    gateway = Gateway(engine, **limits)
    with (
        BackgroundServer(gateway) as server,
        openai.OpenAI(base_url=server.url, api_key="x", max_retries=0) as client,
    ):
        yield gateway, engine, client


def streamed(client: openai.OpenAI, **asked: Any) -> tuple[Response, list[Any]]:
    """Ask with a stream; return its last response and all events, checked for order."""
    events = list(client.responses.create(stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    texts: dict[int, str] = {}
    for event in events:
        if event.type.endswith((".delta",)):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
        if event.type == "response.output_item.done":
            item = event.item
            whole = item.arguments if item.type == "function_call" else item.content[0].text
            assert texts[event.output_index] == whole
    last = events[-1].response
    assert [event.item for event in events if event.type == "response.output_item.added"] != []
    done = {e.output_index: e.item for e in events if e.type == "response.output_item.done"}
    assert [done[index] for index in range(len(done))] == last.output
    return last, events


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_goes_on_by_response_id(tokenizer_path: Path, stream: bool) -> None:
    texts = [THOUGHT, "Sun."] * 3
    with served(tokenizer_path, *texts) as (gateway, engine, client):
        previous, question = None, "Weather?"
        asked: dict[str, Any] = {"model": "gold", "tools": [TOOL], "instructions": "Be brief."}
        items: Any = question
        for turn in range(6):
            more = {"input": items, "previous_response_id": previous, **asked}
            reply = streamed(client, **more)[0] if stream else client.responses.create(**more)
            previous = reply.id
            assert reply.status == "completed"
            assert reply.previous_response_id == more["previous_response_id"]
            kvbench = reply.usage.kvbench
            assert kvbench["session_resets"] == 0
            assert kvbench["turn"] == turn
            assert (reply.usage.input_tokens_details.cached_tokens > 0) == (turn > 0)
            if turn % 2 == 0:
                reasoning, message, call = reply.output
                assert reasoning.content[0].text == "hm é"
                assert message.content[0].text == "Let me see 🌦️"
                assert json.loads(call.arguments) == {"day": 1}
                assert reply.usage.output_tokens_details.reasoning_tokens > 0
                result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
                items = [result]
            else:
                assert reply.output_text == "Sun."
                items = question
        (session,) = gateway.sessions()
        tokens, _ = gateway.token_log(session)
        assert tokens == engine.token_log(session)
        assert httpx.delete(f"{client.base_url}sessions/{session}").status_code == 200


def test_a_client_that_sends_everything_needs_no_id(tokenizer_path: Path) -> None:
    """What it was given, it may send back; with `conversations` it stays in one session."""
    with served(tokenizer_path, THOUGHT, "Sun.", conversations=4) as (gateway, _, client):
        items: list[Any] = [{"role": "user", "content": "Weather?"}]
        first = client.responses.create(model="gold", input=items, tools=[TOOL])
        items += [item.model_dump(exclude_none=True) for item in first.output]
        call = first.output[-1]
        items.append(
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": [{"type": "input_text", "text": "sun"}],
            }
        )
        second = client.responses.create(model="gold", input=items, tools=[TOOL])
        assert second.output_text == "Sun."
        assert second.usage.kvbench["turn"] == 1
        assert second.usage.kvbench["session_resets"] == 0
        assert len(gateway.sessions()) == 1


def test_without_conversations_it_leaves_no_session_behind(tokenizer_path: Path) -> None:
    with served(tokenizer_path, "Sun.") as (gateway, _, client):
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        client.responses.create(model="gold", input=[*said, said[0]])
        client.responses.create(model="gold", input="a", store=False)
        assert gateway.sessions() == []


def test_two_that_go_on_from_one_response_both_get_it_whole(tokenizer_path: Path) -> None:
    with served(tokenizer_path, "one", "two") as (gateway, engine, client):
        ask = client.responses.create
        first = ask(model="gold", input="a")
        second = ask(model="gold", input="b", previous_response_id=first.id)
        third = ask(model="gold", input="c", previous_response_id=first.id)
        sessions = [reply.usage.kvbench["session"] for reply in (first, second, third)]
        assert sessions == [first.id, first.id, third.id]
        text = gateway.codec.decode(engine.token_log(third.id))
        assert text.index("a<|im_end|>") < text.index("one<|im_end|>") < text.index("c<|im_end|>")
        assert "two" not in text.split("c<|im_end|>")[0]


def test_two_at_once_do_not_meet_in_one_session(slow: Any) -> None:
    gateway = Gateway(slow)
    answers: list[httpx.Response] = []

    def ask(url: str, **more: Any) -> None:
        body = {"model": "gold", "input": "a", "max_output_tokens": 8, **more}
        answers.append(httpx.post(f"{url}/responses", json=body, timeout=60))

    with BackgroundServer(gateway) as server:
        slow.free = 100
        ask(server.url)
        slow.running.acquire()
        slow.free = 2
        first = answers.pop().json()["id"]
        threads = [
            threading.Thread(target=ask, args=(server.url,), kwargs={"previous_response_id": first})
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
            assert slow.running.acquire(timeout=60), "the second one does not run"
        slow.go.set()
        for thread in threads:
            thread.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    used = {answer.json()["usage"]["kvbench"]["session"] for answer in answers}
    assert len(used) == 2
    assert first in used


def test_a_refused_request_leaves_the_conversation_where_it_was(tokenizer_path: Path) -> None:
    """What was wrong is mended and sent again: thoughts and cache are still there."""
    with served(tokenizer_path, "one", "two") as (gateway, _, client):
        first = client.responses.create(model="gold", input="a")
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            client.responses.create(
                model="gold",
                input="b",
                previous_response_id=first.id,
                include=["message.output_text.logprobs"],
            )
        assert gateway.sessions() == [first.id]
        second = client.responses.create(model="gold", input="b", previous_response_id=first.id)
        assert second.usage.kvbench["session"] == first.id
        assert second.usage.input_tokens_details.cached_tokens > 0
        # One that fails in the middle of an answer has been read: another session takes over.
        schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
        with pytest.raises(openai.BadRequestError, match="breaks what the request demands"):
            client.responses.create(
                model="gold", input="c", previous_response_id=second.id, text={"format": schema}
            )
        assert gateway.sessions() == []


def test_a_session_that_is_gone_is_computed_again(tokenizer_path: Path) -> None:
    with served(tokenizer_path, "one", "two") as (gateway, engine, client):
        first = client.responses.create(model="gold", input="a")
        gateway.close_report(first.id)
        second = client.responses.create(model="gold", input="b", previous_response_id=first.id)
        assert second.usage.input_tokens_details.cached_tokens == 0
        text = gateway.codec.decode(engine.token_log(second.usage.kvbench["session"]))
        assert text.count("<|im_start|>") == 4


def test_only_so_many_sessions_rest(tokenizer_path: Path) -> None:
    with served(tokenizer_path, "one") as (gateway, _, client):
        ids = [
            client.responses.create(model="gold", input=f"a {number}").id
            for number in range(KEPT_SESSIONS + 3)
        ]
        assert gateway.sessions() == sorted(ids[3:])


def test_a_named_session_stays_the_clients(tokenizer_path: Path) -> None:
    with served(tokenizer_path, "one", "two") as (gateway, _, client):
        named = {"extra_headers": {"X-KVBench-Session": "mine"}}
        first = client.responses.create(model="gold", input="a", **named)
        second = client.responses.create(model="gold", input="b", previous_response_id=first.id)
        assert second.usage.kvbench["session"] == "mine"
        assert second.usage.kvbench["session_resets"] == 0
        for number in range(KEPT_SESSIONS + 1):
            client.responses.create(model="gold", input=f"a {number}")
        assert "mine" in gateway.sessions()


def test_an_answer_that_is_cut_off_is_incomplete(tokenizer_path: Path) -> None:
    with served(tokenizer_path, "word " * 50) as (_, __, client):
        asked: dict[str, Any] = {"model": "gold", "input": "a", "max_output_tokens": 5}
        reply = client.responses.create(**asked)
        last, events = streamed(client, **asked)
        for each in (reply, last):
            assert each.status == "incomplete"
            assert each.incomplete_details.reason == "max_output_tokens"
            assert each.output[0].status == "incomplete"
        assert events[-1].type == "response.incomplete"


def test_a_stream_that_breaks_off_says_so(tokenizer_path: Path) -> None:
    class Breaks(ScriptedEngine):
        def stats(self, session: str) -> Any:
            found = super().stats(session)
            if found.decode_tokens:
                raise UsageError("the engine is gone")
            return found

    gateway = Gateway(Breaks(lambda _: ["word"], tokenizer_path=tokenizer_path))
    with BackgroundServer(gateway) as server:
        body = {"model": "gold", "input": "a", "stream": True}
        text = httpx.post(f"{server.url}/responses", json=body).text
    last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["message"] == "the engine is gone"


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"input": []}, None, "input"),
        ({"input": 5}, None, "input"),
        ({"input": [5]}, None, "input"),
        ({"input": [{"type": "image"}]}, None, "no input item of type 'image'"),
        ({"input": [{"role": "robot", "content": "a"}]}, None, "no role 'robot'"),
        ({"input": [{"type": "function_call", "name": "f"}]}, None, "'call_id'"),
        ({"input": [{"type": "function_call_output"}]}, None, "'call_id'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None, "not text"),
        ({"input": [{"role": "assistant", "content": {"a": 1}}]}, None, "must be text"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "web_search"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "with a name"),
        ({"reasoning": {"effort": "low"}}, "unsupported_parameter", "reasoning"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"conversation": "c"}, "unsupported_parameter", "conversation"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"previous_response_id": "resp_1"}, "previous_response_not_found", "resp_1"),
        ({"max_output_tokens": 0}, None, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, None, "text.format"),
        ({"text": {"verbosity": "low"}}, None, "verbosity"),
        ({"top_logprobs": 1}, None, "has no logprobs"),
        ({"messages": []}, "unknown_parameter", "messages"),
        ({"tool_choice": "required"}, None, "there are no tools"),
        ({"tool_choice": {"type": "function"}}, None, "tool_choice"),
    ],
)
def test_what_is_wrong_with_a_request(
    shared: str, body: dict[str, Any], code: str | None, words: str
) -> None:
    answer = httpx.post(f"{shared}/responses", json={"model": "gold", "input": "a", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code), error
    assert words in error["message"]


@pytest.fixture(scope="module")
def shared(tokenizer_path: Path) -> Iterator[str]:
    gateway = Gateway(ScriptedEngine(lambda _: ["x"], tokenizer_path=tokenizer_path))
    with BackgroundServer(gateway) as server:
        yield server.url
        assert gateway.sessions() == []


def test_items_of_one_answer_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"text": "a"}]}
    result = {"type": "function_call_output", "call_id": "c1", "output": "x"}
    user = {"role": "user", "content": "u"}
    one = as_messages([user, thought, said, call, {**call, "call_id": "c2"}, result, said, user])
    assert [message["role"] for message in one] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert one[1]["content"] == "a"
    assert one[1]["reasoning_content"] == "hm"
    assert [each["id"] for each in one[1]["tool_calls"]] == ["c1", "c2"]
    # A call before the text belongs to the same answer; a second text does not.
    assert len(as_messages([call, said])) == 1
    assert len(as_messages([said, said])) == 2
