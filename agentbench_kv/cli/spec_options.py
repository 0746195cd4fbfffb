"""Options that every verb which plays sessions has: engine, model, decoding, where to put runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from agentbench_kv.spec import RunSpec

F = TypeVar("F", bound=Callable[..., Any])

ENGINE_OPTIONS = (
    click.option(
        "--engine-arg",
        "engine_args",
        multiple=True,
        metavar="NAME=VALUE",
        envvar="KVBENCH_ENGINE_ARG",
        help="Option of a serving engine's own command line, without dashes; repeatable.",
    ),
    click.option(
        "--allow-untested-engine",
        "allow_untested",
        is_flag=True,
        envvar="KVBENCH_ALLOW_UNTESTED_ENGINE",
        help="Go on with a version of the engine that the adapter was not tested with.",
    ),
)
"""For verbs that may start a serving engine."""

_OPTIONS = (
    click.option("--engine", default="embedded", envvar="KVBENCH_ENGINE", show_default=True),
    click.option(
        "--model",
        default="micro",
        envvar="KVBENCH_MODEL",
        show_default=True,
        help="The shipped micro model, or a Hugging Face model folder.",
    ),
    click.option("--limit", type=int, envvar="KVBENCH_LIMIT", help="Only the first N samples."),
    click.option("--trials", type=int, default=1, envvar="KVBENCH_TRIALS", show_default=True),
    click.option(
        "--concurrency",
        type=int,
        default=16,
        envvar="KVBENCH_CONCURRENCY",
        show_default=True,
        help="Sessions driven at once.",
    ),
    click.option("--temperature", type=float, default=0.0, envvar="KVBENCH_TEMPERATURE"),
    click.option("--max-tokens", type=int, default=1024, envvar="KVBENCH_MAX_TOKENS"),
    click.option(
        "--timeout", type=float, default=3600.0, envvar="KVBENCH_TIMEOUT", help="Seconds per trial."
    ),
    click.option("--dtype", default="float32", envvar="KVBENCH_DTYPE", show_default=True),
    click.option("--device", default="auto", envvar="KVBENCH_DEVICE", show_default=True),
    *ENGINE_OPTIONS,
)
_NAMES = (
    "engine", "model", "limit", "trials", "concurrency", "temperature", "max_tokens", "timeout",
    "dtype", "device", "engine_args", "allow_untested",
)  # fmt: skip


def spec_options(command: F) -> F:
    """Add the options; the command gets them as one dict called `shared`, see `base_spec`."""

    @functools.wraps(command)
    def gathered(**options: Any) -> Any:
        shared = {name: options.pop(name) for name in _NAMES}
        return command(shared=shared, **options)

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return gathered  # type: ignore[return-value]


def quiet_option(command: F) -> F:
    """Add `--quiet`."""
    added: F = click.option(
        "--quiet", "-q", is_flag=True, envvar="KVBENCH_QUIET", help="Show no progress."
    )(command)
    return added


def out_option(command: F) -> F:
    """Add `--out`, the folder of runs."""
    added: F = click.option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path("runs"),
        envvar="KVBENCH_OUT",
        show_default=True,
        help="Folder of runs.",
    )(command)
    return added


def base_spec(shared: dict[str, Any]) -> RunSpec:
    """Return the spec all runs of a command share; method, budget and task are to be filled in."""
    # Imported here: torch takes seconds, which `kvbench --help` should not.
    from agentbench_kv.cli.options import parse_settings
    from agentbench_kv.spec import RunSpec

    plain = dict(shared)
    plain["engine_args"] = parse_settings(plain["engine_args"], "--engine-arg")
    return RunSpec(method="", budget=None, task="", timeout_s=plain.pop("timeout"), **plain)
