"""Option types and settings that several verbs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError

_F = TypeVar("_F", bound=Callable[..., Any])


def address_options(port: int) -> Callable[[_F], _F]:
    """Add `--host` and `--port` to a command that listens, by default on the loopback only."""
    host_option = click.option(
        "--host", default="127.0.0.1", envvar="KVBENCH_HOST", show_default=True
    )
    port_option = click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=port,
        envvar="KVBENCH_PORT",
        show_default=True,
    )
    return lambda command: host_option(port_option(command))


def parse_settings(pairs: Iterable[str], option: str = "--set") -> dict[str, str]:
    """Turn `key=value` texts of an option into a dict.

    Raises
    ------
    UsageError
        If a text has no `=` or a key comes twice.
    """
    settings: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise UsageError(f"{option} {pair!r}: expected key=value, e.g. {option} window=16")
        if key in settings:
            raise UsageError(f"{option} {key} is given twice")
        settings[key.strip()] = value.strip()
    return settings


def parse_budget(text: str) -> int | str:
    """Read a budget: tokens (`3072`, `3k`) or a share of the logical length (`25%`).

    Returns
    -------
    int or str
        Tokens, or the share as `25%`.

    Raises
    ------
    UsageError
        If it is neither.
    """
    return Budget.parse(text).spelled
