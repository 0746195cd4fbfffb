"""The parts of a score that its readers ask for first: measures of answers, and evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from agentbench_kv.results.papers import MEASURES, PublishedFigure, quality
from agentbench_kv.results.ranking import Board
from agentbench_kv.results.runs import SCORE, Run, RunGroup, asked_once
from agentbench_kv.results.stats import Interval, level
from agentbench_kv.results.tables.accuracy import PUBLISHED, BoardPage, asked_all, pages
from agentbench_kv.results.tables.ledger import hosted
from agentbench_kv.results.tables.model import Cell, Column, Kind, Row, Table, Unit, setting_table

# Sub-scores shown without being asked for, in this order, where any of `FIRST` is there.
FIRST = {"f1": "F1", "bleu1": "BLEU-1", "evidence_recall": "evidence recall"}
PARTS = FIRST | {
    "f1_undisputed": "F1, undisputed",
    "evidence_sent": "evidence sent",
    "similarity": "similarity",
    "bertscore": "BERTScore",
    "adversarial": "adversarial",
    "adversarial_null": "a null agent's",
    "attempted": "attempted",
}
# What says nothing without another part beside it.
_BESIDE = {"adversarial_null": "adversarial", "attempted": "adversarial"}
LEGEND = (
    "over questions, whichever trial asked them; --metric has every part, with differences",
    "evidence recall: share of what an answer needs that a memory put before the model",
)
SENT = "evidence sent: share of it in what the task sent"
UNDISPUTED = "F1, undisputed: without the questions whose answer in the data is disputed"
ADVERSARIAL = (
    "adversarial: share of trick questions that it declined, beside that of an agent that says of "
    "everything that it was never told; attempted: share of the other questions that it answered"
)
ENCODERS = "similarity and BERTScore: of the encoder that each run, or paper, had"


class _PartsRow(NamedTuple):  # runs under the name of their row
    name: str
    group: RunGroup
    samples: frozenset[str]  # that count; all of its own if empty
    below: str | None = None


def part_tables(runs: Sequence[Run]) -> list[Table]:
    """Return a table for every board with one of the parts that come first."""
    found = (_parts(page) for page in pages(runs, SCORE))
    return [table for table in found if table is not None]


def _parts(page: BoardPage) -> Table | None:
    board, named = page.board, list(_named(page))
    known = {part for each in named for run in each.group.runs for part in run.counts}
    shown = [part for part in PARTS if part in known and _BESIDE.get(part, part) in known]
    if not known & FIRST.keys():
        return None
    groups = [entry.group for entry in board.entries]
    asked = {part: asked_once(groups, part) for part in shown}
    rows = []
    for each in named:
        levels = (_level(each, part, asked[part]) for part in shown)
        cells = (Cell(own.point, own.low, own.high) if own else Cell() for own in levels)
        budget = None if each.group.budget is None else str(each.group.budget)
        rows.append(Row((Cell(each.name), Cell(budget), *cells), each.below))
    beside = [Row(cells, published=True) for cells in _published(board, shown)]
    optional = {
        UNDISPUTED: {"f1_undisputed"},
        SENT: {"evidence_sent"},
        ENCODERS: {"similarity", "bertscore"},
        ADVERSARIAL: {"adversarial"},
    }
    legend = [
        *LEGEND,
        *hosted(run for each in named for run in each.group.runs),
        *(text for text, parts in optional.items() if parts & {*shown}),
    ]
    legend += [PUBLISHED] * bool(beside)
    number = len(board.samples)
    return setting_table(
        Kind.ACCURACY,
        f"parts of the score, % [95% interval], {page.size}",
        board.setting,
        (*map(Column, ("method", "budget")), *(Column(PARTS[part], Unit.SHARE) for part in shown)),
        [*rows, *beside],
        (),
        legend,
        board.conditions,
        ("parts", str(number) * bool(board.beside)),
        samples=number,
    )


def _named(page: BoardPage) -> Iterator[_PartsRow]:
    """Yield the rows: who keeps everything first, floors last, then what is on no board."""
    samples = page.board.samples
    groups = (entry.group for entry in page.board.entries)
    for group in sorted(groups, key=lambda each: (each.compressed, each.method != "full")):
        yield _PartsRow(group.label, group, samples)
    for name, group in page.null:
        yield _PartsRow(name, group, samples)
    for run, reason in page.board.out:
        yield _PartsRow(run.label, RunGroup(run.label, (run,)), frozenset(), reason)


def _level(each: _PartsRow, part: str, asked: dict[str, float]) -> Interval | None:
    scores = each.group.scores(part, asked)
    own = scores.only(set(each.samples)) if scores and each.samples else scores
    return level(own) if own and own.parts else None


def _published(board: Board, shown: Sequence[str]) -> Iterator[tuple[Cell, ...]]:
    """Yield a paper's figures of the methods on a board, where it was asked what theirs was."""
    groups = [entry.group for entry in board.entries if asked_all(entry.group)]
    known = quality(board.setting.task, board.setting.model)
    for method in dict.fromkeys(group.method for group in groups if group.budget is None):
        own = [figure for figure in known if figure.method == method and figure.budget is None]
        for cited in dict.fromkeys(figure.cited for figure in own):
            cells = [_figure((f for f in own if f.cited == cited), part) for part in shown]
            if any(cell.value is not None for cell in cells):
                yield (Cell(f"{method}, {cited}"), Cell(), *cells)


def _figure(figures: Iterable[PublishedFigure], part: str) -> Cell:
    value = next((f.value for f in figures if f.metric in MEASURES.get(part, ())), None)
    return Cell() if value is None else Cell(value / 100)
