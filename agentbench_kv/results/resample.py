"""Bootstrap of sums over units: one draw serves every column, so that arms stay paired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.results.statistics import ANALYSIS_SEED, LEVEL, RESAMPLES, Floats, steady_ends

__all__ = ["by_group", "change_ends", "percentile_ends", "resampled_sums", "unseen_change"]

_PSEUDO = 0.5**0.5
_CONSTANT = 1e-12
# Drawn counts held at once: 8 bytes each, so about 40 MB.
_BATCH_ITEMS = 5_000_000


def by_group(
    ids: Sequence[str], columns: Floats, clusters: Mapping[str, str] | None
) -> tuple[Floats, int | None]:
    """Sum the rows of dependent samples: what is resampled is the group.

    Parameters
    ----------
    ids : sequence of str
        Sample of each row.
    columns : (samples, columns) array
    clusters : mapping of str to str, optional
        Group of each sample; samples not named stand alone.

    Returns
    -------
    units : (units, columns) array
    groups : int or None
        Number of units if some sample shares its group with another, else None.
    """
    names = [(clusters or {}).get(name, name) for name in ids]
    unique, group = np.unique(np.array(names, dtype=object).astype(str), return_inverse=True)
    if len(unique) == len(ids):
        return columns, None
    units = np.zeros((len(unique), columns.shape[1]))
    np.add.at(units, group, columns)
    return units, len(unique)


def resampled_sums(units: Floats, resamples: int, seed: int = ANALYSIS_SEED) -> Floats:
    """Return the column sums of `resamples` draws of the units with replacement.

    Parameters
    ----------
    units : (units, columns) array
    resamples : int
    seed : int
        The same seed and number of units draw the same units.

    Returns
    -------
    (resamples, columns) array
    """
    rng = np.random.default_rng(seed)
    number = len(units)
    even = np.full(number, 1.0 / number)
    batch = max(1, min(resamples, _BATCH_ITEMS // number))
    parts = [
        rng.multinomial(number, even, size=min(batch, resamples - start)) @ units
        for start in range(0, resamples, batch)
    ]
    return np.concatenate(parts)


def percentile_ends(values: NDArray[np.float64], level: float = LEVEL) -> tuple[float, float]:
    """Return the values that leave (1 - level) / 2 on each side; infinite ones sort as usual.

    Draws that are NaN (nothing to divide by) are left out; NaN if all are.
    """
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return float("nan"), float("nan")
    tail = (1.0 - level) / 2
    low = int(tail * (len(known) - 1))
    return float(known[low]), float(known[len(known) - 1 - low])


def unseen_change(changes: Floats) -> Floats:
    """Return how far two units more, one for better and one for worse, would change.

    A few units show too little spread: without those two, a bootstrap of 20 paired binary scores
    leaves out the truth in one case of ten instead of one of twenty.

    Parameters
    ----------
    changes : (units, ...) array
        The change of every unit, a share of 1.
    """
    return np.asarray(_PSEUDO * np.abs(changes).max(0))


def change_ends(
    units: Floats, resamples: int = RESAMPLES, levels: Sequence[float] = (LEVEL,)
) -> list[tuple[float, float]]:
    """Return the ends of a paired change of scores, at each level.

    A percentile bootstrap of the units and of two that were not seen (`unseen_change`); Wilson's
    bound where every unit changed by the same.

    Parameters
    ----------
    units : (units, 4) array
        Right and asked of one side and of the other; right / asked in [0, 1].
    resamples : int
    levels : sequence of float
    """
    changes = units[:, 0] / units[:, 1] - units[:, 2] / units[:, 3]
    if np.ptp(changes) < _CONSTANT:
        return [steady_ends(float(changes[0]), len(units), level) for level in levels]
    weight = float(units[:, [1, 3]].mean())
    half = float(unseen_change(changes)) * weight
    more = [[change, weight, 0.0, weight] for change in (half, -half)]
    right, asked, other, of = resampled_sums(np.vstack([units, more]), resamples).T
    drawn = np.clip(right / asked - other / of, -1.0, 1.0)
    return [percentile_ends(drawn, level) for level in levels]
