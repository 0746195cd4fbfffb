"""FRAMES over an imported corpus, and a synthetic variant that proves the plumbing."""

from __future__ import annotations

import ast
import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from agentbench_kv.adapters.browser.questions import BrowsingQuestion
from agentbench_kv.adapters.browser.task import BrowsingTask, SyntheticTask
from agentbench_kv.adapters.data import data_file, file_sha256
from agentbench_kv.errors import UsageError
from agentbench_kv.params import param

FILE = "frames_test_set.csv"
SHA256 = "88f24731424bf8b9dd93174e4cc30a3c220fe0c8910701b77036b80b88e60ada"
HINT = "take the test set of google/frames-benchmark as CSV"
SPLITS = ("all", "kvbench-424")
_PART = 424
_NEEDED = ("Prompt", "Answer", "wiki_links")


def read_questions(path: Path) -> list[BrowsingQuestion]:
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


def choose(questions: Sequence[BrowsingQuestion], split: str) -> list[BrowsingQuestion]:
    """Return a split, in the order of the file.

    `kvbench-424` is ours: as many questions as SideQuest tests on, but its ids are not published.
    """
    if split == "all":
        return list(questions)
    ranked = sorted(questions, key=lambda each: hashlib.sha256(each.id.encode()).digest())
    kept = {each.id for each in ranked[:_PART]}
    return [each for each in questions if each.id in kept]


def _question(row: dict[str, str], number: int) -> BrowsingQuestion:
    try:
        links = ast.literal_eval(row["wiki_links"])
    except (ValueError, SyntaxError):
        links = ()
    pages = tuple(dict.fromkeys(str(link).strip() for link in links))
    name = f"frames-{row.get('id') or number}"
    return BrowsingQuestion(name, row["Prompt"].strip(), row["Answer"].strip(), pages)


@dataclass(kw_only=True, eq=False)
class FramesTest(BrowsingTask):
    """The 824 questions of google/frames-benchmark. The corpus is the user's: none is published."""

    name = "frames/test"
    summary = "FRAMES: 824 multi-hop questions, browsing a corpus of yours"
    file = FILE
    published_sha256: ClassVar[str | None] = SHA256

    split: str = param("all", "all 824, or kvbench-424: a choice of ours", choices=SPLITS)

    def questions(self) -> list[BrowsingQuestion]:
        return choose(read_questions(self._file()), self.split)

    def data_provenance(self) -> dict[str, Any]:
        ids = "\n".join(sample.id for sample in self.samples(None, 0))
        ours = "chosen by kvbench; no publication uses this split"
        return {
            "data_sha256": file_sha256(self._file()),
            "split": self.split,
            "split_ids_sha256": hashlib.sha256(ids.encode()).hexdigest(),
            "split_note": None if self.split == "all" else ours,
        }

    def _file(self) -> Path:
        return data_file(FILE, self.published_sha256, HINT)


@dataclass(kw_only=True, eq=False)
class FramesSynthetic(SyntheticTask, FramesTest):
    """The same loop over made pages that hold the answers: never a FRAMES result."""

    name = "frames/synthetic"
    summary = "plumbing of frames/test over made pages; not a FRAMES result"
    published_sha256 = None
