"""How SGLang is started and spoken to: streaming sessions that take only the new ids of a turn."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import time
from collections.abc import Generator
from typing import Any

import httpx

from agentbench_kv.engines.serving.control import ControlClient
from agentbench_kv.engines.serving.process import Launch
from agentbench_kv.engines.serving.streams import RequestError, post_events
from agentbench_kv.engines.serving.wire import PluginWire, Request, ServerSetup, stop_document
from agentbench_kv.engines.sglang.backend.versions import KEY
from agentbench_kv.engines.sglang.flags import flags
from agentbench_kv.errors import CapacityError

_BACKEND = "agentbench_kv.engines.sglang.backend"
_HOST = "127.0.0.1"
_PORTS = range(20_000, 30_000)
_POLL_S = 0.005
_requests = itertools.count(1)


class SglangWire(PluginWire):
    """One SGLang server on a loopback port.

    As shipped, its radix cache finds what a session sent before.
    """

    def __init__(self, setup: ServerSetup) -> None:
        super().__init__(setup)
        self._commands = ControlClient(self.control)
        self._complete: dict[str, int] = {}  # session -> tokens of its completed turns

    def launch(self) -> Launch:
        """Return the command that starts the server, on a port that is free now."""
        self._commands.close()
        port = _free_port()
        self._client.base_url = httpx.URL(f"http://{_HOST}:{port}")
        command = [str(self._setup.python), "-m", f"{_BACKEND}.launch"]
        command += ["--model-path", str(self._setup.model), "--host", _HOST, "--port", str(port)]
        command += flags(self._options, self._setup.facts, gpu=self._setup.gpu, stock=self.stock)
        plugins = {} if self.stock else {"kvbench": f"{_BACKEND}.plugin:register"}
        if not self._setup.gpu:
            plugins["kvbench-cpu"] = f"{_BACKEND}.cpu:register"
        environment = self._environment("sglang.srt.plugins", plugins) | {
            KEY: self._key,
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            # Never opened, but derived from the other port and refused if it is too large.
            "SGLANG_GRPC_PORT": str(_free_port()),
        }
        if not self._setup.gpu:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        return Launch(command, self._ready, environment)

    def stream(self, request: Request) -> Generator[int]:
        name = f"{request.session}.{next(_requests)}"
        body = self._stock_body(request) if self.stock else self._session_body(request)
        read, ended = len(request.tokens), False
        try:
            for event in post_events(self._client, "/generate", body | {"rid": name}):
                _refuse_abort(event)
                request.usage["cached_tokens"] = event["meta_info"].get("cached_tokens", 0)
                for token in event.get("output_ids") or ():
                    read += 1
                    yield token
            ended = True
            self._complete[request.session] = read
        finally:
            if not ended:
                self._hang_up(request.session, name, read)

    def opened(self, session: str) -> None:
        self._complete[session] = 0

    def forked(self, session: str, new: str) -> None:
        """Let a session start with another one's history."""
        self._complete[new] = self._complete[session]

    def forget(self, session: str) -> None:
        self._complete.pop(session, None)

    def close(self) -> None:
        self._commands.close()
        super().close()

    def _session_body(self, request: Request) -> dict[str, Any]:
        """Return a turn: what the server's session has not completed, and how it ends."""
        complete = self._complete[request.session]
        if not complete and not self._commands.call("known", session=request.session):
            self._commands.call("open", session=request.session, recipe=request.recipe)
        new = request.tokens[complete:]
        # A request must bring an id, even to go on from the last one.
        ids = new or request.tokens[-1:]
        wishes = {
            "total": len(request.tokens),
            "new": len(request.tokens) - request.known,
            "repeated": len(ids) - len(new),
            "stop": stop_document(request.sampling),
            "stop_ids": sorted(request.sampling.stop_token_ids),
        }
        return {
            "input_ids": list(ids),
            "session_params": {"id": request.session},
            "sampling_params": _sampling(request) | {"custom_params": {"kvbench": wishes}},
            "stream": True,
        }

    def _stock_body(self, request: Request) -> dict[str, Any]:
        """Return a generation over all tokens, as any client would ask for it."""
        stop_ids = request.sampling.stop_token_ids
        stops = {"stop_token_ids": sorted(stop_ids), "ignore_eos": False} if stop_ids else {}
        return {
            "input_ids": list(request.tokens),
            "sampling_params": _sampling(request) | stops,
            "stream": True,
        }

    def _hang_up(self, session: str, name: str, read: int) -> None:
        """End a generation nobody reads any more, and see where its session is then."""
        with contextlib.suppress(OSError, httpx.HTTPError):
            self._client.post("/abort_request", json={"rid": name})
            if self.stock:
                return
            while (completed := self._commands.call("completed", session=session)) is None:
                time.sleep(_POLL_S)
            if completed > read:
                # It ended by itself, behind the last token that was read.
                self._commands.call("reset", session=session)
                completed = 0
            self._complete[session] = completed

    def _ready(self) -> bool:
        try:
            up = self._client.get("/model_info").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False
        return up and (self.stock or self._commands.answers())


def _sampling(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "max_new_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "sampling_seed": sampling.seed % (1 << 31),
        "ignore_eos": True,
    }


def _refuse_abort(event: dict[str, Any]) -> None:
    """Raise what the server says about a generation it gave up."""
    reason = (event.get("meta_info") or {}).get("finish_reason") or {}
    if reason.get("type") != "abort":
        return
    message = str(reason.get("message"))
    if reason.get("err_type") == CapacityError.__name__:
        raise CapacityError(message)
    raise RequestError(f"the backend gave up: {message}")


def _free_port() -> int:
    """Return a port nobody has, below those that systems hand out unasked.

    It is used many seconds later; one of the others could be some connection's by then.
    """
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HOST, port))
            return port
