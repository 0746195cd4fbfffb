"""Chat templating with the model's own jinja template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.gateway.messages import Message, for_template

# Text that no template rewrites and no message holds.
_SENTINEL = "kvbench\u2063sentinel\u2063kvbench"
_STAND_IN = [{"role": "user", "content": "."}, {"role": "assistant", "content": _SENTINEL}]

Tools = Sequence[Mapping[str, Any]] | None


class ChatTemplate:
    """Renders whole prompts, and what a later turn adds to a prompt."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render_first(self, messages: Sequence[Message], tools: Tools = None) -> str:
        """Return the whole prompt, generation prompt included."""
        if not messages:
            raise UsageError("a chat request needs at least one message")
        return self._render(messages, tools)

    def render_delta(self, messages: Sequence[Message], tools: Tools = None) -> str:
        """Return the text between an assistant's last content and its next turn.

        The turn end marker comes first. The new messages are rendered behind a stand-in assistant
        message, so that a template which drops the thoughts of earlier turns (Qwen3) still gives
        text that extends what the session holds.
        """
        _, found, delta = self._render([*_STAND_IN, *messages], tools).rpartition(_SENTINEL)
        if not found:
            raise UsageError("the model's chat template does not show the assistant's content")
        return delta

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [for_template(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except KVBenchError:
            raise
        except Exception as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UsageError(f"the model's chat template refuses these messages: {line}") from error
        return str(text)
