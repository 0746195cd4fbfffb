"""The HTTP surface, held by the OpenAI client and by rougher hands."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.errors import CapacityError, PrerequisiteError, UsageError
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import BackgroundServer, ServerSettings, run_server
from agentbench_kv.gateway.listening import check_exposure, listen

EngineOf = Callable[..., ScriptedEngine]
USER = [{"role": "user", "content": "Weather?"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
TURNS = 10
SESSION = {"X-KVBench-Session": "s-1"}


def call(turn: int) -> str:
    return (
        f"<think>\nstep {turn} é\n</think>\n\nTurn {turn} 🌦️\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {{"day": {turn}}}}}\n</tool_call>'
    )


SCRIPT = [call(turn) for turn in range(TURNS)]


@contextmanager
def served(engine: ScriptedEngine, **options: Any) -> Iterator[tuple[Gateway, str]]:
    settings = ServerSettings(**options)
    gateway = Gateway(engine)
    with BackgroundServer(gateway, concurrency=settings.threads, settings=settings) as server:
        yield gateway, server.url


@contextmanager
def sdk(url: str, key: str = "none") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        yield client


def streamed(client: openai.OpenAI, history: list[Any]) -> tuple[dict[str, Any], Any]:
    """Ask with a stream, return the message put together and its usage."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    usage = None
    stream = client.chat.completions.create(
        model="gold",
        messages=history,
        tools=TOOLS,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers=SESSION,
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert "\ufffd" not in (choice.delta.content or "")
            message["content"] += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                if part.id:
                    message["tool_calls"].append(part.model_dump())
                else:
                    arguments = message["tool_calls"][part.index]["function"]
                    arguments["arguments"] += part.function.arguments
    return message, usage


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_holds_a_ten_turn_session(engine_of: EngineOf, stream: bool) -> None:
    engine = engine_of(*SCRIPT)
    with served(engine) as (gateway, url), sdk(url) as client:
        history: list[Any] = list(USER)
        for turn in range(TURNS):
            if stream:
                message, usage = streamed(client, history)
            else:
                answer = client.chat.completions.create(
                    model="gold",
                    messages=history,
                    tools=TOOLS,
                    extra_headers=SESSION,
                )
                assert answer.choices[0].finish_reason == "tool_calls"
                reasoning = answer.choices[0].message.reasoning_content
                assert reasoning == f"step {turn} é"
                message = answer.choices[0].message.model_dump(exclude_none=True)
                usage = answer.usage
            assert message["content"] == f"Turn {turn} 🌦️"
            function = message["tool_calls"][0]["function"]
            assert json.loads(function["arguments"]) == {"day": turn}
            account = usage.kvbench
            assert (account["session"], account["turn"]) == ("s-1", turn)
            assert account["session_resets"] == 0
            assert account["live"] == account["logical"] == usage.total_tokens
            assert set(account["phases"]) == {"think", "act", "tool", "others"}
            assert (usage.prompt_tokens_details.cached_tokens > 0) == (turn > 0)
            history += [
                message,
                {
                    "role": "tool",
                    "tool_call_id": message["tool_calls"][0]["id"],
                    "content": f"sun {turn}",
                },
            ]
        tokens, _ = gateway.token_log("s-1")
        assert tokens == engine.token_log("s-1")
        text = gateway.codec.decode(tokens)
        assert all(script in text for script in SCRIPT)
        final = httpx.delete(f"{url}/sessions/s-1").json()
        assert final["kvbench"]["turns"] == TURNS
        assert final["kvbench"]["session_resets"] == 0
        assert final["kvbench"]["logical"] == len(tokens)
        assert gateway.sessions() == []


def test_a_rewritten_history_is_answered_and_counted(engine_of: EngineOf) -> None:
    with served(engine_of("one", "two")) as (_, url), sdk(url) as client:
        for content, resets in (("a", 0), ("b", 1)):
            answer = client.chat.completions.create(
                model="gold",
                messages=[{"role": "user", "content": content}],
                extra_body={"session_id": "s"},
            )
            assert answer.usage.kvbench["session_resets"] == resets
        assert answer.choices[0].message.content == "two"


def test_a_hundred_one_shots_at_once(engine_of: EngineOf) -> None:
    async def ask_all(url: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            asks = [
                client.chat.completions.create(
                    model="gold", messages=[{"role": "user", "content": f"question {n}"}]
                )
                for n in range(100)
            ]
            return await asyncio.gather(*asks)

    with served(engine_of("answer"), threads=4) as (gateway, url):
        answers = asyncio.run(ask_all(url))
        assert [a.choices[0].message.content for a in answers] == ["answer"] * 100
        assert len({a.usage.kvbench["session"] for a in answers}) == 100
        assert gateway.sessions() == []


def test_completions_with_text_ids_and_streams(engine_of: EngineOf) -> None:
    texts = ("Hello STOP", "World", "!")
    with served(engine_of(*texts)) as (gateway, url), sdk(url) as client:
        body = {"kvbench": {"session": "s"}, "return_token_ids": True}
        first = client.completions.create(model="gold", prompt="Q: ", stop=" STOP", extra_body=body)
        assert (first.choices[0].text, first.choices[0].finish_reason) == ("Hello", "stop")
        stream = client.completions.create(
            model="gold", prompt="Q: Hello STOP A: ", stream=True, extra_body=body
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "World"
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert gateway.report("s").resets == 0
        ids = gateway.token_log("s")[0]
        third = client.completions.create(model="gold", prompt=[*ids, 7], extra_body=body)
        assert third.usage.prompt_tokens_details.cached_tokens == len(ids)
        assert third.choices[0].token_ids == gateway.token_log("s")[0][len(ids) + 1 :]


def test_models_health_and_metrics(engine_of: EngineOf) -> None:
    with served(engine_of("x")) as (_, url), sdk(url) as client:
        assert [model.id for model in client.models.list()] == ["gold"]
        root = url.removesuffix("/v1")
        assert httpx.get(f"{root}/health").json()["status"] == "ok"
        client.chat.completions.create(model="gold", messages=USER)
        text = httpx.get(f"{root}/metrics").text
        assert 'kvbench_requests_total{route="/v1/chat/completions",status="200"} 1' in text
        assert "kvbench_sessions 0" in text
        assert "# TYPE kvbench_generated_tokens_total counter" in text


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "gold", "messages": USER, **fields}


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("chat/completions", b"{", 400, "invalid_json", None),
        ("chat/completions", b"[1]", 400, None, None),
        ("chat/completions", b"[" * 100_000, 400, "invalid_json", None),
        ("chat/completions", chat(model="gpt"), 404, "model_not_found", "model"),
        ("chat/completions", {"model": "gold"}, 400, None, "messages"),
        ("chat/completions", chat(messages=[]), 400, None, "messages"),
        ("chat/completions", chat(messages=[{"role": "user", "content": 1}]), 400, None, None),
        ("chat/completions", chat(max_tokens=-1), 400, None, "max_tokens"),
        ("chat/completions", chat(max_completion_tokens=0), 400, None, "max_completion_tokens"),
        ("chat/completions", chat(temperature=-1), 400, None, "temperature"),
        ("chat/completions", chat(top_p=0), 400, None, "top_p"),
        ("chat/completions", chat(n=2), 400, "unsupported_parameter", "n"),
        ("chat/completions", chat(tool_choice="required"), 400, None, None),
        ("chat/completions", chat(tool_choice="perhaps"), 400, None, "tool_choice"),
        ("chat/completions", chat(logprobs=True), 400, None, None),
        ("completions", {"model": "gold", "prompt": "a", "tool_choice": "required"}, 400,
         "unsupported_parameter", "tool_choice"),
        ("chat/completions", chat(session_id="a b"), 400, None, "session_id"),
        ("chat/completions", chat(stream=True, messages=[{}]), 400, None, None),
        ("chat/completions", chat(messages=[{"role": "forbidden"}]), 400, None, None),
        ("completions", {"model": "gold", "prompt": ""}, 400, None, None),
        ("completions", {"model": "gold", "prompt": ["a", "b"]}, 400, None, "prompt"),
        ("completions", {"model": "gold", "prompt": [-1]}, 400, None, "prompt"),
        ("nowhere", {}, 404, "not_found", None),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_request(
    shared_server: str, path: str, body: Any, status: int, code: str | None, param: str | None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{shared_server}/{path}", content=content, headers=headers)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (answer.status_code, error["code"]) == (status, code), error
    assert param is None or error["param"].startswith(param)


@pytest.fixture(scope="module")
def shared_server(tokenizer_path: Any) -> Iterator[str]:
    engine = ScriptedEngine(lambda _: ["x"], tokenizer_path=tokenizer_path)
    with served(engine, max_body=200_000) as (_, url):
        yield url


def test_bodies_are_limited_and_typed(shared_server: str) -> None:
    big = httpx.post(f"{shared_server}/chat/completions", json=chat(user="x" * 200_000))
    assert (big.status_code, big.json()["error"]["code"]) == (413, "body_too_large")
    plain = httpx.post(f"{shared_server}/chat/completions", content=json.dumps(chat()))
    assert plain.status_code == 415
    wrong = httpx.get(f"{shared_server}/chat/completions")
    assert wrong.status_code == 405
    assert httpx.delete(f"{shared_server}/sessions/none").status_code == 404


def test_half_a_character_is_harmless(shared_server: str) -> None:
    body = b'{"model": "gold", "messages": [{"role": "user", "content": "\\ud800"}]}'
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{shared_server}/chat/completions", content=body, headers=headers)
    assert answer.status_code == 200
    body = body.replace(b"gold", b"\\ud800")
    answer = httpx.post(f"{shared_server}/chat/completions", content=body, headers=headers)
    assert answer.status_code == 404


def test_the_key_is_required(engine_of: EngineOf) -> None:
    with served(engine_of("x"), api_key="sécret") as (_, url):
        assert httpx.get(f"{url}/models").status_code == 401
        wrong = httpx.get(f"{url}/models", headers={"Authorization": "Bearer nope"})
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        assert wrong.json()["error"]["type"] == "authentication_error"
        assert httpx.get(f"{url.removesuffix('/v1')}/health").status_code == 200
    with served(engine_of("x"), api_key="secret") as (_, url), sdk(url, "secret") as client:
        assert client.models.list().data[0].id == "gold"
        with sdk(url, "other") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_other_machines_need_a_key(engine_of: EngineOf) -> None:
    for host in ("0.0.0.0", "::", "example.org", "192.168.1.2"):
        with pytest.raises(UsageError, match="KVBENCH_API_KEY"):
            check_exposure(host, None)
        check_exposure(host, "key")
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_exposure(host, "")
    gateway, taken = (
        Gateway(engine_of("x")),
        pytest.raises(PrerequisiteError, match="another --port"),
    )
    with BackgroundServer(gateway) as server, taken:
        run_server(gateway, "127.0.0.1", server.port)


def test_accepted_sockets_send_every_piece_at_once() -> None:
    with (
        listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "nothing happened in 10 s"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_generation(slow: Any, stream: bool) -> None:
    async def leave(url: str) -> None:
        async with httpx.AsyncClient() as client:
            body = chat(stream=stream, session_id="s")
            task = asyncio.create_task(client.post(f"{url}/chat/completions", json=body))
            await asyncio.to_thread(slow.running.acquire)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with served(slow) as (gateway, url):
        asyncio.run(leave(url))
        wait_until(lambda: len(gateway.report("s").turns) == 1)
        turn = gateway.report("s").turns[0]
        assert turn.finish_reason == "cancelled"
        assert turn.output_tokens < 50
        assert gateway.token_log("s")[0] == slow.token_log("s")
        assert httpx.delete(f"{url}/sessions/s").status_code == 200


def test_leaving_in_the_middle_of_a_stream(slow: Any) -> None:
    slow.free = 12
    with served(slow) as (gateway, url):
        body = chat(stream=True, session_id="s")
        with httpx.stream("POST", f"{url}/chat/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert len(list(itertools.islice(lines, 4))) == 4
        wait_until(lambda: len(gateway.report("s").turns) == 1)
        assert gateway.report("s").turns[0].finish_reason == "cancelled"
        assert gateway.token_log("s")[0] == slow.token_log("s")


def test_a_request_of_a_deleted_session_is_answered(slow: Any) -> None:
    slow.free = 12
    answers: list[httpx.Response] = []

    def ask(url: str) -> None:
        body = chat(session_id="s")
        answers.append(httpx.post(f"{url}/chat/completions", json=body, timeout=20))

    with served(slow) as (_, url):
        thread = threading.Thread(target=ask, args=(url,))
        thread.start()
        slow.running.acquire()
        assert httpx.delete(f"{url}/sessions/s", timeout=20).status_code == 200
        thread.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["kvbench"]["finish_reason"] == "cancelled"


def test_busy_sessions_and_full_queues(slow: Any) -> None:
    def post(url: str, **fields: Any) -> httpx.Response:
        return httpx.post(f"{url}/chat/completions", json=chat(**fields), timeout=20)

    with served(slow, threads=2, queue=0) as (_, url):
        answers: list[httpx.Response] = []
        first = threading.Thread(target=lambda: answers.append(post(url, session_id="s")))
        first.start()
        slow.running.acquire()
        busy = post(url, session_id="s")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "session_busy")
        second = threading.Thread(target=lambda: answers.append(post(url)))
        second.start()
        slow.running.acquire()
        full = post(url)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert full.json()["error"]["type"] == "rate_limit_error"
        slow.go.set()
        first.join()
        second.join()
        assert [answer.status_code for answer in answers] == [200, 200]


def test_engine_errors_have_clear_bodies(engine_of: EngineOf) -> None:
    engine = engine_of("long " * 50, "x", context_limit=80)
    with served(engine) as (gateway, url), sdk(url) as client:
        first = client.chat.completions.create(
            model="gold",
            messages=USER,
            extra_headers=SESSION,
        )
        assert first.choices[0].finish_reason == "length"
        assert first.usage.kvbench["finish_reason"] == "context_limit"
        too_long: Any = [{"role": "user", "content": "x" * 200}]
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="gold", messages=too_long, stream=stream)
            assert caught.value.code == "context_length_exceeded"

        def full(*_: Any) -> Any:
            raise CapacityError("no room for 9 tokens")

        def broken(*_: Any) -> Any:
            raise RuntimeError("a secret path")

        engine.generate = full
        with pytest.raises(openai.BadRequestError, match="no room"):
            client.chat.completions.create(model="gold", messages=USER)
        engine.generate = broken
        with pytest.raises(openai.InternalServerError) as failed:
            client.chat.completions.create(model="gold", messages=USER)
        assert "secret" not in str(failed.value)
        assert gateway.sessions() == ["s-1"]


def test_session_limit_is_429(engine_of: EngineOf) -> None:
    gateway = Gateway(engine_of("x"), max_sessions=1)
    with BackgroundServer(gateway) as server:
        for name, status in (("a", 200), ("b", 429)):
            answer = httpx.post(
                f"{server.url}/chat/completions",
                json=chat(),
                headers={"X-KVBench-Session": name},
            )
            assert answer.status_code == status
        assert answer.headers["retry-after"] == "1"
