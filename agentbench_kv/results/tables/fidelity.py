"""How far from the full cache methods are, board by board: divergence, its parts, budgets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import median

from agentbench_kv.results.curves import smallest_budget
from agentbench_kv.results.fidelity import FLIPS, KL, VALUE, Divergence, divergence, of_fidelity
from agentbench_kv.results.ranking import Board, Entry, boards
from agentbench_kv.results.runs import Run, RunGroup, budget_order
from agentbench_kv.results.stats import LEVEL, Interval, open_change
from agentbench_kv.results.tables.model import (
    Cell,
    Column,
    Kind,
    Mark,
    Row,
    Table,
    Unit,
    setting_table,
)

_FEWEST = 3  # sessions that a smallest budget is said of
CLOSE = 0.01  # nats on value tokens: what is asked of a budget

LEGEND = (
    "KL: of the next token's distribution, full cache over the method's, in nats: mean over tokens "
    "with a 95% interval over sessions",
    "marked: at a budget and precision the lowest KL, if it leads alone, or it and all that are "
    "not told from it (paired by session; Bonferroni over all pairs of the table)",
    "behind an event %: of the tokens, those that came after their session's first event; until "
    "then KL is 0 under any method",
    "peak live MB: of a session, K and V over all layers and heads, at the precision of its rows",
)
_HEAD = (Column("budget"), Column("method"))
_FIGURES = (
    *_HEAD,
    Column("sessions", Unit.NUMBER),
    Column("events", Unit.NUMBER),
    Column("behind an event %", Unit.SHARE),
    Column("peak live MB", Unit.MEGABYTES),
    Column("KL", Unit.NATS),
    Column("KL of values", Unit.NATS),
    Column("same best token %", Unit.SHARE),
    Column("flips %", Unit.SHARE),
    Column("exact calls %", Unit.SHARE),
)
# A part's suffix, and what it is called.
_PARTS = {
    "_think": "think", "_act": "act", "_others": "others", "_value": "values",
    "_template": "template", "_text": "text", "_before": "no event yet", "_to1": "1 after an event",
    "_to8": "2-8", "_to32": "9-32", "_to128": "33-128", "_later": "later",
}  # fmt: skip


@dataclass(frozen=True)
class _Arm:
    run: RunGroup
    found: Divergence
    mark: Mark | None = None
    below: str | None = None


def fidelity_tables(runs: Sequence[Run]) -> list[Table]:
    """Return the tables of every board whose runs say how far from the full cache they are."""
    known = [run for run in runs if of_fidelity(run)]
    return [table for board in boards(known) for table in distance_tables(board)]


def distance_tables(board: Board) -> Iterator[Table]:
    """Return what the runs on and below a board come to; nothing if none is of fidelity."""
    marks = nearest(board)
    arms = [
        _Arm(entry.group, found, marks.get(id(entry)))
        for entry in board.entries
        if (found := divergence(entry.group, board.samples)) is not None
    ]
    arms += [
        _Arm(group, found, below=reason)
        for run, reason in board.out
        if (found := divergence(group := RunGroup(run.label, (run,)))) is not None
    ]
    unread = [
        f"{RunGroup(run.label, (run,)).name}: {why}"
        for run, why in board.out
        if of_fidelity(run) and KL not in run.means
    ]
    arms.sort(key=lambda arm: (budget_order(arm.run.budget), arm.found.means[KL].point))
    if not arms and not unread:
        return
    table = partial(
        setting_table, setting=board.setting, kind=Kind.FIDELITY, conditions=board.conditions,
        samples=len(board.samples),
    )  # fmt: skip
    number, few = len(board.samples), board.too_small
    notes = [few.replace("samples", "sessions")] if few and board.entries else []
    notes += unread
    yield table(
        what=f"distance from the full cache [95% interval], {number} sessions",
        apart=("fidelity", str(number)), columns=_FIGURES, rows=list(map(_figures, arms)),
        notes=[*notes, *_calls(arms), *board.unplaced, *_alike(board)], legend=LEGEND,
    )  # fmt: skip
    if not arms:
        return
    named = [name for name in _PARTS if any(f"{KL}{name}" in arm.found.means for arm in arms)]
    yield table(
        what=f"KL by phase, kind of token, and tokens since the last event, {number} sessions",
        apart=("fidelity-parts", str(number)),
        columns=(*_HEAD, *(Column(_PARTS[name], Unit.NATS) for name in named)),
        rows=[_parts(arm, named) for arm in arms],
    )  # fmt: skip
    if rows := _budgets(board):
        yield table(
            what=f"smallest budget whose KL of values is at most {CLOSE:g} nats, {number} sessions",
            apart=("fidelity-budgets", str(number)), rows=rows,
            columns=(Column("method"), Column("budgets"), Column("tokens", Unit.TOKENS)),
            notes=notes,
            legend=("the curve is made to fall, straight over log2(budget); 95% interval from "
                    "resampled sessions",),
        )  # fmt: skip


def _figures(arm: _Arm) -> Row:
    means, shares = arm.found.means, arm.found.shares
    sizes = [size for own in arm.run.sizes("peak_bytes").values() for size in own]
    return Row((
        *_name(arm),
        Cell(arm.found.sessions),
        Cell(round(arm.found.events, 1)),
        Cell(arm.found.behind),
        Cell(median(sizes) / 1e6 if sizes else None),
        _cell(means[KL], arm.mark),
        _cell(means.get(VALUE)),
        _cell(shares.get("top1")),
        _cell(means.get(FLIPS)),
        _cell(shares.get("calls_exact")),
    ), arm.below)  # fmt: skip


def _parts(arm: _Arm, names: Sequence[str]) -> Row:
    means = arm.found.means
    found = (means.get(f"{KL}{name}") for name in names)
    cells = (Cell() if each is None else Cell(each.point) for each in found)
    return Row((*_name(arm), *cells), arm.below)


def _name(arm: _Arm) -> tuple[Cell, Cell]:
    return Cell(arm.found.budget), Cell(arm.found.method)


def _cell(known: Interval | None, mark: Mark | None = None) -> Cell:
    return Cell() if known is None else Cell(known.point, known.low, known.high, mark=mark)


def _calls(arms: Sequence[_Arm]) -> list[str]:
    """Say what the full cache itself makes of the recorded calls."""
    shares = [arm.found.shares.get("calls_exact_full") for arm in arms if arm.below is None]
    known = [share for share in shares if share is not None]
    told = "exact calls: every token is the best one; with the full cache {:.1f}%"
    return [told.format(100 * known[0].point)] if known else []


def _alike(board: Board) -> list[str]:
    """Say behind how few system messages the sessions are: what is alike is not independent."""
    known = {
        name: sha
        for entry in board.entries
        for run in entry.group.runs
        for name, sha in run.systems.items()
        if name in board.samples
    }
    systems = len(set(known.values()))
    if len(known) < 2 or systems == len(known):
        return []
    return [
        f"{len(known)} sessions begin with {systems} system message{'s' * (systems > 1)} (tools "
        "included): intervals and marks are about sessions behind these, not about other tools"
    ]


def contests(board: Board) -> dict[str, list[Entry]]:
    """Return who competes, by budget: rows of another precision are others at the same tokens."""
    found: dict[tuple[str, int | str | None], list[Entry]] = {}
    for entry in board.placed:
        key = entry.group.first.spec.get("kv_dtype") or "", entry.group.budget
        found.setdefault(key, []).append(entry)
    ordered = sorted(found, key=lambda key: (key[0], budget_order(key[1])))
    return {f"{budget} kv={kv}" if kv else str(budget): found[kv, budget] for kv, budget in ordered}


def nearest(board: Board) -> dict[int, Mark]:
    """Mark, by `id`, who has the lowest KL at a budget of two methods, alone or with others."""
    found = contests(board)
    pairs = sum(len(list(combinations(each, 2))) for each in found.values())
    marks: dict[int, Mark] = {}
    for contest in found.values() if board.too_small is None else ():
        if len({entry.group.method for entry in contest}) > 1:
            marks |= _leaders(contest, board.samples, 1 - (1 - LEVEL) / pairs)
    return marks


def _leaders(
    contest: Sequence[Entry], sessions: frozenset[str], confidence: float
) -> dict[int, Mark]:
    totals: dict[int, Mapping[str, tuple[float, float]]] = {}
    for entry in contest:
        found = entry.group.means(KL)
        totals[id(entry)] = {} if found is None else found.only(set(sessions)).parts
    known = {key: parts for key, parts in totals.items() if parts}
    if len(known) < 2:
        return {}
    lowest = min(known, key=lambda key: _mean(known[key]))
    groups = contest[0].scores.groups
    tied = [
        key
        for key, parts in known.items()
        if key == lowest
        or (told := open_change(parts, known[lowest], groups, confidence)) is None
        or told.tied
    ]
    return dict.fromkeys(tied, Mark.BEST if len(tied) == 1 else Mark.TIED)


def _mean(parts: Mapping[str, tuple[float, float]]) -> float:
    return sum(total for total, _ in parts.values()) / sum(count for _, count in parts.values())


def _budgets(board: Board) -> list[Row]:
    """Return what budget each method needs, of those with two budgets or more.

    Resamples of one or two sessions say nothing, those of few too little for an interval.
    """
    if len(board.samples) < _FEWEST:
        return []
    curves: dict[str, dict[int, Mapping[str, tuple[float, float]]]] = {}
    groups: dict[str, str] = {}
    for entry in board.placed:
        found, tokens = entry.group.means(VALUE), entry.group.first.tokens
        if tokens and found is not None:
            groups |= found.groups
            curves.setdefault(entry.group.label, {})[tokens] = found.only(set(board.samples)).parts
    rows = []
    for label, points in sorted(curves.items()):
        if len(points) < 2 or (needed := smallest_budget(points, CLOSE, groups)) is None:
            continue
        words, least, most = str(needed), min(points), max(points)
        value = words if needed.point is None else needed.point
        cell = Cell(value, needed.low, needed.high, text=words)
        if board.too_small is not None:
            cell = Cell(value, text=words.partition(" [")[0])
        rows.append(Row((Cell(label), Cell(f"{len(points)}, {least} to {most}"), cell)))
    return rows
