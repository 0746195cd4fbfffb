"""The user's side: the benchmark's LLM simulator over any endpoint, or a fixed script for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tau2.data_model.message import MultiToolMessage, ToolCall, ToolMessage, UserMessage
from tau2.user.user_simulator import UserSimulator

from .interfaces import STOP, UserBase, UserState

_RETRIES = 3


class UserFailedError(Exception):
    """The user simulator gave no valid message; the agent is not to blame."""


class ScriptedUser(UserBase):  # type: ignore[misc]  # tau2 has no types
    """States the scenario, does what the golden actions ask of it, then stops.

    The next golden user action is done when the agent's message names it; any other message ends
    the simulation. So it fits agents that are scripted, too.
    """

    def __init__(self, scenario: str, actions: Sequence[Any]) -> None:
        super().__init__(instructions=scenario)
        self.usage: dict[str, int] = {}
        self._pending = [each for each in actions if each.requestor == "user"]
        self._greeted = False

    def get_init_state(self, message_history: list[Any] | None = None) -> UserState:
        return UserState(system_messages=[], messages=message_history or [])

    @classmethod
    def is_stop(cls, message: UserMessage) -> bool:
        return not message.is_tool_call() and STOP in (message.content or "")

    def set_seed(self, seed: int) -> None:
        """Do nothing: there is nothing random."""

    def generate_next_message(
        self, message: Any, state: UserState
    ) -> tuple[UserMessage, UserState]:
        if not self._greeted:
            self._greeted = True
            return _says(str(self.instructions) or "Hello."), state
        if isinstance(message, (ToolMessage, MultiToolMessage)):
            return _says("Done."), state
        if self._pending and self._pending[0].name in (message.content or ""):
            action = self._pending.pop(0)
            asked = {"name": action.name, "arguments": action.arguments, "requestor": "user"}
            call = ToolCall(id=f"user_{len(self._pending)}", **asked)
            return UserMessage(role="user", tool_calls=[call], cost=0.0), state
        return _says(STOP), state


class SimulatedUser(UserSimulator):  # type: ignore[misc]  # tau2 has no types
    """The benchmark's own simulator, with its failures marked and its tokens counted.

    `settings` are `url`, `model` and `key`; without a `url` litellm finds the model by its name.
    """

    def __init__(
        self, scenario: str, tools: Sequence[Any] | None, settings: dict[str, Any], wait_s: float
    ) -> None:
        model = settings["model"]
        options: dict[str, Any] = {"temperature": 0.0, "timeout": wait_s, "num_retries": _RETRIES}
        if settings["url"]:
            model = f"openai/{model}"
            options["api_base"] = settings["url"]
        # An OpenAI client wants some key even where the server wants none.
        if settings["key"] or settings["url"]:
            options["api_key"] = settings["key"] or "none"
        super().__init__(tools=tools, instructions=scenario, llm=model, llm_args=options)
        # Of the user alone.
        self.usage = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}

    def generate_next_message(
        self, message: Any, state: UserState
    ) -> tuple[UserMessage, UserState]:
        """Ask the model; whatever goes wrong is the user's failure."""
        try:
            said, state = super().generate_next_message(message, state)
            said.validate()
        except Exception as error:
            raise UserFailedError(f"{type(error).__name__}: {error}"[:500]) from error
        self.usage["requests"] += 1
        for key, count in (said.usage or {}).items():
            self.usage[key] = self.usage.get(key, 0) + (count or 0)
        return said, state


def _says(text: str) -> UserMessage:
    return UserMessage(role="user", content=text, cost=0.0)
