"""Chat templates of real models: tool syntax found, and whether turns extend what stands.

    python benchmarks/templates.py FOLDER

For every `*.jinja` in FOLDER (collections come with llama-cpp-python's source and with vLLM): a
conversation with a call and its result is rendered whole, and as the gateway does it, turn by turn;
what the gateway adds must be the end of the whole. Prints a Markdown table for docs/models.md.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.errors import KVBenchError
from agentbench_kv.gateway.messages import ChatTemplate, tool_call
from agentbench_kv.phases.machine import FAMILIES, PLAIN, Family
from agentbench_kv.phases.syntax import SYNTAXES, ToolSyntax, choose_syntax
from agentbench_kv.phases.tokens import load_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ASKED = {"role": "user", "content": "Weather in Oslo?"}
RESULT = "19 degrees and sunny"


def family_of(template: str) -> Family:
    """Pick the family as `PhaseTable` does, of the tokens that the template names."""
    shown = (family for family in FAMILIES if all(token in template for token in family.detect))
    return next(shown, PLAIN)


def markers_of(family: Family) -> tuple[str, ...]:
    return (*family.opens, *family.closes)


def takes_tools(template: ChatTemplate) -> bool:
    """Whether the template shows the tools at all."""
    return "get_weather" in template.render_first([ASKED], [TOOL])


def check(template: ChatTemplate, syntax: ToolSyntax) -> str:
    """Render a call, its result and a last question; return what is wrong, or `exact`."""
    call = tool_call(syntax.call_ids.format(1), "get_weather", {"city": "Oslo"})
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    back = {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": RESULT}
    first = template.render_first([ASKED], [TOOL])
    whole = template.render_first([ASKED, said, back], [TOOL])
    delta = template.render_delta([back], [TOOL], said)
    if RESULT not in delta:
        return "the result is not shown"
    if not whole.endswith(delta):
        return "a result is rendered otherwise later"
    answer = whole.removesuffix(delta)
    if "get_weather" not in answer[len(first) - len("get_weather") :]:
        return "the call is not shown"
    answered = {"role": "assistant", "content": "It is sunny."}
    again = {"role": "user", "content": "And Rome?"}
    delta = template.render_delta([again], [TOOL], answered)
    whole = template.render_first([ASKED, answered, again], [TOOL])
    return "exact" if whole.endswith(delta) else "a question is rendered otherwise later"


def examine(tokenizer: Any, text: str) -> tuple[str, str, str]:
    """Return family, syntax and verdict of one template."""
    family = family_of(text)
    syntax = choose_syntax("auto", text, ())
    tokenizer.chat_template = text
    verdict = ""
    try:
        native = takes_tools(ChatTemplate(tokenizer, syntax))
        if not native or syntax.name == "none":
            known = "shows no tools" if not native else "syntax unknown"
            syntax, verdict = SYNTAXES["json"], f"{known}; with json: "
        verdict += check(ChatTemplate(tokenizer, syntax, markers_of(family)), syntax)
    except KVBenchError as error:
        verdict += f"refused: {error}"
    return family.name, syntax.name, verdict


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    tokenizer = copy.deepcopy(load_tokenizer(model_path("micro")))
    print("| template | family | syntax | turns |\n|---|---|---|---|")
    for file in sorted(args.folder.rglob("*.jinja"), key=lambda file: file.name.lower()):
        print(f"| {file.stem} | " + " | ".join(examine(tokenizer, file.read_text("utf-8"))) + " |")


if __name__ == "__main__":
    main()
