"""The figures of a trial: every answer's marks, and their sums.

Every column is there as a mean and, for the tables, as a sub-score (sum `_right` over questions
`_asked`), so that questions weigh alike however they are spread over trials. What was not answered
has no point in any column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agentbench_kv.adapters.layers import best_layer
from agentbench_kv.adapters.locomo.abstention import abstains, resists
from agentbench_kv.adapters.locomo.data import ABSENT, ADVERSARIAL, CATEGORIES, Question
from agentbench_kv.adapters.locomo.disputed import Disputed
from agentbench_kv.adapters.locomo.scoring import Compare, bleu1, f1, f1_authors
from agentbench_kv.results.records import Metric

BY_MODEL = ("similarity", "bertscore")
COLUMNS = ("f1", "bleu1", "f1_authors", *BY_MODEL)
NOT_AVAILABLE = "n/a"
Marks = Mapping[str, float | None]


@dataclass(frozen=True)
class Answered:
    """A question and what came back."""

    question: Question
    answer: str  # visible text of the reply
    finish_reason: str
    seconds: float  # from the question to the whole answer
    marks: Marks
    sent: float | None = None  # share of its evidence in what the task sent so far
    recalled: float | None = None  # and in what a memory put before the model for this answer
    recalled_texts: int | None = None  # how many texts a memory of plain text put before the model
    recalled_messages: float | None = None  # how many utterances that were, evidence or not
    spots: Mapping[str, int] = field(default_factory=dict)  # utterances read, by message number
    layers: Mapping[int, Sequence[float]] | None = None  # shares of messages that came back

    def document(self, disputed: Disputed | None = None) -> dict[str, Metric]:
        """Return it for the transcript."""
        category = self.question.category
        shown = {"evidence_sent": self.sent, "evidence_recalled": self.recalled}
        known: dict[str, Metric] = {k: value for k, value in shown.items() if value is not None}
        trap = {"trap": self.question.trap} if category == ADVERSARIAL else {}
        return {
            "question": self.question.text,
            "index": self.question.index,
            "category": CATEGORIES.get(category, "cat5_adversarial"),
            "gold": self.question.answer,
            **trap,
            "answer": self.answer,
            "finish_reason": self.finish_reason,
            "seconds": self.seconds,
            **{k: NOT_AVAILABLE if mark is None else mark for k, mark in self.marks.items()},
            **known,
            **({} if disputed is None else {"disputed": disputed.kind}),
        }


def marks(question: Question, answer: str, encoders: Mapping[str, Compare]) -> Marks:
    """Mark an answer in every column, in [0, 1] (similarity in [-1, 1]); None without its model.

    A question of the fifth category has a column of its own and none of the others.
    """
    if question.category == ADVERSARIAL:
        return {"adversarial": float(_resisted(question, answer))}
    gold = question.answer
    by_model = [encoders[name](answer, gold) if name in encoders else None for name in BY_MODEL]
    by_words = (f1(answer, gold), bleu1(answer, gold), f1_authors(answer, gold, question.category))
    columns: Marks = dict(zip(COLUMNS, (*by_words, *by_model), strict=True))
    return {**columns, "attempted": float(bool(answer.strip()) and not abstains(answer))}


def _resisted(question: Question, answer: str) -> bool:
    right = "" if question.answer == ABSENT else question.answer
    return resists(answer, question.text, question.trap, right)


def trial_metrics(
    asked: Sequence[Question],
    answered: Sequence[Answered],
    disputed: Mapping[int, Disputed] | None = None,
) -> dict[str, Metric]:
    """Return a trial's metrics; `disputed` are questions by their indices, None if unknown."""
    found: dict[str, Metric] = {
        "questions": len(asked),
        "answered": len(answered),
        "truncated_answers": sum(each.finish_reason == "length" for each in answered),
    }
    plain = [each for each in asked if each.category != ADVERSARIAL]
    replies = [each for each in answered if each.question.category != ADVERSARIAL]
    if plain:
        found |= _columns(plain, replies)
        found |= _evidence(plain, replies, disputed)
        if disputed is not None:
            sound = [each for each in plain if not _is_wrong(disputed.get(each.index))]
            found |= _sub_score("f1_undisputed", _total("f1", replies, sound), len(sound))
    return found | _adversarial([q for q in asked if q.category == ADVERSARIAL], answered)


def _columns(asked: Sequence[Question], answered: Sequence[Answered]) -> dict[str, Metric]:
    """Return every column, F1 by category, and how many questions were not evaded."""
    found: dict[str, Metric] = {}
    for name in COLUMNS:
        if not answered or any(each.marks[name] is None for each in answered):
            found[name] = NOT_AVAILABLE
        else:
            total = _total(name, answered, asked)
            found |= {name: total / len(asked), **_sub_score(name, total, len(asked))}
    for category, name in CATEGORIES.items():
        of_it = [each for each in asked if each.category == category]
        if of_it:
            found |= _sub_score(name, _total("f1", answered, of_it), len(of_it))
    return found | _sub_score("attempted", _total("attempted", answered, asked), len(asked))


def _evidence(
    asked: Sequence[Question],
    answered: Sequence[Answered],
    disputed: Mapping[int, Disputed] | None,
) -> dict[str, Metric]:
    """Return the shares of evidence that were sent, and recalled if a memory says so.

    Questions without evidence in the file are not asked for it.
    """
    sets = _with_evidence(asked, disputed)
    found: dict[str, Metric] = {}
    for name, questions in sets.items():
        sent = _sum(answered, questions, lambda each: each.sent)
        found |= _sub_score(f"evidence_sent{name}", sent, len(questions))
        wanted = [each for each in answered if each.question in questions]
        if wanted and all(each.recalled is not None for each in wanted):
            recalled = _sum(answered, questions, lambda each: each.recalled)
            found |= _sub_score(f"evidence_recall{name}", recalled, len(questions))
    found |= _best_layer(answered, sets[""])
    counts = [each.recalled_messages for each in answered]
    known = [count for count in counts if count is not None]
    if known and len(known) == len(counts):
        found |= {"recalled_total": sum(known), "recalled_count": len(known)}
    texts = [each.recalled_texts for each in answered if each.recalled_texts is not None]
    if texts:
        found["recalled_texts"] = sum(texts)
    return found


def nothing_recalled(
    asked: Sequence[Question], disputed: Mapping[int, Disputed] | None
) -> dict[str, Metric]:
    """Return the shares of evidence that a memory brought back of which nothing was heard."""
    found: dict[str, Metric] = {}
    plain = [each for each in asked if each.category != ADVERSARIAL]
    for name, questions in _with_evidence(plain, disputed).items():
        found |= _sub_score(f"evidence_recall{name}", 0, len(questions))
    return found


def _with_evidence(
    asked: Sequence[Question], disputed: Mapping[int, Disputed] | None
) -> dict[str, list[Question]]:
    """Return the questions whose evidence is in the file, and those that nobody disputes."""
    has = [question for question in asked if question.evidence]
    if disputed is None:
        return {"": has}
    return {"": has, "_undisputed": [each for each in has if each.index not in disputed]}


def _best_layer(answered: Sequence[Answered], asked: Sequence[Question]) -> dict[str, Metric]:
    """Return what the layer that has most of the evidence brought back of it, and of anything."""
    wanted = [each for each in answered if each.question in asked]
    layers = [each.layers for each in wanted if each.layers is not None]
    if not wanted or len(layers) < len(wanted):
        return {}
    needed = [
        (shares, each.spots[id])
        for each, shares in zip(wanted, layers, strict=True)
        for id in each.question.evidence
        if id in each.spots
    ]
    return best_layer(needed, layers, len(wanted[0].spots))


def _adversarial(asked: Sequence[Question], answered: Sequence[Answered]) -> dict[str, Metric]:
    """Return who saw through false premises, and beside it what saying so to everything gives."""
    if not asked:
        return {}
    null = sum(_resisted(question, ABSENT) for question in asked)
    return {
        **_sub_score("adversarial", _total("adversarial", answered, asked), len(asked)),
        **_sub_score("adversarial_null", null, len(asked)),
    }


def by_words(figures: Mapping[str, Metric], encoders: Sequence[str]) -> dict[str, Metric]:
    """Return the figures that none of these encoders made and no clock."""
    left_out = (*encoders, "seconds")
    return {name: each for name, each in figures.items() if not name.startswith(left_out)}


def _is_wrong(found: Disputed | None) -> bool:
    return found is not None and found.answer


def _sub_score(name: str, right: float, asked: int) -> dict[str, Metric]:
    return {f"{name}_right": right, f"{name}_asked": asked} if asked else {}


def _total(name: str, answered: Iterable[Answered], asked: Sequence[Question]) -> float:
    return _sum(answered, asked, lambda each: each.marks.get(name))


def _sum(
    answered: Iterable[Answered],
    asked: Sequence[Question],
    of: Callable[[Answered], float | None],
) -> float:
    wanted = {each.index for each in asked}
    return sum(of(each) or 0.0 for each in answered if each.question.index in wanted)
