"""pass^1 to pass^K of runs that tried every sample more than once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentbench_kv.results.passk import common_trials, is_binary, sample_powers
from agentbench_kv.results.tables.cells import NULL, View, views
from agentbench_kv.results.tables.conditions import conditions
from agentbench_kv.results.tables.measured import SCORE, Measured
from agentbench_kv.results.tables.model import Cell, Column, Kind, Row, Table, Unit
from agentbench_kv.results.tables.pairing import Scores, intervals
from agentbench_kv.results.tables.words import heading, slug

__all__ = ["pass_tables"]

LEGEND = (
    "pass^k: the chance that k trials of a sample all succeed: C(c, k) / C(K, k) of its K trials "
    "with c successes, mean over samples (tau2-bench's convention)"
)


@dataclass(frozen=True)
class _Line:
    """A row to be: its name and budget, and every sample's trials."""

    name: str
    budget: int | str | None
    trials: Mapping[str, Sequence[float]]
    clusters: Mapping[str, str]
    below: str | None = None

    @property
    def most(self) -> int:
        """K: the trials that each sample has at least."""
        return common_trials(self.trials)


def pass_tables(measured: Sequence[Measured]) -> list[Table]:
    """Return a table for each task, model and engine with scores of 0 or 1 in several trials.

    Runs with one trial are left out, and so are graded scores, of which no trial need ever be a
    success. The trials of runs that only differ in seed are put together, as their scores are.
    """
    tables = []
    for view in views([run for run in measured if _repeats(run)], SCORE):
        lines = [line for line in _lines(view) if line.most > 1 and is_binary(line.trials)]
        if lines:
            tables.append(_table(view, lines))
    return tables


def _repeats(run: Measured) -> bool:
    return any(len(scores) > 1 for scores in run.arm.scores.values())


def _lines(view: View) -> list[_Line]:
    ranked = [_line(group.label, group.runs) for group in view.groups]
    null = [_line(NULL, group.runs) for group in view.null]
    return [*ranked, *null, *(_line(run.label, [run], run.reason) for run in view.below)]


def _line(name: str, runs: Sequence[Measured], below: str | None = None) -> _Line:
    trials: dict[str, list[float]] = {}
    clusters: dict[str, str] = {}
    for run in runs:
        clusters |= run.arm.clusters
        for sample, scores in run.arm.scores.items():
            trials.setdefault(sample, []).extend(scores)
    return _Line(name, runs[0].arm.budget, trials, clusters, below)


def _table(view: View, lines: Sequence[_Line]) -> Table:
    place, most = view.place, max(line.most for line in lines)
    tries = sorted({line.most for line in lines})
    return Table(
        kind=Kind.ACCURACY,
        key=slug("passk", place.task, place.model, place.engine),
        title=heading("pass^k, % [95% interval]", place),
        columns=(
            Column("method"),
            Column("budget"),
            Column("samples", Unit.NUMBER),
            Column("K", Unit.NUMBER),
            *(Column(f"pass^{k}", Unit.SHARE) for k in range(1, most + 1)),
        ),
        rows=tuple(_row(line, most) for line in lines),
        notes=(LEGEND, f"K = {', '.join(map(str, tries))} trials", *conditions(view.runs)),
        where={"task": place.task, "model": place.model, "engine": place.engine},
    )


def _row(line: _Line, most: int) -> Row:
    ends = intervals([_scores(line, k) for k in range(1, line.most + 1)])
    cells = [Cell(each.point, each.low, each.high) for each in ends]
    missing = [Cell()] * (most - line.most)
    budget = None if line.budget is None else str(line.budget)
    identity = (Cell(line.name), Cell(budget), Cell(len(line.trials)), Cell(line.most))
    return Row((*identity, *cells, *missing), below=line.below)


def _scores(line: _Line, k: int) -> Scores:
    powers = sample_powers(line.trials, k)
    # All of them graded: a bootstrap over samples, as `passk.pass_power` has it.
    parts = {name: (power, 1.0) for name, power in powers.items()}
    return Scores(parts, frozenset(parts), line.clusters)
