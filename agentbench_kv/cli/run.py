"""`kvbench run`: play a task with a method, check the answers, keep the proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from agentbench_kv.budget import Budget
from agentbench_kv.cli import options as opt
from agentbench_kv.cli.config import config_option, save, save_option


@click.command()
@opt.grid_options
@opt.spec_options
@opt.out_option()
@opt.shown(
    "--max-cost",
    "Stop once this much is spent (engine api, prices from KVBENCH_API_PRICES).",
    opt.ABOVE_ZERO,
)
@opt.banks_option
@config_option
@save_option
@opt.dry_run_option
@opt.quiet_option
@opt.json_option
@click.pass_context
def run(
    ctx: click.Context,
    /,
    shared: dict[str, Any],
    out: Path,
    max_cost: float | None,
    banks: Path | None,
    save_config: Path | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **asked: Any,
) -> int:
    """Run METHOD at BUDGET on TASK and print score, KV figures and validity.

    Repeated options make a grid. The same command finishes a run that was interrupted.
    """
    from agentbench_kv.cli.interrupts import interruptible
    from agentbench_kv.cli.output import run_progress, show_lost, show_outcome, show_plan
    from agentbench_kv.engines.api.spending import spending_limit
    from agentbench_kv.run.calibration import identified
    from agentbench_kv.run.runner import check_all, run_all
    from agentbench_kv.run.spec import default_methods, grid

    if max_cost is not None:
        _check_billed(shared["engine"])
    if save_config is not None:
        save(save_config, ctx, {**shared, **asked})
    specs = grid(
        opt.base_spec(shared),
        asked["methods"] or default_methods(shared["engine"], asked["budgets"]),
        [Budget.parse(text) for text in asked["budgets"]] or [None],
        asked["tasks"],
        asked["seeds"],
        opt.parse_settings(asked["pairs"]),
    )
    opt.check_banks(ctx, specs, banks)
    if dry_run:
        check_all(specs)
        show_plan([identified(spec, make=False) for spec in specs], out, as_json)
        return 0
    with interruptible(), spending_limit(max_cost), run_progress(quiet) as progress:
        summaries = run_all(specs, out, progress, banks)
    return show_outcome(summaries, out, as_json) or show_lost(summaries, out)


def _check_billed(engine: str) -> None:
    """Refuse a limit on costs where nothing costs anything."""
    from agentbench_kv.engines.base import Capability
    from agentbench_kv.errors import UsageError
    from agentbench_kv.registry import load_engine

    if Capability.TEXT not in load_engine(engine).capabilities:
        raise UsageError(f"--max-cost is for engines that send bills; {engine!r} is free")
