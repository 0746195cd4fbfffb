"""Reading `frames_test_set.csv`, and choosing a part of it."""

from __future__ import annotations

import ast
import csv
import hashlib
from collections.abc import Sequence
from pathlib import Path

from agentbench_kv.adapters.browser.made import Question
from agentbench_kv.errors import UsageError

FILE = "frames_test_set.csv"
SHA256 = "88f24731424bf8b9dd93174e4cc30a3c220fe0c8910701b77036b80b88e60ada"
HINT = "take the test set of google/frames-benchmark as CSV"
SPLITS = ("all", "kvbench-424")
_PART = 424
_NEEDED = ("Prompt", "Answer", "wiki_links")


def read_questions(path: Path) -> list[Question]:
    """Return the questions in the order of the file; UsageError if it lacks columns or rows."""
    with path.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
        if missing:
            raise UsageError(f"{path} has no column {missing[0]!r}; expected {', '.join(_NEEDED)}")
        questions = [_question(row, number) for number, row in enumerate(reader)]
    if not questions:
        raise UsageError(f"{path} holds no question")
    return questions


def choose(questions: Sequence[Question], split: str) -> list[Question]:
    """Return a split, in the order of the file.

    `kvbench-424` is ours: as many questions as SideQuest tests on, but its ids are not published.
    """
    if split == "all":
        return list(questions)
    ranked = sorted(questions, key=lambda each: hashlib.sha256(each.id.encode()).digest())
    kept = {each.id for each in ranked[:_PART]}
    return [each for each in questions if each.id in kept]


def _question(row: dict[str, str], number: int) -> Question:
    try:
        links = ast.literal_eval(row["wiki_links"])
    except (ValueError, SyntaxError):
        links = ()
    pages = tuple(dict.fromkeys(str(link).strip() for link in links))
    name = f"frames-{row.get('id') or number}"
    return Question(name, row["Prompt"].strip(), row["Answer"].strip(), pages)
