"""The HTTP client of a job, and the key it sends.

What a kind of endpoint must tell the client.

`POST /v1/completions` with token ids: our gateway, and vLLM's own server (0.32).

SGLang's own endpoints (0.5.12): `/generate` in a streaming session takes only new ids.

What servers understand: one file per kind of endpoint.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import aiohttp

from agentbench_kv.serving_bench.records import Answer

_CONNECT_S = 20.0


# Below uvicorn's 5 s, so that a request never takes a connection that the server is closing.
_KEEP_ALIVE_S = 2.0


def authorization() -> dict[str, str]:
    """Return the header with the server's key, which comes from KVBENCH_API_KEY."""
    key = os.environ.get("KVBENCH_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def open_client() -> aiohttp.ClientSession:
    """Return a client that keeps its connections and lets any number be open at once.

    It must be made inside the event loop. How long an answer may take is up to the caller.
    """
    return aiohttp.ClientSession(
        headers={**authorization(), "Accept-Encoding": "identity"},
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_S),
    )


@dataclass(frozen=True)
class Call:
    """One HTTP request."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)


class Wire(ABC):
    """Requests and answers of one kind of endpoint. Greedy, and of fixed length."""

    needs_ids: ClassVar[bool] = True  # whether a later turn sends the generated ids back

    def __init__(self, model: str, *, keep: bool) -> None:
        self.model = model
        self.keep = keep  # sessions have more than one turn: the server must know them again

    def opening(self, session: str) -> Call | None:  # noqa: ARG002
        """Return what starts a session; None where the first turn does."""
        return None

    @abstractmethod
    def turn(self, session: str, log: Sequence[int], new: int, output: int) -> Call:
        """Return a request for `output` tokens.

        `log` holds all ids of the session; the server has not seen the last `new` of them.
        """

    @abstractmethod
    def read(self, event: dict[str, Any], answer: Answer, at: float) -> None:
        """Take one event of the answer, which arrived at `at` seconds."""

    def closing(self, session: str) -> Call | None:  # noqa: ARG002
        """Return what ends a session; None where the server forgets it by itself."""
        return None


def failure(event: dict[str, Any]) -> str | None:
    error = event.get("error")
    if not error:
        return None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


class VllmWire(Wire):
    """vLLM: the prompt is the whole session, as ids; `session_id` is a field of its own.

    A parked session is dropped when memory is needed, so nothing ends one.
    """

    def turn(self, session: str, log: Sequence[int], new: int, output: int) -> Call:  # noqa: ARG002
        body = {
            "model": self.model,
            "prompt": list(log),
            "max_tokens": output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self.keep:
            return Call("POST", "/v1/completions", body)
        # Ids of the answer are asked for only if another turn sends them back.
        body |= {"return_token_ids": True, "session_id": session}
        return Call("POST", "/v1/completions", body)

    def read(self, event: dict[str, Any], answer: Answer, at: float) -> None:
        answer.error = answer.error or failure(event)
        for choice in event.get("choices") or ():
            self.read_choice(choice, answer, at)
        usage = event.get("usage")
        if usage:
            answer.tokens = usage.get("completion_tokens") or answer.tokens
            answer.prompt_tokens = usage.get("prompt_tokens")
            answer.kv = usage.get("kvbench") or answer.kv

    def read_choice(self, choice: dict[str, Any], answer: Answer, at: float) -> None:
        """Take a chunk's only choice: text, ids of that text, or the end."""
        ids = choice.get("token_ids") or []
        if choice.get("text") or ids:
            answer.arrive(at, len(ids) or 1)
        answer.ids += ids
        if choice.get("finish_reason"):
            answer.end = at


class GatewayWire(VllmWire):
    """Our gateway: a header names the session too, which is ended by name."""

    def turn(self, session: str, log: Sequence[int], new: int, output: int) -> Call:
        call = super().turn(session, log, new, output)
        return replace(call, headers={"X-KVBench-Session": session}) if self.keep else call

    def read_choice(self, choice: dict[str, Any], answer: Answer, at: float) -> None:
        """Take a chunk's only choice; ids come with the last chunk, for the whole answer."""
        if choice.get("text"):
            answer.arrive(at)
        answer.ids += choice.get("token_ids") or []
        if choice.get("finish_reason"):
            answer.end = at

    def closing(self, session: str) -> Call | None:
        return Call("DELETE", f"/v1/sessions/{session}") if self.keep else None


_CAPACITY = 1 << 24  # characters a session may grow to; larger than any context


class SglangWire(Wire):
    """`/open_session`, `/generate`, `/close_session`; needs --enable-streaming-session."""

    needs_ids: ClassVar[bool] = False

    def opening(self, session: str) -> Call | None:
        if not self.keep:
            return None
        body = {"capacity_of_str_len": _CAPACITY, "session_id": session, "streaming": True}
        return Call("POST", "/open_session", body)

    def turn(self, session: str, log: Sequence[int], new: int, output: int) -> Call:
        sampling = {"temperature": 0.0, "max_new_tokens": output, "ignore_eos": True}
        body = {"sampling_params": sampling, "stream": True}
        if self.keep:
            body |= {"input_ids": list(log[-new:]), "session_params": {"id": session}}
        else:
            body |= {"input_ids": list(log)}
        return Call("POST", "/generate", body)

    def read(self, event: dict[str, Any], answer: Answer, at: float) -> None:
        """Take one event; `completion_tokens` counts from the answer's beginning."""
        answer.error = answer.error or failure(event)
        meta = event.get("meta_info") or {}
        count = meta.get("completion_tokens") or answer.tokens
        if count > answer.tokens:
            answer.arrive(at, count - answer.tokens)
            answer.tokens = count
        reason = meta.get("finish_reason") or {}
        if reason:
            answer.end = at
            answer.prompt_tokens = meta.get("prompt_tokens")
            answer.kv = meta.get("kvbench") or answer.kv
        if reason.get("type") == "abort":
            answer.error = answer.error or str(reason.get("message") or "aborted")

    def closing(self, session: str) -> Call | None:
        return Call("POST", "/close_session", {"session_id": session}) if self.keep else None


WIRES: dict[str, type[Wire]] = {"gateway": GatewayWire, "vllm": VllmWire, "sglang": SglangWire}
