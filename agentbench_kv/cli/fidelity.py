"""`kvbench fidelity`: how far a method's predictions are from the full cache's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.budget import Budget
from agentbench_kv.cli import options as opt

if TYPE_CHECKING:
    from rich.table import Table

    from agentbench_kv.results.fidelity import FidelityLine
    from agentbench_kv.results.stats import Interval
    from agentbench_kv.run.recordings import Recording


@click.command()
@opt.many("--method methods METHOD", "Method, or method@preset; repeatable.", required=True)
@opt.many("--budget budgets TOKENS", "As kvbench run takes it; repeatable.")
@opt.option("--task", "Play this task's golden sessions.", default="", show_default=False)
@opt.shown("--from source RUN", "Play the sessions of this run instead.", opt.FOLDER, envvar=None)
@opt.option("--model", "The shipped micro model, or a Hugging Face model folder.", default="micro")
@opt.shown("--limit", "Only the first N sessions.", opt.POSITIVE)
@opt.option("--dtype", default="float32")
@opt.option("--device", default="auto")
@opt.option("--tool-syntax", "How the golden sessions' calls are read.", default="auto")
@opt.set_option("Parameter of the methods or the task; repeatable.")
@opt.out_option()
@opt.quiet_option
@opt.json_option
def fidelity(
    methods: tuple[str, ...],
    budgets: tuple[str, ...],
    pairs: tuple[str, ...],
    out: Path,
    quiet: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Play recorded sessions with METHOD at BUDGET beside the full cache, and compare predictions.

    Every token of an answer is fed as if the model had written it. KL is that of the next token's
    distribution, full cache over METHOD's, in nats; 0 is the full cache. The same command finishes
    what was interrupted.
    """
    from agentbench_kv.cli.interrupts import interruptible
    from agentbench_kv.errors import UsageError
    from agentbench_kv.registry import load_task
    from agentbench_kv.results.fidelity import fidelity_lines
    from agentbench_kv.results.store import RunStore
    from agentbench_kv.results.terminal import console
    from agentbench_kv.run.fidelity import fidelity_arms, play_fidelity

    if bool(asked["task"]) == bool(asked["source"]):
        raise UsageError("name the sessions: --task TASK, or --from RUN")
    settings = opt.parse_settings(pairs)
    of_task = set(load_task(asked["task"]).parameters()) if asked["task"] else set()
    own = {key: value for key, value in settings.items() if key not in of_task}
    arms = fidelity_arms(methods, [Budget.parse(text) for text in budgets], own)
    with interruptible():
        chosen = {key: value for key, value in settings.items() if key in of_task}
        recordings, label, model = _recorded(asked, chosen)
        specs = [arm.spec(model, label, asked["dtype"], asked["device"]) for arm in arms]
        told = _say if not quiet else lambda *_: None
        play_fidelity(specs, recordings, out, {"sessions": label}, told)
    lines = fidelity_lines([RunStore(out).find(spec.id) for spec in specs])
    if as_json:
        opt.print_json([asdict(line) for line in lines])
    else:
        console().print(_table(lines))


def _recorded(asked: dict[str, Any], chosen: dict[str, str]) -> tuple[list[Recording], str, str]:
    """Return the sessions, what they are called, and the model whose tokens they are."""
    from agentbench_kv.run.recordings import record_gold, record_run

    if asked["source"]:
        found, model = record_run(asked["source"], asked["limit"])
        return found, f"run/{asked['source'].resolve().name}", model
    model, task = asked["model"], asked["task"]
    found = record_gold(task, model, asked["limit"], chosen, asked["tool_syntax"])
    return found, f"{task}/gold", model


def _say(session: str, done: int, total: int) -> None:
    click.echo(f"{done}/{total} sessions; playing {session}", err=True)


def _table(lines: list[FidelityLine]) -> Table:
    from agentbench_kv.results.terminal import new_table

    rows = []
    for line in lines:
        found, shares = line.against_first, line.shares
        change = (
            "" if found is None else f"{found.point:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
        )
        adjusted = "" if line.p_value is None else f"{line.p_value:.3g}"
        rows.append((
            line.method, line.budget, line.sessions, f"{line.events:.1f}",
            _nats(line.means.get("kl")), _nats(line.means.get("kl_value")),
            _percent(shares.get("top1")), _percent(shares.get("flips")),
            _percent(shares.get("calls_exact")), change, adjusted,
        ))  # fmt: skip
    return new_table(
        "method", "budget", "sessions", "events", "KL", "KL of values", "same best token",
        "flips", "exact calls", "KL less the first's", "p (Holm)", rows=rows,
    )  # fmt: skip


def _nats(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    return f"{interval.point:.4f} [{interval.low:.4f}, {interval.high:.4f}]"


def _percent(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    return f"{interval.point:.1%} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"
