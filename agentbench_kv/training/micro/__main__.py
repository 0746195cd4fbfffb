"""Train the micro model: `python -m agentbench_kv.training.micro --out DIR`."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from agentbench_kv.training.micro.train import RECIPE, Trainer, TrainingOptions


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Output folder.")
@click.option("--seed", default=0, show_default=True, help="Of weights and data.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--threads", default=1, show_default=True, help="CPU threads.")
@click.option("--resume", is_flag=True, help="Go on from the checkpoint in the output folder.")
def main(out: Path, seed: int, device: str, threads: int, resume: bool) -> None:
    """Train from scratch on generated episodes and write OUT/model."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    trainer = Trainer(TrainingOptions(out, seed, device, threads), RECIPE)
    if resume:
        trainer.resume()
    trainer.run()
    trainer.save()


if __name__ == "__main__":
    main()
