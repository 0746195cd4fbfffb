"""Every kvbench command that a page shows exists, with the options it is shown with."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from agentbench_kv.cli import VERBS, kvbench
from agentbench_kv.cli.sweep import SweepGroup

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BEGIN = re.compile(r"(?:^\s*(?:\$ )?|&& |; )(kvbench \S.*)")
END = re.compile(r"\s(&&|\|\||;|\||>|2>|#)\s")


def commands(text: str) -> list[str]:
    """Return the kvbench commands of a page's shell blocks, each without what comes after it."""
    found: list[str] = []
    for block in re.findall(r"^```(?:bash|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            shown = re.sub(r"(^|\s+)# .*$", "", line)
            found += [END.split(f"{each} ")[0].strip() for each in BEGIN.findall(shown)]
    return found


def wrong(command: str) -> str | None:
    """Say what is wrong with a command; None if nothing is."""
    verb, *words = shlex.split(command)[1:]
    if verb.startswith("-") or verb not in VERBS:
        return None if verb in {"--help", "--version", "--json"} else f"no verb {verb}"
    found: click.Command | None = kvbench.get_command(click.Context(kvbench), verb)
    if isinstance(found, SweepGroup) and words and words[0] not in found.commands:
        found = found.commands["start"]
    elif isinstance(found, click.Group) and words and not words[0].startswith("-"):
        found = found.get_command(click.Context(found), words.pop(0))
    if found is None:
        return "no such subcommand"
    known = {name for each in found.params for name in (*each.opts, *each.secondary_opts)}
    options = {word.split("=")[0] for word in words if re.match(r"--[a-z]", word)}
    return ", ".join(sorted(options - known - {"--help"})) or None


def test_pages_show_commands():
    assert sum(len(commands(page.read_text("utf-8"))) for page in PAGES) > 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_exist(page):
    found = {command: wrong(command) for command in commands(page.read_text("utf-8"))}
    assert {command: why for command, why in found.items() if why} == {}


def test_a_wrong_verb_and_a_wrong_option_are_seen():
    text = "```bash\nkvbench rum --limit 2\nkvbench run --limits 2 && kvbench ls methods\n```\n"
    assert [wrong(command) for command in commands(text)] == ["no verb rum", "--limits"]
