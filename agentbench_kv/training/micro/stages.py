"""The curriculum: what is trained on, in which order, and when to go on."""

from __future__ import annotations

from dataclasses import dataclass

from agentbench_kv.adapters.micro.profiles import CURRICULUM, PROFILES
from agentbench_kv.training.micro.data import Mix

SHORT, MEDIUM, LONG, LONGER, LONGEST = CURRICULUM
TASK_1K = PROFILES["recall-1k"]


@dataclass(frozen=True)
class Stage:
    """A stretch of training."""

    name: str
    mixes: tuple[Mix, ...]  # taken in turn, one per step
    tokens: int  # after which the stage is over
    recall: float = 2.0  # it is over earlier once every kind of code is recalled this well
    rates: tuple[float, float] = (1.0, 1.0)  # learning-rate factors at its first and last token


RECIPE = (
    Stage("drills", (Mix(160, 14, (SHORT,), drills=1.0),), 4_000_000, recall=0.93),
    Stage(
        "turns",
        (
            Mix(512, 4, (SHORT,), drills=0.25, auxiliary=0.15),
            Mix(512, 4, (SHORT, MEDIUM), drills=0.25, auxiliary=0.15),
        ),
        1_500_000,
        recall=0.95,
    ),
    Stage(
        "sessions",
        (Mix(1152, 2, (MEDIUM, TASK_1K), drills=0.1, auxiliary=0.2, gaps=0.4),),
        1_000_000,
        recall=0.96,
    ),
    Stage(
        "long",
        (
            Mix(1152, 2, (MEDIUM, TASK_1K), drills=0.05, auxiliary=0.2, gaps=0.5),
            Mix(2560, 1, (LONG, LONGER), auxiliary=0.2, gaps=0.3),
        ),
        500_000,
        recall=0.97,
    ),
    Stage(
        "final",
        (
            Mix(1152, 2, (MEDIUM, TASK_1K), 0.02, 0.2, gaps=0.5, names=5.0, memory=5.0),
            Mix(5632, 1, (LONGEST,), auxiliary=0.1, names=5.0, memory=5.0),
            Mix(512, 4, (SHORT,), auxiliary=0.7, names=5.0, memory=5.0),
            Mix(2560, 1, (LONG, LONGER), auxiliary=0.15, gaps=0.3, names=5.0, memory=5.0),
            Mix(5632, 1, (LONGEST,), auxiliary=0.1, names=5.0, memory=5.0),
        ),
        3_000_000,
        rates=(1.0, 0.0),
    ),
    Stage(
        "memory",
        (
            Mix(512, 6, (SHORT, MEDIUM), auxiliary=0.85, names=5.0, memory=5.0),
            Mix(5632, 1, (LONGEST,), names=5.0),
            Mix(512, 6, (SHORT, MEDIUM), auxiliary=0.85, names=5.0, memory=5.0),
            Mix(1152, 2, (MEDIUM, TASK_1K), auxiliary=0.5, gaps=0.3, names=5.0, memory=5.0),
        ),
        2_000_000,
        rates=(0.6, 0.0),
    ),
)
"""From dense drills to whole sessions at a falling rate; then once more with more memory turns."""
