"""A small corpus whose search results, lines and matches can be worked out by hand."""

from __future__ import annotations

import pytest

from agentbench_kv.adapters.browser.corpus import Corpus, Document

pytest.importorskip("bm25s", reason="the extra [browser] is not installed")


def pages() -> list[Document]:
    """Return five made documents; `twin-a` and `twin-b` say the same."""
    long = "\n".join(f"Paragraph {n} speaks of river number {n}." for n in range(400))
    return [
        Document("twin-a", "https://made.test/a", "Twin", "The same heron stands in the reeds."),
        Document(
            "otter", "https://made.test/Otter%20Lake", "Otter Lake", "Otter.\n\nA quiet lake."
        ),
        Document("twin-b", "https://made.test/b", "Twin", "The same heron stands in the reeds."),
        Document("long", "https://made.test/long", "Rivers", long),
        Document(
            "wrapped",
            "https://made.test/wrapped",
            "Wrapped",
            "word " * 14 + "Crossing the\nborder of two lines. Café Müller.",
        ),
    ]


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """Return the documents as a corpus in memory."""
    return Corpus.from_documents(pages(), "five", synthetic=True)
