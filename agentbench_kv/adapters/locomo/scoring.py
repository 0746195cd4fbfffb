"""From answers to the figures of a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from agentbench_kv.adapters.locomo import metrics
from agentbench_kv.adapters.locomo.data import CATEGORIES, Question
from agentbench_kv.adapters.locomo.encoders import Compare
from agentbench_kv.results.records import Metric

COLUMNS = ("f1", "bleu1", "f1_authors", "similarity", "bertscore")
NOT_AVAILABLE = "n/a"


@dataclass(frozen=True)
class Answered:
    """A question and what came back."""

    question: Question
    answer: str  # visible text of the reply
    finish_reason: str
    seconds: float  # from the question to the whole answer
    marks: dict[str, float | None]  # see `marks`

    def document(self) -> dict[str, Metric]:
        """Return it as JSON data."""
        return {
            "question": self.question.text,
            "index": self.question.index,
            "category": CATEGORIES[self.question.category],
            "gold": self.question.answer,
            "answer": self.answer,
            "finish_reason": self.finish_reason,
            "seconds": self.seconds,
            **{k: NOT_AVAILABLE if mark is None else mark for k, mark in self.marks.items()},
        }


def marks(
    question: Question, answer: str, encoders: Mapping[str, Compare]
) -> dict[str, float | None]:
    """Mark an answer in every column, in [0, 1] (similarity in [-1, 1]); None without its model."""
    gold = question.answer
    return {
        "f1": metrics.f1(answer, gold),
        "bleu1": metrics.bleu1(answer, gold),
        "f1_authors": metrics.f1_authors(answer, gold, question.category),
        "similarity": encoders["similarity"](answer, gold) if "similarity" in encoders else None,
        "bertscore": encoders["bertscore"](answer, gold) if "bertscore" in encoders else None,
    }


def mean_f1(answered: Sequence[Answered]) -> float:
    """Return the score of a trial whose questions were all answered."""
    return fmean(each.marks["f1"] or 0.0 for each in answered)


def trial_metrics(asked: Sequence[Question], answered: Sequence[Answered]) -> dict[str, Metric]:
    """Return a trial's metrics; what was not answered has no point in any column.

    Every column is there as a mean and, for the tables, as a sub-score (sum `_right` over
    questions `_asked`), so that questions weigh alike however they are spread over trials. The
    categories' sub-scores are of F1.
    """
    found: dict[str, Metric] = {
        "questions": len(asked),
        "answered": len(answered),
        "truncated_answers": sum(each.finish_reason == "length" for each in answered),
    }
    for name in COLUMNS:
        if not answered or any(each.marks[name] is None for each in answered):
            found[name] = NOT_AVAILABLE
        else:
            total = _total(name, answered)
            found |= {name: total / len(asked), **_sub_score(name, total, len(asked))}
    for category, name in CATEGORIES.items():
        count = sum(each.category == category for each in asked)
        if count:
            of_it = [each for each in answered if each.question.category == category]
            found |= _sub_score(name, _total("f1", of_it), count)
    return found


def _sub_score(name: str, right: float, asked: int) -> dict[str, Metric]:
    return {f"{name}_right": right, f"{name}_asked": asked}


def _total(name: str, answered: Sequence[Answered]) -> float:
    return sum(each.marks[name] or 0.0 for each in answered)
