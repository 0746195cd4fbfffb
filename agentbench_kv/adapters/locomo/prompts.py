"""What the agent reads: the dialogue turn by turn, then a question."""

from __future__ import annotations

import re

from agentbench_kv.adapters.base import Fact, Message
from agentbench_kv.adapters.locomo.data import Conversation, Question, Session, Utterance

SYSTEM = (
    "You will read what {0} and {1} said to each other in several sessions, each under its date, "
    "and then be asked about it. Give each answer as a short phrase and nothing else, in the "
    "words of the conversation where you can. Say when things happened by the sessions' dates."
)
QUESTION = "Question: {}\nAnswer with a short phrase."
RIGHT_FROM = 0.5
"""F1 from which an answer counts as known in an audit of its evidence."""

_PLAIN = re.compile(r"[\x20-\x7e]+")


def history(conversation: Conversation) -> list[Message]:
    """Return a system message and one user message per turn of the dialogue."""
    system = {"role": "system", "content": SYSTEM.format(*conversation.speakers)}
    lines = (text for session in conversation.sessions for text in _lines(session))
    return [system, *(_user(text) for text in lines)]


def ask(question: Question) -> Message:
    return _user(QUESTION.format(question.text))


def _line(utterance: Utterance) -> str:
    shown = f" [image: {utterance.caption}]" if utterance.caption else ""
    return f"{utterance.speaker}: {utterance.text}{shown}"


def facts(conversation: Conversation, question: Question, f1: float) -> list[Fact]:
    """Return the turns a question's answer comes from, for an audit of what was evicted.

    Each is represented by its longest stretch of ASCII: a token may hold part of another character,
    and then the text of single tokens does not add up to the text that was sent.
    """
    utterances = conversation.utterances
    texts = (max(_PLAIN.findall(_line(utterances[id])), key=len) for id in question.evidence)
    return [Fact(text, "others", "one_shot", f1 >= RIGHT_FROM) for text in texts]


def _lines(session: Session) -> list[str]:
    """Write a session; its first turn carries the date."""
    lines = [_line(each) for each in session.utterances]
    return [f"[{session.date}]\n{text}" if at == 0 else text for at, text in enumerate(lines)]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
