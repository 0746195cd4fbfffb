"""The client and its connections: bodies of every kind, reuse, servers that break off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import RawTestServer

from agentbench_kv.errors import KVBenchError
from agentbench_kv.serving_bench import loadgen
from agentbench_kv.serving_bench.endpoints import open_client
from agentbench_kv.serving_bench.jobs import Load, Target, TraceCall
from agentbench_kv.serving_bench.loadgen import Player

HEAD = b"HTTP/1.1 200 OK\r\n"
ERRORS = ("ServerDisconnectedError", "ClientResponseError", "ClientPayloadError", "ClientOSError")
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def chunked(payloads: Sequence[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in [*payloads, b""])


class RawServer:
    """Answers the n-th request with the n-th bytes; `None` closes the connection instead.

    Parameters
    ----------
    answers : sequence of bytes or None
    close : bool
        Whether the connection ends with every answer.
    """

    def __init__(self, answers: Sequence[bytes | None], *, close: bool = False) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self._answers = list(answers)
        self._close = close

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self._answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if b"content-length" in line]
                size = int(length[0].split(b":")[1]) if length else 0
                self.requests.append(head + await reader.readexactly(size))
                answer = self._answers.pop(0)
                writer.write(answer or b"")
                if answer is None or self._close:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    def ask(
        self, question: Callable[[aiohttp.ClientSession, str], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Run a coroutine with the load generator's client and the server's URL."""

        async def asking() -> Any:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            try:
                async with open_client() as client:
                    return await question(client, f"http://127.0.0.1:{port}")
            finally:
                server.close()
                await server.wait_closed()

        return asyncio.run(asking())


async def get(client: aiohttp.ClientSession, url: str, count: int = 1) -> list[bytes]:
    """Ask one after the other."""
    found = []
    for _ in range(count):
        async with client.get(f"{url}/x") as response:
            found.append(await response.read())
    return found


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + chunked([b"hel", b"lo"]),
        HEAD + b"Content-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"content-length:5\r\n\r\nhello",
    ],
)
def test_bodies_are_read_whole_and_the_connection_is_kept(answer: bytes) -> None:
    server = RawServer([answer] * 3)
    assert server.ask(lambda client, url: get(client, url, 3)) == [b"hello"] * 3
    assert server.connections == 1


@pytest.mark.parametrize("head", [HEAD + b"\r\n", HEAD + b"Connection: close\r\n\r\n"])
def test_a_body_may_end_with_its_connection(head: bytes) -> None:
    server = RawServer([head + b"hello"] * 2, close=True)
    assert server.ask(lambda client, url: get(client, url, 2)) == [b"hello"] * 2
    assert server.connections == 2


def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    server = RawServer([HEAD + b"Content-Length: 2\r\n\r\nok"] * 2, close=True)

    async def twice(client: aiohttp.ClientSession, url: str) -> list[bytes]:
        first = await get(client, url)
        await asyncio.sleep(0.05)
        return [*first, *await get(client, url)]

    assert server.ask(twice) == [b"ok", b"ok"]
    assert server.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"SSH-2.0-x\r\n\r\n",
        CHUNKED + b"5\r\nhel",
        CHUNKED + b"zz\r\n",
        HEAD + b"Content-Length: 9\r\n\r\nhello",
    ],
)
def test_an_answer_that_breaks_off_is_a_failed_turn(
    answer: bytes | None, make_job: Callable[..., Any]
) -> None:
    server = RawServer([answer], close=True)

    async def play(client: aiohttp.ClientSession, url: str) -> Any:
        job = make_job("vllm", target=Target(url, "vllm", "model"), timeout_s=5.0)
        return await Player(client, job).play(0, "one", [(TraceCall(2, 5), [1, 2])], lambda _: 0.0)

    (turn,) = server.ask(play)
    assert turn.error
    assert turn.error.split(":")[0] in ERRORS
    assert len(server.requests) == 1


def test_a_server_that_is_not_there_is_a_failed_turn(make_job: Callable[..., Any]) -> None:
    outcome = asyncio.run(
        loadgen.play(make_job(target=Target("http://127.0.0.1:9", "vllm", "model")))
    )
    assert [turn.error is not None for turn in outcome.turns] == [True, True]
    assert all("Cannot connect" in (turn.error or "") for turn in outcome.turns)


def test_an_answer_that_takes_too_long_is_a_failed_turn(make_job: Callable[..., Any]) -> None:
    server = RawServer([CHUNKED + b"2\r\nok\r\n", None])

    async def play(client: aiohttp.ClientSession, url: str) -> Any:
        job = make_job("vllm", target=Target(url, "vllm", "model"), timeout_s=0.2)
        return await Player(client, job).play(0, "one", [(TraceCall(2, 5), [1, 2])], lambda _: 0.0)

    (turn,) = server.ask(play)
    assert turn.error == "no whole answer within 0.2 s"


def test_an_answer_that_is_left_early_costs_its_connection() -> None:
    server = RawServer([CHUNKED + b"2\r\nok\r\n", HEAD + b"Content-Length: 2\r\n\r\nok"])

    async def leaving(client: aiohttp.ClientSession, url: str) -> list[bytes]:
        async with client.get(f"{url}/x") as response:
            assert response.status == 200
        return await get(client, url)

    assert server.ask(leaving) == [b"ok"]
    assert server.connections == 2


def test_bodies_and_the_key_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_API_KEY", "secret")
    server = RawServer([HEAD + b"Content-Length: 2\r\n\r\nok"])

    async def post(client: aiohttp.ClientSession, url: str) -> None:
        async with client.post(f"{url}/v1/x?y=1", data=b'{"a":1}') as response:
            await response.read()

    server.ask(post)
    (request,) = server.requests
    assert request.startswith(b"POST /v1/x?y=1 HTTP/1.1\r\n")
    assert request.endswith(b'{"a":1}')
    assert b"Authorization: Bearer secret" in request
    assert b"Accept-Encoding: identity" in request


def test_sessions_at_once_have_connections_of_their_own() -> None:
    server = RawServer([CHUNKED, CHUNKED])

    async def both(client: aiohttp.ClientSession, url: str) -> None:
        async with client.get(f"{url}/x"), client.get(f"{url}/x"):
            assert server.connections == 2

    server.ask(both)


def test_any_number_of_sessions_may_be_open_at_once() -> None:
    async def limit() -> int:
        async with open_client() as client:
            assert client.connector is not None
            return client.connector.limit

    assert asyncio.run(limit()) == 0


def test_a_client_process_that_dies_is_one_line(
    monkeypatch: pytest.MonkeyPatch, make_job: Callable[..., Any]
) -> None:
    monkeypatch.setattr(loadgen.sys, "executable", "/bin/false")
    with pytest.raises(KVBenchError, match="ended with code 1: it said nothing"):
        loadgen.measure_apart(make_job(), lambda: None)


def test_the_client_process_waits_when_it_is_warm(make_job: Callable[..., Any]) -> None:
    target = Target("http://127.0.0.1:9", "gateway", "nobody")
    told: list[str] = []
    job = make_job(target=target, load=Load(sessions=2, concurrency=1, warmup=1))
    result = loadgen.measure_apart(job, lambda: told.append("warm"))
    assert told == ["warm"]
    assert (result.warmup_errors, result.figures["failed"]) == (1, 2)


def test_the_warm_up_is_over_before_anything_is_measured(
    fake_server: Callable[..., Any], make_job: Callable[..., Any]
) -> None:
    server, seen = fake_server("gateway"), list[int]()

    async def playing() -> None:
        async with RawTestServer(server) as running:
            target = Target(f"http://127.0.0.1:{running.port}", "gateway", "m")
            job = make_job(target=target, load=Load(sessions=2, concurrency=1, warmup=1))
            await loadgen.play(job, lambda: seen.append(len(server.generations)))

    asyncio.run(playing())
    assert seen == [3]  # the turns of one session
    assert len(server.generations) == 9


def test_the_client_process_is_light() -> None:
    """It imports no heavy library, and nothing of ours that knows engines or methods."""
    script = "import sys, agentbench_kv.serving_bench.loadgen; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    modules = set(done.stdout.split())
    assert not {"torch", "pandas", "scipy", "transformers"} & modules
    ours = {name.split(".")[1] for name in modules if name.startswith("agentbench_kv.")}
    assert ours == {"errors", "serving_bench"}
