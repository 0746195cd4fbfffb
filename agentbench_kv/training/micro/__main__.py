"""Train the micro model: `python -m agentbench_kv.training.micro --out DIR`."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from agentbench_kv.training.micro.train import LONG_RECIPE, RECIPE, Trainer, TrainingOptions


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Output folder.")
@click.option("--seed", default=0, show_default=True, help="Of weights and data.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--threads", default=1, show_default=True, help="CPU threads.")
@click.option(
    "--long-turns",
    "weights",
    type=click.Path(path_type=Path, exists=True),
    help="Train this model further on sessions with long turns.",
)
@click.option("--resume", is_flag=True, help="Go on from the checkpoint in the output folder.")
def main(
    out: Path, seed: int, device: str, threads: int, weights: Path | None, resume: bool
) -> None:
    """Train on generated episodes, from scratch if nothing else is said, and write OUT/model."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    trainer = Trainer(
        TrainingOptions(out, seed, device, threads), LONG_RECIPE if weights else RECIPE
    )
    if weights is not None:
        trainer.start_from(weights)
    if resume:
        trainer.resume()
    trainer.run()
    trainer.save()


if __name__ == "__main__":
    main()
