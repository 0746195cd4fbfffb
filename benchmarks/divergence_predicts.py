"""Does divergence predict success? Runs of a task against fidelity runs of the same arms.

    kvbench run --task micro/recall-1k --method ... --budget ... --out TASK
    kvbench fidelity --task micro/recall-1k --method ... --budget ... --out FIDELITY
    python benchmarks/divergence_predicts.py TASK FIDELITY [--figure kl_value] [--metric score]

An arm is a method with its settings at a budget. Prints a row for every arm that both folders have,
and Spearman's rank correlation of success and divergence over the arms: over all, within each
budget (where the budget itself explains nothing), and over methods' means. Intervals resample the
task's samples and the sessions, independently of each other; arms are what they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from agentbench_kv.results.runs import RunGroup, grouped, load_runs
from agentbench_kv.results.stats import SEED, ends

Floats = NDArray[np.float64]
RESAMPLES = 2000


@dataclass(frozen=True)
class Arm:
    """Totals and counts of each sample of the task, and of each session."""

    name: str
    method: str
    budget: str
    success: Floats  # [2, samples]
    divergence: Floats  # [2, sessions]


def read_arms(task: Path, fidelity: Path, metric: str, figure: str) -> list[Arm]:
    """Pair the valid runs of two folders by method, settings and budget."""
    played, compared = _by_name(task), _by_name(fidelity)
    shared = sorted(played.keys() & compared.keys())
    scores = {name: played[name].scores(metric) for name in shared}
    means = {name: compared[name].means(figure) for name in shared}
    known = [name for name in shared if scores[name] is not None and means[name] is not None]
    samples = set.intersection(*(set(scores[name].parts) for name in known))  # type: ignore[union-attr]
    sessions = set.intersection(*(set(means[name].parts) for name in known))  # type: ignore[union-attr]
    arms = []
    for name in known:
        columns = [
            np.array([found.parts[each] for each in sorted(ids)]).T  # type: ignore[union-attr]
            for found, ids in ((scores[name], samples), (means[name], sessions))
        ]
        method, budget = name
        arms.append(Arm(f"{method} at {budget}", method, budget, columns[0], columns[1]))
    return arms


def _by_name(folder: Path) -> dict[tuple[str, str], RunGroup]:
    runs = [run for run in load_runs([folder])[0] if run.valid and run.compressed]
    return {(run.label, str(run.budget)): group for group in grouped(runs) for run in group.runs}


def ratios(parts: Floats, weights: Floats) -> Floats:
    """Return totals over counts, [resamples], for how often each sample is drawn."""
    sums = weights @ parts.T
    return np.asarray(sums[:, 0] / sums[:, 1])


def correlation(x: Floats, y: Floats, groups: Sequence[str] | None) -> float:
    """Return Spearman's correlation; with groups, of ranks within each, centred there."""
    if groups is None:
        return _pearson(rankdata(x), rankdata(y))
    left, right = [], []
    for group in dict.fromkeys(groups):
        inside = np.array([each == group for each in groups])
        for values, ranks in ((x, left), (y, right)):
            own = rankdata(values[inside])
            ranks.append(own - own.mean())
    return _pearson(np.concatenate(left), np.concatenate(right))


def _pearson(x: Floats, y: Floats) -> float:
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale else 0.0


def estimate(arms: Sequence[Arm], of: Callable[[Floats, Floats], float]) -> tuple[float, ...]:
    """Return a figure of all arms' successes and divergences with its 95% interval."""
    rng = np.random.default_rng(SEED)
    drawn = []
    sizes = arms[0].success.shape[1], arms[0].divergence.shape[1]
    weights = [
        np.vstack([np.ones(size), rng.multinomial(size, np.full(size, 1 / size), RESAMPLES)])
        for size in sizes
    ]
    success = np.array([ratios(arm.success, weights[0]) for arm in arms])
    divergence = np.array([ratios(arm.divergence, weights[1]) for arm in arms])
    drawn = np.array([of(*pair) for pair in zip(success.T, divergence.T, strict=True)])
    return float(drawn[0]), *ends(drawn[1:])


def main() -> None:
    """Print the arms and the correlations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", type=Path, help="folder of the task's runs")
    parser.add_argument("fidelity", type=Path, help="folder of the fidelity runs")
    parser.add_argument("--metric", default="score")
    parser.add_argument("--figure", default="kl_value")
    given = parser.parse_args()
    arms = read_arms(given.task, given.fidelity, given.metric, given.figure)
    print(f"| arm | {given.metric}, % | {given.figure} |\n|---|--:|--:|")
    for arm in sorted(arms, key=lambda arm: arm.divergence[0].sum() / arm.divergence[1].sum()):
        score, nats = (part[0].sum() / part[1].sum() for part in (arm.success, arm.divergence))
        print(f"| {arm.name} | {100 * score:.1f} | {nats:.4f} |")
    samples, sessions = arms[0].success.shape[1], arms[0].divergence.shape[1]
    print(f"\n{len(arms)} arms, {samples} samples, {sessions} sessions")
    budgets = [arm.budget for arm in arms]
    for title, groups in (("over all arms", None), ("within budgets", budgets)):
        found = estimate(arms, lambda x, y, groups=groups: correlation(x, y, groups))
        print(f"Spearman {title}: {found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]")


if __name__ == "__main__":
    main()
