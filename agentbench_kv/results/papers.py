"""Figures that papers publish: the package's own copy, with source and table of every figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, Self

import pandas as pd
from pydantic import BaseModel, Field, FiniteFloat, PositiveInt, model_validator

from agentbench_kv.results.runs import SCORE

FILES = (
    "accuracy_vs_budget",
    "locomo_quality",
    "ablations",
    "efficiency",
    "sidequest_ranges",
    "utility_coverage",
)
# What papers call a score or a sub-score of ours.
MEASURES = {
    SCORE: ("accuracy_pct", "reward_pct", "f1"),
    "f1": ("f1",),
    "bleu1": ("bleu1",),
    "similarity": ("embedding_similarity",),
    "bertscore": ("bertscore_f1",),
}
QUALITY = "f1"  # of answers: the score of tasks that have this sub-score
SAME_QUESTIONS = {"probe/locomo": "locomo/qa"}  # tasks that ask what a paper's task asks
UNCOMPRESSED = "full"
_SEPARATORS = str.maketrans("", "", "-_ ")


class PublishedFigure(BaseModel, frozen=True, extra="forbid"):
    """One figure of a paper, a value or a range; names as the paper has them, methods as here."""

    file: str  # which of `FILES` holds it
    source: str
    where: str  # table, figure or appendix
    model: str
    metric: str
    method: str | None = None
    benchmark: str | None = None
    task: str | None = None
    engine: str | None = None
    budget: PositiveInt | None = None  # tokens per (layer, KV head)
    value: FiniteFloat | None = None  # in the unit the metric's name ends in
    low: FiniteFloat | None = None
    high: FiniteFloat | None = None
    setting: dict[str, str] = Field(default_factory=dict)  # columns that only this file has

    @property
    def place(self) -> tuple[str, str, str]:
        """Benchmark, task and model: with a budget, the cell in which methods compete."""
        return self.benchmark or "", self.task or "", self.model

    @property
    def cited(self) -> str:
        """Source and table, e.g. `agentkv table1`."""
        return f"{self.source} {self.where}"

    @model_validator(mode="after")
    def _is_a_value_or_a_range(self) -> Self:
        if (self.value is None) == (self.low is None or self.high is None):
            raise ValueError("a published figure is either a value or a range with both ends")
        return self


@cache
def figures(file: str) -> tuple[PublishedFigure, ...]:
    """Load one of `FILES`, in the order of the file."""
    with files("agentbench_kv.results").joinpath("published", f"{file}.csv").open("rb") as stream:
        table = pd.read_csv(stream, dtype=str, keep_default_na=False)
    known = []
    for row in table.rename(columns={"table": "where"}).to_dict("records"):
        figure: dict[str, Any] = {"file": file, "setting": {}}
        for name, text in row.items():
            if text:
                own = figure if name in PublishedFigure.model_fields else figure["setting"]
                own[str(name)] = text
        known.append(PublishedFigure.model_validate(figure))
    return tuple(known)


def quality(task: str, model: str) -> list[PublishedFigure]:
    """Return what papers publish of answers' quality on what a task asks, every measure."""
    asked = SAME_QUESTIONS.get(task, task)
    return [
        figure
        for file in ("accuracy_vs_budget", "locomo_quality")
        for figure in figures(file)
        if figure.value is not None
        and f"{figure.benchmark}/{figure.task}" == asked
        and _plain(figure.model) == _plain(model)
    ]


def headlines(task: str, model: str, metric: str = SCORE) -> list[PublishedFigure]:
    """Return those of them that measure what the score, or a sub-score of ours, measures."""
    return [each for each in quality(task, model) if each.metric in MEASURES.get(metric, ())]


def _plain(model: str) -> str:
    """Write a model's name as all do: the paper's `Qwen-2.5-7B` is `Qwen2.5-7B`."""
    return model.casefold().translate(_SEPARATORS)


def leaders(cell: Iterable[PublishedFigure]) -> list[PublishedFigure]:
    """Return the highest of the compressed methods' figures of one cell, all of them if tied."""
    compressed = [figure for figure in cell if figure.method != UNCOMPRESSED]
    best = max((figure.value or 0.0 for figure in compressed), default=0.0)
    return [figure for figure in compressed if figure.value == best]


class Firsts(NamedTuple):
    """In how many cells (model, task, budget) of a benchmark a method is first or tied first."""

    method: str
    benchmark: str
    first: int
    cells: int


def count_first(method: str, published: Sequence[PublishedFigure] | None = None) -> list[Firsts]:
    """Count a method's firsts and ties per benchmark, of `accuracy_vs_budget` if none are given."""
    cells: dict[tuple[Any, ...], list[PublishedFigure]] = {}
    for figure in figures("accuracy_vs_budget") if published is None else published:
        cells.setdefault((*figure.place, figure.budget), []).append(figure)
    counts: dict[str, list[int]] = {}
    for (benchmark, *_), cell in cells.items():
        won = any(figure.method == method for figure in leaders(cell))
        counts.setdefault(benchmark, []).append(won)
    return [Firsts(method, name, sum(won), len(won)) for name, won in counts.items()]
