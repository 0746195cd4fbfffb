"""SideQuest in the gateway: the fork that is asked which tool results are expired."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentbench_kv.gateway.aside import Aside
from agentbench_kv.gateway.cursors import (
    named_cursors,
    places_of_cursors,
    question,
    with_cursors,
)
from agentbench_kv.gateway.dropping import SessionDrops
from agentbench_kv.gateway.messages import Message
from agentbench_kv.gateway.session import Session
from agentbench_kv.methods.dropping.policy import Drop, What
from agentbench_kv.methods.dropping.sidequest import SideQuestPrompted

Tools = Sequence[Mapping[str, Any]] | None
# Begins a request beside a session: its messages, how they are shown, tools, most tokens.
Ask = Callable[[Session, Sequence[Message], Sequence[Message], Tools, int], Aside]


class SideQuests:
    """Asks beside sessions, and takes the answers in.

    A question is asked at a request, of a fork that has read what the request brings; the session
    goes on with the request meanwhile. Its answer is waited for at the next one, so that what
    leaves does not depend on how fast either is.
    """

    def __init__(self, method: SideQuestPrompted, ask: Ask) -> None:
        self._method = method
        self._ask = ask

    def collect(
        self, session: Session, drops: SessionDrops, messages: Sequence[Message]
    ) -> frozenset[Drop]:
        """Return what leaves by the answer that is due; nothing without one."""
        if drops.aside is None:
            return frozenset()
        aside, drops.aside = drops.aside, None
        answer = aside.result()
        session.charge(answer)
        if answer.error:  # the engine's, which had no room or failed: the model has said nothing
            drops.count("questions")
            drops.count("unanswered_questions")
            return frozenset()
        return expired(self._method, drops, messages, answer.text)

    def begin(
        self, session: Session, drops: SessionDrops, messages: Sequence[Message], tools: Tools
    ) -> None:
        """Ask, if it is time for it."""
        if question_due(self._method, drops, messages) and session.opened:
            last = question(self._method.trained)
            asked, shown = [*messages, last], [*with_cursors(messages), last]
            drops.aside = self._ask(session, asked, shown, tools, self._method.fork_tokens)


def question_due(
    method: SideQuestPrompted, drops: SessionDrops, messages: Sequence[Message]
) -> bool:
    """Return whether a request is one to ask at, with a result to ask about."""
    due = drops.requests % method.fork_every == 0 and drops.aside is None
    return due and any(part.clearable for part in drops.history(messages).parts)


def expired(
    method: SideQuestPrompted, drops: SessionDrops, messages: Sequence[Message], answer: str
) -> frozenset[Drop]:
    """Return what leaves by an answer, and count what came of it.

    One that names a cursor which no result has drops nothing; a result that cannot leave, or has
    left, is passed over.
    """
    history, places = drops.history(messages), places_of_cursors(messages)
    cursors = named_cursors(answer)
    unknown = [cursor for cursor in cursors or () if cursor not in places]
    results = [places[cursor] for cursor in cursors or () if not unknown]
    left = [number for number in results if history.parts[number].left(What.RESULT)]
    drops.count("questions")
    drops.count("unreadable_answers", cursors is None)
    drops.count("unknown_cursors", len(unknown))
    found = method.expired(history, left)
    return frozenset(drop for drop in found if history.parts[drop.message].left(drop.what))
