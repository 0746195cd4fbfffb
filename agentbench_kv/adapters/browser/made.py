"""Documents made from questions, for testing the plumbing: they hold the answers in plain words."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

from agentbench_kv.adapters.browser.documents import Document

_PADDING_LINES = 120


def made_documents(notes: Iterable[tuple[str, str, str]]) -> list[Document]:
    """Return a document per page: some filler, and the answer of each question that needs it.

    A note is (page URL, question id, answer); pages may be repeated.
    """
    found: dict[str, list[str]] = {}
    for page, name, answer in notes:
        said = " ".join(answer.split())
        found.setdefault(page, []).append(f"The answer to {name} is: {said}")
    return [_document(page, lines) for page, lines in found.items()]


def _document(page: str, notes: list[str]) -> Document:
    title = unquote(page.rstrip("/").rpartition("/")[2]).replace("_", " ") or page
    opening = f"{title}\n\nThis page was made by kvbench to test its browser. It is not an article."
    filler = [f"Line {number} of {title} says nothing." for number in range(_PADDING_LINES)]
    return Document(page, page, title, "\n".join([opening, *filler, *notes]))
