"""Sizes of episodes: the two tasks and the stages of the training curriculum."""

from __future__ import annotations

from dataclasses import dataclass

Span = tuple[int, int]
"""Inclusive range that a count is drawn from."""

TEST_SEEDS = 1 << 32
"""Test seeds are below this number, training seeds from it on."""


def held_out_seed(index: int) -> int:
    return index % TEST_SEEDS


def train_seed(index: int) -> int:
    return TEST_SEEDS + index


@dataclass(frozen=True)
class Profile:
    """How long an episode is and how far apart its facts lie."""

    name: str  # part of the random state: equal seeds of two profiles are unrelated episodes
    stores: Span  # user turns of each sort
    ships: Span  # never more than stores
    reads: Span
    rules: Span  # handles in the system prompt's table
    memos: Span  # handles in the first user message
    scan_log: Span  # handles of noise in the results of the tools
    ship_log: Span
    read_log: Span
    tools: bool = True  # schemas in the system prompt; the shortest training rows have none


PROFILES = {
    "recall-1k": Profile(
        "recall-1k", (2, 3), (2, 2), (0, 0), (2, 4), (2, 3), (1, 4), (0, 2), (4, 8)
    ),
    "recall-5k": Profile(
        "recall-5k", (5, 6), (5, 5), (7, 8), (64, 76), (30, 38), (4, 14), (4, 12), (22, 32)
    ),
}
"""The profiles behind the tasks `micro/recall-1k` and `micro/recall-5k`."""

CURRICULUM = (
    Profile("s0", (1, 2), (1, 1), (0, 1), (1, 3), (1, 3), (0, 1), (0, 1), (2, 3), tools=False),
    Profile("s1", (2, 4), (2, 3), (0, 1), (3, 8), (2, 6), (0, 4), (0, 3), (3, 8)),
    Profile("s2", (3, 4), (2, 4), (0, 2), (4, 30), (2, 16), (2, 10), (0, 8), (4, 20)),
    Profile("s3", (3, 6), (3, 5), (1, 4), (8, 80), (4, 40), (4, 20), (2, 16), (12, 30)),
    Profile("s4", (6, 7), (6, 6), (4, 5), (78, 92), (36, 46), (4, 14), (4, 12), (18, 28)),
)
"""Profiles of the training stages, shortest first; the last asks for more than any task does."""
