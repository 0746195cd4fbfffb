"""A board as its pages show it: who leads at each budget and achieved KV, and in which words."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from agentbench_kv.results import stats
from agentbench_kv.results.drift import speed_conditions
from agentbench_kv.results.fidelity import KL, SHARES, divergence
from agentbench_kv.results.gate import describe, repeats
from agentbench_kv.results.ranking import Board, Entry, Rank, boards, rank
from agentbench_kv.results.runs import Run, RunGroup, asked_once, budget_order
from agentbench_kv.results.site import charts
from agentbench_kv.results.site.charts import NOTHING, percent, visible
from agentbench_kv.results.site.memory import Held, held
from agentbench_kv.results.stats import Interval, Median
from agentbench_kv.results.tables.fidelity import contests, distance_tables, nearest
from agentbench_kv.results.tables.floors import null_of
from agentbench_kv.results.tables.model import Mark, Table

TIERS = (0.10, 0.25, 0.50, 0.75, 0.95)  # of achieved KV
_COLOURS = 10
_MOST_NAMES = 4
_MOST_TRIALS = 8


@dataclass(frozen=True)
class Contest:
    """The entries that compete at a budget or in a tier, the best first."""

    name: str
    ranks: tuple[Rank, ...]
    others: tuple[Entry, ...] = ()  # of the same methods, which are in a tier once

    @property
    def best(self) -> Entry:
        """Who has the highest score, by whatever margin."""
        return self.ranks[0].entry

    @property
    def alone(self) -> bool:
        """Whether there is one method only, in whatever settings."""
        return len({each.entry.group.method for each in self.ranks}) < 2

    @property
    def decides(self) -> bool:
        """Whether a place means anything: two methods, enough samples, and not all at 0."""
        return self.ranks[0].rank is not None and not self.alone and self.best.level.point > 0

    @property
    def leaders(self) -> list[Entry]:
        first = [each.entry for each in self.ranks if each.rank == 1]
        return first if self.decides and len(first) < len(self.ranks) else []

    def place(self, entry: Entry) -> str:
        """Return `1`, or `1=` if shared; a dash where places mean nothing."""
        rank = next((each.rank for each in self.ranks if each.entry is entry), None)
        if rank is None or not self.decides:
            return NOTHING
        return f"{rank}{'=' * (sum(each.rank == rank for each in self.ranks) > 1)}"

    def mark(self, entry: Entry) -> str:
        leaders = self.leaders
        return ("tied" if len(leaders) > 1 else "best") if entry in leaders else ""


def by_budget(board: Board) -> list[Contest]:
    budgets: dict[int | str | None, list[Entry]] = {}
    for entry in board.placed:
        budgets.setdefault(entry.group.budget, []).append(entry)
    ordered = sorted(budgets, key=budget_order)
    ranked = rank([budgets[name] for name in ordered], board.too_small is not None)
    return [Contest(str(name), tuple(row)) for name, row in zip(ordered, ranked, strict=True)]


def by_tier(board: Board) -> list[Contest]:
    """Return a contest for each tier of achieved KV, ranked together."""
    # A method competes with its largest budget in a tier, which says nothing of the score.
    tiers: dict[int, dict[str, list[Entry]]] = {}
    shares = {id(entry): held(board, entry).share for entry in board.entries}
    for entry in board.entries:
        share = shares[id(entry)]
        if entry.group.holds_less and share is not None and not entry.group.first.foresees:
            # The last digits of two shares that are one must not decide.
            methods = tiers.setdefault(bisect_left(TIERS, round(share, 9)), {})
            methods.setdefault(entry.group.label, []).append(entry)

    def size(entry: Entry) -> tuple[int, float]:
        return entry.group.first.tokens or 0, shares[id(entry)] or 0.0

    order = sorted(tiers)
    chosen = [[max(own, key=size) for own in tiers[index].values()] for index in order]
    ranked = rank(chosen, board.too_small is not None)
    found = []
    for index, row, ranks in zip(order, chosen, ranked, strict=True):
        others = [entry for own in tiers[index].values() for entry in own if entry not in row]
        found.append(Contest(tier_name(index), tuple(ranks), tuple(others)))
    return found


def tier_name(index: int) -> str:
    """Return a tier as shown, e.g. `25-50%`."""
    ends = [0, *(round(100 * edge) for edge in TIERS)]
    if index == len(TIERS):  # with what a method asks beside a session, above 100%, too
        return f"over {ends[-1]}%"
    return f"{ends[index]}–{ends[index + 1]}%"  # noqa: RUF001  an en dash between numbers


def family(contests: Sequence[Contest]) -> str:
    """Say which comparisons the places of some contests hold for together."""
    pairs = sum(len(contest.ranks) * (len(contest.ranks) - 1) // 2 for contest in contests)
    if pairs < 1:
        return ""
    return (
        f"Places rest on paired intervals adjusted (Bonferroni) for all {pairs} pairs of "
        f"methods here: in 19 of 20 such tables, no two equal methods get different places."
    )


@dataclass(frozen=True)
class MatrixRow:
    """A method of a matrix: a cell per budget, or one for all if it keeps everything."""

    name: str
    style: str
    cells: tuple[tuple[Entry, Interval, str] | None, ...]


@dataclass(frozen=True)
class BoardView:
    """A board with what is said of it."""

    board: Board
    name: str  # what tells it from the other boards of its task
    floor: Interval | None  # what an agent that does nothing scores on the same samples
    styles: Mapping[str, str]  # colour class of each method, the same on every page
    ends: tuple[float, float] | None  # least and most bytes of a session on the task's boards

    @cached_property
    def budgets(self) -> list[Contest]:
        return by_budget(self.board)

    @cached_property
    def tiers(self) -> list[Contest]:
        return by_tier(self.board)

    @property
    def answers(self) -> list[tuple[str, Markup]]:
        """Name and sentence of each budget, or the one sentence that holds for all."""
        notes = [
            ("", Markup("{}.").format(visible(note, 600)))
            for note in (*self.board.unplaced, *self.board.seeds)
        ]
        if not self.budgets:
            return [("", Markup("No compressed run yet."))]
        if self.board.too_small:
            return [("", Markup("{}.").format(self.board.too_small))]
        if self.distance:
            marks = nearest(self.board)
            found = contests(self.board).items()
            return [(n, _nearest(entries, self.nats, marks)) for n, entries in found] + notes
        placed = [(contest.name, _sentence(contest, self.board.full)) for contest in self.budgets]
        return placed + notes

    @property
    def chart(self) -> charts.Chart | None:
        return charts.by_budget(self.board, self.floor, self.styles)

    @cached_property
    def memory(self) -> dict[int, Held]:
        """What each entry holds, by its `id`."""
        return {id(entry): held(self.board, entry) for entry in self.board.entries}

    def held(self, entry: Entry) -> Held:
        return self.memory[id(entry)]

    @property
    def unsized(self) -> list[str]:
        """Names of the entries that no axis of bytes has a place for: their records have none."""
        return [e.group.name for e in self.board.entries if not self.held(e).bytes]

    @property
    def memory_chart(self) -> charts.Chart | None:
        if self.ends is None:
            return None
        return charts.by_memory(self.board, self.floor, self.styles, self.memory, self.ends)

    @cached_property
    def distance(self) -> list[Table]:
        """How far from the full cache its runs are; empty unless they are of fidelity."""
        return list(distance_tables(self.board))

    @cached_property
    def nats(self) -> dict[int, Interval]:
        """How far from the full cache each entry is, by its `id`."""
        found = {id(e): divergence(e.group, self.board.samples) for e in self.board.entries}
        return {key: each.means[KL] for key, each in found.items() if each is not None}

    @property
    def distance_chart(self) -> charts.Chart | None:
        return charts.nats_by_budget(self.board, self.nats, self.styles)

    @property
    def noise(self) -> str:
        return describe(repeats(run for entry in self.board.entries for run in entry.group.runs))

    @property
    def size(self) -> str:
        """How many samples everybody played, in how many groups, and what of the first board's."""
        groups = next((e.level.groups for e in self.board.entries if e.level.groups), None)
        text = f"{len(self.board.samples):,} samples" + (f" in {groups:,} groups" if groups else "")
        return f"{text}, {self.board.beside}" if self.board.beside else text

    @property
    def matrix(self) -> list[MatrixRow]:
        marks = {id(r.entry): c.mark(r.entry) for c in self.budgets for r in c.ranks}
        return self._rows({id(e): (e.level, marks.get(id(e), "")) for e in self.board.entries})

    @cached_property
    def parts(self) -> list[tuple[str, list[MatrixRow]]]:
        """Matrices of pass^k and of every sub-score, by name; they rank nobody."""
        entries = self.board.entries
        names = {name for e in entries for run in e.group.runs for name in run.counts}
        if self.distance:  # which has more by phase, kind and turn than anyone opens here
            names &= set(SHARES)
        return [(name, self._part(name)) for name in [*self._passes(), *sorted(names)]]

    @property
    def speeds(self) -> list[tuple[Entry, Median]]:
        """Output tokens/s of those that ran often enough on the same hardware."""
        found = ((entry, _speeds(entry.group)) for entry in self.board.entries)
        return [(e, stats.median(own)) for e, own in found if len(own) >= stats.REPETITIONS]

    def _passes(self) -> list[str]:
        trials = [e.group.trials[name] for e in self.board.entries for name in self.board.samples]
        most = min(map(len, trials), default=0)
        if most < 2 or not all(stats.succeed_or_fail(e.group.trials) for e in self.board.entries):
            return []
        return [f"pass^{k}" for k in range(2, min(most, _MOST_TRIALS) + 1)]

    def _part(self, metric: str) -> list[MatrixRow]:
        groups = [entry.group for entry in self.board.entries]
        asked = {} if stats.pass_k(metric) else asked_once(groups, metric)
        found = {}
        for entry in self.board.entries:
            scores = entry.group.scores(metric, asked)
            own = scores and scores.only(set(self.board.samples))
            if own and own.parts:
                found[id(entry)] = (stats.level(own), "")
        return self._rows(found)

    def _rows(self, levels: Mapping[int, tuple[Interval, str]]) -> list[MatrixRow]:
        """Return those that keep everything, then the others by their mean over all budgets."""
        entries = self.board.entries
        cells = {id(e): (e, *levels[id(e)]) for e in entries if id(e) in levels}
        plain = [cells[id(e)] for e in entries if not e.group.compressed and id(e) in cells]
        rows = [MatrixRow(cell[0].group.label, "full", (cell,)) for cell in plain]
        compressed = [entry for entry in entries if entry.group.compressed]
        columns = [
            {e.group.label: id(e) for e in compressed if str(e.group.budget) == contest.name}
            for contest in self.budgets
        ]
        labels = {label for column in columns for label in column}
        found = [
            MatrixRow(label, self.styles[label], tuple(cells.get(c.get(label, 0)) for c in columns))
            for label in labels
        ]
        found.sort(key=lambda row: (-sum(cell[1].point for cell in row.cells if cell), row.name))
        return rows + [row for row in found if any(row.cells)]


def views(runs: Sequence[Run]) -> list[BoardView]:
    """Return the boards of every setting but the null agent's, in their order."""
    every = [each for each in boards(runs) if not each.setting.null]
    labels = sorted({e.group.label for b in every for e in b.entries if e.group.holds_less})
    styles = {label: f"s{number % _COLOURS + 1}" for number, label in enumerate(labels)}
    sizes: dict[str, list[float]] = {}
    for board in every:
        own = (size for e in board.entries if (size := held(board, e).bytes))
        sizes.setdefault(board.setting.task, []).extend(own)
    found = []
    for board in every:
        parts = [visible(part, 120) for part in (board.setting.model, board.setting.engine)]
        name = " · ".join([*parts, *[visible(board.conditions, 600)] * bool(board.conditions)])
        sized = sizes[board.setting.task]
        ends = (min(sized), max(sized)) if sized else None
        found.append(BoardView(board, name, _floor(board, runs), styles, ends))
    return found


def _floor(board: Board, runs: Sequence[Run]) -> Interval | None:
    """Return the null agent's level, if it played every sample of the board."""
    own = null_of((run for entry in board.entries for run in entry.group.runs), runs)
    scores = own.scores() if own else None
    if scores is None or not board.samples or not board.samples <= scores.parts.keys():
        return None
    return stats.level(scores.only(set(board.samples)))


def _speeds(group: RunGroup) -> list[float]:
    """Return the speeds of the most runs whose speeds compare."""
    places: dict[object, list[float]] = {}
    for run in group.measured:
        if run.summary.tokens_per_s:
            places.setdefault(speed_conditions(run), []).append(run.summary.tokens_per_s)
    return max(places.values(), key=len, default=[])


def _sentence(contest: Contest, full: Entry | None) -> Markup:
    """Say who leads at a budget, and how far from full that is."""
    best, number = contest.best, len(contest.ranks)
    score = f"{percent(best.level)}{_to_full(best, full)}"
    if contest.alone:
        several = f" in {number} settings; the highest" if number > 1 else ""
        name = _bold(best.group.method if number > 1 else best.group.label)
        return Markup("Only {} has run{}: {}.").format(name, several, score)
    if best.level.point <= 0:
        return Markup("<b>Nobody leads</b>: all {} methods score 0%.").format(number)
    leaders = contest.leaders
    if len(leaders) == 1:
        return Markup("{} leads: {}.").format(_names(leaders), score)
    if leaders:
        return Markup("{} lead, tied. The highest: {}.").format(_names(leaders), score)
    least = 100 * contest.ranks[-1].entry.level.point
    return Markup(
        "<b>Nobody leads</b>: these samples cannot tell the {} methods apart, from {:.1f}% up. "
        "The highest: {}."
    ).format(number, least, score)


def _nearest(
    contest: Sequence[Entry], nats: Mapping[int, Interval], marks: Mapping[int, Mark]
) -> Markup:
    """Say who is nearest to the full cache at a budget; `nats` and `marks` by `id` of entries."""
    entries = [entry for entry in contest if id(entry) in nats]
    if not entries:
        return Markup("No session has a divergence.")
    entries.sort(key=lambda entry: nats[id(entry)].point)
    lowest = nats[id(entries[0])]
    least = f"KL {lowest.point:.4f} [{lowest.low:.4f}, {lowest.high:.4f}] nats"
    if len({entry.group.method for entry in entries}) < 2:
        several = f" in {len(entries)} settings; the lowest" if len(entries) > 1 else ""
        name = _bold(entries[0].group.method if several else entries[0].group.label)
        return Markup("Only {} has run{}: {}.").format(name, several, least)
    leaders = [entry for entry in entries if id(entry) in marks]
    if len(leaders) == 1:
        return Markup("{} is nearest: {}.").format(_names(leaders), least)
    if 0 < len(leaders) < len(entries):
        return Markup("{} are nearest, tied. The lowest: {}.").format(_names(leaders), least)
    return Markup(
        "<b>Nobody is nearest</b>: these sessions cannot tell the {} methods apart, up to {:.4f} "
        "nats. The lowest: {}."
    ).format(len(entries), nats[id(entries[-1])].point, least)


def _names(leaders: Sequence[Entry]) -> Markup:
    """Name one method, or several, the rest by their number."""
    names = [_bold(entry.group.label) for entry in leaders]
    if len(names) > _MOST_NAMES:
        names[_MOST_NAMES:] = [Markup("{} more").format(len(names) - _MOST_NAMES)]
    last = names.pop()
    return Markup("{} and {}").format(Markup(", ").join(names), last) if names else last


def _to_full(entry: Entry, full: Entry | None) -> str:
    found = full and stats.change(entry.scores, full.scores, tested=False)
    if not found:
        return ""
    gap, low, high = (100 * value for value in (found.point, found.low, found.high))
    if found.tied:
        return f", not told apart from full ({gap:+.1f} points [{low:+.1f}, {high:+.1f}])"
    where, ends = ("below", (-high, -low)) if gap < 0 else ("above", (low, high))
    return f", {abs(gap):.1f} points {where} full [{ends[0]:.1f}, {ends[1]:.1f}]"


def _bold(name: str) -> Markup:
    return Markup("<b>{}</b>").format(visible(name, 80))
