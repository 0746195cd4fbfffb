"""The official multi-turn loop over an append-only text; runs in the bfcl environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bfcl_eval.model_handler.base_handler import BaseHandler

from .calls import parse, refused, to_python, visible
from .completions import Completion, Completions
from .transcript import Transcript


class TruncatedError(Exception):
    """The engine ran into the model's last position in the middle of an answer."""


class RawSessionHandler(BaseHandler):  # type: ignore[misc]  # bfcl_eval has no types
    """What the official loop asks of a model, answered by one session of a completions server.

    Parameters
    ----------
    name : str
        Key of this trial's simulators; no other living trial of the sample has it.
    tools : sequence of dict
        The entry's tool descriptions.
    line : Completions
        The server.

    Attributes
    ----------
    transcript : Transcript
        Whole text of the session.
    steps : list of dict
        One record per completion.
    """

    def __init__(self, name: str, tools: Sequence[dict[str, Any]], line: Completions) -> None:
        super().__init__(name, 0.0, name, is_fc_model=False)
        self.transcript = Transcript(tools)
        self.steps: list[dict[str, Any]] = []
        self._tools = frozenset(tool["name"] for tool in tools)
        self._line = line
        self._turn = 0

    def decode_execute(self, result: str, has_tool_call_tag: bool = False) -> list[str]:  # noqa: ARG002
        """Turn visible text into the source lines that the executor evaluates."""
        calls, _ = parse(result)
        return [to_python(call, self._tools) for call in calls]

    def _pre_query_processing_prompting(self, test_entry: dict[str, Any]) -> dict[str, Any]:
        return {"id": test_entry["id"]}

    def add_first_turn_message_prompting(
        self, inference_data: dict[str, Any], first_turn_message: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Write the system message and the first turn."""
        system = [m["content"] for m in first_turn_message if m["role"] == "system"]
        self.transcript.begin(system)
        self._add_messages(m for m in first_turn_message if m["role"] != "system")
        return inference_data

    def _add_next_turn_user_message_prompting(
        self, inference_data: dict[str, Any], user_message: list[dict[str, Any]]
    ) -> dict[str, Any]:
        self._turn += 1
        self._add_messages(user_message)
        return inference_data

    def _add_messages(self, messages: Any) -> None:
        for message in messages:
            self.transcript.add(message["role"], message["content"])

    def _query_prompting(self, inference_data: dict[str, Any]) -> tuple[Completion, float]:  # noqa: ARG002
        answer = self._line.complete(self.transcript.prompt())
        return answer, answer.seconds

    def _parse_query_response_prompting(self, api_response: Completion) -> dict[str, Any]:
        shown = visible(api_response.text)
        self._record(api_response, shown)
        if api_response.finish_reason == "context_limit":
            self.transcript.add_generated(api_response.text)
            raise TruncatedError("the session reached the model's last position")
        return {
            "model_responses": shown,
            "raw": api_response.text,
            "input_token": api_response.usage.get("prompt_tokens", 0),
            "output_token": api_response.usage.get("completion_tokens", 0),
        }

    def _record(self, answer: Completion, shown: str) -> None:
        calls, unparsable = parse(shown)
        self.steps.append({
            "turn": self._turn,
            "calls": [{"name": c.name, "arguments": c.arguments} for c in calls],
            "refused": sum(refused(c, self._tools) for c in calls),
            "unparsable": unparsable,
            "finish_reason": answer.finish_reason,
            "seconds": round(answer.seconds, 4),
            "usage": answer.usage,
            "results": [],
        })  # fmt: skip

    def _add_assistant_message_prompting(
        self, inference_data: dict[str, Any], model_response_data: dict[str, Any]
    ) -> dict[str, Any]:
        self.transcript.add_generated(model_response_data["raw"])
        return inference_data

    def _add_execution_results_prompting(
        self,
        inference_data: dict[str, Any],
        execution_results: list[str],
        model_response_data: dict[str, Any],  # noqa: ARG002
    ) -> dict[str, Any]:
        self.steps[-1]["results"] = list(execution_results)
        self.transcript.add_results(execution_results)
        return inference_data
