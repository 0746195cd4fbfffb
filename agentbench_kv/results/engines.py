"""The same run on different engines, sample by sample: equal scores, equal tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agentbench_kv.errors import UsageError
from agentbench_kv.results.reader import RunReader, TrialKey
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.runs import Run

_FREE = {
    "engine", "engine_args", "allow_untested", "device", "concurrency", "timeout_s", "limit",
    "model",
}  # fmt: skip
"""Parts of a spec that may differ between engines; the model's name is compared by its end."""

Outputs = list[list[int]]


@dataclass(frozen=True)
class Difference:
    """A trial that two engines did not end alike.

    Attributes
    ----------
    sample, trial : str, int
    engine : str
        The engine that is not the base.
    scores : tuple of float
        Of the base and of the other; a failed trial counts 0.
    turn, index : int or None
        The first differing token: which generation, which token of it. None if all are equal, or
        if a run does not say what it generated.
    tokens : tuple of (int or None)
        The base's id there and the other's; None where a generation had ended.
    gap : float or None
        How much larger the base's logit was there, if it was asked.
    note : str
        What else is to be said.
    """

    sample: str
    trial: int
    engine: str
    scores: tuple[float, float]
    turn: int | None = None
    index: int | None = None
    tokens: tuple[int | None, int | None] = (None, None)
    gap: float | None = None
    note: str = ""


@dataclass(frozen=True)
class EngineRow:
    """One run beside the base.

    Attributes
    ----------
    trials : int
        Those that both runs have.
    equal_scores, equal_tokens : int
        How many of them agree; tokens None if a run does not say what it generated.
    score : float or None
        Mean over the trials.
    """

    engine: str
    run_id: str
    trials: int
    equal_scores: int
    equal_tokens: int | None
    score: float | None


@dataclass(frozen=True)
class Consistency:
    """A table over engines; the first row is the base."""

    task: str
    method: str
    budget: int | str | None
    model: str
    rows: tuple[EngineRow, ...]
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether every trial has the same score and the same tokens on every engine."""
        return not self.differences and all(
            row.trials == row.equal_scores == row.equal_tokens for row in self.rows
        )

    def with_gaps(self, gaps: Mapping[int, tuple[float | None, str]]) -> Consistency:
        """Return the table with logit gaps, or why there is none, by number of the difference."""
        known = [
            replace(each, gap=gaps[i][0], note=gaps[i][1]) if i in gaps else each
            for i, each in enumerate(self.differences)
        ]
        return replace(self, differences=tuple(known))

    def document(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {**asdict(self), "equal": self.equal}


def consistency(runs: Sequence[Run]) -> Consistency:
    """Compare runs that differ in their engine only; the embedded engine's is the base if there.

    Raises
    ------
    UsageError
        If there are fewer than two, they differ in more than the engine, or share no trial.
    """
    if len(runs) < 2:
        raise UsageError(f"{len(runs)} run; --engines compares two or more")
    base, *others = sorted(runs, key=lambda run: run.setting.engine != "embedded")
    for other in others:
        _check_alike(base, other)
    rows, differences = [], []
    for run in (base, *others):
        row, found = _compare(base, run)
        rows.append(row)
        differences += found
    return Consistency(
        task=base.setting.task,
        method=base.label,
        budget=base.budget,
        model=base.setting.model,
        rows=tuple(rows),
        differences=tuple(differences),
    )


def first_difference(base: Outputs, other: Outputs) -> tuple[int, int] | None:
    """Return generation and token at which two sessions part; None if they never do."""
    for turn in range(max(len(base), len(other))):
        mine = base[turn] if turn < len(base) else []
        theirs = other[turn] if turn < len(other) else []
        if mine != theirs:
            pairs = enumerate(zip(mine, theirs, strict=False))
            return turn, next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
    return None


def _check_alike(base: Run, other: Run) -> None:
    mine, theirs = _fixed(base), _fixed(other)
    odd = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
    if odd:
        values = ", ".join(f"{key} {mine.get(key)} and {theirs.get(key)}" for key in odd)
        raise UsageError(
            f"{base.run_id} and {other.run_id} differ in {values}; --engines compares runs that "
            "differ in the engine only"
        )


def _fixed(run: Run) -> dict[str, Any]:
    fixed = {key: value for key, value in run.spec.items() if key not in _FREE}
    return {**fixed, "model": run.setting.model}


def _compare(base: Run, run: Run) -> tuple[EngineRow, list[Difference]]:
    mine, theirs = _records(base), _records(run)
    shared = [key for key in mine if key in theirs]
    if not shared:
        raise UsageError(f"{base.run_id} and {run.run_id} have no trial in common")
    found, unknown = [], False
    for key in shared:
        outputs = _outputs(base, mine[key]), _outputs(run, theirs[key])
        unknown |= None in outputs
        found.append(_difference(run.setting.engine, mine[key], theirs[key], outputs))
    differences = [each for each in found if each is not None]
    row = EngineRow(
        engine=run.setting.engine,
        run_id=run.run_id,
        trials=len(shared),
        equal_scores=len(shared) - sum(a.scores[0] != a.scores[1] for a in differences),
        equal_tokens=None
        if unknown
        else len(shared) - sum(a.turn is not None for a in differences),
        score=sum(theirs[key].headline for key in shared) / len(shared),
    )
    return row, differences


def _records(run: Run) -> dict[TrialKey, TrialRecord]:
    return {record.key: record for record in run.records()}


def _outputs(run: Run, record: TrialRecord) -> Outputs | None:
    """Return the ids of every generation of a trial, if the run recorded them."""
    document = RunReader(run.path).transcript(record)
    if not isinstance(document, dict) or "generated" not in document:
        return None
    return [[int(token) for token in turn.split()] for turn in document["generated"]]


def _difference(
    engine: str,
    base: TrialRecord,
    other: TrialRecord,
    outputs: tuple[Outputs | None, Outputs | None],
) -> Difference | None:
    scores = base.headline, other.headline
    one = Difference(base.sample_id, base.trial, engine, scores)
    mine, theirs = outputs
    if mine is None or theirs is None:
        return one if scores[0] != scores[1] else None
    place = first_difference(mine, theirs)
    if place is None:
        return one if scores[0] != scores[1] else None
    turn, index = place
    return replace(
        one, turn=turn, index=index, tokens=(_at(mine, turn, index), _at(theirs, turn, index))
    )


def _at(outputs: Outputs, turn: int, index: int) -> int | None:
    generation = outputs[turn] if turn < len(outputs) else []
    return generation[index] if index < len(generation) else None
