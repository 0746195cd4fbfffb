"""BrowseComp-Plus over its imported corpus, and a synthetic variant that proves the plumbing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.base import Message
from agentbench_kv.adapters.browser.answers import seal
from agentbench_kv.adapters.browser.corpus import Document
from agentbench_kv.adapters.browser.questions import BrowsingQuestion
from agentbench_kv.adapters.browser.task import BrowsingTask, SyntheticTask
from agentbench_kv.adapters.data import data_file, file_sha256, json_rows
from agentbench_kv.errors import UsageError

FILE = "browsecomp_plus_decrypted.jsonl"  # what the authors' own script writes
HINT = "make it with scripts_build_index/decrypt_dataset.py of texttron/BrowseComp-Plus"
_NEEDED = ("query_id", "query", "answer")
_PAGES = ("gold_docs", "evidence_docs")


def read_questions(path: Path) -> list[BrowsingQuestion]:
    """Return the questions in the order of the file; UsageError if it holds none, or others."""
    questions = [_question(row) for row in _rows(path)]
    if not questions:
        raise UsageError(f"{path} holds no question")
    return questions


def read_evidence(path: Path) -> list[Document]:
    """Return the documents that come with the questions, those with a text."""
    found: dict[str, Document] = {}
    for row in _rows(path):
        for each in _documents(row, (*_PAGES, "negative_docs")):
            name, text = str(each.get("docid", "")), str(each.get("text") or "")
            if name and text:
                url = str(each.get("url") or name)
                found.setdefault(url, Document(name, url, url, text))
    return list(found.values())


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    for number, row in json_rows(path):
        if missing := [key for key in _NEEDED if key not in row]:
            raise UsageError(f"{path} line {number} has no {missing[0]!r}")
        yield row


def _question(row: Mapping[str, Any]) -> BrowsingQuestion:
    listed = (str(each["docid"]) for each in _documents(row, _PAGES) if "docid" in each)
    name, text, answer = (str(row[field]) for field in _NEEDED)
    pages = tuple(dict.fromkeys(listed))
    return BrowsingQuestion(f"browsecomp-plus-{name}", text.strip(), answer.strip(), pages)


def _documents(row: Mapping[str, Any], fields: tuple[str, ...]) -> list[Mapping[str, Any]]:
    listed = [each for name in fields for each in row.get(name) or ()]
    return [each for each in listed if isinstance(each, dict)]


@dataclass(kw_only=True, eq=False)
class BrowseCompPlusTest(BrowsingTask):
    """BrowseComp-Plus with our browser tools; transcripts are sealed, as its authors ask.

    The authors' agents have `search` and `get_document` and are judged by Qwen3-32B: figures of
    this task are not those of their leaderboard.
    """

    name = "browsecomp-plus/test"
    summary = "BrowseComp-Plus: hard questions over its corpus; data from you"
    file = FILE

    def questions(self) -> list[BrowsingQuestion]:
        return read_questions(self._file())

    def made_documents(self) -> list[Document]:
        found = [] if self._made else read_evidence(self._file())
        return found or super().made_documents()

    def data_provenance(self) -> dict[str, Any]:
        return {"data_sha256": file_sha256(self._file()), "split": "all"}

    def transcript(self, entries: list[Message]) -> Any:
        """Seal the transcript: a run never holds questions and answers in plain text."""
        return seal(entries)

    def _file(self) -> Path:
        return data_file(FILE, None, HINT)  # no published hash is known to compare it with


@dataclass(kw_only=True, eq=False)
class BrowseCompPlusSynthetic(SyntheticTask, BrowseCompPlusTest):
    """The same loop over a made corpus: never a BrowseComp-Plus result."""

    name = "browsecomp-plus/synthetic"
    summary = "plumbing of browsecomp-plus/test over a made corpus; not its result"
