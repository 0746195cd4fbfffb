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

from agentbench_kv.adapters.micro.profiles import PROFILES, Profile, held_out_seed
from agentbench_kv.training.micro.conversation import LABELS, TEMPLATE
from agentbench_kv.training.micro.data import Encoder, Row, auxiliary_row, episode_row
from agentbench_kv.training.micro.model import MicroModel, load_model
from agentbench_kv.training.micro.tokenizer import build_tokenizer

SINKS = 4


@dataclass(frozen=True)
class Report:
    """How a model did.

    Parameters
    ----------
    episodes, exact : int
        Rows seen, and rows without any error.
    recall : dict of str to float
        Share of right tokens by what they are, see `conversation.LABELS`.
    tokens, spoken : float
        Mean length of a row, and how much of it the agent says.
    """

    episodes: int
    exact: int
    recall: dict[str, float]
    tokens: float
    spoken: float


@torch.no_grad()
def evaluate(model: MicroModel, rows: list[Row], window: int | None = None) -> Report:
    """Feed rows one by one.

    Parameters
    ----------
    model : MicroModel
        What to check.
    rows : list of Row
        See `data.episode_row` and `data.auxiliary_row`.
    window : int, optional
        How many of the latest keys a token sees besides the first few.
    """
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
    model: MicroModel, row: Row, window: int | None
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


def gaps(rows: list[Row]) -> dict[str, list[int]]:
    """Measure how far back facts were last stated: 10th, 50th and 90th percentile in tokens.

    Parameters
    ----------
    rows : list of Row
        Whole episodes.
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
    tiers = (10, 50, 90)
    return {
        name: [int(np.percentile(all_, tier)) for tier in tiers] for name, all_ in found.items()
    }


def _rows(profile: Profile, count: int, first: int, memory: bool) -> list[Row]:
    encoder = Encoder(build_tokenizer())
    make = auxiliary_row if memory else episode_row
    return [make(encoder, held_out_seed(first + index), profile) for index in range(count)]


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
    rows = _rows(PROFILES[profile], episodes, first, memory)
    report = evaluate(load_model(model), rows, window)
    click.echo(json.dumps({**vars(report), "gaps": gaps(rows)}, indent=2))


if __name__ == "__main__":
    main()
