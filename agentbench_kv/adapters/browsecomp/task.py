"""BrowseComp-Plus over its imported corpus, and a synthetic variant that proves the plumbing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from agentbench_kv.adapters.base import Message
from agentbench_kv.adapters.browsecomp.data import FILE, HINT, read_evidence, read_questions
from agentbench_kv.adapters.browser.documents import Document
from agentbench_kv.adapters.browser.made import Question
from agentbench_kv.adapters.browser.seal import seal
from agentbench_kv.adapters.browser.task import BrowsingTask
from agentbench_kv.adapters.data import data_file, file_sha256


@dataclass(kw_only=True, eq=False)
class BrowseCompPlusTest(BrowsingTask):
    """BrowseComp-Plus with our browser tools; transcripts are sealed, as its authors ask.

    The authors' agents have `search` and `get_document` and are judged by Qwen3-32B: figures of
    this task are not those of their leaderboard.
    """

    name: ClassVar[str] = "browsecomp-plus/test"
    summary: ClassVar[str] = "BrowseComp-Plus: hard questions over its corpus; data from you"

    def questions(self) -> list[Question]:
        return read_questions(self._file())

    def made_documents(self, questions: Sequence[Question]) -> list[Document]:
        """Take the documents that come with the questions; make pages if there are none."""
        return read_evidence(self._file()) or super().made_documents(questions)

    def data_provenance(self) -> dict[str, Any]:
        return {"data_sha256": file_sha256(self._file()), "split": "all"}

    def transcript(self, entries: list[Message]) -> Any:
        """Seal the transcript: a run never holds questions and answers in plain text."""
        return seal(entries)

    def _file(self) -> Path:
        return data_file(FILE, None, HINT)  # no published hash is known to compare it with


@dataclass(kw_only=True, eq=False)
class BrowseCompPlusSynthetic(BrowseCompPlusTest):
    """The same loop over a made corpus: never a BrowseComp-Plus result."""

    name: ClassVar[str] = "browsecomp-plus/synthetic"
    summary: ClassVar[str] = "plumbing of browsecomp-plus/test over a made corpus; not its result"
    synthetic: ClassVar[bool] = True
