"""The phase machine: one label per token id, from markers alone.

Labels are causal: a token's phase depends on it and the tokens before it, so that a prompt labelled
in one piece, in any chunks, or token by token while decoding gets the same labels. It follows:

* A marker belongs to the phase it introduces, a closing marker to the phase it closes (`own`), or
  to what follows it (`next`): papers do not say. Of a marker that takes several tokens the
  completing one is the first of the new phase.
* `<|im_start|>` of a tool message is `others`: nobody knows the role yet. From the token that
  completes the role name up to and including `<|im_end|>`, the message is `tool`.
* Qwen3's form is a user message holding `<tool_response>` spans: the spans with their markers are
  `tool`; its header, its `<|im_end|>` and text between spans are `others`, as in any user message.
* Think and act spans count in the assistant's messages only. They nest: a call inside a thought is
  `act`, what follows it is `think` again. Opening what is already open or closing what is not
  changes nothing. A span without an end ends with its message, whose end marker is the message's.
* Where a syntax has calls without markers, a message whose first character other than white space
  is a call's is `act` from the token that holds it to its end.
* Families without headers (Mistral, DeepSeek, GLM) have a marker for each role: it belongs to the
  message it opens.

A labeller has a name and a JSON document of its state, from which another process goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import CLOSINGS, Phase
from agentbench_kv.phases.syntax import ToolSyntax, choose_syntax
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


@dataclass(frozen=True, eq=False)
class Family:
    """The markers of one chat format. A message's header holds role, channel and recipient."""

    name: str
    detect: tuple[str, ...]  # added tokens that together only this family has
    # What opens a message, with its role; None: a header that ends in `header_close` says it.
    opens: Mapping[str, str | None]
    closes: Mapping[str, str]  # what ends a message, with the role of the next if one follows
    header_close: str = ""
    headers: tuple[HeaderRule, ...] = ()  # first match wins; a message without one is `others`
    spans: tuple[SpanRule, ...] = ()  # besides thoughts and calls
    assistant: str = r"assistant\Z"  # header of the messages that hold these


_RESPONSE = SpanRule("<tool_response>", "</tool_response>", Phase.TOOL, r"user\Z")

CHATML = Family(
    name="chatml",
    detect=("<|im_start|>",),
    opens={"<|im_start|>": None},
    closes={"<|im_end|>": ""},
    header_close="\n",
    headers=(HeaderRule(r"tool\Z", Phase.TOOL),),
    spans=(_RESPONSE,),
)

PHI4 = replace(
    CHATML, name="phi4", detect=("<|im_start|>", "<|im_sep|>"), header_close="<|im_sep|>"
)

LLAMA3 = Family(
    name="llama3",
    detect=("<|start_header_id|>",),
    opens={"<|start_header_id|>": None},
    closes={"<|eot_id|>": "", "<|eom_id|>": "", "<|end_of_text|>": ""},
    header_close="<|end_header_id|>",
    headers=(HeaderRule(r"(ipython|tool)\Z", Phase.TOOL),),
)

LLAMA4 = replace(
    LLAMA3,
    name="llama4",
    detect=("<|header_start|>",),
    opens={"<|header_start|>": None},
    closes={"<|eot|>": "", "<|eom|>": ""},
    header_close="<|header_end|>",
)

HARMONY = Family(
    name="harmony",
    detect=("<|channel|>", "<|message|>"),
    opens={"<|start|>": None},
    closes={"<|end|>": "", "<|call|>": "", "<|return|>": ""},
    header_close="<|message|>",
    headers=(
        HeaderRule(r"(functions\.|browser\b|python\b)", Phase.TOOL),
        HeaderRule(r"assistant.*\sto=", Phase.ACT),
        HeaderRule(r"assistant.*<\|channel\|>analysis", Phase.THINK),
    ),
    assistant=r"(?!)",  # its thoughts and calls are messages of their own
)

KIMI = Family(
    name="kimi",
    detect=("<|im_middle|>",),
    opens=dict.fromkeys(("<|im_system|>", "<|im_user|>", "<|im_assistant|>")),
    closes={"<|im_end|>": ""},
    header_close="<|im_middle|>",
    headers=(HeaderRule(r"tool\Z", Phase.TOOL),),
)

_TOOL = (HeaderRule("tool", Phase.TOOL),)
DEEPSEEK = Family(
    name="deepseek",
    detect=("<｜Assistant｜>",),
    opens={
        "<｜User｜>": "user",
        "<｜Assistant｜>": "assistant",
        "<｜tool▁outputs▁begin｜>": "tool",
        "<｜tool▁output▁begin｜>": "tool",
    },
    closes={
        "<｜end▁of▁sentence｜>": "",
        "<｜tool▁outputs▁end｜>": "assistant",
        "<｜tool▁output▁end｜>": "assistant",
    },
    headers=_TOOL,
)

MISTRAL = Family(
    name="mistral",
    detect=("[INST]", "[/INST]"),
    opens={
        "[INST]": "user",
        "[AVAILABLE_TOOLS]": "system",
        "[SYSTEM_PROMPT]": "system",
        "[TOOL_RESULTS]": "tool",
    },
    closes={"[/INST]": "assistant", "[/TOOL_RESULTS]": "assistant", "</s>": ""},
    headers=_TOOL,
)

GLM = Family(
    name="glm",
    detect=("<|observation|>", "<|assistant|>"),
    opens={
        "<|system|>": "system",
        "<|user|>": "user",
        "<|assistant|>": "assistant",
        "<|observation|>": "tool",
    },
    closes={},
    headers=_TOOL,
)

PHI = Family(
    name="phi",
    detect=("<|assistant|>", "<|end|>"),
    opens={
        "<|system|>": "system",
        "<|user|>": "user",
        "<|assistant|>": "assistant",
        "<|tool_response|>": "tool",
    },
    closes={"<|end|>": ""},
    headers=_TOOL,
)

GEMMA = Family(
    name="gemma",
    detect=("<start_of_turn>",),
    opens={"<start_of_turn>": None},
    closes={"<end_of_turn>": ""},
    header_close="\n",
    assistant=r"model\Z",
)

GRANITE = Family(
    name="granite",
    detect=("<|start_of_role|>",),
    opens={"<|start_of_role|>": None},
    closes={"<|end_of_text|>": ""},
    header_close="<|end_of_role|>",
    headers=(HeaderRule(r"tool(_response)?\Z", Phase.TOOL),),
    spans=(_RESPONSE,),
)

SEED = Family(
    name="seed",
    detect=("<seed:bos>",),
    opens={"<seed:bos>": None},
    closes={"<seed:eos>": ""},
    header_close="\n",
    headers=(HeaderRule(r"tool\Z", Phase.TOOL),),
)

MINIMAX = Family(
    name="minimax",
    detect=("]~b]",),
    opens={"]~b]": None},
    closes={"[e~[": ""},
    header_close="\n",
    headers=(HeaderRule(r"tool\Z", Phase.TOOL),),
    assistant=r"ai\Z",
)

COHERE = Family(
    name="cohere",
    detect=("<|CHATBOT_TOKEN|>",),
    opens={
        "<|SYSTEM_TOKEN|>": "system",
        "<|USER_TOKEN|>": "user",
        "<|CHATBOT_TOKEN|>": "assistant",
    },
    closes={"<|END_OF_TURN_TOKEN|>": ""},
    spans=(
        SpanRule("<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>", Phase.TOOL, r"(system|user)\Z"),
    ),
)

PLAIN = Family("plain", (), {}, {})
# The first whose tokens are all there: what others have too comes later.
FAMILIES = (
    *(HARMONY, DEEPSEEK, LLAMA3, KIMI, PHI4, CHATML, MISTRAL, GLM, PHI, GEMMA, GRANITE),
    *(LLAMA4, SEED, MINIMAX, COHERE),
)


class PhaseTable:
    """A family's markers, resolved against a vocabulary. Immutable; shared by all sessions."""

    def __init__(
        self, family: Family, codec: TokenCodec, syntax: ToolSyntax, closing: str = CLOSINGS[0]
    ) -> None:
        self.family = family
        self.closing = closing
        self.codec = codec
        self.syntax = syntax
        self.rules = (*_spans(family, syntax), *family.spans)
        spans = [text for span in self.rules for text in (span.open, span.close) if text]
        # Channel and constrain markers of harmony are part of the header's text: no entry.
        markers = (*family.opens, family.header_close, *family.closes, *spans)
        # An added token is matched by id only: the same text in ordinary tokens is no marker.
        self.atomic = {codec.added[text]: text for text in markers if text in codec.added}
        self.textual = tuple(text for text in spans if text not in codec.added)
        self.reach = max((len(text) for text in self.textual), default=1) - 1

    @classmethod
    def for_tokenizer(
        cls, tokenizer: Any, syntax: str = "auto", closing: str = CLOSINGS[0]
    ) -> Self:
        """Pick the family whose own tokens the vocabulary has; without one all is `others`."""
        codec = tokenizer if isinstance(tokenizer, TokenCodec) else TokenCodec(tokenizer)
        families = (known for known in FAMILIES if codec.added.keys() >= set(known.detect))
        chosen = choose_syntax(syntax, codec.template, codec.added)
        return cls(next(families, PLAIN), codec, chosen, closing)

    def header_phase(self, header: str) -> Phase:
        """Return the phase of a message from its header as far as it is known."""
        for rule in self.family.headers:
            if re.match(rule.pattern, header, re.DOTALL):
                return rule.phase
        return Phase.OTHERS

    def spans_in(self, header: str) -> tuple[SpanRule, ...]:
        return tuple(span for span in self.rules if re.match(span.header, header))


_BARE = ""  # what opens a call without markers


def _spans(family: Family, syntax: ToolSyntax) -> list[SpanRule]:
    """Return the spans of thoughts and calls in the family's assistant messages."""
    marked = [(*span, Phase.ACT) for span in syntax.spans]
    if syntax.think[0]:
        marked.insert(0, (*syntax.think, Phase.THINK))
    if syntax.bare:
        marked.append((_BARE, None, Phase.ACT))
    spans = [SpanRule(*span, family.assistant) for span in marked]
    return [*spans, _RESPONSE] if syntax.prompted and _RESPONSE not in family.spans else spans


@dataclass(frozen=True)
class PhaseState:
    """Where a machine is; immutable, so that a copy is an assignment."""

    place: str = "outside"
    header: str = ""
    base: Phase = Phase.OTHERS
    spans: tuple[SpanRule, ...] = ()
    open: tuple[SpanRule, ...] = ()
    tail: str = ""
    begun: bool = False  # the message has text outside spans

    @property
    def phase(self) -> Phase:
        return self.open[-1].phase if self.open else self.base


MARKERS = "markers"  # a labeller's name is this, its tool syntax and how it reads closing markers
_RULES = {"spans", "open"}  # the state's fields that hold span rules


class PhaseMachine:
    """Labels one session's tokens in order. Satisfies `engines.base.PhaseLabeller`."""

    def __init__(self, table: PhaseTable, state: PhaseState | None = None) -> None:
        self.labeller_name = f"{MARKERS}/{table.syntax.name}/{table.closing}"
        self.table = table
        self.state = state or PhaseState()

    def copy(self) -> PhaseMachine:
        return PhaseMachine(self.table, self.state)

    def document(self) -> dict[str, Any]:
        """Return the state as JSON; span rules by their place in the family's."""
        rule = self.table.rules.index
        spans = {name: [rule(each) for each in getattr(self.state, name)] for name in _RULES}
        return {**vars(self.state), **spans}

    @classmethod
    def from_document(cls, table: PhaseTable, document: dict[str, Any]) -> Self:
        """Return a machine that goes on from a state; from the start if the document is empty."""
        state = dict(document)
        for name in _RULES & state.keys():
            state[name] = tuple(table.rules[rule] for rule in state[name])
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
        if marker in family.opens:
            self._open(family.opens[marker])
            return self.state.base
        if marker in family.closes:
            base = self.state.base
            self._open(family.closes[marker])
            return base if self.table.closing == "own" else self.state.base
        if self.state.place == "header":
            return self._header(marker)
        self.state = replace(self.state, tail="")
        return self._span_marker(marker)

    def _open(self, role: str | None) -> None:
        """Begin a message: of a role, of one that its header will say (None), or none (empty)."""
        self.state = PhaseState(place="outside" if role == "" else "header")
        if role:
            base, spans = self.table.header_phase(role), self.table.spans_in(role)
            self.state = PhaseState("message", role, base, spans)

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
        if not state.spans:
            return state.phase
        window = state.tail + piece
        if not state.begun and not state.open and self._begins(window.lstrip()):
            return self._span_marker(_BARE)
        phase, read = state.phase, 0
        for end, marker in _completed(table.textual, window, len(state.tail)):
            before = self.state.open
            phase = self._span_marker(marker)
            # What opened or closed a span is no beginning of another marker; "```" may be.
            read = read if self.state.open == before else end
        self.state = replace(self.state, tail=window[max(read, len(window) - table.reach) :])
        return phase

    def _begins(self, said: str) -> bool:
        """Note that a message has begun; return whether with a call that has no marker."""
        if not said or any(marker.startswith(said) for marker in self.table.textual):
            return False  # it may still become a marker
        self.state = replace(self.state, begun=True)
        bare = any(span.open == _BARE for span in self.state.spans)
        return bare and said.startswith(tuple(self.table.syntax.bare))

    def _span_marker(self, marker: str) -> Phase:
        for span in self.state.spans:
            if marker == span.open:
                if span not in self.state.open:
                    self.state = replace(self.state, open=(*self.state.open, span))
                return span.phase
            if marker == span.close and span in self.state.open:
                outer = self.state.open[: self.state.open.index(span)]
                self.state = replace(self.state, open=outer)
                return span.phase if self.table.closing == "own" else self.state.phase
        return self.state.phase


def _completed(markers: tuple[str, ...], window: str, start: int) -> list[tuple[int, str]]:
    """Return where markers end behind `start` in `window`, and which, in order."""
    ends = []
    for marker in markers:
        at = window.find(marker, max(0, start - len(marker) + 1))
        while at >= 0:
            ends.append((at + len(marker), marker))
            at = window.find(marker, at + 1)
    return sorted(ends)


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
    _, *reading = name.split("/")
    table = PhaseTable.for_tokenizer(load_tokenizer(model_path), *reading)
    return lambda document: PhaseMachine.from_document(table, document)


@dataclass(frozen=True)
class PromptPhases:
    """Phases of a session's tokens up to a generation, and the labeller that goes on from there.

    An engine labels only what it samples itself. Without arguments nothing is labelled yet. How the
    session began goes along, so that a backend which lost it protects the same tokens again.
    """

    labeller_name: str = MARKERS
    state: dict[str, Any] = field(default_factory=dict)  # the labeller's document
    runs: Sequence[Sequence[int]] = ()  # [phase, tokens] of every run, in order
    prompt: int = 0  # tokens of the session's first prefill; 0: not known
    system: int = 0  # and of its system message, where the method asks for it

    def expand(self) -> list[Phase]:
        return [phase for code, tokens in self.runs for phase in [Phase(code)] * tokens]


def add_run(runs: list[list[int]], phases: Iterable[Phase]) -> None:
    for phase in phases:
        if runs and runs[-1][0] == phase:
            runs[-1][1] += 1
        else:
            runs.append([int(phase), 1])


def cut_runs(runs: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Return the runs of the first `length` tokens."""
    cut: list[list[int]] = []
    for phase, tokens in runs:
        if length > 0:
            cut.append([phase, min(tokens, length)])
        length -= tokens
    return cut
