"""`POST /v1/completions` with token ids: our gateway, and vLLM's own server (0.32)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from agentbench_kv.loadgen.answers import Answer
from agentbench_kv.loadgen.wires.base import Call, Wire, failure

__all__ = ["CompletionsWire", "GatewayWire", "VllmWire"]


class CompletionsWire(Wire):
    """What both have in common: the prompt is the whole session, as ids."""

    def turn(self, session: str, log: Sequence[int], new: int, output: int) -> Call:  # noqa: ARG002
        """Return the request; ids of the answer only if another turn follows."""
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
        body |= {"return_token_ids": True, "session_id": session}
        return Call("POST", "/v1/completions", body, self.headers(session))

    def headers(self, session: str) -> dict[str, str]:  # noqa: ARG002
        """Return headers that name the session, besides the field in the body."""
        return {}

    def read(self, event: dict[str, Any], answer: Answer, at: float) -> None:
        """Take one chunk."""
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


class VllmWire(CompletionsWire):
    """vLLM: `session_id` is its own field; a parked session is dropped when memory is needed."""


class GatewayWire(CompletionsWire):
    """Our gateway: ids come with the last chunk, and a session is ended by name."""

    def headers(self, session: str) -> dict[str, str]:
        """Return the session header."""
        return {"X-KVBench-Session": session}

    def read_choice(self, choice: dict[str, Any], answer: Answer, at: float) -> None:
        """Take a chunk's only choice; the ids are those of the whole answer."""
        if choice.get("text"):
            answer.arrive(at)
        answer.ids += choice.get("token_ids") or []
        if choice.get("finish_reason"):
            answer.end = at

    def closing(self, session: str) -> Call | None:
        """Return the request that ends the session."""
        return Call("DELETE", f"/v1/sessions/{quote(session, safe='')}") if self.keep else None
