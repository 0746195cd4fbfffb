"""What a request adds to its session's token log, or that it starts the session over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agentbench_kv.errors import UsageError
from agentbench_kv.gateway.messages import ChatTemplate, Message, text_of
from agentbench_kv.gateway.placing import content_spans, token_spans
from agentbench_kv.gateway.session import Known, Plan, Session
from agentbench_kv.methods.spans import SpanRange
from agentbench_kv.phases.machine import PhaseTable
from agentbench_kv.phases.tokens import TokenCodec


def reminder(codec: TokenCodec, tokens: Sequence[int], spans: Sequence[SpanRange]) -> str:
    """Return one line per span of a session's tokens, special tokens left out."""
    lines = []
    for start, end in spans:
        ids = [token for token in tokens[start:end] if token not in codec.special]
        text = " ".join(codec.decode(ids).split())
        lines.append(f"[earlier: {text}]\n")
    return "".join(lines)


def remind(messages: Sequence[Message], text: str) -> list[dict[str, Any]]:
    """Return messages of which the last one by the user begins with the reminder."""
    reminded = [dict(message) for message in messages]
    users = [message for message in reminded if message.get("role") == "user"]
    if users:
        users[-1]["content"] = text + text_of(users[-1].get("content"))
    return reminded


class Planner:
    """Turns requests into plans."""

    def __init__(self, codec: TokenCodec, table: PhaseTable) -> None:
        self._codec = codec
        family = table.family
        self._template = ChatTemplate(
            codec.tokenizer, table.syntax, (*family.opens, *family.closes)
        )
        self._message_ends = codec.ids_of(family.closes)  # two in a row are one too many
        self._vocabulary = 1 + max(codec.tokenizer.get_vocab().values())

    def chat(
        self,
        session: Session,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        reminder: str = "",
        shown: Sequence[Message] | None = None,
    ) -> Plan:
        """Plan a chat request: the client sends its whole history each time.

        A reminder is put before the user's new message; the client never learns of it. `shown` are
        the same messages as the model is shown them, where that is not as the client wrote them.
        """
        asked, old = Known.of_chat(messages, tools), session.known
        if old is not None and not session.broken and asked.extends(old):
            written = messages if shown is None else shown
            new = remind(written[len(old.messages) :], reminder)
            last = written[len(old.messages) - 1]
            text, reset = self._template.render_delta(new, tools, last), False
            ids = self._without_second_end(session, self._codec.encode(text))
        else:
            text = self._template.render_first(messages if shown is None else shown, tools)
            ids, reset = self._codec.encode(text), not session.fresh
        return Plan(ids, reset, asked, thinking=_thinks(text), text=text)

    def past(
        self, session: Session, messages: Sequence[Message]
    ) -> tuple[Plan, list[SpanRange | None]]:
        """Plan a session that is over: these messages, and nothing that asks for an answer.

        Return which of the plan's ids are the contents of each message, too; of an assistant's all
        that it wrote, thoughts and calls.
        """
        render = self._template.render_whole
        text, known = render(messages), Known.of_chat(messages, None)
        ids = self._codec.encode(text)
        found = [
            _whole(render, messages, at, text) if message.get("role") == "assistant" else span
            for at, (message, span) in enumerate(
                zip(messages, content_spans(render, messages), strict=True)
            )
        ]
        spans = token_spans(self._codec, ids, text, found)
        return Plan(ids, not session.fresh, known, text=text), spans

    def rewrite(
        self,
        session: Session,
        plan: Plan,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> Plan:
        """Plan the same request with a history of these messages in place of the client's.

        The log stays as far as it begins with the same tokens, if the engine can forget the rest.
        Nothing of it does where the plan is to begin anew.
        """
        text = self._template.render_first(messages, tools)
        if plan.reset:
            return replace(plan, ids=self._codec.encode(text), thinking=_thinks(text), text=text)
        ids = self._codec.encode(text)
        keep = _kept(session, ids)
        return replace(plan, ids=ids[keep:], thinking=_thinks(text), keep=keep, text=text)

    def contents(
        self,
        plan: Plan,
        old: Known | None,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> list[SpanRange | None]:
        """Return which of a chat plan's ids are the contents of the messages that it adds.

        `old` is what was known before it, None of a whole prompt.
        """
        if old is None:
            new = list(messages)
            render = partial(self._template.render_first, tools=tools)
        else:
            new, last = list(messages[len(old.messages) :]), messages[len(old.messages) - 1]
            render = partial(self._template.render_delta, tools=tools, last=last)
        found = content_spans(render, new)
        return token_spans(self._codec, plan.ids, plan.text, found)

    def raw(self, session: Session, prompt: str | Sequence[int], *, anew: bool = False) -> Plan:
        """Plan a completion: a prompt of text, or of ids that extend the token log.

        Ids may be the history written `anew`: the log stays as far as it begins with the same.
        """
        if not prompt:
            raise UsageError("the prompt is empty")
        if not isinstance(prompt, str):
            return self._raw_ids(session, list(prompt), anew=anew)
        rest = None if session.broken else _rest_of(prompt, session.known)
        ids = self._codec.encode(prompt if rest is None else rest)
        return Plan(ids, rest is None and not session.fresh, Known(text=prompt))

    def _raw_ids(self, session: Session, ids: list[int], *, anew: bool) -> Plan:
        if not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise UsageError(f"token ids of this model are from 0 to {self._vocabulary - 1}")
        size = len(session.tokens)
        extends = not session.fresh and not session.broken and ids[:size] == session.tokens
        asked = Known(text=self._codec.decode(ids))
        if anew and not (extends or session.fresh or session.broken):
            keep = _kept(session, ids)
            return Plan(ids[keep:], reset=False, known=asked, keep=keep)
        return Plan(ids[size:] if extends else ids, not (extends or session.fresh), asked)

    def said(self, message: Message) -> str:
        """Return an assistant's message as the model writes it."""
        return self._template.render_said(message)

    def _without_second_end(self, session: Session, ids: list[int]) -> list[int]:
        if not ids:
            return ids
        last = session.tokens[-1]
        both_ends = last in self._message_ends and ids[0] in self._message_ends
        return ids[1:] if ids[0] == last or both_ends else ids


def _whole(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message], at: int, text: str
) -> SpanRange | None:
    """Return where a message stands in a text; None where the template renders a part otherwise."""
    before = render(messages[:at]) if at else ""
    through = render(messages[: at + 1])
    fits = text.startswith(before) and text.startswith(through)
    return (len(before), len(through)) if fits else None


def _kept(session: Session, ids: Sequence[int]) -> int:
    """Return how much of the log stays where a prompt is written anew; one id is always read."""
    log = session.tokens if session.rewinds else []
    same = (i for i, (new, old) in enumerate(zip(ids[:-1], log, strict=False)) if new != old)
    return next(same, min(len(ids) - 1, len(log)))


def _thinks(prompt: str) -> bool:
    return prompt.rstrip().endswith("<think>")


def _rest_of(prompt: str, known: Known | None) -> str | None:
    """Return what `prompt` adds to the known text; None if it is another text."""
    # The stop that ended the last generation is in the log but not in the text the client got. A
    # client that goes on without it has another text.
    if known is None or known.text is None:
        return None
    seen = known.text + known.tail
    return prompt[len(seen) :] if prompt.startswith(seen) else None
