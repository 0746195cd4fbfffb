"""From an interval to a word that a CI job acts on, and what so many samples can tell.

Two numbers: `margin`, how much worse is harmless, and `catch`, the loss that must not slip
through. docs/decisions/0030 has the error rates behind the levels. Two runs of `full` (A/A) show
the noise floor under every difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import combinations
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import binom, norm

from agentbench_kv.errors import UsageError
from agentbench_kv.results.runs import SCORE, Run, RunGroup, asked_once
from agentbench_kv.results.stats import LEVEL, SEED, Change, change, paired_ends

MARGIN, CATCH = 1.0, 10.0
# Share of samples whose outcome differs that a plan assumes if nothing was measured.
DISCORDANCE = 0.15
LOSSES = (0.05, 0.10, 0.15, 0.20)
POWER = 0.9
_ALARM = 0.03  # two-sided: a loss of the margin is called a regression in at most 1.5 %
_MOST_EXACT = 1000
_MOST = 100_000
_SAME = 1e-12
_RARE = 1e-9
_DRAWS = 16


class Verdict(StrEnum):
    """What a comparison says; `exit_code` is what a CI job sees."""

    OK = "ok"
    INCONCLUSIVE = "inconclusive"
    REGRESSION = "regression"

    @property
    def exit_code(self) -> int:
        return {"ok": 0, "inconclusive": 4, "regression": 3}[self.value]


@dataclass(frozen=True)
class Rule:
    """When a row is a regression, and when it is ok; shares of 1.

    A job of several rows fails if one of them does, so each gets its part of the alarms that a job
    may raise (Bonferroni). `ok` needs no such care: every row must be.
    """

    margin: float
    catch: float
    rows: int = 1

    @classmethod
    def of(cls, margin: float, catch: float | None, rows: int = 1) -> Rule:
        """Take points or percent, as the options do; a UsageError if they make no sense."""
        if not 0 <= margin < 100:
            raise UsageError(f"margin {margin:g}: expected 0 or more and below 100")
        wanted = max(CATCH, margin) if catch is None else catch
        if not margin <= wanted <= 100 or not wanted:
            raise UsageError(
                f"catch {wanted:g}: expected above 0, at most 100, and at least the margin "
                f"({margin:g}): a loss that is harmless cannot be one to catch"
            )
        return cls(margin / 100, wanted / 100, rows)

    @property
    def alarm(self) -> float:
        """Two-sided level of a regression: half of it is the chance of one at the margin."""
        return _ALARM / self.rows

    def judge(self, low: float, sure_high: float) -> Verdict:
        """Place a change; negative is worse."""
        # By the lower end of its 95% interval and the upper end of the one that leaves out `alarm`.
        if sure_high < -self.margin:
            return Verdict.REGRESSION
        return Verdict.OK if low > -self.catch else Verdict.INCONCLUSIVE


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the gravest of some verdicts; at least one."""
    return max(verdicts, key=list(Verdict).index)


def units_to_decide(rule: Rule, point: float, spread: float, units: int) -> int | None:
    """Return how many samples or groups would decide an undecided row in 4 of 5 cases."""
    # Normal approximation, if the true change is `point`; None if that lies on both limits.
    sure, seen, often = (float(norm.ppf(1 - p)) for p in (rule.alarm / 2, (1 - LEVEL) / 2, 0.2))
    needed = []
    for quantile, distance in ((sure, -rule.margin - point), (seen, point + rule.catch)):
        if distance > _SAME and spread > 0:
            needed.append(ceil(((quantile + often) * spread / distance) ** 2))
        elif distance > _SAME:
            unseen = distance / (1 + abs(point))  # Wilson's bound on what equal units may hide
            needed.append(int(quantile**2 * (1 - unseen) / unseen) + 1)
    return max(min(needed), units + 1) if needed else None


@dataclass(frozen=True)
class Design:
    """What a comparison will rest on."""

    samples: int
    discordance: float = DISCORDANCE  # share of samples whose outcome differs between the sides
    trials: int = 1  # of each sample, on each side
    groups: int | None = None  # that samples come in; independent answers within one

    @property
    def exact(self) -> bool:
        """Whether chances are enumerated, not approximated."""
        return self.groups is None and self.trials == 1 and self.samples <= _MOST_EXACT

    def of(self, samples: int) -> Design:
        """Return the same with another number of samples, in groups of the same size."""
        groups = self.groups and max(2, round(self.groups * samples / self.samples))
        return Design(samples, self.discordance, self.trials, groups)


def chances(rule: Rule, design: Design, loss: float) -> dict[Verdict, float]:
    """Return how often each verdict is given if the candidate truly loses so much.

    Samples with one right or wrong answer are enumerated: each is lost, won or the same, lost more
    often than won by `loss`. Otherwise the change is taken to be normal around an interval that is
    as wide as usual.
    """
    regression, ok = (_enumerated if design.exact else _approximate)(rule, design, loss)
    left = max(0.0, 1 - regression - ok)
    return {Verdict.OK: ok, Verdict.INCONCLUSIVE: left, Verdict.REGRESSION: regression}


def smallest_caught(rule: Rule, design: Design) -> float | None:
    """Return the smallest loss, in half points, that is called a regression in 9 of 10 cases."""
    losses = (step / 200 for step in range(1, 200))
    regression = Verdict.REGRESSION
    return next((x for x in losses if chances(rule, design, x)[regression] >= POWER), None)


def samples_for(rule: Rule, design: Design, verdict: Verdict, loss: float) -> int | None:
    """Return about how many samples give a verdict in 9 of 10 cases; None if 100,000 do not."""

    def often(samples: int) -> bool:
        return chances(rule, design.of(samples), loss)[verdict] >= POWER

    high = 5
    while not often(high):
        high *= 2
        if high > _MOST:
            return None
    low = high // 2
    while high - low > 5:
        middle = (low + high) // 2
        low, high = (low, middle) if often(middle) else (middle, high)
    return 5 * ceil(high / 5)


def _enumerated(rule: Rule, design: Design, loss: float) -> tuple[float, float]:
    n, differ = design.samples, max(design.discordance, abs(loss))
    won, lost = (differ - loss) / 2, (differ + loss) / 2
    most = min(n, int(binom.isf(_RARE, n, won)))
    wins = np.arange(most + 1)
    proof, fine = _limits(rule, n, most)
    chance = binom.pmf(wins, n, won)
    rest = min(1.0, lost / max(1 - won, _SAME))
    regression = float(chance @ binom.sf(proof - 1, n - wins, rest))
    ok = float(chance @ binom.cdf(np.minimum(fine, proof - 1), n - wins, rest))
    return regression, ok


def _approximate(rule: Rule, design: Design, loss: float) -> tuple[float, float]:
    """Take the interval to reach as far as it does on average in a few draws."""
    n, differ = design.samples, max(design.discordance, abs(loss))
    chance = [(differ - loss) / 2, (differ + loss) / 2, 1 - differ]
    groups = None if design.groups is None else np.arange(n) * design.groups // n
    rng = np.random.default_rng(SEED)
    reach = np.zeros(2)
    for _ in range(_DRAWS):
        moves = rng.choice([1.0, -1.0, 0.0], (n, design.trials), p=chance).mean(1)
        low = paired_ends(moves, LEVEL, groups)[0]
        high = paired_ends(moves, 1 - rule.alarm, groups)[1]
        reach += np.array([high - moves.mean(), moves.mean() - low]) / _DRAWS
    error = max(sqrt(max(differ - loss**2, 0.0) / (n * design.trials)), _SAME)
    regression = float(ndtr((loss - rule.margin - reach[0]) / error))
    ok = float(ndtr((rule.catch - loss - reach[1]) / error))
    return regression, min(ok, 1 - regression)


@lru_cache(maxsize=256)
def _limits(rule: Rule, n: int, most: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return, for 0 to `most` wins, the fewest losses that prove a regression and the most ok."""
    # Both grow with the wins; -1 if no number of losses is ok.
    # Both grow with the wins; -1 if no number of losses is ok.

    def ends(wins: int, losses: int, confidence: float) -> tuple[float, float]:
        changes = np.repeat([1.0, -1.0, 0.0], [wins, losses, n - wins - losses])
        return paired_ends(changes, confidence)

    proof, fine = np.zeros(most + 1, np.intp), np.zeros(most + 1, np.intp)
    fewest, above = 0, 0
    for wins in range(most + 1):
        while fewest <= n - wins and ends(wins, fewest, 1 - rule.alarm)[1] >= -rule.margin:
            fewest += 1
        while above <= n - wins and ends(wins, above, LEVEL)[0] > -rule.catch:
            above += 1
        proof[wins], fine[wins] = fewest, above - 1
    return proof, fine


# What the specs of two runs may differ in that are an A/A pair.
_FREE = frozenset({"limit", "trials", "concurrency"})


@dataclass(frozen=True)
class Repeat:
    """Two runs of `full` that only differ in being run twice; first minus second."""

    first: Run
    second: Run
    metric: str
    change: Change
    changed: int  # samples whose score differs


def repeats(runs: Iterable[Run], metric: str = SCORE) -> list[Repeat]:
    """Compare every two runs of `full` of one setting that were run apart and share samples.

    `metric` is a score, `pass^k` or a sub-score.
    """
    full = [run for run in runs if run.method == "full" and run.valid]
    pairs = (_repeat(a, b, metric) for a, b in combinations(full, 2) if _twice(a, b))
    return [pair for pair in pairs if pair is not None]


def describe(found: Sequence[Repeat]) -> str:
    """Return the line that stands under a table or a verdict."""
    if not found:
        return "no A/A arm: the noise floor is unknown; run full twice (a second --out folder)"
    worst = max(found, key=lambda each: (abs(each.change.point), each.changed / each.change.n))
    gap = worst.change
    several = f", the widest of {len(found)} pairs" if len(found) > 1 else ""
    of = "" if worst.metric == SCORE else f" of {worst.metric}"
    return (
        f"A/A noise floor{of} on {worst.first.setting.task}: full against full "
        f"{100 * gap.point:+.1f} points [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}], "
        f"{worst.changed} of {gap.n} samples changed{several}"
    )


def _twice(a: Run, b: Run) -> bool:
    """Tell a second run from a copy of the first, such as the one in a baseline."""
    copied = a.run_id == b.run_id and a.info.created == b.info.created
    one, other = ({k: v for k, v in run.spec.items() if k not in _FREE} for run in (a, b))
    return not copied and a.setting == b.setting and one == other


def _repeat(a: Run, b: Run, metric: str) -> Repeat | None:
    groups = [RunGroup(run.label, (run,)) for run in (a, b)]
    asked = asked_once(groups, metric)
    first, second = (group.scores(metric, asked) for group in groups)
    if not first or not second or (gap := change(first, second, tested=False)) is None:
        return None
    shared = first.parts.keys() & second.parts.keys()
    return Repeat(
        a, b, metric, gap, sum(first.parts[name] != second.parts[name] for name in shared)
    )
