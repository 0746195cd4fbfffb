"""The agent of a simulation: answers come from one session of a chat server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
from tau2.data_model.message import AssistantMessage, MultiToolMessage, ToolCall, ToolMessage

from .chat import ChatLine, ContextLimitError
from .interfaces import AgentBase


class InvalidAnswerError(Exception):
    """The agent's answer is neither text nor a call with an object of arguments."""


class EndpointAgent(AgentBase):  # type: ignore[misc]  # tau2 has no types
    """The benchmark's own agent prompt and loop, over a session that keeps what was generated.

    The history only grows, and an answer goes back as it came: the server's session goes on.
    """

    def __init__(self, policy: str, tools: Sequence[dict[str, Any]], line: ChatLine) -> None:
        prompt = SYSTEM_PROMPT.format(domain_policy=policy, agent_instruction=AGENT_INSTRUCTION)
        # The whole history in OpenAI form, and one record per answer.
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": prompt}]
        self.steps: list[dict[str, Any]] = []
        self._tools = tools
        self._line = line

    def get_init_state(self, message_history: list[Any] | None = None) -> None:
        """Begin; a task that starts in the middle brings its messages along."""
        for message in message_history or []:
            self._hear(message)

    def set_seed(self, seed: int) -> None:
        """Do nothing: the seed is in every request."""

    def generate_next_message(self, message: Any, state: None) -> tuple[AssistantMessage, None]:
        self._hear(message)
        choice = self._line.ask(self.messages, self._tools)
        answer, usage = choice["message"], choice["usage"]
        # The reasoning does not go back in the history: the server's session has it.
        said = {"role": "assistant", "content": answer.get("content")}
        if answer.get("tool_calls"):
            said["tool_calls"] = answer["tool_calls"]
        self.messages.append(said)
        self.steps.append({
            "calls": len(answer.get("tool_calls") or ()),
            "unparsable": int("<tool_call>" in (answer.get("content") or "")),
            "finish_reason": choice["finish_reason"],
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
        })  # fmt: skip
        if choice["finish_reason"] == "context_limit":
            raise ContextLimitError("the session reached the model's last position")
        return _parsed(said, usage), state

    def _hear(self, message: Any) -> None:
        if isinstance(message, MultiToolMessage):
            for each in message.tool_messages:
                self._hear(each)
        elif isinstance(message, ToolMessage):
            content = message.content or ""
            result = {"role": "tool", "tool_call_id": message.id, "content": content}
            self.messages.append(result)
        else:
            role = "assistant" if isinstance(message, AssistantMessage) else "user"
            self.messages.append({"role": role, "content": message.content})


def _parsed(said: dict[str, Any], usage: dict[str, Any]) -> AssistantMessage:
    try:
        calls = [_call(call) for call in said.get("tool_calls", ())]
        answer = AssistantMessage(
            role="assistant",
            content=said["content"],
            tool_calls=calls or None,
            cost=0.0,
            usage={key: usage.get(key, 0) for key in ("completion_tokens", "prompt_tokens")},
        )
        answer.validate()
    # A pydantic error is a ValueError, too.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidAnswerError(f"{type(error).__name__}: {error}"[:500]) from error
    return answer


def _call(call: dict[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = json.loads(function.get("arguments") or "{}")
    return ToolCall(id=call.get("id") or "", name=function["name"], arguments=arguments)
