"""Options that the analyses share, and how their texts are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(path_type=Path)
_HELP = "Capture file, .npz or .safetensors (docs/analysis.md)"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_PLACE = re.compile(r"(\d+):(\d+)")

one_capture = click.option(
    "--capture", type=FILE, required=True, envvar="KVBENCH_CAPTURE", help=f"{_HELP}."
)
many_captures = click.option(
    "--capture",
    "captures",
    type=FILE,
    multiple=True,
    required=True,
    envvar="KVBENCH_CAPTURE",
    help=f"{_HELP}; repeatable, results are pooled.",
)
layer_option = click.option(
    "--layer",
    "layers",
    type=int,
    multiple=True,
    envvar="KVBENCH_LAYER",
    help="Only this layer of the capture; repeatable. [default: all]",
)
trace_option = click.option(
    "--trace", type=FILE, envvar="KVBENCH_TRACE", help="Trace file of a session."
)
set_option = click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    envvar="KVBENCH_SET",
    help="Method parameter; repeatable. See kvbench ls methods.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, envvar="KVBENCH_JSON", help="Print one JSON document."
)


def outputs(command: F) -> F:
    """Add `--plot` and `--json`."""
    plot = click.option(
        "--plot", type=FILE, envvar="KVBENCH_PLOT", help="Also draw it: a .png or .svg file."
    )
    return plot(json_option(command))


def number(name: str, default: int, help_text: str, low: int = 1) -> Callable[[F], F]:
    """Return an option for a whole number of at least `low`."""
    return click.option(
        f"--{name}",
        type=click.IntRange(low),
        default=default,
        envvar=f"KVBENCH_{name.upper().replace('-', '_')}",
        show_default=True,
        help=help_text,
    )


def read_tokens(text: str) -> int:
    """Read a budget in tokens, `3072` or `3k`.

    Raises
    ------
    UsageError
        If it is none, or a share.
    """
    tokens = Budget.parse(text).tokens
    if tokens is None:
        raise UsageError(f"budget {text!r}: expected a number of tokens, e.g. 3072 or 3k")
    return tokens


def read_place(text: str) -> tuple[int, int]:
    """Read `LAYER:HEAD`.

    Raises
    ------
    UsageError
        If it is not two numbers.
    """
    match = _PLACE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--at {text!r}: expected LAYER:HEAD, e.g. --at 24:32")
    return int(match[1]), int(match[2])


def read_positions(text: str) -> list[int]:
    """Read positions and inclusive ranges, `120-135,200`.

    Raises
    ------
    UsageError
        If a part is neither, or a range runs backwards.
    """
    positions: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise UsageError(
                f"--positions {part.strip()!r}: expected positions and ranges, e.g. 120-135,200"
            )
        positions += range(first, last + 1)
    return positions
