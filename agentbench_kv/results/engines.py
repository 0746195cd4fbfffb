"""The same run on different engines, sample by sample: equal scores, equal tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agentbench_kv.errors import UsageError
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.runs import Run

# Parts of a spec that may differ between engines.
_FREE = {
    "engine",
    "engine_args",
    "allow_untested",
    "device",
    "concurrency",
    "max_live_tokens",
    "timeout_s",
    "limit",
}
Outputs = list[list[int]]


@dataclass(frozen=True)
class Difference:
    """A trial that two engines did not end alike; pairs are of the base and of the other."""

    sample: str
    trial: int
    engine: str  # the one that is not the base
    scores: tuple[float, float]  # a failed trial counts 0
    turn: int | None = None  # generation of the first differing token, if there is one and known
    index: int | None = None  # its place in the generation
    tokens: tuple[int | None, int | None] = (None, None)  # ids; None where a generation had ended
    gap: float | None = None  # how much larger the base's logit was there, if it was asked
    note: str = ""  # why there is no gap


@dataclass(frozen=True)
class EngineRow:
    """One run beside the base."""

    engine: str
    run_id: str
    trials: int  # that both runs have
    equal_scores: int
    equal_tokens: int | None  # None if a run does not say what it generated
    score: float | None  # mean over the trials
    lacking: str | None = None  # why equal trials are no proof: not valid, or not all of the base's


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
        """Whether every trial has the same score and tokens in valid runs on every engine."""
        return not self.differences and all(
            row.lacking is None and row.trials == row.equal_scores == row.equal_tokens
            for row in self.rows
        )

    def with_gaps(self, gaps: Mapping[int, tuple[float | None, str]]) -> Consistency:
        """Return the table with logit gaps, or why there is none, by number of the difference."""
        known = list(self.differences)
        for i, (gap, note) in gaps.items():
            known[i] = replace(known[i], gap=gap, note=note)
        return replace(self, differences=tuple(known))

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "equal": self.equal}


def consistency(runs: Sequence[Run]) -> Consistency:
    """Compare runs that differ in their engine only; the embedded engine's is the base if there.

    A UsageError if there are fewer than two, or of fewer than two engines, one is there twice, they
    differ in more than the engine, or share no trial.
    """
    _refuse_alike(runs)
    base, *others = sorted(runs, key=lambda run: run.setting.engine != "embedded")
    for other in others:
        # The model's name is compared by its end: each engine has it in another folder.
        mine, theirs = ({**run.spec, "model": run.setting.model} for run in (base, other))
        odd = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
        values = ", ".join(f"{k} {mine.get(k)} and {theirs.get(k)}" for k in odd if k not in _FREE)
        if values:
            raise UsageError(
                f"{base.run_id} and {other.run_id} differ in {values}; --engines compares runs "
                "that differ in the engine only"
            )
    compared = [_compare(base, run) for run in (base, *others)]
    rows = tuple(row for row, _ in compared)
    differences = tuple(each for _, found in compared for each in found)
    setting = base.setting
    return Consistency(setting.task, base.label, base.budget, setting.model, rows, differences)


def _refuse_alike(runs: Sequence[Run]) -> None:
    if len(runs) < 2:
        raise UsageError(f"{len(runs)} run; --engines compares two or more")
    seen = set[tuple[str, str, float]]()
    for run in runs:
        key = (run.setting.engine, run.run_id, run.info.created)
        if key in seen:
            raise UsageError(f"{run.run_id} is there twice; name the run of each engine once")
        seen.add(key)
    if len({run.setting.engine for run in runs}) < 2:
        raise UsageError(
            f"all {len(runs)} runs are on {runs[0].setting.engine}; --engines compares runs on two "
            "engines or more"
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


def _compare(base: Run, run: Run) -> tuple[EngineRow, list[Difference]]:
    mine, theirs = ({record.key: record for record in side.records()} for side in (base, run))
    shared = [key for key in mine if key in theirs]
    if not shared:
        raise UsageError(f"{base.run_id} and {run.run_id} have no trial in common")
    found, unknown, engine = [], False, run.setting.engine
    for key in shared:
        one, other = mine[key], theirs[key]
        recorded = [_outputs(base, one), _outputs(run, other)]
        known = [outputs for outputs in recorded if outputs is not None]
        unknown |= len(known) < 2
        scores = one.headline, other.headline
        place = first_difference(*known) if len(known) == 2 else None
        if place is not None:
            tokens = _at(known[0], *place), _at(known[1], *place)
            found.append(Difference(*key, engine, scores, *place, tokens))
        elif scores[0] != scores[1]:
            found.append(Difference(*key, engine, scores))
    number = len(shared)
    alike = number - sum(each.scores[0] != each.scores[1] for each in found)
    equal = None if unknown else number - sum(each.turn is not None for each in found)
    mean = sum(theirs[key].headline for key in shared) / number
    lacking = _lacking(run, len(mine) - number)
    return EngineRow(engine, run.run_id, number, alike, equal, mean, lacking), found


def _lacking(run: Run, missing: int) -> str | None:
    """Say why a run is no proof, whatever its trials hold; one declared so short by a limit is."""
    if not run.valid:
        return run.reason
    if missing and run.spec.get("limit") != len(run.scores):
        return f"{missing} of the base's trials are missing, which no limit of its own explains"
    return None


def _outputs(run: Run, record: TrialRecord) -> Outputs | None:
    """Return the ids of every generation of a trial, if the run recorded them."""
    document = RunReader(run.path).transcript(record)
    if not isinstance(document, dict) or "generated" not in document:
        return None
    return [[int(token) for token in turn.split()] for turn in document["generated"]]


def _at(outputs: Outputs, turn: int, index: int) -> int | None:
    generation = outputs[turn] if turn < len(outputs) else []
    return generation[index] if index < len(generation) else None
