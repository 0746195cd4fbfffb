"""`POST /v1/completions` with token ids: our gateway, and vLLM's own server (0.32)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentbench_kv.loadgen.answers import Answer
from agentbench_kv.loadgen.wires.base import Call, Wire, failure


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
