"""Does a request extend the session? What it adds if so, the whole prompt if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentbench_kv.errors import UsageError
from agentbench_kv.gateway.messages import Message
from agentbench_kv.gateway.reminders import remind
from agentbench_kv.gateway.session import Known, Plan, Session
from agentbench_kv.gateway.templates import ChatTemplate
from agentbench_kv.phases.codec import TokenCodec


class Planner:
    """Turns requests into plans. Of `message_ends` (ids), two in a row are one too many."""

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
        asked, old = Known.of_chat(messages, tools), session.known
        if old is not None and not session.broken and asked.extends(old):
            new = remind(messages[len(old.messages) :], reminder)
            text, reset = self._template.render_delta(new, tools), False
            ids = self._without_second_end(session, self._codec.encode(text))
        else:
            text, reset = self._template.render_first(messages, tools), not session.fresh
            ids = self._codec.encode(text)
        return Plan(ids, reset, asked, thinking=text.rstrip().endswith("<think>"))

    def raw(self, session: Session, prompt: str | Sequence[int]) -> Plan:
        """Plan a completion: a prompt of text, or of ids that extend the token log."""
        if not prompt:
            raise UsageError("the prompt is empty")
        if not isinstance(prompt, str):
            return self._raw_ids(session, list(prompt))
        rest = None if session.broken else _rest_of(prompt, session.known)
        ids = self._codec.encode(prompt if rest is None else rest)
        return Plan(ids, rest is None and not session.fresh, Known(text=prompt))

    def _raw_ids(self, session: Session, ids: list[int]) -> Plan:
        size = len(session.tokens)
        extends = not session.fresh and not session.broken and ids[:size] == session.tokens
        asked = Known(text=self._codec.decode(ids))
        return Plan(ids[size:] if extends else ids, not (extends or session.fresh), asked)

    def _without_second_end(self, session: Session, ids: list[int]) -> list[int]:
        if not ids:
            return ids
        last = session.tokens[-1]
        both_ends = last in self._message_ends and ids[0] in self._message_ends
        return ids[1:] if ids[0] == last or both_ends else ids


def _rest_of(prompt: str, known: Known | None) -> str | None:
    """Return what `prompt` adds to the known text; None if it is another text.

    The stop that ended the last generation is in the log but not in the text the client got. A
    client that goes on without it has another text.
    """
    if known is None or known.text is None:
        return None
    seen = known.text + known.tail
    return prompt[len(seen) :] if prompt.startswith(seen) else None
