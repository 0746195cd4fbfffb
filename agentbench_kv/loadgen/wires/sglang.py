"""SGLang's own endpoints (0.5.12): `/generate` in a streaming session takes only new ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agentbench_kv.loadgen.answers import Answer
from agentbench_kv.loadgen.wires.base import Call, Wire, failure

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
