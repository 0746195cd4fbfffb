"""`kvbench ablate`: which of a method's parameters matter, on a task, with paired statistics."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.cli import options as opt

if TYPE_CHECKING:
    from rich.table import Table

    from agentbench_kv.run.ablation import Variant


@click.command()
@opt.option("--method", default="agentkv")
@opt.option("--budget", "As kvbench run takes it.")
@opt.option("--task", "Slice.", default="micro/recall-5k")
@opt.option("--seed", default=0)
@opt.many(
    "--axis axes KEY=V1,V2,...",
    "Parameter and values; repeatable. [default: the paper's and the open choices]",
    envvar=None,
)
@opt.set_option("Parameter of all arms; repeatable.", envvar=None)
@opt.option("--metric", "score, or a sub-score such as recurring.", default="score", envvar=None)
@opt.spec_options
@opt.out_option()
@opt.banks_option
@opt.dry_run_option
@opt.quiet_option
@opt.json_option
@click.pass_context
def ablate(
    ctx: click.Context,
    /,
    shared: dict[str, Any],
    axes: tuple[str, ...],
    pairs: tuple[str, ...],
    metric: str,
    out: Path,
    banks: Path | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **base: Any,
) -> None:
    """Vary one parameter of METHOD at a time and compare every variant with METHOD as it is.

    Runs are resumed and shared with `kvbench run`. Differences are variant minus baseline over the
    same samples; p-values are Holm-adjusted over all variants.
    """
    from agentbench_kv.cli.interrupts import interruptible
    from agentbench_kv.cli.output import run_progress, show_plan
    from agentbench_kv.results.terminal import console
    from agentbench_kv.run.ablation import ablate as run_arms
    from agentbench_kv.run.ablation import variants
    from agentbench_kv.run.calibration import identified
    from agentbench_kv.run.runner import check_all

    chosen = {key: value.split(",") for key, value in opt.parse_settings(axes).items()}
    arms = variants(opt.base_spec(shared, **base), opt.parse_settings(pairs), chosen or None)
    opt.check_banks(ctx, [arm.spec for arm in arms], banks)
    if dry_run:
        check_all([arm.spec for arm in arms])
        show_plan([identified(arm.spec, make=False) for arm in arms], out, as_json)
        return
    with interruptible(), run_progress(quiet) as progress:
        compared = run_arms(arms, out, progress, metric, banks)
    if as_json:
        opt.print_json([_document(arm) for arm in compared])
    else:
        console().print(_table(compared, metric))


def _document(arm: Variant) -> dict[str, Any]:
    return {
        "axis": arm.axis,
        "value": arm.value,
        "run_id": arm.spec.id,
        "spec": arm.spec.document(),
        "level": asdict(arm.level) if arm.level else None,
        "difference": asdict(arm.difference) if arm.difference else None,
        "adjusted_p": arm.adjusted_p,
        "doubt": arm.doubt,
    }


def _table(arms: list[Variant], metric: str) -> Table:
    from agentbench_kv.results.show import percent
    from agentbench_kv.results.terminal import new_table

    rows = []
    for arm in arms:
        gap, head = arm.difference, (arm.axis or "baseline", arm.value, percent(arm.level))
        between = f"{gap.point:+.1%} [{gap.low:+.1%}, {gap.high:+.1%}]" if gap else None
        p = f"{arm.adjusted_p:.3f}" if arm.adjusted_p is not None else None
        validity = arm.doubt or "valid"
        rows.append((*head, between, p, gap.n if gap else None, validity, arm.spec.id))
    between = "difference [95% CI]"
    columns = ("axis", "value", metric, between, "p (Holm)", "samples", "validity", "run")
    return new_table(*columns, rows=rows)
