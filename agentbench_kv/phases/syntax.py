"""How models write tool calls: one table, from which calls are read and their tokens labelled."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from agentbench_kv.errors import UsageError, unknown_name


@dataclass(frozen=True)
class ToolSyntax:
    """Where calls stand in an assistant's text; `gateway.calls` reads what stands there."""

    name: str
    # Opening and closing text of what holds calls; without a closing one, to the message's end.
    spans: tuple[tuple[str, str | None], ...] = ()
    bare: str = ""  # a message that begins with one of these characters is a call as a whole
    inner: tuple[str, ...] = ()  # markers inside a span
    think: tuple[str, str] = ("<think>", "</think>")
    # Texts that show it, all in the chat template or among the added tokens.
    signs: tuple[str, ...] = ()
    call_ids: str = "call_{}"  # of a session's first, second, ... call
    prompted: bool = False  # the chat template knows nothing of it: the system prompt explains it

    @property
    def markers(self) -> tuple[str, ...]:
        spans = [text for span in self.spans for text in span if text]
        return (*spans, *self.inner, *self.think)

    def without_calls(self) -> ToolSyntax:
        """Return what leaves calls in the text; in harmony they are messages and never text."""
        return replace(self, spans=(), bare="")


# Of those whose signs are there the first counts.
SYNTAXES: Mapping[str, ToolSyntax] = {
    syntax.name: syntax
    for syntax in (
        ToolSyntax(
            "harmony",
            inner=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"),
            think=("", ""),
            signs=("<|channel|>", "<|message|>"),
        ),
        ToolSyntax(
            "kimi",
            (("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
            inner=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            signs=("<|tool_calls_section_begin|>",),
        ),
        ToolSyntax(
            "deepseek",
            (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
            inner=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
            signs=("<｜tool▁calls▁begin｜>",),
        ),
        ToolSyntax(
            "mistral",
            (("[TOOL_CALLS]", None),),
            inner=("[ARGS]", "[CALL_ID]"),
            think=("[THINK]", "[/THINK]"),
            signs=("[TOOL_CALLS]",),
            call_ids="call{:05d}",  # nine letters or digits: its templates check it
        ),
        ToolSyntax(
            "pythonic",
            (("<|python_start|>", "<|python_end|>"),),
            bare="[",
            signs=("[func_name1(params_name1=",),  # how Meta's prompt explains it
        ),
        ToolSyntax("llama3_json", (("<|python_tag|>", None),), bare="{", signs=("<|python_tag|>",)),
        ToolSyntax("glm", (("<tool_call>", "</tool_call>"),), signs=("<arg_key>",)),
        ToolSyntax(
            "seed_oss",
            (("<seed:tool_call>", "</seed:tool_call>"),),
            think=("<seed:think>", "</seed:think>"),
            signs=("<seed:tool_call>",),
        ),
        ToolSyntax(
            "minimax",
            (("<minimax:tool_call>", "</minimax:tool_call>"),),
            signs=("<minimax:tool_call>",),
        ),
        ToolSyntax(
            "cohere",
            (("<|START_ACTION|>", "<|END_ACTION|>"),),
            think=("<|START_THINKING|>", "<|END_THINKING|>"),
            signs=("<|START_ACTION|>",),
        ),
        ToolSyntax(
            "lfm2",
            (("<|tool_call_start|>", "<|tool_call_end|>"),),
            signs=("<|tool_call_start|>",),
        ),
        # Granite 3 ends its list with the message, Phi-4-mini with a marker.
        ToolSyntax("granite", (("<|tool_call|>", "<|/tool_call|>"),), signs=("<|tool_call|>",)),
        ToolSyntax("qwen3_coder", (("<tool_call>", "</tool_call>"),), signs=("<function=",)),
        ToolSyntax("hermes", (("<tool_call>", "</tool_call>"),), signs=("<tool_call>",)),
        ToolSyntax("json", (("```json", "```"),), bare="{[", prompted=True),
        ToolSyntax("none"),
    )
}


def choose_syntax(name: str, template: str, vocabulary: Container[str]) -> ToolSyntax:
    """Return the syntax of a name; for `auto` the one that chat template or vocabulary show.

    A template that shows none means `none`, which is refused where tools are asked for. Without a
    template there are no tools to render, and calls are read as most models write them (hermes).
    """
    if name != "auto":
        if name not in SYNTAXES:
            raise unknown_name("tool syntax", name, [*SYNTAXES, "auto"])
        return SYNTAXES[name]
    for syntax in SYNTAXES.values():
        shown = [sign in template or sign in vocabulary for sign in syntax.signs]
        if shown and all(shown):
            return syntax
    return SYNTAXES["none" if template else "hermes"]


def refuse_tools_without_syntax(syntax: ToolSyntax, asked: str) -> None:
    """UsageError if a session has tools and nobody knows how the model writes calls."""
    if syntax.name == "none" and asked == "auto":
        known = ", ".join(name for name in SYNTAXES if name != "none")
        raise UsageError(
            "this model's chat template and vocabulary show no tool-call syntax that is known; "
            f"choose one with --tool-syntax: {known} (json explains itself to any model), or none"
        )
