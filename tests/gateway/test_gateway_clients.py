"""Clients of every kind: strange names, slow senders, deaf readers, and a server that stops."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import BackgroundServer, ServerSettings
from agentbench_kv.gateway.listening import HostGuard, Patience, ends_soon

EngineOf = Callable[..., ScriptedEngine]
CHAT = {"model": "gold", "messages": [{"role": "user", "content": "hi"}]}
WAIT_S = 120  # for what takes a second where nothing else runs


@contextmanager
def served(engine: ScriptedEngine, **options: Any) -> Iterator[BackgroundServer]:
    settings = ServerSettings(**options)
    server = BackgroundServer(Gateway(engine), concurrency=settings.threads, settings=settings)
    with server:
        yield server


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"nothing happened in {WAIT_S} s"
        time.sleep(0.005)


def code_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


# Names and pages


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:{port}", True),
        ("localhost:{port}", True),
        ("LOCALHOST", True),
        ("localhost.:{port}", True),
        ("agent.localhost", True),
        ("[::1]:{port}", True),
        ("127.9.9.9", True),
        ("evil.example", False),
        ("evil.example:{port}", False),
        ("localhost.evil.example", False),
        ("localhost@evil.example", False),
        ("evil.example#@localhost", False),
        ("192.168.1.7", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_without_a_key_only_names_of_this_machine_are_answered(
    engine_of: EngineOf, host: str, allowed: bool
) -> None:
    with served(engine_of("x")) as server:
        for path in ("health", "v1/models", "metrics", "nowhere"):
            url = f"http://127.0.0.1:{server.port}/{path}"
            answer = httpx.get(url, headers={"Host": host.format(port=server.port)})
            assert (answer.status_code != 403) == allowed, answer.text
            assert allowed or code_of(answer) == "host_not_allowed"


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1:8000", True),
        ("https://evil.example", False),
        ("null", False),
        ("file://", False),
        ("http://192.168.1.7", False),
        ("http://[", False),
    ],
)
def test_pages_of_other_machines_are_refused(
    engine_of: EngineOf, origin: str, allowed: bool
) -> None:
    with served(engine_of("x")) as server:
        url = f"{server.url}/chat/completions"
        answer = httpx.post(url, json=CHAT, headers={"Origin": origin})
        assert (answer.status_code == 200) == allowed
        assert allowed or code_of(answer) == "origin_not_allowed"


def test_names_can_be_added_and_a_key_allows_all(engine_of: EngineOf) -> None:
    def status(server: BackgroundServer, **headers: str) -> int:
        return httpx.get(f"{server.url}/models", headers=headers).status_code

    with served(engine_of("x"), allow_hosts=("gpu7", "App.Example")) as server:
        assert status(server, Host="gpu7:8000") == 200
        assert status(server, Host="app.example", Origin="https://app.example") == 200
        assert status(server, Host="other") == 403
    with served(engine_of("x"), allow_hosts=("*",)) as server:
        assert status(server, Host="other", Origin="https://other") == 200
    key = {"Authorization": "Bearer k"}
    with served(engine_of("x"), api_key="k") as server:
        assert status(server, Host="other", **key) == 200
    with served(engine_of("x"), api_key="k", allow_hosts=("gpu7",)) as server:
        assert status(server, Host="other", **key) == 403
        assert status(server, Host="gpu7", **key) == 200


def test_other_applications_are_guarded_too() -> None:
    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    transport = httpx.ASGITransport(HostGuard(app, "127.0.0.1", None))

    async def ask(host: str) -> int:
        async with httpx.AsyncClient(transport=transport) as client:
            return (await client.get(f"http://{host}/")).status_code

    assert [asyncio.run(ask(host)) for host in ("localhost", "evil.example")] == [200, 403]


# Slow and deaf


@contextmanager
def raw(server: BackgroundServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
        yield connection


def everything(connection: socket.socket) -> bytes:
    """Read until the server hangs up."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
BODY = json.dumps(CHAT).encode()
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/chat", HEAD], ids=["nothing", "half a line", "half the headers"]
)
def test_headers_that_do_not_come_end_the_connection(engine_of: EngineOf, sent: bytes) -> None:
    with served(engine_of("x"), patience=Patience(headers_s=0.3)) as server, raw(server) as client:
        client.sendall(sent)
        answer = everything(client)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"


@pytest.mark.parametrize("later", [False, True])
def test_half_a_second_request_ends_the_connection(engine_of: EngineOf, later: bool) -> None:
    with served(engine_of("x"), patience=Patience(headers_s=0.3)) as server, raw(server) as client:
        client.sendall(WHOLE if later else WHOLE + b"GET /he")
        answer = b""
        while not answer.endswith(b"}}}"):
            answer += client.recv(65536)
        if later:
            client.sendall(b"GET /he")
        assert everything(client).startswith(b"HTTP/1.1 408 ")


def test_a_byte_now_and_then_does_not_help(engine_of: EngineOf) -> None:
    with served(engine_of("x"), patience=Patience(headers_s=0.5)) as server, raw(server) as client:
        client.settimeout(0.05)
        answer = b""
        for _ in range(20 * WAIT_S):
            try:
                client.sendall(b"x")
                answer += client.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
            if answer:
                break
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_slow_client_in_time_is_served(engine_of: EngineOf) -> None:
    patience = Patience(headers_s=20)
    with served(engine_of("x"), patience=patience) as server, raw(server) as client:
        for byte in WHOLE:
            client.sendall(bytes([byte]))
        assert client.recv(12) == b"HTTP/1.1 200"


def test_a_slow_body_is_408_and_does_not_hold_a_place(engine_of: EngineOf) -> None:
    options = {"body_timeout_s": 0.3, "threads": 1, "queue": 0}
    with served(engine_of("x"), **options) as server:
        with raw(server) as slow:
            slow.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
            url = f"{server.url}/chat/completions"
            assert httpx.post(url, json=CHAT).status_code == 200
            assert slow.recv(12) == b"HTTP/1.1 408"
        with raw(server) as gone:
            gone.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        wait_until(lambda: 'status="499"} 1' in httpx.get(f"{server.url[:-3]}/metrics").text)


def test_without_the_key_no_body_is_waited_for(engine_of: EngineOf) -> None:
    with served(engine_of("x"), api_key="k") as server, raw(server) as client:
        client.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert client.recv(12) == b"HTTP/1.1 401"


def test_nonsense_is_400_in_json(engine_of: EngineOf) -> None:
    with served(engine_of("x")) as server:
        chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
        for sent in (b"\x16\x03\x01\x02\r\n\r\n", b"GET / HTTP/9\r\n\r\n", chunked + b"zz\r\n"):
            with raw(server) as client:
                client.sendall(sent)
                answer = everything(client)
            assert answer.startswith(b"HTTP/1.1 400 ")
            body = json.loads(answer.partition(b"\r\n\r\n")[2])
            assert body["error"]["code"] == "invalid_http"
        assert httpx.get(f"{server.url}/models").status_code == 200


def test_a_client_that_reads_nothing_is_hung_up_on(tokenizer_path: Path) -> None:
    engine = ScriptedEngine(lambda _: ["word " * 60_000], tokenizer_path=tokenizer_path)
    with served(engine, patience=Patience(write_s=0.3)) as server:
        body = json.dumps({**CHAT, "stream": True, "max_tokens": 100_000}).encode()
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", server.port))
            deaf.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            wait_until(lambda: bool(server._server.server_state.connections))
            wait_until(lambda: not server._server.server_state.connections)


def test_too_many_connections_are_told_so(engine_of: EngineOf) -> None:
    with served(engine_of("x"), patience=Patience(connections=2)) as server:
        with raw(server), raw(server):
            wait_until(lambda: len(server._server.server_state.connections) == 2)
            with raw(server) as third:
                assert everything(third).startswith(b"HTTP/1.1 503 ")
        wait_until(lambda: not server._server.server_state.connections)
        assert httpx.get(f"{server.url}/models").status_code == 200


# Large


@pytest.mark.parametrize("header", [{}, {"Connection": "close"}, {"Expect": "100-continue"}])
def test_a_body_that_is_too_large_is_413_for_every_client(
    engine_of: EngineOf, header: dict[str, str]
) -> None:
    with served(engine_of("x"), max_body=10_000) as server:
        big = b"x" * 8_000_000
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        headers = {"Content-Type": "application/json", **header}
        connection.request("POST", "/v1/chat/completions", big, headers)
        answer = connection.getresponse()
        assert (answer.status, json.load(answer)["error"]["code"]) == (413, "body_too_large")
        connection.close()
        url = f"{server.url}/chat/completions"
        asked = urllib.request.Request(url, big, headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=WAIT_S)
        assert refused.value.code == 413
        refused.value.close()
        assert httpx.post(url, content=big, headers=headers, timeout=WAIT_S).status_code == 413


def test_a_chunked_body_is_limited_too(engine_of: EngineOf) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    with served(engine_of("x"), max_body=10_000) as server:
        headers = {"Content-Type": "application/json"}
        url = f"{server.url}/chat/completions"
        answer = httpx.post(url, content=parts(), headers=headers, timeout=WAIT_S)
        assert (answer.status_code, code_of(answer)) == (413, "body_too_large")


# Sessions of others


def test_no_verb_takes_an_id_that_is_none(slow: Any) -> None:
    with served(slow) as server:
        answers: list[httpx.Response] = []
        url = f"{server.url}/chat/completions"
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(url, json=CHAT, timeout=WAIT_S))
        )
        asking.start()
        slow.running.acquire()
        assert httpx.delete(f"{server.url}/sessions/a%0Ab").status_code == 404
        for name in ("one%20shot%201", "one shot 1", "%00", "x" * 257, "ä"):
            refused = httpx.delete(f"{server.url}/sessions/{name}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_id")
        for headers in ({"X-KVBench-Session": ""}, {"X-KVBench-Session": "a b"}):
            assert httpx.post(url, json=CHAT, headers=headers).status_code == 400
        slow.go.set()
        asking.join(WAIT_S)
        assert answers[0].json()["usage"]["kvbench"]["finish_reason"] == "stop"


# Stopping


def test_answers_in_flight_get_their_time_and_then_an_error(slow: Any) -> None:
    slow.free = 5
    answers: dict[bool, httpx.Response] = {}

    def ask(url: str, stream: bool) -> None:
        body = {**CHAT, "stream": stream}
        answers[stream] = httpx.post(f"{url}/chat/completions", json=body, timeout=WAIT_S)

    with served(slow, threads=2, patience=Patience(drain_s=0.3)) as server:
        asking = [threading.Thread(target=ask, args=(server.url, s)) for s in (True, False)]
        for each in asking:
            each.start()
            slow.running.acquire()
        queued = threading.Thread(target=ask, args=(server.url, None))
        queued.start()
        wait_until(lambda: server._server._answers._pool.admitted == 3)  # type: ignore[union-attr]
        with raw(server) as receiving:
            receiving.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
            wait_until(lambda: bool(server._server._answers._receiving))  # type: ignore[union-attr]
            server._server.should_exit = True
            assert receiving.recv(12) == b"HTTP/1.1 503"
        for each in (*asking, queued):
            each.join(WAIT_S)
    assert answers[True].status_code == 200
    *_, error, done = [line for line in answers[True].text.splitlines() if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "server_stopping"
    assert done == "data: [DONE]"
    for plain in (answers[False], answers[None]):  # type: ignore[index]
        assert (plain.status_code, code_of(plain)) == (503, "server_stopping")
        assert plain.headers["retry-after"]


def test_answers_that_end_in_time_are_whole(slow: Any) -> None:
    answers: list[httpx.Response] = []
    with served(slow, patience=Patience(drain_s=WAIT_S)) as server:
        url = f"{server.url}/chat/completions"
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(url, json=CHAT, timeout=WAIT_S))
        )
        asking.start()
        slow.running.acquire()
        server._server.should_exit = True
        wait_until(lambda: server._server._answers._stopping)  # type: ignore[union-attr]
        slow.go.set()
        asking.join(WAIT_S)
    assert answers[0].status_code == 200
    assert answers[0].json()["choices"][0]["message"]["content"].startswith("word word")


SERVE = """
import sys, threading, time
from pathlib import Path
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import ServerSettings, run_server
from agentbench_kv.gateway.listening import Patience

go, stuck = Path(sys.argv[3]), sys.argv[4] == "stuck"

class Waiting(ScriptedEngine):
    def generate(self, session, sampling):
        while stuck or not go.exists():
            time.sleep(0.01)
        return super().generate(session, sampling)

engine = Waiting(lambda _: ["word " * 100] * 9, tokenizer_path=Path(sys.argv[1]))
settings = ServerSettings(patience=Patience(drain_s=0.5 if stuck else 60))
run_server(Gateway(engine), "127.0.0.1", int(sys.argv[2]), settings)
print("ended", threading.active_count(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "signals"), [("working", 1), ("stuck", 1), ("stuck", 2)])
def test_sigterm_leaves_nothing_running(
    tokenizer_path: Path, tmp_path: Path, kind: str, signals: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program, go = tmp_path / "serve.py", tmp_path / "go"
    program.write_text(SERVE)
    process = subprocess.Popen(
        [sys.executable, str(program), str(tokenizer_path), str(port), str(go), kind],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        wait_until(lambda: _answers(port))
        answers: list[int] = []

        def ask() -> None:
            try:
                answers.append(httpx.post(url, json=CHAT, timeout=WAIT_S).status_code)
            except httpx.HTTPError:  # a second signal asks for no good manners
                answers.append(0)

        asking = threading.Thread(target=ask)
        asking.start()
        metrics = f"http://127.0.0.1:{port}/metrics"
        wait_until(lambda: "in_flight 1" in httpx.get(metrics).text)
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
        go.touch()
        out, err = process.communicate(timeout=WAIT_S)
        asking.join(WAIT_S)
        assert process.returncode == 0, err
        assert "Traceback" not in err
        assert "ended" in out
        assert signals == 2 or answers == [503 if kind == "stuck" else 200]
    finally:
        process.kill()
        process.communicate()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_an_engine_that_does_not_stop_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    codes: list[int] = []
    monkeypatch.setattr("os._exit", lambda code: (codes.append(code), ended.set()))
    with ends_soon("the engine", WAIT_S):
        pass
    with ends_soon("the engine", 0.01):
        assert ended.wait(WAIT_S)
    assert codes == [1]
