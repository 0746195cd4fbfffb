"""Answers in OpenAI's harmony format: messages on channels instead of markers inside one message.

`openai-harmony` would do this from token ids, but only with its own vocabulary, which it downloads;
text is enough, and works with any tokenizer that has the markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from agentbench_kv.gateway.calls import Call, NotACallError, json_object
from agentbench_kv.gateway.parsing import Delta, MessageReader, beginning_of

_START, _MESSAGE, _END = "<|start|>", "<|message|>", "<|end|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyReader(MessageReader):
    """Reads what follows `<|start|>assistant`: analysis, commentary, calls, the final answer.

    A message to `functions.NAME` is a call; its end marker ends the generation and has no text.
    """

    def __init__(self, next_id: Callable[[], str]) -> None:
        super().__init__(next_id)
        self._header = ""
        self._body: str | None = None  # of a call; None: no call is being read
        self._in_message = False

    def finish(self) -> list[Delta]:
        if self._in_message:
            self._say(self._buffer)
            self._end_message()
        elif not (_CHANNEL.search(self._buffer) or _RECIPIENT.search(self._buffer)):
            # A model that does not speak the format at all has still said something.
            self._emit("content", self._buffer)
        self._buffer = ""
        return self._take_deltas()

    def _step(self) -> bool:
        """Take what is certain; False when more text is needed."""
        if not self._in_message:
            header, found, rest = self._buffer.partition(_MESSAGE)
            if found:
                self._begin_message(header, rest)
            return bool(found)
        ends = [(at, end) for end in (_END, _START) if (at := self._buffer.find(end)) >= 0]
        if not ends:
            certain = len(self._buffer) - beginning_of((_END, _START), self._buffer)
            self._say(self._buffer[:certain])
            self._buffer = self._buffer[certain:]
            return False
        at, end = min(ends)
        self._say(self._buffer[:at])
        self._buffer = self._buffer[at + len(end) :]
        self._end_message()
        return True

    def _begin_message(self, header: str, rest: str) -> None:
        self._header, self._buffer, self._in_message = header, rest, True
        self._body = "" if _RECIPIENT.search(header) else None

    def _say(self, text: str) -> None:
        if self._body is not None:
            self._body += text
            return
        channel = _CHANNEL.search(self._header)
        analysis = channel is not None and channel.group(1) == "analysis"
        self._emit("reasoning" if analysis else "content", text)

    def _end_message(self) -> None:
        body, self._body, self._in_message = self._body, None, False
        recipient = _RECIPIENT.search(self._header)
        if body is None or recipient is None:
            return
        name = recipient.group(1).removeprefix("functions.")
        try:
            self._emit_calls([Call(name, json_object(body or "{}"))])
        except (NotACallError, RecursionError):
            self.unparsable = True
            self._emit("content", f"{self._header}{_MESSAGE}{body}")
