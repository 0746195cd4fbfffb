"""When sessions of an open loop begin."""

from __future__ import annotations

import numpy as np


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Return when `count` sessions begin, in seconds: the first at 0, `rate` a second on average.

    The same seed gives the same schedule; another rate stretches it.
    """
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    starts: list[float] = (np.concatenate([[0.0], np.cumsum(gaps)[:-1]]) / rate).tolist()
    return starts
