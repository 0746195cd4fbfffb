"""Ranks inside a tier of achieved KV (results.md, Leaderboard)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentbench_kv.results.arms import Arm
from agentbench_kv.results.paired import paired_difference
from agentbench_kv.results.resample import (
    by_group,
    percentile_ends,
    resampled_sums,
    unseen_change,
)
from agentbench_kv.results.statistics import RESAMPLES, Floats, steady_ends
from agentbench_kv.results.validity import RunState, assess

__all__ = ["TIERS", "Gap", "Standing", "standings", "tier"]

_CONSTANT = 1e-12
TIERS = (0.10, 0.25, 0.50, 0.75, 0.95)


@dataclass(frozen=True)
class Gap:
    """Score minus the tier leader's on the samples both have, with the paired 95% interval."""

    point: float
    low: float
    high: float
    n: int

    @property
    def tied(self) -> bool:
        """Whether the interval includes 0."""
        return self.low <= 0.0 <= self.high


@dataclass(frozen=True)
class Standing:
    """Where a run stands.

    Attributes
    ----------
    arm : Arm
        The run.
    tier : int or None
        Index into the tiers of peak live / logical, 0 the smallest; None below the line.
    asked : int
        Which set of prompts of the cell: runs of other seeds may have been asked other things.
    rank, of : int or None, int
        Place in its tier, and how many runs are ranked there; None below the line.
    gap : Gap or None
        To the leader of the tier; None for the leader itself and below the line.
    reason : str or None
        Why the run is below the line.
    """

    arm: Arm
    tier: int | None = None
    asked: int = 0
    rank: int | None = None
    of: int = 0
    gap: Gap | None = None
    reason: str | None = None

    @property
    def ranked(self) -> bool:
        """Whether the run is above the line."""
        return self.rank is not None


def tier(kept: float) -> int:
    """Return the index of the tier that holds a share of KV, peak live / logical in (0, 1]."""
    return bisect_left(TIERS, kept)


def standings(arms: Iterable[Arm]) -> list[Standing]:
    """Rank runs; only those of one cell, its conditions, one set of prompts and one tier compete.

    The run with the best score leads; those whose paired interval against it includes 0 share its
    rank. The best of those left leads the next group, and so on.

    Returns
    -------
    list of Standing
        By cell, set of prompts, tier and rank; the runs below the line last.
    """
    cells: dict[object, list[Arm]] = {}
    for arm in arms:
        cells.setdefault((arm.cell, arm.conditions), []).append(arm)
    placed = [standing for cell in cells.values() for standing in _in_cell(cell)]
    return [s for s in placed if s.ranked] + [s for s in placed if not s.ranked]


def _in_cell(arms: Sequence[Arm]) -> list[Standing]:
    below = [Standing(arm, reason=why) for arm in arms if (why := _disqualified(arm))]
    out = {id(standing.arm) for standing in below}
    sets, drifted = _by_prompts([arm for arm in arms if id(arm) not in out])
    ranked = [
        standing for number, members in enumerate(sets) for standing in _in_set(members, number)
    ]
    return ranked + below + drifted


def _disqualified(arm: Arm) -> str | None:
    validity = arm.summary.validity
    if validity.state is not RunState.VALID:
        return f"{validity.state.value}: {'; '.join(validity.reasons)}"
    if arm.summary.score is None:
        return "no trials"
    return None if arm.summary.kv else "no KV figures: no trial reached the engine"


def _by_prompts(arms: Sequence[Arm]) -> tuple[list[list[Arm]], list[Standing]]:
    """Split a cell into sets of runs that were asked the same; the first of a set is its measure.

    Runs of another seed may have other prompts throughout. Any other difference is drift.
    """
    sets: list[list[Arm]] = []
    drifted: list[Standing] = []
    for arm in arms:
        verdicts = [_same_prompts(members[0], arm) for members in sets]
        reasons = [why for why in verdicts if why]
        if None in verdicts:
            sets[verdicts.index(None)].append(arm)
        elif reasons:
            drifted.append(Standing(arm, reason=f"drift: {reasons[0]}"))
        else:
            sets.append([arm])
    return sets, drifted


def _same_prompts(reference: Arm, arm: Arm) -> str | None:
    """Return None if the prompts agree, "" if all differ with the seed, else what drifted."""
    verdict = assess(arm.spec, arm.trials, reference=reference.trials)
    if verdict.state is not RunState.DRIFT:
        return None
    theirs = {record.prompt_sha for record in reference.trials}
    shared = any(record.prompt_sha in theirs for record in arm.trials)
    other_seed = arm.summary.seed != reference.summary.seed
    return "" if other_seed and not shared else f"{verdict.reasons[0]} ({reference.run_id})"


def _in_set(arms: Sequence[Arm], number: int) -> list[Standing]:
    gaps = _Gaps(arms)
    tiers: dict[int, list[Arm]] = {}
    for arm in arms:
        kept = arm.summary.kv.live_over_logical if arm.summary.kv else 1.0
        tiers.setdefault(tier(kept), []).append(arm)
    return [
        replace(standing, tier=index, asked=number)
        for index in sorted(tiers)
        for standing in _in_tier(tiers[index], gaps)
    ]


def _in_tier(arms: Sequence[Arm], gaps: _Gaps) -> list[Standing]:
    left = sorted(arms, key=_score, reverse=True)
    first = left[0]
    placed: list[Standing] = []
    while left:
        leader, rank = left[0], len(placed) + 1
        group = [arm for arm in left if arm is leader or gaps.between(arm, leader).tied]
        placed += [
            Standing(
                arm,
                rank=rank,
                of=len(arms),
                gap=None if arm is first else gaps.between(arm, first),
            )
            for arm in group
        ]
        done = {id(arm) for arm in group}
        left = [arm for arm in left if id(arm) not in done]
    return placed


def _score(arm: Arm) -> float:
    return arm.summary.score.point if arm.summary.score else 0.0


class _Gaps:
    """Paired differences within a set of runs; runs with equal sample ids share one bootstrap."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        groups: dict[tuple[str, ...], list[Arm]] = {}
        for arm in arms:
            groups.setdefault(tuple(sorted(arm.scores)), []).append(arm)
        self._columns: dict[int, tuple[int, float, Floats, Floats]] = {}
        self._unseen: dict[int, Floats] = {}
        for number, (ids, members) in enumerate(groups.items()):
            self._add(number, ids, members)

    def _add(self, number: int, ids: tuple[str, ...], arms: Sequence[Arm]) -> None:
        means = np.array([[np.mean(arm.scores[name]) for arm in arms] for name in ids])
        units, _ = by_group(ids, means, arms[0].clusters)
        weights, _ = by_group(ids, np.ones((len(ids), 1)), arms[0].clusters)
        known = np.hstack([units, weights, np.zeros_like(weights)])
        # Two units that were not seen, which change by +1 and -1 times what the pair tells.
        size = weights.mean()
        more = [[*np.zeros(len(arms)), size, sign * size] for sign in (1.0, -1.0)]
        sums = resampled_sums(np.vstack([known, more]), RESAMPLES)
        drawn = sums[:, :-2] / sums[:, -2:-1]
        self._unseen[number] = sums[:, -1] / sums[:, -2]
        for column, arm in enumerate(arms):
            mean, own = float(means[:, column].mean()), units[:, column] / weights[:, 0]
            self._columns[id(arm)] = (number, mean, drawn[:, column], own)

    def between(self, arm: Arm, leader: Arm) -> Gap:
        """Return arm minus leader."""
        group, mean, drawn, own = self._columns[id(arm)]
        other, their_mean, their_drawn, theirs = self._columns[id(leader)]
        if group == other:
            changes = own - theirs
            if np.ptp(changes) < _CONSTANT:
                low, high = steady_ends(mean - their_mean, len(own))
            else:
                unseen = self._unseen[group] * unseen_change(changes)
                low, high = percentile_ends(np.clip(drawn - their_drawn + unseen, -1.0, 1.0))
            return Gap(mean - their_mean, low, high, len(arm.scores))
        difference = paired_difference(arm.scores, leader.scores)
        if difference is None:
            # Nothing in common: no grounds to place one before the other.
            return Gap(mean - their_mean, -1.0, 1.0, 0)
        return Gap(difference.point, difference.low, difference.high, difference.n)
