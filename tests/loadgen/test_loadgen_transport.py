"""The client's own HTTP: bodies of every kind, kept connections, servers that break off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.errors import KVBenchError
from agentbench_kv.loadgen import process
from agentbench_kv.loadgen.connections import Connections
from agentbench_kv.loadgen.transport import ChunkDecoder

HEAD = b"HTTP/1.1 200 OK\r\n"
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

    def ask(self, question: Callable[[Connections], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine against the server, with connections to it."""

        async def asking() -> Any:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            connections = Connections(f"http://127.0.0.1:{port}")
            try:
                return await question(connections)
            finally:
                await connections.close()
                server.close()
                await server.wait_closed()

        return asyncio.run(asking())


async def get(connections: Connections, count: int = 1) -> list[bytes]:
    """Ask one after the other, with one client."""
    with connections.one() as client:
        return [(await client.get("/x")).content for _ in range(count)]


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
    assert server.ask(lambda connections: get(connections, 3)) == [b"hello"] * 3
    assert server.connections == 1


@pytest.mark.parametrize("head", [HEAD + b"\r\n", HEAD + b"Connection: close\r\n\r\n"])
def test_a_body_may_end_with_its_connection(head: bytes) -> None:
    server = RawServer([head + b"hello"] * 2, close=True)
    assert server.ask(lambda connections: get(connections, 2)) == [b"hello"] * 2
    assert server.connections == 2


def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    server = RawServer([HEAD + b"Content-Length: 2\r\n\r\nok"] * 2, close=True)

    async def twice(connections: Connections) -> list[bytes]:
        first = await get(connections)
        await asyncio.sleep(0.05)
        return [*first, *await get(connections)]

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
def test_an_answer_that_breaks_off_is_an_error_of_httpx(answer: bytes | None) -> None:
    server = RawServer([answer], close=True)
    with pytest.raises(httpx.RemoteProtocolError):
        server.ask(get)


def test_an_answer_that_is_left_early_costs_its_connection() -> None:
    server = RawServer([CHUNKED + b"2\r\nok\r\n", HEAD + b"Content-Length: 2\r\n\r\nok"])

    async def leaving(connections: Connections) -> list[bytes]:
        with connections.one() as client:
            async with client.stream("GET", "/x") as response:
                assert response.status_code == 200
            return [(await client.get("/x")).content]

    assert server.ask(leaving) == [b"ok"]
    assert server.connections == 2


def test_bodies_and_the_key_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_API_KEY", "secret")
    server = RawServer([HEAD + b"Content-Length: 2\r\n\r\nok"])

    async def post(connections: Connections) -> None:
        with connections.one() as client:
            await client.post("/v1/x?y=1", json={"a": 1})

    server.ask(post)
    (request,) = server.requests
    assert request.startswith(b"POST /v1/x?y=1 HTTP/1.1\r\n")
    assert request.endswith(b'{"a":1}')
    assert b"Authorization: Bearer secret" in request


def test_sessions_at_once_have_clients_of_their_own() -> None:
    connections = Connections("http://nobody")
    with connections.one() as first, connections.one() as second:
        assert first is not second
    with connections.one() as again:
        assert again in (first, second)
    asyncio.run(connections.close())


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.integers(1, 17))
def test_chunks_are_joined_however_they_are_cut(payloads: list[bytes], step: int) -> None:
    data, decoder, found = chunked(payloads), ChunkDecoder(), b""
    for at in range(0, len(data), step):
        assert not decoder.done
        found += decoder.feed(data[at : at + step])
    assert decoder.done
    assert found == b"".join(payloads)


def test_a_client_process_that_dies_is_one_line(
    monkeypatch: pytest.MonkeyPatch, make_job: Callable[..., Any]
) -> None:
    monkeypatch.setattr(process.sys, "executable", "/bin/false")
    with pytest.raises(KVBenchError, match="ended with code 1: it said nothing"):
        process.measure_apart(make_job())


def test_the_client_process_is_light() -> None:
    heavy = "{'torch', 'pandas', 'scipy', 'transformers'}"
    script = f"import sys, agentbench_kv.loadgen.process; print({heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
