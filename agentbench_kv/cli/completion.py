"""`kvbench completion`: print the shell's completion script."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    For bash: add `eval "$(kvbench completion bash)"` to ~/.bashrc.
    """
    from agentbench_kv.cli import kvbench

    cls = get_completion_class(shell)
    if cls is not None:
        click.echo(cls(kvbench, {}, "kvbench", "_KVBENCH_COMPLETE").source())
