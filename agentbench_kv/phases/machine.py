"""The phase machine: one label per token id, from markers alone.

Labels are causal: a token's phase depends on it and the tokens before it, so that a prompt labelled
in one piece, in any chunks, or token by token while decoding gets the same labels. It follows:

* A marker belongs to the phase it introduces, a closing marker to the phase it closes. Of a marker
  that takes several tokens the completing one is the first of the new phase.
* `<|im_start|>` of a tool message is `others`: nobody knows the role yet. From the token that
  completes the role name up to and including `<|im_end|>`, the message is `tool`.
* Qwen3's form is a user message holding `<tool_response>` spans: the spans with their markers are
  `tool`; its header, its `<|im_end|>` and text between spans are `others`, as in any user message.
* Think and act spans count in the assistant's messages only. They nest: a call inside a thought is
  `act`, what follows it is `think` again. Opening what is already open or closing what is not
  changes nothing. A span without an end ends with its message, whose end marker is the message's.

A labeller has a name and a JSON document of its state, from which another process goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer


@dataclass(frozen=True)
class HeaderRule:
    """Gives a whole message a phase; `pattern` is matched at the start of the header so far."""

    pattern: str  # ends in `\Z` if it must see the complete role name
    phase: Phase


@dataclass(frozen=True)
class SpanRule:
    """A marked span inside messages whose header matches `header`; no `close`: to the end."""

    open: str
    close: str | None
    phase: Phase
    header: str


@dataclass(frozen=True)
class Family:
    """The markers of one chat format. A message's header holds role, channel and recipient."""

    name: str
    detect: str  # an added token only this family has; empty for the family without markers
    message_open: str
    header_close: str
    message_close: tuple[str, ...]  # any of them ends a message
    headers: tuple[HeaderRule, ...]  # first match wins; a message without a match is `others`
    spans: tuple[SpanRule, ...]


_ASSISTANT = r"assistant\Z"
_THINK = SpanRule("<think>", "</think>", Phase.THINK, _ASSISTANT)
_CALL = SpanRule("<tool_call>", "</tool_call>", Phase.ACT, _ASSISTANT)


CHATML = Family(
    name="chatml",
    detect="<|im_start|>",
    message_open="<|im_start|>",
    header_close="\n",
    message_close=("<|im_end|>",),
    headers=(HeaderRule(r"tool\Z", Phase.TOOL),),
    spans=(_THINK, _CALL, SpanRule("<tool_response>", "</tool_response>", Phase.TOOL, r"user\Z")),
)

LLAMA3 = Family(
    name="llama3",
    detect="<|start_header_id|>",
    message_open="<|start_header_id|>",
    header_close="<|end_header_id|>",
    message_close=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    headers=(HeaderRule(r"(ipython|tool)\Z", Phase.TOOL),),
    spans=(_THINK, _CALL, SpanRule("<|python_tag|>", None, Phase.ACT, _ASSISTANT)),
)

HARMONY = Family(
    name="harmony",
    detect="<|channel|>",
    message_open="<|start|>",
    header_close="<|message|>",
    message_close=("<|end|>", "<|call|>", "<|return|>"),
    headers=(
        HeaderRule(r"(functions\.|browser\b|python\b)", Phase.TOOL),
        HeaderRule(r"assistant.*\sto=", Phase.ACT),
        HeaderRule(r"assistant.*<\|channel\|>analysis", Phase.THINK),
    ),
    spans=(),
)

PLAIN = Family("plain", "", "", "", (), (), ())
FAMILIES = (HARMONY, LLAMA3, CHATML)


class PhaseTable:
    """A family's markers, resolved against a vocabulary. Immutable; shared by all sessions."""

    def __init__(self, family: Family, codec: TokenCodec) -> None:
        self.family = family
        self.codec = codec
        spans = [text for span in family.spans for text in (span.open, span.close) if text]
        # Channel and constrain markers of harmony are part of the header's text: no entry.
        markers = (family.message_open, family.header_close, *family.message_close, *spans)
        # An added token is matched by id only: the same text in ordinary tokens is no marker.
        self.atomic = {codec.added[text]: text for text in markers if text in codec.added}
        self.textual = tuple(text for text in spans if text not in codec.added)
        self.reach = max((len(text) for text in self.textual), default=1) - 1

    @classmethod
    def for_tokenizer(cls, tokenizer: Any) -> Self:
        """Pick the family whose own token the vocabulary has; without one all is `others`."""
        codec = tokenizer if isinstance(tokenizer, TokenCodec) else TokenCodec(tokenizer)
        family = next((known for known in FAMILIES if known.detect in codec.added), PLAIN)
        return cls(family, codec)

    def header_phase(self, header: str) -> Phase:
        """Return the phase of a message from its header as far as it is known."""
        for rule in self.family.headers:
            if re.match(rule.pattern, header, re.DOTALL):
                return rule.phase
        return Phase.OTHERS

    def spans_in(self, header: str) -> tuple[SpanRule, ...]:
        return tuple(span for span in self.family.spans if re.match(span.header, header))


@dataclass(frozen=True)
class PhaseState:
    """Where a machine is; immutable, so that a copy is an assignment."""

    place: str = "outside"
    header: str = ""
    base: Phase = Phase.OTHERS
    spans: tuple[SpanRule, ...] = ()
    open: tuple[SpanRule, ...] = ()
    tail: str = ""

    @property
    def phase(self) -> Phase:
        return self.open[-1].phase if self.open else self.base


_RULES = {"spans", "open"}  # the state's fields that hold span rules


class PhaseMachine:
    """Labels one session's tokens in order. Satisfies `engines.base.PhaseLabeller`."""

    labeller_name = "markers"

    def __init__(self, table: PhaseTable, state: PhaseState | None = None) -> None:
        self.table = table
        self.state = state or PhaseState()

    def copy(self) -> PhaseMachine:
        return PhaseMachine(self.table, self.state)

    def document(self) -> dict[str, Any]:
        """Return the state as JSON; span rules by their place in the family's."""
        rule = self.table.family.spans.index
        spans = {name: [rule(each) for each in getattr(self.state, name)] for name in _RULES}
        return {**vars(self.state), **spans}

    @classmethod
    def from_document(cls, table: PhaseTable, document: dict[str, Any]) -> Self:
        """Return a machine that goes on from a state; from the start if the document is empty."""
        state = dict(document)
        for name in _RULES & state.keys():
            state[name] = tuple(table.family.spans[rule] for rule in state[name])
        if state:
            state["base"] = Phase(state["base"])
        return cls(table, PhaseState(**state))

    def label(self, token: int) -> Phase:
        marker = self.table.atomic.get(token)
        if marker is not None:
            return self._marker(marker)
        if self.state.place == "outside":
            return Phase.OTHERS
        piece = self.table.codec.piece(token)
        return self._header(piece) if self.state.place == "header" else self._text(piece)

    def label_many(self, tokens: Iterable[int]) -> list[Phase]:
        return [self.label(token) for token in tokens]

    def _marker(self, marker: str) -> Phase:
        family = self.table.family
        if marker == family.message_open:
            self.state = PhaseState(place="header")
            return Phase.OTHERS
        if marker in family.message_close:
            base, self.state = self.state.base, PhaseState()
            return base
        if self.state.place == "header":
            return self._header(marker)
        self.state = replace(self.state, tail="")
        return self._span_marker(marker)

    def _header(self, piece: str) -> Phase:
        close = self.table.family.header_close
        header, closed, rest = (self.state.header + piece).partition(close)
        base = self.table.header_phase(header)
        self.state = replace(self.state, header=header, base=base)
        if not closed:
            return base
        self.state = replace(self.state, place="message", spans=self.table.spans_in(header))
        return self._text(rest)

    def _text(self, piece: str) -> Phase:
        state, table = self.state, self.table
        phase = state.phase
        if state.spans and table.textual:
            window = state.tail + piece
            for marker in _completed(table.textual, window, len(state.tail)):
                phase = self._span_marker(marker)
            tail = window[-table.reach :] if table.reach else ""
            self.state = replace(self.state, tail=tail)
        return phase

    def _span_marker(self, marker: str) -> Phase:
        for span in self.state.spans:
            if marker == span.open:
                if span not in self.state.open:
                    self.state = replace(self.state, open=(*self.state.open, span))
                return span.phase
            if marker == span.close and span in self.state.open:
                outer = self.state.open[: self.state.open.index(span)]
                self.state = replace(self.state, open=outer)
                return span.phase
        return self.state.phase


def _completed(markers: tuple[str, ...], window: str, start: int) -> list[str]:
    """Return the markers that end behind `start` in `window`, in order of their ends."""
    ends = []
    for marker in markers:
        at = window.find(marker, max(0, start - len(marker) + 1))
        while at >= 0:
            ends.append((at + len(marker), marker))
            at = window.find(marker, at + 1)
    return [marker for _, marker in sorted(ends)]


class TokenPhases:
    """Labels a token by its id, so that all four phases occur in random ids. For tests."""

    labeller_name = "token-id"

    def label(self, token: int) -> Phase:
        return Phase(token % len(Phase))

    def document(self) -> dict[str, Any]:
        return {}


Labeller = PhaseMachine | TokenPhases  # what another process can make again


def resumable(labeller: Any) -> Labeller:
    """Return the labeller; UsageError for one that only exists in this process."""
    if isinstance(labeller, PhaseMachine | TokenPhases):
        return labeller
    raise UsageError(
        f"{type(labeller).__name__} cannot label tokens in another process; use --engine embedded"
    )


def labeller_source(name: str, model_path: Path) -> Callable[[dict[str, Any]], Labeller]:
    """Return what makes the labellers of a name from their documents."""
    if name == TokenPhases.labeller_name:
        return lambda _: TokenPhases()
    table = PhaseTable.for_tokenizer(TokenCodec(load_tokenizer(model_path)))
    return lambda document: PhaseMachine.from_document(table, document)


@dataclass(frozen=True)
class PromptPhases:
    """Phases of a session's tokens up to a generation, and the labeller that goes on from there.

    An engine labels only what it samples itself. Without arguments nothing is labelled yet.
    """

    labeller_name: str = PhaseMachine.labeller_name
    state: dict[str, Any] = field(default_factory=dict)  # the labeller's document
    runs: Sequence[Sequence[int]] = ()  # [phase, tokens] of every run, in order

    def expand(self) -> list[Phase]:
        return [phase for code, tokens in self.runs for phase in [Phase(code)] * tokens]


def add_run(runs: list[list[int]], phases: Iterable[Phase]) -> None:
    for phase in phases:
        if runs and runs[-1][0] == phase:
            runs[-1][1] += 1
        else:
            runs.append([int(phase), 1])
