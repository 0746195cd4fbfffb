"""Options that every verb which plays sessions has: engine, model, decoding."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from agentbench_kv.cli.options import (
    F,
    device_option,
    dtype_option,
    engine_option,
    flag,
    many,
    model_option,
    option,
    parse_settings,
)

if TYPE_CHECKING:
    from agentbench_kv.spec import RunSpec

engine_arg_option = many(
    "--engine-arg engine_args NAME=VALUE",
    "Option of a serving engine's own command line, without dashes; repeatable.",
)
untested_option = flag(
    "--allow-untested-engine allow_untested",
    "Go on with a version of the engine that the adapter was not tested with.",
)
SPEC_OPTIONS = {
    "engine": engine_option,
    "model": model_option,
    "limit": option("--limit", "Only the first N samples.", int),
    "trials": option("--trials", default=1),
    "concurrency": option("--concurrency", "Sessions driven at once.", default=16),
    "temperature": option("--temperature", default=0.0, show_default=False),
    "max_tokens": option("--max-tokens", default=1024, show_default=False),
    "timeout": option("--timeout", "Seconds per trial.", default=3600.0, show_default=False),
    "dtype": dtype_option,
    "device": device_option,
    "engine_args": engine_arg_option,
    "allow_untested": untested_option,
}


def spec_options(command: F) -> F:
    """Add the options; the command gets them as one dict called `shared`, see `base_spec`."""

    @functools.wraps(command)
    def gathered(**options: Any) -> Any:
        shared = {name: options.pop(name) for name in SPEC_OPTIONS}
        return command(shared=shared, **options)

    for declare in reversed(SPEC_OPTIONS.values()):
        gathered = declare(gathered)
    return gathered  # type: ignore[return-value]


def base_spec(shared: dict[str, Any]) -> RunSpec:
    """Return the spec all runs of a command share; method, budget and task are to be filled in."""
    from agentbench_kv.spec import RunSpec

    plain = {**shared, "engine_args": parse_settings(shared["engine_args"], "--engine-arg")}
    return RunSpec(method="", budget=None, task="", timeout_s=plain.pop("timeout"), **plain)
