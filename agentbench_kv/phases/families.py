"""Marker tables: how each model family writes messages, thoughts, calls and tool results."""

from __future__ import annotations

from dataclasses import dataclass

from agentbench_kv.methods.phases import Phase


@dataclass(frozen=True)
class HeaderRule:
    r"""Gives a whole message a phase; `pattern` is matched at the start of the header so far.

    A pattern that must see the complete role name ends in ``\Z``.
    """

    pattern: str
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
