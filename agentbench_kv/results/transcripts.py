"""Transcripts to be read: messages by phase, with events where they happened.

A transcript is what a model and a benchmark wrote: any JSON at all. What looks like chat messages
is laid out as such.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from agentbench_kv.results.records import TurnRecord
from agentbench_kv.results.terminal import visible

# Colours as in the pictures of `kvbench analyze`; every line names its phase too.
PHASE_STYLES = {"think": "blue", "act": "yellow", "tool": "green", "others": ""}
_MOST_CHARACTERS = 8_000
_EVENT_STYLE = "bold red"
_TAG = max(map(len, PHASE_STYLES))


class Segment(NamedTuple):
    """A part of a message that belongs to one phase."""

    phase: str
    text: str


def segments(message: Any) -> list[Segment]:
    """Split a chat message into its phases, in the order a chat template writes them.

    Reasoning is *think*, tool calls are *act*, a tool's answer is *tool*, and all else, the final
    answer included, *others*.
    """
    if not isinstance(message, dict):
        return [Segment("others", _text(message))]
    content = _text(message.get("content"))
    if message.get("role") == "tool":
        return [Segment("tool", content)]
    thought = _text(message.get("reasoning_content") or message.get("reasoning"))
    acts = map(_call, _list(message.get("tool_calls") or None))
    found = [Segment("think", thought), Segment("others", content)]
    return [part for part in found if part.text] + [Segment("act", act) for act in acts]


def transcript_lines(document: Any, turns: Sequence[TurnRecord]) -> Iterator[Text]:
    """Yield what to print of a transcript file's content, a line or a paragraph each.

    With one turn per assistant message, events are placed after the message during which they
    happened, else they are listed at the end.
    """
    fields = document if isinstance(document, dict) else {"transcript": document}
    messages, events = _list(fields.get("transcript")), _list(fields.get("events"))
    replies = sum(_role(message) == "assistant" for message in messages)
    placed = replies == len(turns) and sum(turn.events for turn in turns) == len(events)
    left, turn_of = iter(events), iter(turns)
    for message in messages:
        turn = next(turn_of) if placed and _role(message) == "assistant" else None
        yield _header(message, turn)
        for segment in segments(message):
            yield _paragraph(segment)
        for _ in range(turn.events if turn else 0):
            yield _event(next(left))
    for event in left:
        yield _event(event)


def _header(message: Any, turn: TurnRecord | None) -> Text:
    text = Text(visible(_role(message)), style="bold")
    if turn is not None:
        live = f"{turn.live_before} > {turn.live_after} live"
        text.append(f"  turn {turn.turn}, {live}", style="dim")
    return text


def _paragraph(segment: Segment) -> Text:
    shown = segment.text[:_MOST_CHARACTERS]
    if len(shown) < len(segment.text):
        left = len(segment.text) - len(shown)
        shown += f"\n({left} more characters; --json shows all)"
    lines = visible(shown, keep="\n").split("\n")
    tag = f"  {segment.phase:<{_TAG}} | "
    return Text("\n".join(tag + line for line in lines), style=PHASE_STYLES[segment.phase])


def _event(event: Any) -> Text:
    if not isinstance(event, dict):
        return Text(f"  event: {visible(_text(event))}", style=_EVENT_STYLE)
    before, after = event.get("live_before"), event.get("live_after")
    known = isinstance(before, int) and isinstance(after, int)
    lost = f"{before - after} evicted, " if known else ""  # type: ignore[operator]
    line = (
        f"  event: {before} > {after} live ({lost}{event.get('decoded')} decoded, "
        f"{event.get('logical')} logical so far)"
    )
    return Text(visible(line), style=_EVENT_STYLE)


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    return role if isinstance(role, str) else "entry"


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return _text(call)
    return f"{_text(function.get('name'))}({_text(function.get('arguments'))})"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] * (value is not None)


def _text(value: Any) -> str:
    known = "" if value is None else value
    return known if isinstance(known, str) else json.dumps(known, ensure_ascii=False)
