"""Documents made from questions, for testing the plumbing: they hold the answers in plain words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from agentbench_kv.adapters.browser.documents import Document

_PADDING_LINES = 120


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
    return [_document(page, notes) for page, notes in found.items()]


def _document(page: str, notes: list[str]) -> Document:
    title = unquote(page.rstrip("/").rpartition("/")[2]).replace("_", " ") or page
    opening = f"{title}\n\nThis page was made by kvbench to test its browser. It is not an article."
    filler = [f"Line {number} of {title} says nothing." for number in range(_PADDING_LINES)]
    return Document(page, page, title, "\n".join([opening, *filler, *notes]))
