"""The A/A arm: how far two runs of `full` lie apart is the floor under every difference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from agentbench_kv.results.groups import RunGroup
from agentbench_kv.results.runs import SCORE, Run
from agentbench_kv.results.stats import Change, change

_FREE = frozenset({"limit", "trials", "concurrency"})
"""What the specs of two runs may differ in that are an A/A pair."""


@dataclass(frozen=True)
class Repeat:
    """Two runs of `full` that only differ in being run twice; first minus second."""

    first: Run
    second: Run
    change: Change
    changed: int  # samples whose score differs


def repeats(runs: Iterable[Run], metric: str = SCORE) -> list[Repeat]:
    """Compare every two runs of `full` of one setting that were run apart and share samples."""
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
    return (
        f"A/A noise floor on {worst.first.setting.task}: full against full "
        f"{100 * gap.point:+.1f} points [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}], "
        f"{worst.changed} of {gap.n} samples changed{several}"
    )


def _twice(a: Run, b: Run) -> bool:
    """Tell a second run from a copy of the first, such as the one in a baseline."""
    copied = a.run_id == b.run_id and a.info.created == b.info.created
    one, other = ({k: v for k, v in run.spec.items() if k not in _FREE} for run in (a, b))
    return not copied and a.setting == b.setting and one == other


def _repeat(a: Run, b: Run, metric: str) -> Repeat | None:
    first, second = (RunGroup(run.label, (run,)).scores(metric) for run in (a, b))
    if not first or not second or (gap := change(first, second, tested=False)) is None:
        return None
    shared = first.parts.keys() & second.parts.keys()
    return Repeat(a, b, gap, sum(first.parts[name] != second.parts[name] for name in shared))
