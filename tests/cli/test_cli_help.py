"""The help of every verb and the parameters behind it, as they were last looked at.

After a change that is meant: `python tests/cli/test_cli_help.py` writes `data/help.txt` and
`data/parameters.txt` again; read the difference before committing it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from agentbench_kv.cli import kvbench

DATA = Path(__file__).parent / "data"
WIDTH = 80


def walk(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Context]]:
    """Yield every command with its full name, groups before what they hold."""
    command._help_option = None  # click keeps the one made for the first caller's context
    yield context.command_path, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            member = command.get_command(context, name)
            assert member is not None, name
            yield from walk(member, context_of(member, name, context))


def context_of(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    settings = command.context_settings
    return click.Context(
        command, parent, name, terminal_width=WIDTH, max_content_width=WIDTH, **settings
    )


def everything() -> Iterator[tuple[str, click.Context]]:
    return walk(kvbench, context_of(kvbench, "kvbench", None))


def helps() -> str:
    return "\n".join(f"### {path} --help\n{it.get_help()}\n" for path, it in everything())


def parameters() -> str:
    lines = [
        f"{path} {described(parameter)}"
        for path, context in everything()
        for parameter in context.command.params
    ]
    return "\n".join(lines) + "\n"


def described(parameter: click.Parameter) -> str:
    """Say in one line how a parameter is spelled, where it comes from and what it becomes."""
    names = ("default", "envvar", "nargs", "multiple", "required", "metavar", "is_flag")
    names += ("flag_value", "count", "hidden", "show_default", "show_envvar", "secondary_opts")
    found = {name: getattr(parameter, name, None) for name in names}
    if found["is_flag"]:  # differs between releases of click
        found["flag_value"] = None
    spelled = " ".join(parameter.opts) if isinstance(parameter, click.Option) else "ARGUMENT"
    return f"{spelled} -> {parameter.name}: {kind(parameter.type)}{said(found)}"


def kind(of: click.ParamType) -> str:
    settings = {name: value for name, value in vars(of).items() if not name.startswith("_")}
    return type(of).__name__ + said(settings).replace("<class 'pathlib.Path'>", "Path")


def said(settings: dict[str, Any]) -> str:
    """Spell what is set; how an unset value is spelled differs between releases of click."""
    given = {name: value for name, value in sorted(settings.items()) if value is not None}
    shown = {name: v for name, v in given.items() if v is not False and v not in ([], ())}
    return "".join(f" {name}={v}" for name, v in shown.items() if "UNSET" not in str(v))


GOLDEN = {"help.txt": helps, "parameters.txt": parameters}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_command_line_is_what_it_was(name: str) -> None:
    assert GOLDEN[name]() == (DATA / name).read_text("utf-8")


if __name__ == "__main__":
    for name, write in GOLDEN.items():
        (DATA / name).write_text(write(), "utf-8")
