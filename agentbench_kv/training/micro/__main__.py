"""Train the micro model: `python -m agentbench_kv.training.micro --out DIR`."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from agentbench_kv.training.micro.train import (
    LONG_RECIPE,
    MEMORY_RECIPE,
    RECIPE,
    Trainer,
    TrainingOptions,
)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Output folder.")
@click.option("--seed", default=0, show_default=True, help="Of weights and data.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--threads", default=1, show_default=True, help="CPU threads.")
@click.option(
    "--long-turns",
    type=click.Path(path_type=Path, exists=True),
    help="Train this model further on sessions with long turns.",
)
@click.option(
    "--memory-turns",
    type=click.Path(path_type=Path, exists=True),
    help="Train this model further on SideQuest's auxiliary turns.",
)
@click.option("--resume", is_flag=True, help="Go on from the checkpoint in the output folder.")
def main(
    out: Path,
    seed: int,
    device: str,
    threads: int,
    long_turns: Path | None,
    memory_turns: Path | None,
    resume: bool,
) -> None:
    """Train on generated episodes, from scratch if nothing else is said, and write OUT/model."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if long_turns and memory_turns:
        raise click.UsageError("--long-turns and --memory-turns are two trainings")
    recipe = LONG_RECIPE if long_turns else MEMORY_RECIPE if memory_turns else RECIPE
    trainer = Trainer(TrainingOptions(out, seed, device, threads), recipe)
    if weights := long_turns or memory_turns:
        trainer.start_from(weights)
    if resume:
        trainer.resume()
    trainer.run()
    trainer.save()


if __name__ == "__main__":
    main()
