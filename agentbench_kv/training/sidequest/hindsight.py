"""Which tool results a finished trace still needed, and from when on it did not.

Answers are numbered from 1, as requests are; a cursor is the number of a tool result, from 0. A
result is used by an answer that names its cursor in a call, or writes a word that the result was
the first to say. That is the paper's reading of "referenced" (section 3.3, footnote 2) for tools
whose calls name values and not cursors; thoughts do not count, as there.

Not all that is expired can be told at the time: what was just looked up and will never be used
looks like what will. How results of the same tool fared in all traces says which those are.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentbench_kv.adapters.base import Message
from agentbench_kv.adapters.probe.session import ChatSession, ToolUse, text_of, tool_uses

# Words may hold single signs, as in `bag/timu`, `3.5`, `2024-05-01` or `/tmp/a.txt`.
WORD = re.compile(r"\w+(?:[^\s\w\"'{}\[\](),;<>]\w+)*")
_SHORTEST = 3  # shorter words stand in any text


@dataclass(frozen=True)
class CursorUse:
    """A tool result in a trace."""

    cursor: int
    message: int
    brought: int  # the first answer that has read it
    uses: tuple[int, ...]  # the answers that use it, in order
    call: ToolUse | None

    @property
    def last(self) -> int:
        """The last answer that uses it; the first that has read it if none does."""
        return self.uses[-1] if self.uses else self.brought

    def habit(self, request: int) -> Habit:
        """Return what speaks for its being used again, as a request sees it."""
        name = self.call.name if self.call else ""
        return name, any(answer < request for answer in self.uses)


Habit = tuple[str, bool]  # a tool, and whether its result has been used before


def cursor_uses(session: ChatSession) -> list[CursorUse]:
    """Return every tool result of a session with its uses, in order."""
    messages, answers = session.messages, session.answers
    calls = {use.result: use for use in tool_uses(messages) if use.result is not None}
    results = [at for at, message in enumerate(messages) if message["role"] == "tool"]
    said = {at: _said(messages[at]) for at in answers}
    known = _words(json.dumps(list(session.tools), ensure_ascii=False, default=str))
    own = _first_words(messages, known)
    found = []
    for cursor, at in enumerate(results):
        after = [number for number, answer in enumerate(answers, start=1) if answer > at]
        if not after:
            continue  # nobody read it
        using = tuple(n for n in after if _uses(said[answers[n - 1]], own[at], cursor))
        found.append(CursorUse(cursor, at, after[0], using, calls.get(at)))
    return found


def expired(uses: Sequence[CursorUse], request: int) -> set[int]:
    """Return the cursors that no answer needs from this request on (Algorithm 2, line 16)."""
    return {use.cursor for use in uses if use.last < request}


def awaited(traces: Iterable[Sequence[CursorUse]]) -> frozenset[Habit]:
    """Return by which habits a result is more often used again than not."""
    again: dict[Habit, list[bool]] = defaultdict(list)
    for uses in traces:
        for use in uses:
            again[use.habit(use.brought)].append(bool(use.uses))
            if use.uses:
                again[use.habit(use.uses[0] + 1)].append(len(use.uses) > 1)
    return frozenset(habit for habit, found in again.items() if 2 * sum(found) > len(found))


def told(uses: Sequence[CursorUse], request: int, habits: frozenset[Habit]) -> set[int]:
    """Return the expired cursors that can be told by then: no habit speaks for another use."""
    gone = expired(uses, request)
    return {use.cursor for use in uses if use.cursor in gone and use.habit(request) not in habits}


def _first_words(messages: Sequence[Message], known: set[str]) -> dict[int, set[str]]:
    """Return, for every tool result, the words that nothing before it had said."""
    seen, found = set(known), {}
    for at, message in enumerate(messages):
        words = _words(text_of(message))
        if message["role"] == "tool":
            found[at] = words - seen
        seen |= words | _words(json.dumps(message.get("tool_calls") or [], ensure_ascii=False))
    return found


def _said(message: Message) -> tuple[set[str], set[int]]:
    """Return the words of an answer and its calls, and the cursors that the calls name."""
    words, cursors = _words(text_of(message)), set()
    for use in tool_uses([message]):
        # Names of arguments are the tool's words, not the agent's.
        words |= _words(json.dumps(list(use.arguments.values()), ensure_ascii=False))
        for name, value in use.arguments.items():
            if name in ("cursor", "cursors"):
                listed = value if isinstance(value, list) else [value]
                cursors |= {each for each in listed if type(each) is int}
    return words, cursors


def _uses(said: tuple[set[str], set[int]], own: set[str], cursor: int) -> bool:
    words, cursors = said
    return cursor in cursors or bool(words & own)


def _words(text: str) -> set[str]:
    return {word for word in WORD.findall(text) if len(word) >= _SHORTEST}
