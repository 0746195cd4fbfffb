"""The sessions that the suite plays: random ids from fixed seeds."""

from __future__ import annotations

import torch

from agentbench_kv.conformance.engines.models import CONTEXT, VOCAB
from agentbench_kv.conformance.engines.traces import Step

BUDGET = 96
INTERVAL = 32

SMALL_POOL = CONTEXT + 256
"""Cached tokens of a small pool: serving engines want to hold one session of the full context."""

Sessions = dict[str, list[Step]]


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCAB, (length,), generator=generator).tolist())


def long_sessions() -> Sessions:
    # The first: prompts longer than a prefill chunk, of one id and of none, and 235 decoded tokens,
    # so at least five events.
    sizes = {
        "long": ((60, 45), (600, 60), (1, 45), (0, 40), (33, 45)),
        "late": ((90, 20), (300, 40), (20, 40)),
        "brief": ((80, 33), (65, 20), (40, 12)),
    }
    return {
        name: [Step(prompt(n, 100 * i + j), out) for j, (n, out) in enumerate(turns)]
        for i, (name, turns) in enumerate(sizes.items())
    }


def crowd(sessions: int = 10) -> Sessions:
    """Make sessions whose prompts together are twice what the models' context holds."""
    first = 2 * CONTEXT // sessions
    return {
        f"s{i}": [Step(prompt(first, 1000 + i), 40), Step(prompt(50, 2000 + i), 40)]
        for i in range(sessions)
    }
