"""A board as its pages show it.

What a board says in words: for each budget, who leads and how far from full that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from agentbench_kv.results.gate import describe, repeats
from agentbench_kv.results.papers import HEADLINES, PublishedFigure, figures
from agentbench_kv.results.ranking import Board, Entry, boards
from agentbench_kv.results.runs import Run, RunGroup, Setting, asked_once
from agentbench_kv.results.site import charts
from agentbench_kv.results.site import charts as contests
from agentbench_kv.results.site.charts import Contest, percent, visible
from agentbench_kv.results.stats import (
    REPETITIONS,
    Interval,
    Median,
    change,
    level,
    median,
    pass_k,
    succeed_or_fail,
)

_MOST_NAMES = 4


def answers(board: Board, contests: Sequence[Contest]) -> list[tuple[str, Markup]]:
    """Return name and sentence of each contest, or the one sentence that holds for all."""
    if not contests:
        return [("", Markup("No compressed run yet."))]
    if board.too_small:
        return [("", Markup("{}.").format(board.too_small))]
    return [(contest.name, _sentence(contest, board.full)) for contest in contests]


def family(contests: Sequence[Contest]) -> str:
    """Say which comparisons the places of some contests hold for together."""
    pairs = sum(len(contest.ranks) * (len(contest.ranks) - 1) // 2 for contest in contests)
    if pairs < 1:
        return ""
    return (
        f"Places rest on paired intervals adjusted (Bonferroni) for all {pairs} pairs of "
        f"methods here: in 19 of 20 such tables, no two equal methods get different places."
    )


def _sentence(contest: Contest, full: Entry | None) -> Markup:
    best, number = contest.best, len(contest.ranks)
    score = f"{percent(best.level)}{_to_full(best, full)}"
    if contest.alone:
        several = f" in {number} settings; the highest" if number > 1 else ""
        return Markup("Only {} has run{}: {}.").format(
            _name_answers(best, number > 1), several, score
        )
    if best.level.point <= 0:
        return Markup("<b>Nobody leads</b>: all {} methods score 0%.").format(number)
    leaders = contest.leaders
    if len(leaders) == 1:
        return Markup("{} leads: {}.").format(_name_answers(best), score)
    if leaders:
        return Markup("{} lead, tied. The highest: {}.").format(_names(leaders), score)
    least = 100 * contest.ranks[-1].entry.level.point
    return Markup(
        "<b>Nobody leads</b>: these samples cannot tell the {} methods apart, from {:.1f}% up. "
        "The highest: {}."
    ).format(number, least, score)


def _to_full(entry: Entry, full: Entry | None) -> str:
    found = full and change(entry.scores, full.scores, tested=False)
    if not found:
        return ""
    gap, low, high = (100 * value for value in (found.point, found.low, found.high))
    if found.tied:
        return f", not told apart from full ({gap:+.1f} points [{low:+.1f}, {high:+.1f}])"
    where, ends = ("below", (-high, -low)) if gap < 0 else ("above", (low, high))
    return f", {abs(gap):.1f} points {where} full [{ends[0]:.1f}, {ends[1]:.1f}]"


def _names(entries: Sequence[Entry]) -> Markup:
    shown = [_name_answers(entry) for entry in entries[:_MOST_NAMES]]
    if len(entries) > _MOST_NAMES:
        shown.append(Markup("{} more").format(len(entries) - _MOST_NAMES))
    return Markup(" and ").join([Markup(", ").join(shown[:-1]), shown[-1]] if shown[1:] else shown)


def _name_answers(entry: Entry, bare: bool = False) -> Markup:
    return Markup("<b>{}</b>").format(
        visible(entry.group.method if bare else entry.group.label, 80)
    )


_COLOURS = 10


_MOST_TRIALS = 8


@dataclass(frozen=True)
class Row:
    """A method of a matrix: a cell per budget, or one for all if it keeps everything."""

    name: str
    style: str
    cells: tuple[tuple[Entry, Interval, str] | None, ...]


@dataclass(frozen=True)
class View:
    """A board with what is said of it."""

    board: Board
    name: str  # what tells it from the other boards of its task
    smaller: bool  # whether there is a board of the same setting on more samples
    floor: Interval | None  # what an agent that does nothing scores on the same samples
    styles: Mapping[str, str]  # colour class of each method, the same on every page

    @cached_property
    def budgets(self) -> list[Contest]:
        """What is decided at each budget."""
        return contests.by_budget_contests(self.board)

    @cached_property
    def tiers(self) -> list[Contest]:
        """What is decided in each tier of achieved KV."""
        return contests.by_tier(self.board)

    @property
    def answers(self) -> list[tuple[str, Markup]]:
        """Name and sentence of each budget."""
        return answers(self.board, self.budgets)

    @property
    def chart(self) -> charts.Chart | None:
        """Accuracy against budget."""
        return charts.by_budget(self.board, self.floor, self.styles)

    @property
    def kept_chart(self) -> charts.Chart | None:
        """Accuracy against achieved KV."""
        return charts.by_kept(self.board, self.floor, self.styles)

    @property
    def noise(self) -> str:
        """The A/A line."""
        return describe(repeats(run for entry in self.board.entries for run in entry.group.runs))

    @property
    def size(self) -> str:
        """How many samples everybody played, and in how many groups they come."""
        groups = next((e.level.groups for e in self.board.entries if e.level.groups), None)
        text = f"{len(self.board.samples):,} samples"
        return f"{text} in {groups:,} groups" if groups else text

    @property
    def matrix(self) -> list[Row]:
        """Scores by method and budget."""
        marks = {id(r.entry): c.mark(r.entry) for c in self.budgets for r in c.ranks}
        return self._rows({id(e): (e.level, marks.get(id(e), "")) for e in self.board.entries})

    @cached_property
    def parts(self) -> list[tuple[str, list[Row]]]:
        """Matrices of pass^k and of every sub-score, by name; they rank nobody."""
        entries = self.board.entries
        names = {name for e in entries for run in e.group.runs for name in run.counts}
        return [(name, self._part(name)) for name in [*self._passes(), *sorted(names)]]

    @property
    def speeds(self) -> list[tuple[Entry, Median]]:
        """Output tokens/s of those that ran often enough on the same hardware."""
        found = ((entry, _speeds(entry.group)) for entry in self.board.entries)
        return [(e, median(own)) for e, own in found if len(own) >= REPETITIONS]

    def _passes(self) -> list[str]:
        trials = [e.group.trials[name] for e in self.board.entries for name in self.board.samples]
        most = min(map(len, trials), default=0)
        if most < 2 or not all(succeed_or_fail(e.group.trials) for e in self.board.entries):
            return []
        return [f"pass^{k}" for k in range(2, min(most, _MOST_TRIALS) + 1)]

    def _part(self, metric: str) -> list[Row]:
        groups = [entry.group for entry in self.board.entries]
        asked = {} if pass_k(metric) else asked_once(groups, metric)
        found = {}
        for entry in self.board.entries:
            scores = entry.group.scores(metric, asked)
            own = scores and scores.only(set(self.board.samples))
            if own and own.parts:
                found[id(entry)] = (level(own), "")
        return self._rows(found)

    def _rows(self, levels: Mapping[int, tuple[Interval, str]]) -> list[Row]:
        """Return those that keep everything, then the others by their mean over all budgets."""
        entries = self.board.entries
        cells = {id(e): (e, *levels[id(e)]) for e in entries if id(e) in levels}
        plain = [cells[id(e)] for e in entries if not e.group.compressed and id(e) in cells]
        rows = [Row(cell[0].group.label, "full", (cell,)) for cell in plain]
        columns = [{r.entry.group.label: id(r.entry) for r in c.ranks} for c in self.budgets]
        labels = {label for column in columns for label in column}
        found = [
            Row(label, self.styles[label], tuple(cells.get(c.get(label, 0)) for c in columns))
            for label in labels
        ]
        found.sort(key=lambda row: (-sum(cell[1].point for cell in row.cells if cell), row.name))
        return rows + [row for row in found if any(row.cells)]


def views(runs: Sequence[Run]) -> list[View]:
    """Return the boards of every setting but the null agent's, the largest of a setting first."""
    null: dict[str, list[Run]] = {}
    for run in runs:
        if run.setting.null and run.valid:
            null.setdefault(run.setting.task, []).append(run)
    every = [each for each in boards(runs) if not each.setting.null]
    labels = sorted({e.group.label for b in every for e in b.entries if e.group.compressed})
    styles = {label: f"s{number % _COLOURS + 1}" for number, label in enumerate(labels)}
    first: dict[tuple[Setting, str], Board] = {}
    for each in every:
        first.setdefault((each.setting, each.conditions), each)
    large = set(map(id, first.values()))
    return [
        View(each, _name(each), id(each) not in large, _floor(each, null), styles) for each in every
    ]


def published(task: str, model: str) -> list[PublishedFigure]:
    """Return the published headline figures of a task and model."""
    return [
        figure
        for figure in figures("accuracy_vs_budget")
        if figure.metric in HEADLINES
        and figure.value is not None
        and f"{figure.benchmark}/{figure.task}" == task
        and figure.model.lower() == model.lower()
    ]


def _name(board: Board) -> str:
    parts = (board.setting.model, board.setting.engine, board.conditions)
    return " · ".join(visible(part, 120) for part in parts if part)


def _floor(board: Board, null: Mapping[str, Sequence[Run]]) -> Interval | None:
    """Return the null agent's level, if it played every sample of the board."""
    own = null.get(board.setting.task)
    scores = RunGroup("null", tuple(own)).scores() if own else None
    if scores is None or not board.samples or not board.samples <= scores.parts.keys():
        return None
    return level(scores.only(set(board.samples)))


def _speeds(group: RunGroup) -> list[float]:
    """Return the speeds of the most runs that share hardware and concurrency."""
    places: dict[str, list[float]] = {}
    for run in group.runs:
        if run.summary.tokens_per_s:
            place = (run.info.provenance.get("hardware"), run.spec.get("concurrency"))
            places.setdefault(repr(place), []).append(run.summary.tokens_per_s)
    return max(places.values(), key=len, default=[])
