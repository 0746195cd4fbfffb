"""Runs that count together: one method at one budget, whatever its seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError
from agentbench_kv.results.runs import CONDITIONS, SCORE, Run, Setting
from agentbench_kv.results.stats import Scores, pass_k, pass_scores

_FREE = frozenset({"seed", "limit", "trials", "concurrency", "budget"})
"""What runs of one group may differ in; the budget tells groups of one label apart."""


@dataclass(frozen=True)
class RunGroup:
    """Runs of one method, settings and budget in one setting, at least one, earliest first.

    Two runs that share the index and seed of a sample's trial played the same one: the earliest
    counts.
    """

    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """The earliest run, whose identity is that of all."""
        return self.runs[0]

    @property
    def budget(self) -> int | str | None:
        """As the spec spells it."""
        return self.first.budget

    @property
    def compressed(self) -> bool:
        """Whether it competes."""
        return self.first.compressed

    @property
    def method(self) -> str:
        """The method's name without preset and settings."""
        return self.first.method.partition("@")[0]

    @property
    def name(self) -> str:
        """Label and budget."""
        return self.label if self.budget is None else f"{self.label} at {self.budget}"

    @cached_property
    def triggered(self) -> set[str]:
        """Samples with an event in some run."""
        return set().union(*(run.trials.triggered for run in self.runs))

    @cached_property
    def clusters(self) -> dict[str, str]:
        """Group of each sample that belongs to one."""
        return {name: group for run in self.runs for name, group in run.trials.groups.items()}

    @cached_property
    def trials(self) -> dict[str, list[float]]:
        """Scores of each sample's trials, every trial once."""
        found: dict[str, dict[tuple[int, int], float]] = {}
        for run in self.runs:
            for sample, scores in run.trials.scores.items():
                found[sample] = {**scores, **found.get(sample, {})}
        return {sample: list(scores.values()) for sample, scores in found.items()}

    @property
    def repeated(self) -> int:
        """Trials that more than one of the runs played; all but the earliest are left out."""
        played = sum(len(scores) for run in self.runs for scores in run.trials.scores.values())
        return played - sum(map(len, self.trials.values()))

    def scores(
        self, metric: str = SCORE, asked: Mapping[str, float] | None = None
    ) -> Scores | None:
        """Return a score, `pass^k` or sub-score sample by sample; None if no run has it.

        Parameters
        ----------
        metric : str
        asked : mapping of str to float, optional
            What a trial of a sample is asked, for failed trials that do not say: nothing was right.
        """
        k = pass_k(metric)
        if metric == SCORE:
            return Scores.of_trials(self.trials, self.clusters)
        if k is not None:
            found = pass_scores(self.trials, k, self.clusters)
            return found if found.parts else None
        counts = self._counts(metric, asked or {})
        return Scores.of_counts(counts, self.clusters) if counts else None

    def _counts(self, metric: str, asked: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        counts: dict[str, tuple[float, float]] = {}
        for run in self._apart():
            for sample, (right, of) in run.trials.counts.get(metric, {}).items():
                old = counts.get(sample, (0.0, 0.0))
                counts[sample] = (old[0] + right, old[1] + of)
            for sample, failed in run.trials.uncounted.items():
                if sample in asked:
                    old = counts.get(sample, (0.0, 0.0))
                    counts[sample] = (old[0], old[1] + failed * asked[sample])
        return counts

    def _apart(self) -> list[Run]:
        """Return the runs that share no trial with an earlier one: sub-scores come summed."""
        kept: list[Run] = []
        seen: set[tuple[object, ...]] = set()
        for run in self.runs:
            own = {(name, *trial) for name, scores in run.trials.scores.items() for trial in scores}
            if not own & seen:
                kept.append(run)
                seen |= own
        return kept


def grouped(runs: Iterable[Run]) -> list[RunGroup]:
    """Put the runs of one setting together that only differ in seed and amount."""
    known = list(runs)
    groups: dict[tuple[str, Any], list[Run]] = {}
    for run, name in zip(known, variants(known), strict=True):
        groups.setdefault((name, run.budget), []).append(run)
    return [
        RunGroup(name, tuple(sorted(same, key=lambda run: (run.info.created, run.run_id))))
        for (name, _), same in groups.items()
    ]


def variants(runs: Sequence[Run]) -> list[str]:
    """Name each run: its label, and in brackets what sets it apart from others so labelled."""
    by_label: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(_fixed(run))
    return [_variant(run, by_label[run.label]) for run in runs]


def by_setting(runs: Iterable[Run]) -> dict[Setting, list[Run]]:
    """Sort runs by task, model and engine, in the order they come."""
    settings: dict[Setting, list[Run]] = {}
    for run in runs:
        settings.setdefault(run.setting, []).append(run)
    return settings


def by_conditions(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Sort a setting's runs by their conditions, each with what sets it apart from the others.

    As `temperature=1.0`, joined by commas; empty where all are alike.
    """
    sets: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        sets.setdefault(run.conditions, []).append(run)
    differ = [
        name
        for name, values in zip(CONDITIONS, zip(*sets, strict=True), strict=True)
        if len(set(values)) > 1
    ]
    return [
        (", ".join(f"{name}={same[0].spec.get(name)}" for name in differ), same)
        for same in sets.values()
    ]


def asked_once(groups: Iterable[RunGroup], metric: str) -> dict[str, float]:
    """Return what one trial of a sample is asked of a sub-score, from any run that says so."""
    found: dict[str, float] = {}
    for run in chain.from_iterable(group.runs for group in groups):
        for sample, (_, asked) in run.trials.counts.get(metric, {}).items():
            counted = len(run.trials.scores[sample]) - run.trials.uncounted.get(sample, 0)
            if counted > 0 and asked:
                found.setdefault(sample, asked / counted)
    return found


def budget_order(budget: int | str | None) -> tuple[int, float]:
    """Sort key: none first, then tokens, then shares, then what is no budget."""
    if budget is None:
        return (0, 0.0)
    try:
        parsed = Budget.parse(budget)
    except UsageError:
        return (3, 0.0)
    return (1, float(parsed.tokens or 0)) if parsed.share is None else (2, parsed.share)


def _variant(run: Run, others: Sequence[dict[str, Any]]) -> str:
    apart = [
        f"{name}={value}"
        for name, value in sorted(_fixed(run).items())
        if any(other.get(name, value) != value for other in others)
    ]
    return f"{run.label} [{', '.join(apart)}]" if apart else run.label


def _fixed(run: Run) -> dict[str, Any]:
    spec = dict(run.spec)
    params = spec.pop("params", None)
    flat = {name: value for name, value in spec.items() if name not in _FREE}
    changed = params if isinstance(params, dict) and run.label == run.method else {}
    return flat | {f"params.{name}": value for name, value in changed.items()}
