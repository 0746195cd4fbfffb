"""Options that come from a file, or go to one: `--config`, `--save-config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from agentbench_kv.cli.options import FILE, local
from agentbench_kv.errors import UsageError

_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)


def _read(ctx: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    """Make what a file says the defaults: the command line and the environment come first."""
    if path is None:
        return None
    from agentbench_kv.sweeps.config import read_options

    options = by_name(ctx)
    defaults: dict[str, Any] = {}
    for name, values in read_options(path).given().items():
        option = options[name]
        key = option.name or ""
        if isinstance(values, Mapping):
            defaults[key] = [f"{k}={_one(path, f'{name}.{k}', v)}" for k, v in values.items()]
        else:
            defaults[key] = values if option.multiple else _one(path, name, values)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return path


def _one(path: Path, name: str, values: list[Any]) -> Any:
    if len(values) > 1:
        raise UsageError(
            f"{path}: {name} has {len(values)} values; kvbench run takes one, "
            "kvbench sweep makes an axis of them"
        )
    return values[0]


config_option = local(
    "--config", "Options from this YAML file; those given here come first.", FILE,
    is_eager=True, callback=_read, expose_value=False,
)  # fmt: skip
save_option = local(
    "--save-config save_config", "Write the options to this YAML file, for --config.", FILE
)


def by_name(ctx: click.Context) -> dict[str, click.Option]:
    """Return a command's options by their long names, without dashes."""
    return {
        name.removeprefix("--"): option
        for option in ctx.command.params
        if isinstance(option, click.Option)
        for name in option.opts
        if name.startswith("--")
    }


def given(ctx: click.Context, asked: Mapping[str, Any], *, all_of: bool = False) -> dict[str, Any]:
    """Return what a command was given of a run's options, as `RunOptions.given` does.

    With `all_of`, defaults that mean something too. `asked` holds the values by click's names.
    """
    from agentbench_kv.sweeps.config import OPTION_NAMES, RunOptions

    found: dict[str, Any] = {}
    for name in OPTION_NAMES:
        option = by_name(ctx)[name]
        value = asked[option.name or ""]
        chosen = ctx.get_parameter_source(option.name or "") in _GIVEN
        if value in (None, (), "") or not (all_of or chosen):
            continue
        if name in ("set", "engine-arg"):
            from agentbench_kv.cli.options import parse_settings

            found[name] = {key: [text] for key, text in parse_settings(value, f"--{name}").items()}
        else:
            found[name] = list(value) if isinstance(value, tuple) else [value]
    return RunOptions.model_validate(found).given()


def save(path: Path, ctx: click.Context, asked: Mapping[str, Any]) -> None:
    """Write all of a run's options that have a value."""
    from agentbench_kv.results.files import write_atomic
    from agentbench_kv.sweeps.config import written

    write_atomic(path, written(given(ctx, asked, all_of=True)).encode())
