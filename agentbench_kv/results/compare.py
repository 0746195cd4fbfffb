"""Two sides, paired sample by sample, with a verdict for every pair."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from agentbench_kv.errors import UsageError
from agentbench_kv.results.arms import Arm
from agentbench_kv.results.contrast import SPEED, Contrast, contrast
from agentbench_kv.results.drift import Drift, find_drift
from agentbench_kv.results.matching import Pair, match
from agentbench_kv.results.noise import describe_noise, noise_floor
from agentbench_kv.results.runinfo import holder
from agentbench_kv.results.statistics import RESAMPLES
from agentbench_kv.results.validity import RunState, assess
from agentbench_kv.results.verdict import Verdict, worst

__all__ = ["Comparison", "compare"]


class Comparison(BaseModel):
    """The outcome.

    Attributes
    ----------
    metric : str
    margin : float
        Points for scores, percent for speed and size.
    rows : list of Contrast
        One per pair, or per pair of methods over all tasks.
    verdict : Verdict
        The gravest of the rows'.
    drift : list of Drift
        What differs and was allowed to.
    notes : list of str
        What a reader should know besides.
    noise : str
        The A/A floor.
    """

    model_config = ConfigDict(frozen=True)

    metric: str
    margin: float
    rows: list[Contrast]
    verdict: Verdict
    drift: list[Drift]
    notes: list[str]
    noise: str


def compare(
    base: Sequence[Arm],
    cand: Sequence[Arm],
    *,
    metric: str = "score",
    margin: float = 2.0,
    by_task: bool = False,
    allow_drift: bool = False,
    noise: Sequence[Arm] = (),
    resamples: int = RESAMPLES,
) -> Comparison:
    """Compare a candidate with a base.

    Parameters
    ----------
    base, cand : sequence of Arm
        As `load_arms` or a baseline gives them.
    metric : str
        `score`, `pass^k`, a sub-score, `peak_live` or `output_tok_s`.
    margin : float
        How much worse is still ok: points for scores, percent otherwise.
    by_task : bool
        A verdict for each task instead of one over the samples of all; speed always has its own.
    allow_drift : bool
        Compare although data, template, parser or versions differ.
    noise : sequence of Arm
        Further runs of full, for the A/A floor.
    resamples : int
        Of bootstraps and permutation tests.

    Raises
    ------
    UsageError
        If a run cannot be compared, nothing matches, something differs that must not, or tasks of
        two releases of a benchmark would get one verdict.
    """
    if not 0 <= margin < 100:
        raise UsageError(f"margin {margin:g}: expected 0 or more and below 100")
    pairs, notes = match(base, cand)
    for pair in pairs:
        notes += _unfit("BASE", pair.base) + _unfit("CAND", pair.cand)
    drift = _checked(pairs, metric == SPEED, allow_drift)
    rows = [
        contrast(group, metric, margin / 100, resamples)
        for group in _grouped(pairs, apart=by_task or metric == SPEED)
    ]
    return Comparison(
        metric=metric,
        margin=margin,
        rows=rows,
        verdict=worst(row.verdict for row in rows),
        drift=drift,
        notes=list(dict.fromkeys([*notes, *(note for row in rows for note in row.notes)])),
        noise=describe_noise(noise_floor([*base, *cand, *noise])),
    )


def _unfit(side: str, arms: Sequence[Arm]) -> list[str]:
    """Refuse runs that no verdict may rest on; name what else is odd about them."""
    notes = []
    for arm in arms:
        writer = holder(arm.info, time.time())
        if writer is not None:
            raise UsageError(f"{side} {arm.run_id} is being written by {writer}; wait for it")
        if not arm.trials:
            raise UsageError(f"{side} {arm.run_id} holds no trial; run its command again first")
        found = assess(arm.spec, arm.trials, expected=arm.info.expected_trials)
        if found.state is RunState.BUDGET_NOT_APPLIED:
            raise UsageError(
                f"{side} {arm.run_id} is not valid ({found.state}: {found.reasons[0]}); "
                "a run whose budget was not applied cannot be compared"
            )
        notes += [f"{side} {arm.run_id}: {reason}" for reason in found.reasons]
        notes += [f"{side} {arm.run_id}: {problem.reason}" for problem in arm.problems]
    return notes


def _checked(pairs: Sequence[Pair], speed: bool, allowed: bool) -> list[Drift]:
    found = [drift for pair in pairs for drift in find_drift(pair.base, pair.cand, speed)]
    drift = list(dict.fromkeys(found))
    if drift and not allowed:
        shown = "; ".join(map(str, drift[:6]))
        more = f"; and {len(drift) - 6} more" if len(drift) > 6 else ""
        raise UsageError(
            f"refused, the two sides differ in more than the method: {shown}{more} "
            "(--allow-drift compares them all the same)"
        )
    return drift


def _grouped(pairs: Sequence[Pair], apart: bool) -> list[list[Pair]]:
    if apart:
        return [[pair] for pair in pairs]
    groups: dict[tuple[str, ...], list[Pair]] = {}
    for pair in pairs:
        sides = (pair.base[0], pair.cand[0])
        names = (part for arm in sides for part in (arm.label, str(arm.budget)))
        groups.setdefault((pair.model, *names), []).append(pair)
    for group in groups.values():
        _refuse_mixed_releases(sorted({pair.task for pair in group}))
    return list(groups.values())


def _refuse_mixed_releases(tasks: Sequence[str]) -> None:
    """Refuse one verdict over `tau2/...` and `tau2-v1/...`: other texts, other rules."""
    names: dict[str, str] = {}
    for task in tasks:
        benchmark = task.partition("/")[0]
        other = names.setdefault(re.sub(r"-v\d+$", "", benchmark), benchmark)
        if other != benchmark:
            both = " and ".join(sorted((other, benchmark)))
            raise UsageError(
                f"refused, {both} are two releases of one benchmark, whose scores "
                "are not one figure (--by task gives each task its own verdict)"
            )
