"""A fast check on held-out episodes: every token the agent should say must be the likeliest.

The expected session is fed as a whole and argmax is compared on the agent's tokens. Greedy decoding
follows the expected session exactly as long as this holds, so an episode that passes here succeeds
in free running too. `--window` keeps only the first and the latest keys: facts with a real source
are lost then.

Run `python -m agentbench_kv.training.micro.evaluate --model DIR --profile recall-5k`.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor

from agentbench_kv.adapters.micro.generate import PROFILES, held_out_seed
from agentbench_kv.training.micro.conversation import LABELS, TEMPLATE
from agentbench_kv.training.micro.data import RowEncoder, TrainingRow, auxiliary_row, episode_row
from agentbench_kv.training.micro.model import MicroModel, load_model
from agentbench_kv.training.micro.tokenizer import build_tokenizer

SINKS = 4


@dataclass(frozen=True)
class Report:
    """How well a model did."""

    episodes: int
    exact: int  # episodes without any error
    recall: dict[str, float]  # share of right tokens by what they are, see `conversation.LABELS`
    tokens: float  # mean length of a row
    spoken: float  # and how much of it the agent says


@torch.no_grad()
def evaluate(model: MicroModel, rows: list[TrainingRow], window: int | None = None) -> Report:
    """Feed rows one by one; with a window a token sees that many latest keys and the first few."""
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    exact = 0
    for row in rows:
        labels = row.labels[1:]
        hits = _hits(model, row, window)
        spoken = labels >= TEMPLATE
        exact += bool(hits[spoken].all())
        for label in np.unique(labels[spoken]):
            asked[LABELS[label]] += int((labels == label).sum())
            right[LABELS[label]] += int(hits[labels == label].sum())
    recall = {name: round(right[name] / asked[name], 4) for name in sorted(asked)}
    lengths = [len(row.ids) for row in rows]
    said = [int((row.labels >= TEMPLATE).sum()) for row in rows]
    return Report(len(rows), exact, recall, float(np.mean(lengths)), float(np.mean(said)))


def _hits(
    model: MicroModel, row: TrainingRow, window: int | None
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    device = model.frequencies.device
    ids = torch.from_numpy(row.ids).to(device)[None]
    positions = torch.from_numpy(row.positions).to(device)[None]
    mask = None if window is None else _window(ids.shape[1] - 1, window).to(device)
    guess = model(ids[:, :-1], positions[:, :-1], mask).argmax(-1)
    hits: np.ndarray[tuple[int], np.dtype[np.bool_]] = (guess == ids[:, 1:])[0].cpu().numpy()
    return hits


def _window(length: int, window: int) -> Tensor:
    """Build the mask of sinks and a sliding window, (length, length)."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    near = distance < window
    near[:, :SINKS] = True
    return near & (distance >= 0)


def gaps(rows: list[TrainingRow]) -> dict[str, list[int]]:
    """Measure how far back facts of whole episodes were last stated, in tokens.

    By label: the 10th, 50th and 90th percentile.
    """
    found: dict[str, list[int]] = {}
    for row in rows:
        seen: dict[tuple[int, ...], int] = {}
        for start in range(2, len(row.ids) - 1):
            key = tuple(row.ids[start - 2 : start + 2].tolist())
            label = LABELS[row.labels[start]]
            # Both syllables of a code have one label; the code starts where the label does.
            if "/" in label and row.labels[start - 1] != row.labels[start] and key in seen:
                found.setdefault(label, []).append(start - seen[key])
            seen[key] = start
    tenths = (10, 50, 90)
    return {key: np.percentile(far, tenths).astype(int).tolist() for key, far in found.items()}


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--profile", type=click.Choice(list(PROFILES)), required=True)
@click.option("--episodes", default=200, show_default=True)
@click.option("--first", default=0, show_default=True, help="First held-out seed.")
@click.option("--window", type=int, help="See only so many of the latest keys.")
@click.option("--memory", is_flag=True, help="Check the auxiliary turn instead.")
@click.option("--threads", default=1, show_default=True)
def main(
    model: Path,
    profile: str,
    episodes: int,
    first: int,
    window: int | None,
    memory: bool,
    threads: int,
) -> None:
    """Check a model on held-out episodes."""
    torch.set_num_threads(threads)
    encoder = RowEncoder(build_tokenizer())
    make = auxiliary_row if memory else episode_row
    seeds = map(held_out_seed, range(first, first + episodes))
    rows = [make(encoder, seed, PROFILES[profile]) for seed in seeds]
    report = evaluate(load_model(model), rows, window)
    click.echo(json.dumps({**vars(report), "gaps": gaps(rows)}, indent=2))


if __name__ == "__main__":
    main()
