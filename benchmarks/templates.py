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
from agentbench_kv.gateway.messages import ChatTemplate
from agentbench_kv.phases.machine import FAMILIES, PLAIN, Family
from agentbench_kv.phases.syntax import SYNTAXES, choose_syntax
from agentbench_kv.phases.tokens import load_tokenizer
from agentbench_kv.run.inspection import ASKED, OK, TOOL, check_turns


def family_of(template: str) -> Family:
    """Pick the family as `PhaseTable` does, of the tokens that the template names."""
    shown = (family for family in FAMILIES if all(token in template for token in family.detect))
    return next(shown, PLAIN)


def markers_of(family: Family) -> tuple[str, ...]:
    return (*family.opens, *family.closes)


def takes_tools(template: ChatTemplate) -> bool:
    """Whether the template shows the tools at all."""
    return "get_weather" in template.render_first([ASKED], [TOOL])


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
        turns = check_turns(ChatTemplate(tokenizer, syntax, markers_of(family)), syntax)
        verdict += "exact" if turns == OK else turns
    except KVBenchError as error:
        verdict += f"refused: {error}"
    return family.name, syntax.name, verdict


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    tokenizer = copy.deepcopy(load_tokenizer(model_path("micro")))
    tokenizer.bos_token = "<s>"  # templates of models that have one write it
    print("| template | family | syntax | turns |\n|---|---|---|---|")
    for file in sorted(args.folder.rglob("*.jinja"), key=lambda file: file.name.lower()):
        print(f"| {file.stem} | " + " | ".join(examine(tokenizer, file.read_text("utf-8"))) + " |")


if __name__ == "__main__":
    main()
