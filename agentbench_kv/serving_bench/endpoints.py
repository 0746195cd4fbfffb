"""What servers understand: requests of each kind of endpoint, and answers as they arrive."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import aiohttp
import msgspec

_CONNECT_S = 20.0
# Below uvicorn's 5 s, so that a request never takes a connection that the server is closing.
_KEEP_ALIVE_S = 2.0
_DATA = b"data:"
_DONE = b"[DONE]"
_SGLANG_CAPACITY = 1 << 24  # characters a session may grow to; larger than any context


def authorization() -> dict[str, str]:
    """Return the header with the server's key, which comes from KVBENCH_API_KEY."""
    key = os.environ.get("KVBENCH_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def open_client() -> aiohttp.ClientSession:
    """Return a client that keeps its connections, any number; call it inside the event loop."""
    return aiohttp.ClientSession(
        headers={**authorization(), "Accept-Encoding": "identity"},
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_S),
    )


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of an event stream, however it is cut; else a `ValueError`."""
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            data = line[len(_DATA) :].strip() if line.startswith(_DATA) else b""
            if data and data != _DONE:
                yield msgspec.json.decode(data, type=dict[str, Any])


class TimedTurn(msgspec.Struct):
    """One request, and what has arrived of its answer. Times are in seconds."""

    session: int
    turn: int
    start: float  # on the client's clock; in a `PlayedJob` from the first session's beginning
    new_tokens: int  # what this request added to the session
    prompt_tokens: int  # with all that came before
    output_tokens: int = 0  # generated, as the server counts
    ttft_s: float = 0.0  # until the first token; where none had a text, until the end
    latency_s: float = 0.0  # until the last one
    itls_s: list[float] = []  # gaps between tokens
    error: str | None = None  # why it counts as failed
    kv: dict[str, Any] | None = None  # `usage.kvbench`, where the server sends it
    ids: list[int] = []  # generated, where they were asked for
    arrivals: int = 0
    part: int = 0  # counts the fresh calls of its session so far
    cached_tokens: int | None = None  # of the prompt, where the server says so
    late_s: float = 0.0  # sent after the trace's own time, as the answer before came too late

    @property
    def tpot_s(self) -> float:
        """Seconds a token after the first; 0 of an answer without another."""
        later = self.output_tokens - 1
        return (self.latency_s - self.ttft_s) / later if later > 0 else 0.0

    @property
    def end(self) -> float:
        return self.start + self.latency_s

    def arrive(self, at: float, count: int = 1) -> None:
        """Note that tokens came; those that arrive together share the gap before them equally."""
        if self.arrivals:
            self.itls_s += [(at - self.end) / count] * count
        self.finish(at)
        self.arrivals += 1

    def finish(self, at: float) -> None:
        self.latency_s = max(at - self.start, 0.0)
        if not self.arrivals:
            self.ttft_s = self.latency_s


@dataclass(frozen=True)
class HttpRequest:
    """One HTTP request."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)


class ServerEndpoint(ABC):
    """Requests and answers of one kind of endpoint. Greedy, and of fixed length."""

    needs_ids: ClassVar[bool] = True  # whether a later turn sends the generated ids back

    def __init__(self, model: str, *, keep: bool, drops: bool = False) -> None:
        self.model = model
        self.drops = drops  # sessions may be shortened, and every turn says what is new
        self.keep = keep  # sessions have more than one turn: the server must know them again

    def opening(self, session: str) -> HttpRequest | None:  # noqa: ARG002
        """Return what starts a session; None where the first turn does."""
        return None

    @abstractmethod
    def turn(self, session: str, log: Sequence[int], new: int, output: int) -> HttpRequest:
        """Return a request for `output` tokens.

        `log` holds all ids of the session; the server has not seen the last `new` of them, nor,
        where the session was shortened, those before them as they are now.
        """

    @abstractmethod
    def read(self, event: dict[str, Any], turn: TimedTurn, at: float) -> None:
        """Take one event of the answer, which arrived at `at` seconds."""

    def closing(self, session: str) -> HttpRequest | None:  # noqa: ARG002
        """Return what ends a session; None where the server forgets it by itself."""
        return None


def _failure(event: dict[str, Any]) -> str | None:
    error = event.get("error")
    if not error:
        return None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


class VllmEndpoint(ServerEndpoint):
    """vLLM's own server (0.32): `POST /v1/completions` with the whole session as token ids.

    `session_id` is a field of its own. A parked session is dropped when memory is needed, so
    nothing ends one.
    """

    def turn(self, session: str, log: Sequence[int], new: int, output: int) -> HttpRequest:  # noqa: ARG002
        sampling = {"max_tokens": output, "temperature": 0.0, "ignore_eos": True}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.model, "prompt": list(log), **sampling, **stream}
        if self.keep:  # ids of the answer are asked for only if another turn sends them back
            body |= {"return_token_ids": True, "session_id": session}
        return HttpRequest("POST", "/v1/completions", body)

    def read(self, event: dict[str, Any], turn: TimedTurn, at: float) -> None:
        turn.error = turn.error or _failure(event)
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids") or []
            turn.ids += ids
            if count := self.count(choice.get("text"), ids):
                turn.arrive(at, count)
            if choice.get("finish_reason"):
                turn.finish(at)
        if usage := event.get("usage"):
            turn.output_tokens = usage.get("completion_tokens") or turn.output_tokens
            turn.kv = usage.get("kvbench") or turn.kv
            details = usage.get("prompt_tokens_details") or {}
            turn.cached_tokens = details.get("cached_tokens", turn.cached_tokens)

    def count(self, text: str | None, ids: Sequence[int]) -> int:
        """Return how many tokens arrived: one where the server does not say how many."""
        return len(ids) or bool(text)


class GatewayEndpoint(VllmEndpoint):
    """Our gateway: as vLLM, but a header names the session too, which is ended by name."""

    def turn(self, session: str, log: Sequence[int], new: int, output: int) -> HttpRequest:
        request = super().turn(session, log, new, output)
        if self.drops and request.body is not None:
            request.body["kvbench"] = {"new_tokens": new}
        return replace(request, headers={"X-KVBench-Session": session}) if self.keep else request

    def count(self, text: str | None, ids: Sequence[int]) -> int:  # noqa: ARG002
        """Return 1 for a text: ids come with the last chunk, for the whole answer."""
        return int(bool(text))

    def closing(self, session: str) -> HttpRequest | None:
        return HttpRequest("DELETE", f"/v1/sessions/{session}") if self.keep else None


class SglangEndpoint(ServerEndpoint):
    """SGLang's server with --enable-streaming-session: `/generate` takes only new ids."""

    needs_ids: ClassVar[bool] = False

    def opening(self, session: str) -> HttpRequest | None:
        if not self.keep:
            return None
        body = {"capacity_of_str_len": _SGLANG_CAPACITY, "session_id": session, "streaming": True}
        return HttpRequest("POST", "/open_session", body)

    def turn(self, session: str, log: Sequence[int], new: int, output: int) -> HttpRequest:
        sampling = {"temperature": 0.0, "max_new_tokens": output, "ignore_eos": True}
        body = {"sampling_params": sampling, "stream": True}
        if self.keep:
            body |= {"input_ids": list(log[-new:]), "session_params": {"id": session}}
        else:
            body |= {"input_ids": list(log)}
        return HttpRequest("POST", "/generate", body)

    def read(self, event: dict[str, Any], turn: TimedTurn, at: float) -> None:
        """Take one event; `completion_tokens` counts from the answer's beginning."""
        turn.error = turn.error or _failure(event)
        meta = event.get("meta_info") or {}
        count = meta.get("completion_tokens") or turn.output_tokens
        if count > turn.output_tokens:
            turn.arrive(at, count - turn.output_tokens)
            turn.output_tokens = count
        reason = meta.get("finish_reason") or {}
        if reason:
            turn.finish(at)
            turn.kv = meta.get("kvbench") or turn.kv
            turn.cached_tokens = meta.get("cached_tokens", turn.cached_tokens)
        if reason.get("type") == "abort":
            turn.error = turn.error or str(reason.get("message") or "aborted")

    def closing(self, session: str) -> HttpRequest | None:
        body = {"session_id": session}
        return HttpRequest("POST", "/close_session", body) if self.keep else None


ENDPOINTS: dict[str, type[ServerEndpoint]] = {
    "gateway": GatewayEndpoint,
    "vllm": VllmEndpoint,
    "sglang": SglangEndpoint,
}
