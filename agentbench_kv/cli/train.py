"""`kvbench train`: models that a method needs to have been trained for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.cli import options as opt

if TYPE_CHECKING:
    from agentbench_kv.training.sidequest.tune import StepReport


@click.group()
def train() -> None:
    """Train a model for a method."""


@train.command()
@opt.many("--runs runs PATH", "A run of MODEL with a full cache, or a folder of such; repeatable.")
@opt.option(
    "--gold", "Golden sessions of this task in place of runs.", default="", show_default=False
)
@opt.option("--model", "The model to train: a Hugging Face folder, or micro.", required=True)
@opt.shown("--limit", "Only the first N sessions of every run or task.", opt.POSITIVE)
@opt.option("--every", "Requests from one question to the next.", opt.POSITIVE, default=4)
@opt.option(
    "--annotator",
    "URL#MODEL of a chat endpoint that writes the reasoning; by rule if not given.",
    default="",
    show_default=False,
)
@opt.option("--rank", "Of the adapter.", opt.POSITIVE, default=8)
@opt.option("--alpha", "Of the adapter.", opt.POSITIVE, default=16)
@opt.option("--epochs", "Times that every session comes.", opt.POSITIVE, default=3)
@opt.option(
    "--lr",
    "Learning rate at the beginning; it falls to zero.",
    click.FloatRange(min=0, min_open=True),
    default=2e-4,
)
@opt.option(
    "--distill",
    "Weight of what is learnt from the base model.",
    click.FloatRange(min=0),
    default=500.0,
)
@opt.option("--batch", "Sessions in a step.", opt.POSITIVE, default=8)
@opt.option(
    "--seed", "Of golden samples, weights, order, and the cursors that are closed.", int, default=0
)
@opt.shown("--steps", "Stop after step N; the same command without it goes on.", opt.POSITIVE)
@opt.option("--dtype", "Of the frozen weights.", default="float32")
@opt.option("--device", default="cpu")
@opt.option("--tool-syntax", "How the golden sessions' calls are written.", default="auto")
@opt.set_option("Setting of the task of --gold; repeatable.", envvar=None)
@opt.out_option()
@opt.quiet_option
def sidequest(out: Path, quiet: bool, pairs: tuple[str, ...], **asked: Any) -> None:
    """Train MODEL to name expired tool results (SideQuest, Algorithm 2), with LoRA.

    Traces whose answers the task's checker finds right are played again; when a result was last
    used says which are expired. One session in ten is not trained on, and judges the outcome. The
    same command goes on where it was interrupted.
    """
    from agentbench_kv.cli.interrupts import interruptible
    from agentbench_kv.run.sidequest_training import TrainingRequest, train_sidequest
    from agentbench_kv.training.sidequest.tune import TuneOptions

    tuning = (
        "rank", "alpha", "epochs", "lr", "distill", "batch", "seed", "dtype",
        "device",
    )  # fmt: skip
    request = TrainingRequest(
        model=asked["model"],
        runs=tuple(map(Path, asked["runs"])),
        gold=asked["gold"],
        settings=opt.parse_settings(pairs),
        tool_syntax=asked["tool_syntax"],
        limit=asked["limit"],
        every=asked["every"],
        annotator=asked["annotator"],
        options=TuneOptions(**{name: asked[name] for name in tuning}),
        most_steps=asked["steps"],
    )
    with interruptible():
        lines = train_sidequest(request, out, _say if not quiet else lambda _: None)
    for line in lines:
        click.echo(line)


def _say(told: StepReport | str) -> None:
    if isinstance(told, str):
        click.echo(told, err=True)
        return
    parts = [f"step {told.step}/{told.steps}"]
    if told.auxiliary is not None:
        parts.append(f"answers {told.auxiliary:.4f}")
    if told.distill is not None:
        parts.append(f"distillation {told.distill:.2e}")
    parts.append(f"{told.tokens} tokens in {told.seconds:.1f} s, {told.peak_mib} MiB")
    click.echo(", ".join(parts), err=True)
