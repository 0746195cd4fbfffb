"""Reading a session into a cache, its answers given, and asking questions that do not see another.

Every question is asked in a fork of the session that was read. Where the engine cannot fork, the
session is read again for each.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from agentbench_kv.adapters.base import Message, Reply, SteeredClient
from agentbench_kv.adapters.probe.questions import Probe
from agentbench_kv.adapters.probe.session import ChatSession, text_of, thoughts_of
from agentbench_kv.adapters.probe.values import contains, is_exact, times
from agentbench_kv.errors import ContextLimitError

REMOVED = "[removed]"
_ESCAPED = frozenset("\"'\\<>&")  # what JSON, or a template's, may write otherwise
Floor = Literal["off", "none", "removed"]
Numbered = tuple[int, Probe]  # rank among the session's questions


@dataclass(frozen=True)
class Place:
    """Where a value stands, in the session's tokens."""

    distance: int  # tokens between the evidence and the question
    seen_again: int  # times that the value stands behind it


@dataclass(frozen=True)
class AskedProbe:
    """A question with what was answered."""

    rank: int
    probe: Probe
    place: Place | None  # None where it is written otherwise than in the message
    answer: str
    exact: bool
    contains: bool


def ask_all(
    client: SteeredClient,
    session: ChatSession,
    probes: Sequence[Probe],
    floor: Floor,
    answer_tokens: int,
) -> Iterator[AskedProbe]:
    """Ask every question from the same state; see the module.

    Raises ContextLimitError where the session does not fit into the model's context.
    """
    histories = list(_histories(session, probes, floor))
    for number, (history, asked) in enumerate(histories):
        # The trial's own session is one of them, so that its account is on record.
        line = client if number == len(histories) - 1 else client.another()
        for each in _ask(line, history, asked, answer_tokens):
            # Without its evidence, a value stands where it happens to stand.
            yield each if floor == "off" else replace(each, place=None)
        if line is not client:
            line.close()


def _histories(
    session: ChatSession, probes: Sequence[Probe], floor: Floor
) -> Iterator[tuple[ChatSession, list[Numbered]]]:
    """Yield what is read, and which questions are asked behind it."""
    numbered = list(enumerate(probes))
    if floor == "off":
        yield session, numbered
    elif floor == "none":
        yield ChatSession(session.id, ()), numbered
    else:
        ordered = sorted(numbered, key=lambda item: item[1].message)
        for message, group in groupby(ordered, lambda item: item[1].message):
            yield without(session, message), list(group)


def without(session: ChatSession, at: int) -> ChatSession:
    """Return a session one of whose messages has been removed; its results of tools stay."""
    removed: Message = {**session.messages[at], "content": REMOVED}
    for part in ("tool_calls", "reasoning_content"):
        removed.pop(part, None)
    messages = [*session.messages]
    messages[at] = removed
    return ChatSession(session.id, tuple(messages), session.tools, session.cluster)


def _ask(
    client: SteeredClient, history: ChatSession, asked: Sequence[Numbered], answer_tokens: int
) -> Iterator[AskedProbe]:
    if history.messages and client.forks:
        places = read(client, history, [probe for _, probe in asked])
        for (rank, probe), place in zip(asked, places, strict=True):
            side = client.fork()
            yield _asked(side, history, rank, probe, place, answer_tokens)
            side.close()
        return
    for number, (rank, probe) in enumerate(asked):
        line = client if number == len(asked) - 1 else client.another()
        (place,) = read(line, history, [probe])
        yield _asked(line, history, rank, probe, place, answer_tokens)
        if line is not client:
            line.close()


def _asked(
    client: SteeredClient,
    history: ChatSession,
    rank: int,
    probe: Probe,
    place: Place | None,
    answer_tokens: int,
) -> AskedProbe:
    reply = question(client, history, probe.question, answer_tokens)
    right = is_exact(reply.content, probe.value), contains(reply.raw, probe.value)
    return AskedProbe(rank, probe, place, reply.raw, *right)


def question(client: SteeredClient, history: ChatSession, text: str, answer_tokens: int) -> Reply:
    """Ask the user's next message; ContextLimitError if there is no room for it."""
    messages = [*history.messages, {"role": "user", "content": text}]
    tools = list(history.tools) or None
    reply = client.chat(messages, tools, max_tokens=answer_tokens)
    if reply.finish_reason == "context_limit":
        raise ContextLimitError("the model's context is full: no room for a question")
    return reply


def read(
    client: SteeredClient, history: ChatSession, probes: Sequence[Probe]
) -> list[Place | None]:
    """Feed a session with its answers; return where each question's value stands in it."""
    ends: list[int] = []
    messages, answers = list(history.messages), history.answers
    for at in answers:
        client.force(messages[:at], messages[at], list(history.tools) or None)
        ends.append(client.tokens())
    if not ends:
        return [None] * len(probes)
    found = client.places([probe.value for probe in probes])
    return [
        _place(history, probe, places, answers, ends)
        for probe, places in zip(probes, found, strict=True)
    ]


def _place(
    history: ChatSession,
    probe: Probe,
    places: Sequence[int],
    answers: Sequence[int],
    ends: Sequence[int],
) -> Place | None:
    """Tell which of the places of a value is that of its evidence."""
    piece = bisect_left(answers, probe.message)  # of the session: a prompt with its answer
    if piece == len(answers):
        return None
    first = ends[piece - 1] if piece else 0
    inside = [place for place in places if first <= place < ends[piece]]
    begin = answers[piece - 1] + 1 if piece else 0
    before = history.messages[begin : probe.message]
    texts = [_written(message) for message in before]
    if begin == 0 < probe.message:
        texts += map(json.dumps, history.tools)
    number = sum(times(text, probe.value) for text in texts)
    if not inside:
        return None
    here = inside[min(number, len(inside) - 1)]
    return Place(ends[-1] - here, sum(place > here for place in places))


def stands(session: ChatSession, probe: Probe) -> bool:
    """Whether a value must be found in the tokens of its evidence, whatever the chat template.

    So it is where a user or a tool says it in signs that JSON leaves as they are, and not at the
    beginning of a line, whose end JSON writes as a letter; an answer has to follow.
    """
    message = session.messages[probe.message]
    value = probe.value
    plain = value.isascii() and value.isprintable() and not _ESCAPED & set(value)
    if not plain or message["role"] not in ("user", "tool"):
        return False
    lines = text_of(message).replace("\t", "\n").splitlines()
    said = any(times(line, value) and not line.startswith(value) for line in lines)
    return said and any(at > probe.message for at in session.answers)


def _written(message: Message) -> str:
    calls: Any = message.get("tool_calls") or ()
    given: list[Mapping[str, Any]] = [call["function"] for call in calls]
    return "\n".join([thoughts_of(message), text_of(message), *map(json.dumps, given)])
