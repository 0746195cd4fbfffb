"""Training rows: token ids, positions and labels, each row a pure function of its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from agentbench_kv.adapters.micro.episode import Episode, cursors
from agentbench_kv.adapters.micro.generate import EpisodeProfile, generate, train_seed
from agentbench_kv.training.micro.conversation import (
    COPIED,
    INVENTED,
    LABELS,
    MEMORY,
    NAME,
    NOISE,
    PAD,
    PROMPT,
    TEMPLATE,
    LabelledText,
    auxiliary,
    drill,
    whole_session,
)
from agentbench_kv.training.micro.memory_drill import memory_drill

Ints = npt.NDArray[np.int64]

WEIGHTS = np.full(len(LABELS) + 1, 5.0, np.float32)
WEIGHTS[[PROMPT, NOISE, TEMPLATE, COPIED, PAD]] = (0.05, 0.01, 1.0, 2.0, 0.0)

FARTHEST = 8192
"""Positions that gaps may reach in rows shorter than that."""


@dataclass(frozen=True)
class TrainingRow:
    """One sequence; arrays are of equal length."""

    ids: Ints
    positions: Ints
    labels: Ints  # indices of `conversation.LABELS`


@dataclass(frozen=True)
class Mix:
    """What rows of a batch are drawn from."""

    length: int  # tokens per row
    rows: int  # per batch
    profiles: tuple[EpisodeProfile, ...]  # drawn from uniformly
    drills: float = 0.0  # share
    auxiliary: float = 0.0  # share of auxiliary turns
    gaps: float = 0.0  # share of rows whose positions leap ahead at some messages
    names: float = 1.0  # weight of the names the agent has to pick, which decide what it recalls
    memory: float = 2.0  # weight of the answer in an auxiliary turn
    memory_drills: float = 0.0  # share
    reasoned: bool = False  # auxiliary turns are answered as SideQuest's training teaches it


@dataclass(frozen=True)
class TrainingBatch:
    """Rows [rows, length + 1]; the model sees `ids[:, :-1]` and is asked for `ids[:, 1:]`."""

    ids: Tensor
    positions: Tensor
    labels: Tensor
    weights: Tensor  # of the loss, [rows, length], aligned with what is asked for

    @property
    def tokens(self) -> int:
        """Tokens the model computes, padding included."""
        return self.ids.shape[0] * (self.ids.shape[1] - 1)


class RowEncoder:
    """Turns conversations into rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._core = tokenizer.backend_tokenizer
        ids: dict[str, int] = self._core.get_vocab()
        self.pad = ids["<|endoftext|>"]
        self.end = ids["<|im_end|>"]
        self.start = ids["<|im_start|>"]

    def row(self, conversation: LabelledText, gone: frozenset[int] = frozenset()) -> TrainingRow:
        """Tokenise; tokens of the evicted cursors `gone` leave, positions keep their gaps."""
        encoding = self._core.encode(conversation.text, add_special_tokens=False)
        starts = np.fromiter((start for start, _ in encoding.offsets), np.int64)
        ids = np.array(encoding.ids, np.int64)
        keep = ~np.isin(conversation.cursor[starts], list(gone))
        labels = conversation.labels[starts].astype(np.int64)
        return TrainingRow(ids[keep], np.arange(len(ids))[keep], labels[keep])


def episode_row(
    encoder: RowEncoder, seed: int, profile: EpisodeProfile, invented: float = 0.0
) -> TrainingRow:
    """Return the row of a whole episode; `invented` is as `generate` takes it."""
    return encoder.row(whole_session(generate(seed, profile, invented)))


def batch(encoder: RowEncoder, mix: Mix, seed: int, step: int) -> TrainingBatch:
    """Build the batch of a training step of the run with this seed.

    Steps of all stages are numbered through, so no episode is seen twice.
    """
    rows = [_row(encoder, mix, (seed * 1_000_000 + step) * 64 + index) for index in range(mix.rows)]
    shape = (mix.rows, mix.length + 1)
    ids, positions = np.full(shape, encoder.pad), np.zeros(shape, np.int64)
    labels = np.full(shape, PAD)
    for index, row in enumerate(rows):
        size = min(len(row.ids), mix.length + 1)
        ids[index, :size], labels[index, :size] = row.ids[:size], row.labels[:size]
        positions[index, :size] = row.positions[:size]
    weights = WEIGHTS[labels[:, 1:]]
    weights[labels[:, 1:] == NAME] = mix.names
    weights[labels[:, 1:] == MEMORY] = mix.memory
    return TrainingBatch(*map(torch.from_numpy, (ids, positions, labels, weights)))


def _row(encoder: RowEncoder, mix: Mix, number: int) -> TrainingRow:
    rng = random.Random(f"row/{number}")
    kind = rng.random()
    seed = train_seed(number * 4)
    if kind < mix.drills:
        row = encoder.row(drill(seed, mix.length))
    elif kind < mix.drills + mix.memory_drills:
        row = encoder.row(memory_drill(seed))
    elif kind < mix.drills + mix.memory_drills + mix.auxiliary:
        row = _auxiliary_row(encoder, mix, rng, seed)
    else:
        row = _longest(encoder, mix, rng, seed)
    return _with_gaps(encoder, row, rng) if rng.random() < mix.gaps else row


def _longest(encoder: RowEncoder, mix: Mix, rng: random.Random, seed: int) -> TrainingRow:
    """Of two episodes take the one that fills the row better; a longer one is cut at its end."""
    profile = rng.choice(mix.profiles)
    rows = [episode_row(encoder, seed + index, profile, INVENTED) for index in range(2)]
    return max(rows, key=lambda row: min(len(row.ids), mix.length + 1))


def _auxiliary_row(encoder: RowEncoder, mix: Mix, rng: random.Random, seed: int) -> TrainingRow:
    """Ask which cursors are stale, some stale ones being gone already."""
    episode = generate(seed, rng.choice(mix.profiles))
    for turns in range(rng.randint(2, len(episode.turns)), 0, -1):
        row = _auxiliary_at(encoder, rng, episode, turns, mix.reasoned)
        if len(row.ids) <= mix.length + 1:
            return row
    return _longest(encoder, mix, rng, seed)


def auxiliary_row(
    encoder: RowEncoder, seed: int, profile: EpisodeProfile, *, reasoned: bool = False
) -> TrainingRow:
    """Return a row that asks which cursors of an episode are stale.

    The seed also decides when it is asked and what is gone by then.
    """
    episode, rng = generate(seed, profile), random.Random(f"memory/{seed}")
    return _auxiliary_at(encoder, rng, episode, rng.randint(2, len(episode.turns)), reasoned)


def _auxiliary_at(
    encoder: RowEncoder, rng: random.Random, episode: Episode, turns: int, reasoned: bool
) -> TrainingRow:
    stale = [cursor.number for cursor in cursors(episode, turns) if cursor.stale]
    gone = frozenset(rng.sample(stale, rng.choice((0, rng.randint(0, len(stale))))))
    return encoder.row(auxiliary(episode, turns, gone, reasoned=reasoned), gone)


def _with_gaps(encoder: RowEncoder, row: TrainingRow, rng: random.Random) -> TrainingRow:
    """Let positions leap ahead at a few messages, as if more had been said in between."""
    room = FARTHEST - int(row.positions[-1]) - 1
    heads = np.flatnonzero(row.ids == encoder.start)
    if room <= 0 or len(heads) < 2:
        return row
    cuts = rng.sample(list(heads[1:]), min(len(heads) - 1, rng.randint(1, 6)))
    total = rng.randint(0, rng.choice((room, room // 4)))
    shares = [rng.random() for _ in cuts]
    leaps = np.zeros(len(row.ids), np.int64)
    for cut, share in zip(cuts, shares, strict=True):
        leaps[cut] = int(total * share / sum(shares))
    return TrainingRow(row.ids, row.positions + np.cumsum(leaps), row.labels)
