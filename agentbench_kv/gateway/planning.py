"""Does a request extend the session? What it adds if so, the whole prompt if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentbench_kv.errors import UsageError
from agentbench_kv.gateway.messages import Message, canonical, tools_key
from agentbench_kv.gateway.reminders import remind
from agentbench_kv.gateway.session import Known, Plan, Session
from agentbench_kv.gateway.templates import ChatTemplate
from agentbench_kv.phases.codec import TokenCodec

__all__ = ["Planner", "extends"]


class Planner:
    """Turns requests into plans.

    Parameters
    ----------
    codec : TokenCodec
        The model's tokenizer.
    message_ends : frozenset of int
        Ids that end a message; two in a row are one too many.
    """

    def __init__(self, codec: TokenCodec, message_ends: frozenset[int]) -> None:
        self._codec = codec
        self._template = ChatTemplate(codec.tokenizer)
        self._message_ends = message_ends

    def chat(
        self,
        session: Session,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        reminder: str = "",
    ) -> Plan:
        """Plan a chat request: the client sends its whole history each time.

        A reminder is put before the user's new message; the client never learns of it.
        """
        asked = Known(tuple(canonical(message) for message in messages), tools_key(tools))
        old = _chat_history(session)
        if old is not None and extends(asked, old):
            new = remind(messages[len(old.messages) :], reminder)
            text = self._template.render_delta(new, tools)
            ids = self._without_second_end(session, self._codec.encode(text))
            return Plan(ids, False, asked, _opens_think(text))
        text = self._template.render_first(messages, tools)
        return Plan(self._codec.encode(text), not session.fresh, asked, _opens_think(text))

    def raw(self, session: Session, prompt: str | Sequence[int]) -> Plan:
        """Plan a completion: a prompt of text, or of ids that extend the token log."""
        if not prompt:
            raise UsageError("the prompt is empty")
        if not isinstance(prompt, str):
            return self._raw_ids(session, list(prompt))
        asked = Known(text=prompt)
        rest = None if session.broken else _rest_of(prompt, session.known)
        if rest is not None:
            return Plan(self._codec.encode(rest), False, asked)
        return Plan(self._codec.encode(prompt), not session.fresh, asked)

    def _raw_ids(self, session: Session, ids: list[int]) -> Plan:
        size = len(session.tokens)
        extends = not session.fresh and not session.broken and ids[:size] == session.tokens
        asked = Known(text=self._codec.decode(ids))
        return Plan(ids[size:] if extends else ids, not (extends or session.fresh), asked)

    def _without_second_end(self, session: Session, ids: list[int]) -> list[int]:
        last = session.tokens[-1]
        same = ids[:1] == [last]
        both_ends = last in self._message_ends and ids[0] in self._message_ends if ids else False
        return ids[1:] if same or both_ends else ids


def _chat_history(session: Session) -> Known | None:
    known = session.known
    usable = known is not None and known.text is None and not session.broken
    return known if usable else None


def extends(asked: Known, old: Known) -> bool:
    """Return whether a request goes on from what is known: same tools, a longer history."""
    return old.tools == asked.tools and asked.messages[: len(old.messages)] == old.messages


def _opens_think(text: str) -> bool:
    return text.rstrip().endswith("<think>")


def _rest_of(prompt: str, known: Known | None) -> str | None:
    """Return what `prompt` adds to the known text; None if it is another text.

    The stop that ended the last generation is in the log but not in the text the client got. A
    client that goes on without it has another text.
    """
    if known is None or known.text is None:
        return None
    seen = known.text + known.tail
    return prompt[len(seen) :] if prompt.startswith(seen) else None
