"""Who may be compared with whom, who leads, and who cannot be told from the leader.

Runs compete on a *board*: one task, model and engine, nothing else apart that `compare` refuses
for scores (weights, data, settings, releases), and one set of samples that everybody on it has
played. A run that lacks some of these samples is not on the board,
whatever it scores on the others; what a run has besides does not count there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from agentbench_kv.results.drift import by_conditions
from agentbench_kv.results.fidelity import KL, of_fidelity
from agentbench_kv.results.runs import (
    SCORE,
    Run,
    RunGroup,
    Setting,
    asked_once,
    by_setting,
    grouped,
)
from agentbench_kv.results.stats import LEVEL, Change, Interval, Scores, change, level
from agentbench_kv.results.validity import UNCOMPRESSED

LEAST_SAMPLES = 20
LEAST_GROUPS = 5  # on fewer samples, or groups of samples, nobody leads
NO_FIGURES = "no session was read, so that nothing was predicted; see their errors"
OTHER_SAMPLES = "other samples: it has {} of the {} that others were asked"


@dataclass(frozen=True)
class Entry:
    """A group of runs on a board, with its scores on the board's samples."""

    group: RunGroup
    scores: Scores
    level: Interval


@dataclass(frozen=True)
class Board:
    """Runs that were asked the same."""

    setting: Setting
    conditions: str  # that set its runs apart in the setting (`temperature=1.0`); often empty
    metric: str
    samples: frozenset[str]  # that everybody on the board has played
    entries: tuple[Entry, ...]  # uncompressed first, then by name and budget
    beside: str = ""  # how its samples are to those of its conditions' first board; empty for that
    out: tuple[tuple[Run, str], ...] = ()  # runs of the setting on no board, with the reason

    @property
    def full(self) -> Entry | None:
        """What others are measured by: `full`, or `full-constrained` where only that has run.

        Never one whose rows are of another precision: it has lost something itself.

        Of several the plain one: a `full@offload` keeps the same rows.
        """
        alike = [entry for entry in self.entries if entry.group.method in UNCOMPRESSED]
        return min(
            alike, key=lambda e: (e.group.method != "full", e.group.label != "full"), default=None
        )

    @property
    def placed(self) -> list[Entry]:
        """The compressed entries that have a place at their nominal budget.

        Not those that had events in less than half the share of trials of another at that budget:
        by a long interval most sessions are the full cache's. Nor those that were told what their
        sessions still need.
        """
        compressed = [e for e in self.entries if e.group.compressed and not e.group.first.foresees]
        most: dict[str, float] = {}
        for entry in compressed:
            budget = str(entry.group.budget)
            most[budget] = max(self.fired(entry), most.get(budget, 0.0))
        return [e for e in compressed if 2 * self.fired(e) >= most[str(e.group.budget)]]

    def fired(self, entry: Entry) -> float:
        """Return the share of an entry's trials of the board's samples that had an event."""
        return entry.group.fired(self.samples)

    @property
    def unplaced(self) -> list[str]:
        """Notes that name the compressed entries without a place; empty if there are none."""
        placed = {id(entry) for entry in self.placed}
        others = [e.group for e in self.entries if e.group.compressed and id(e) not in placed]
        told = ", ".join(group.name for group in others if group.first.foresees)
        idle = ", ".join(
            f"{group.name} ({group.fired(self.samples):.0%})"
            for group in others
            if not group.first.foresees
        )
        few = (
            f"no place at its budget, as it had events in few trials where others had some: {idle}"
        )
        return [
            *[few] * bool(idle),
            *[f"no place, as it is told what a session still needs: {told}"] * bool(told),
        ]

    @property
    def seeds(self) -> list[str]:
        """A note that names the entries' seeds; empty if all have the same."""
        known = {
            entry.group.name: sorted({str(run.spec.get("seed")) for run in entry.group.runs})
            for entry in self.entries
        }
        if len({tuple(seeds) for seeds in known.values()}) < 2:
            return []
        said = "; ".join(f"{name}: {', '.join(seeds)}" for name, seeds in known.items())
        return [f"seeds are not the same, and a run may be the luckiest of several: {said}"]

    @property
    def too_small(self) -> str | None:
        """Why nobody leads here; None if somebody may."""
        if len(self.samples) < LEAST_SAMPLES:
            return f"{len(self.samples)} samples; nobody leads on fewer than {LEAST_SAMPLES}"
        groups = next((e.level.groups for e in self.entries if e.level.groups), None)
        if groups is not None and groups < LEAST_GROUPS:
            return f"{groups} groups of samples; nobody leads on fewer than {LEAST_GROUPS}"
        return None


@dataclass(frozen=True)
class Rank:
    """Where an entry is among those it competes with."""

    entry: Entry
    rank: int | None  # from 1, shared by all tied with the leader; None on a board too small
    of: int  # entries that compete
    change: Change | None  # against the leader, with a plain 95% interval; None for the leader


def boards(runs: Iterable[Run], metric: str = SCORE) -> list[Board]:
    """Sort runs onto boards, by setting and conditions.

    A board is played on a set of samples that two methods have exactly. If others have not played
    all of it but share a set of their own, that is a board too, on which everybody who played it
    is compared. So nobody competes on samples of their own choosing, and a smaller set never
    changes the ranks on a larger one. The first board is that of most methods, each counted at the
    largest set it has; of as many, the one with most samples. Runs that are on no board
    are in the first one's `out`, with the reason, as are those that are not valid.
    """
    return [
        board
        for setting, same in by_setting(runs).items()
        for conditions, alike in by_conditions(same)
        for board in _boards(setting, conditions, alike, metric)
    ]


def rank(contests: Sequence[Sequence[Entry]], small: bool = False) -> list[list[Rank]]:
    """Rank the entries of each contest (a budget, a tier), the best first.

    An entry shares the leader's rank unless an interval of the paired change leaves out 0. Of all
    pairs that could be compared in the contests together, in 19 of 20 tables no two equal methods
    get different ranks: the intervals are Bonferroni's for that number of pairs. A `small` board
    has no ranks.
    """
    pairs = sum(len(contest) * (len(contest) - 1) // 2 for contest in contests)
    return [_ranked(contest, 1 - (1 - LEVEL) / max(pairs, 1), small) for contest in contests]


def _ranked(contest: Sequence[Entry], confidence: float, small: bool) -> list[Rank]:
    left = sorted(contest, key=lambda entry: -entry.scores.mean)
    first, placed = left[0] if left else None, list[Rank]()
    while left:
        leader, place = left[0], len(placed) + 1
        rest: list[Entry] = []
        for entry in left:
            told = change(entry.scores, leader.scores, confidence, tested=False)
            if entry is not leader and told is not None and not told.tied:
                rest.append(entry)
                continue
            gap = None if first is None or entry is first else change(entry.scores, first.scores)
            placed.append(Rank(entry, None if small else place, len(contest), gap))
        left = rest
    return placed


def _boards(setting: Setting, conditions: str, runs: Sequence[Run], metric: str) -> list[Board]:
    out = [(run, run.reason) for run in runs if run.reason is not None]
    sound, drifted = _without_drift([run for run in runs if run.valid])
    groups = grouped(sound)
    asked = asked_once(groups, metric)
    scored = [(group, group.scores(metric, asked)) for group in groups]
    # Nobody may have been asked anything of a sub-score.
    scored = [(group, _predicted(group, scores)) for group, scores in scored]
    known = [(group, scores) for group, scores in scored if scores is not None and scores.parts]
    sets = _sample_sets(list(_played(known)))
    placed = [
        tuple(
            Entry(group, own := scores.only(set(samples)), level(own))
            for group, scores in known
            if samples <= scores.parts.keys()
        )
        for samples in sets
    ]
    on = {id(entry.group) for entries in placed for entry in entries}
    out += [
        (run, OTHER_SAMPLES.format(len(sets[0] & scores.parts.keys()), len(sets[0])))
        for group, scores in known
        if id(group) not in on
        for run in group.runs
    ]
    out += [
        (run, NO_FIGURES)
        for group, scores in scored
        if of_fidelity(group.first) and scores is None
        for run in group.runs
    ]
    made = [
        Board(setting, conditions, metric, samples, entries)
        for samples, entries in zip(sets, placed, strict=True)
    ] or [Board(setting, conditions, metric, frozenset(), ())]
    others = [replace(board, beside=_beside(board, made[0])) for board in made[1:]]
    return [replace(made[0], out=(*out, *drifted)), *others]


def _predicted(group: RunGroup, scores: Scores | None) -> Scores | None:
    """Leave out sessions of fidelity without a figure: means are over those that have one."""
    if scores is None or not of_fidelity(group.first):
        return scores
    found = group.means(KL)
    return None if found is None else scores.only(set(found.parts))


def _beside(board: Board, first: Board) -> str:
    """Say how a board's samples are to those of the first, and whether fewer methods have them."""
    named = "another set"
    if board.samples < first.samples:
        named = "a smaller set"
    elif board.samples > first.samples:
        named = "a larger set"
    mine, theirs = (len({each.group.method for each in b.entries}) for b in (board, first))
    return named + " that fewer methods played" * (mine < theirs)


@dataclass(frozen=True)
class _Played:  # the samples that a method has, in all its runs or in one of them
    label: str
    method: str  # without preset and settings
    samples: frozenset[str]
    declared: bool = False  # a run's own limit says that they are so many, before it was played


def _played(known: Iterable[tuple[RunGroup, Scores]]) -> Iterator[_Played]:
    for group, own in known:
        yield _Played(group.label, group.method, frozenset(own.parts))
        for run in group.runs:
            samples = frozenset(own.parts.keys() & run.scores.keys())
            declared = run.spec.get("limit") == len(samples)
            if samples:
                yield _Played(group.label, group.method, samples, declared)


def _sample_sets(played: Sequence[_Played]) -> list[frozenset[str]]:
    """Return the sets of samples to compete on, that of most methods first, then the largest."""
    # Those that two methods have exactly, or that one declared and another has too, unless whoever
    # played it also played a larger one. Where there is none, the largest anybody has.
    methods: dict[frozenset[str], set[str]] = {}
    for each in played:
        methods.setdefault(each.samples, set()).add(each.label)
    declared = {each.samples for each in played if each.declared}
    chosen: dict[frozenset[str], int] = {}  # to how many methods it is the largest chosen set
    placed: set[str] = set()
    counted: set[str] = set()
    for samples in sorted(methods, key=lambda each: (-len(each), sorted(each))):
        able = {each.label for each in played if samples <= each.samples}
        shared = len(methods[samples]) > 1 or (samples in declared and len(able) > 1)
        if shared and not able <= placed:
            new = {each.method for each in played if samples <= each.samples} - counted
            chosen[samples] = len(new)
            placed |= able
            counted |= new
    if not chosen and methods:
        return [max(methods, key=lambda each: (len(each), sorted(each)))]
    return sorted(chosen, key=lambda each: (-chosen[each], -len(each), sorted(each)))


def _without_drift(runs: Sequence[Run]) -> tuple[list[Run], list[tuple[Run, str]]]:
    """Split off runs whose prompts are not those of `full`, or most methods' elsewhere.

    Where runs of `full` have several, those that most methods had.
    """
    everybody = _votes(runs)
    votes = everybody | _votes(run for run in runs if run.method in UNCOMPRESSED)
    right = {
        key: max(found, key=lambda prompt: (len(everybody[key][prompt]), len(found[prompt])))
        for key, found in votes.items()
    }
    sound, drifted = [], []
    for run in runs:
        wrong = [key for key, prompt in run.prompts.items() if prompt != right[key]]
        if not wrong:
            sound.append(run)
            continue
        sample, trial = wrong[0]
        why = (
            f"drift: prompts differ from the other runs' in {len(wrong)} of {len(run.prompts)} "
            f"trials, first in sample {sample} trial {trial}"
        )
        drifted.append((run, why))
    return sound, drifted


def _votes(runs: Iterable[Run]) -> dict[tuple[str, int], dict[str, set[str]]]:
    """Return the methods that had each prompt of a trial, those of the earliest run first."""
    votes: dict[tuple[str, int], dict[str, set[str]]] = {}
    for run in sorted(runs, key=lambda run: (run.info.created, run.run_id)):
        for key, prompt in run.prompts.items():
            votes.setdefault(key, {}).setdefault(prompt, set()).add(run.method)
    return votes
