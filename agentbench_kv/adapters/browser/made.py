"""Documents made from questions, for testing the plumbing: they hold the answers in plain words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from agentbench_kv.adapters.browser.documents import Document

_PADDING_LINES = 120
_NOTICE = "This page was made by kvbench to test its browser. It is not an article."


@dataclass(frozen=True)
class Question:
    """One item of a benchmark."""

    id: str
    question: str
    answer: str
    pages: tuple[str, ...] = ()  # URLs or ids of the documents the answer is known to need


def made_documents(questions: Iterable[Question]) -> list[Document]:
    """Return a document per page: some filler, and the answer of each question that needs it."""
    found: dict[str, list[str]] = {}
    for question in questions:
        note = f"The answer to {question.id} is: {' '.join(question.answer.split())}"
        for page in question.pages:
            found.setdefault(page, []).append(note)
    documents = []
    for page, notes in found.items():
        title = unquote(page.rstrip("/").rpartition("/")[2]).replace("_", " ") or page
        filler = (f"Line {number} of {title} says nothing." for number in range(_PADDING_LINES))
        text = "\n".join([title, "", _NOTICE, *filler, *notes])
        documents.append(Document(page, page, title, text))
    return documents
