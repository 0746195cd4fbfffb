"""What a command takes from the run whose sessions it plays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from agentbench_kv.run.spec import RunSpec


def like_run(source: Path, asked: dict[str, Any]) -> RunSpec:
    """Return the spec of the run that sessions are from; its dtype is taken unless one is named.

    UsageError for another model or tool syntax than its own: its tokens are what they are.
    """
    from agentbench_kv.errors import UsageError
    from agentbench_kv.results.run_reader import RunReader
    from agentbench_kv.run.spec import RunSpec

    like = RunSpec.of(RunReader(source).info.spec)
    said = click.get_current_context().get_parameter_source
    for name, own in (("model", like.model), ("tool_syntax", like.tool_syntax or "auto")):
        if said(name) is ParameterSource.COMMANDLINE and Path(asked[name]) != Path(own):
            option = f"--{name.replace('_', '-')} {asked[name]}"
            raise UsageError(f"{option}: the run's sessions are of {own}; leave it out")
    if said("dtype") is not ParameterSource.COMMANDLINE:
        asked["dtype"] = like.dtype
    return like
