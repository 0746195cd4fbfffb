"""Reasoning and tool calls in generated text, read while it arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from agentbench_kv.gateway.calls import Call, Tools, read_calls
from agentbench_kv.gateway.messages import tool_call
from agentbench_kv.phases.syntax import ToolSyntax

_Mode = Literal["content", "reasoning", "call"]


Logprob = dict[str, Any]  # of one token, in the form of a chat response


@dataclass(frozen=True)
class Delta:
    """A piece of an assistant message as it becomes certain."""

    kind: Literal["content", "reasoning", "tool_call"]
    text: str = ""
    call: dict[str, Any] | None = None
    logprobs: tuple[Logprob, ...] = ()  # of the tokens drawn since the last piece, if asked for


class Reader:
    """Makes a message of generated text while it arrives. This one takes it for plain content."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self.unparsable = False

    def feed(self, text: str) -> list[Delta]:
        """Take more text, return what is certain now."""
        self.content += text
        return [Delta("content", text)] if text else []

    def finish(self) -> list[Delta]:
        """Take the end of the text, return the rest of the message."""
        return []


class MessageReader(Reader):
    """What readers of reasoning, content and calls share; `next_id` names calls without an id.

    White space that may turn out to be trailing is held back.
    """

    def __init__(self, next_id: Callable[[], str]) -> None:
        super().__init__()
        self._next_id = next_id
        self._buffer = ""  # not certain yet
        self._deltas: list[Delta] = []  # not returned yet
        self._spaces = {"content": "", "reasoning": ""}

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        while self._step():
            pass
        return self._take_deltas()

    def _step(self) -> bool:
        """Take what is certain of the buffer; False when more text is needed."""
        raise NotImplementedError

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _emit(self, kind: Literal["content", "reasoning"], text: str) -> None:
        so_far: str = getattr(self, kind)
        text = self._spaces[kind] + text if so_far else text.lstrip()
        body = text.rstrip()
        self._spaces[kind] = text[len(body) :]
        if body:
            setattr(self, kind, so_far + body)
            self._deltas.append(Delta(kind, body))

    def _emit_calls(self, calls: Iterable[Call]) -> None:
        made = [tool_call(each.id or self._next_id(), each.name, each.arguments) for each in calls]
        self.tool_calls += made
        self._deltas += [Delta("tool_call", call=call) for call in made]


class OutputParser(MessageReader):
    """Splits generated text into reasoning, content and tool calls while it arrives.

    Text that may still turn out to be the beginning of a marker is held back, so the pieces joined
    are the final message whatever the chunks. With `thinking` the prompt already opened the think
    block; `tools` are those offered.
    """

    def __init__(
        self,
        syntax: ToolSyntax,
        next_id: Callable[[], str],
        *,
        thinking: bool = False,
        tools: Tools = (),
    ) -> None:
        super().__init__(next_id)
        self._syntax = syntax
        self._tools = tools
        self._mode: _Mode = "reasoning" if thinking else "content"
        self._span: tuple[str, str | None] = ("", None)  # the call that is being read

    def finish(self) -> list[Delta]:
        if self._mode == "call":
            self._end_call(self._buffer, closed=False)
        else:
            self._say(self._buffer)
        self._buffer = ""
        return self._take_deltas()

    def _step(self) -> bool:
        """Advance over the next marker; False when more text is needed."""
        if self._mode == "call":
            return self._step_call()
        if self._starts_bare():
            self._mode, self._span = "call", ("", None)
            return False
        markers = self._markers()
        found = [(at, mark) for mark in markers if (at := self._buffer.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._say(self._buffer[:at])
            self._buffer = self._buffer[at + len(mark) :]
            self._enter(mark)
            return True
        certain = len(self._buffer) - beginning_of(markers, self._buffer)
        self._say(self._buffer[:certain])
        self._buffer = self._buffer[certain:]
        return False

    def _enter(self, mark: str) -> None:
        if mark in self._syntax.think:
            self._mode = "reasoning" if mark == self._syntax.think[0] else "content"
            return
        self._mode = "call"
        self._span = next(span for span in self._syntax.spans if span[0] == mark)

    def _step_call(self) -> bool:
        close = self._span[1]
        if close is None or close not in self._buffer:
            return False
        payload, _, self._buffer = self._buffer.partition(close)
        self._mode = "content"
        self._end_call(payload, closed=True)
        return True

    def _markers(self) -> tuple[str, ...]:
        opened, closed = self._syntax.think
        if self._mode == "reasoning":
            return (closed,)
        return (opened, *(span[0] for span in self._syntax.spans))

    def _starts_bare(self) -> bool:
        possible = self._syntax.bare and self._mode == "content" and not self.content
        return bool(possible) and self._buffer.lstrip().startswith(tuple(self._syntax.bare))

    def _say(self, text: str) -> None:
        self._emit("reasoning" if self._mode == "reasoning" else "content", text)

    def _end_call(self, payload: str, *, closed: bool) -> None:
        """Take a payload as calls; what is none stays in the content as it was written."""
        calls = read_calls(self._syntax.name, payload, self._tools)
        if calls is not None:
            self._emit_calls(calls)
            return
        opened, close = self._span
        # JSON that was never meant as a call is an answer.
        meant = not self._syntax.bare or (opened and not self._syntax.prompted)
        self.unparsable = self.unparsable or bool(meant) or _looks_like_call(payload)
        self._mode = "content"
        self._say(opened + payload + (close or "" if closed else ""))


def _looks_like_call(payload: str) -> bool:
    return payload.lstrip("[ \n")[1:].lstrip().startswith('"name"')


def beginning_of(markers: Iterable[str], text: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        sizes = range(min(len(marker) - 1, len(text)), 0, -1)
        longest = max(longest, next((n for n in sizes if text.endswith(marker[:n])), 0))
    return longest
