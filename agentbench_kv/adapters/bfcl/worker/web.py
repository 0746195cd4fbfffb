"""The web of the search categories, inside a worker that may not reach the network.

A worker is given one of three webs: a corpus (BM25 over local pages), a recording (answers of an
earlier run), or a service of the harness's own process, which holds the user's key and goes to
the network for it. `WebSearchAPI` has the official class's name and methods and takes its place.
"""

from __future__ import annotations

import http.client
import importlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

SYNTHETIC = "synthetic"
_SNIPPET = 200
_SERVICE_S = 900.0


class Web(Protocol):
    """What answers a model's queries; results always have their snippet and are not cut."""

    def search(self, keywords: str, region: str) -> Any:
        """Return a list of `{"title", "href", "body"}`, or `{"error"}`."""

    def fetch(self, url: str, mode: str) -> dict[str, str]:
        """Return `{"content"}` or `{"error"}`."""


@dataclass(frozen=True)
class Page:
    """A page of a corpus."""

    url: str
    title: str
    text: str


class CorpusWeb:
    """BM25 over pages, at least one; equal scores keep the corpus's order."""

    def __init__(self, pages: Iterable[Page]) -> None:
        bm25: Any = importlib.import_module("rank_bm25")

        self._pages = list(pages)
        if not self._pages:
            raise ValueError("the corpus holds no page")
        self._by_url = {_without_fragment(page.url): page for page in self._pages}
        self._ranking = bm25.BM25Okapi([_words(f"{p.title} {p.text}") for p in self._pages])

    def search(self, keywords: str, region: str) -> Any:  # noqa: ARG002
        """Rank the pages that share a word with the query."""
        scores = self._ranking.get_scores(_words(keywords))
        order = sorted(range(len(self._pages)), key=lambda i: (-scores[i], i))
        found = [self._pages[i] for i in order if scores[i] > 0]
        return [{"title": p.title, "href": p.url, "body": p.text[:_SNIPPET]} for p in found]

    def fetch(self, url: str, mode: str) -> dict[str, str]:  # noqa: ARG002
        """Return a page's text, the same in every mode."""
        page = self._by_url.get(_without_fragment(url))
        if page is None:
            return {"error": f"An error occurred while fetching {url}: 404 Client Error: Not Found"}
        return {"content": page.text}


class RecordedWeb:
    """Answers of an earlier run; what was not asked then has none."""

    def __init__(self, file: Path) -> None:
        self._answers = read_recording(file)

    def search(self, keywords: str, region: str) -> Any:
        return self._answer("search", keywords, region)

    def fetch(self, url: str, mode: str) -> dict[str, str]:
        return dict(self._answer("fetch", url, mode))

    def _answer(self, *question: str) -> Any:
        missing = {"error": f"{question[1]}: not in the recording"}
        return self._answers.get(recording_key(*question), missing)


class ServiceWeb:
    """The harness's own process, asked over loopback with the token that it wants to see."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token

    def search(self, keywords: str, region: str) -> Any:
        return self._ask({"op": "search", "keywords": keywords, "region": region})

    def fetch(self, url: str, mode: str) -> dict[str, str]:
        return dict(self._ask({"op": "fetch", "url": url, "mode": mode}))

    def _ask(self, question: Mapping[str, str]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_SERVICE_S)
        try:
            body = json.dumps({"token": self._token, **question})
            connection.request("POST", "/", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                raise ConnectionError(f"the web service answered HTTP {response.status}")
            return json.loads(answer)
        finally:
            connection.close()


class WebSearchAPI:
    """The two tools, with the official class's arguments and errors."""

    web: Web

    def __init__(self) -> None:
        self._snippets = True

    def _load_scenario(self, initial_config: dict[str, Any], long_context: bool = False) -> None:  # noqa: ARG002
        self._snippets = bool(initial_config["show_snippet"])

    def search_engine_query(
        self, keywords: str, max_results: int | None = 10, region: str | None = "wt-wt"
    ) -> Any:
        limit = 10 if max_results is None else max(0, int(max_results))
        found = self.web.search(str(keywords), str(region or "wt-wt"))
        if not isinstance(found, list):
            return found
        if self._snippets:
            return found[:limit]
        return [{"title": each["title"], "href": each["href"]} for each in found[:limit]]

    def fetch_url_content(self, url: str, mode: str = "raw") -> dict[str, str]:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"Invalid URL: {url}")
        if mode not in ("raw", "markdown", "truncate"):
            return {"error": f"An error occurred while fetching {url}: Unsupported mode: {mode}"}
        return self.web.fetch(url, mode)


def recording_key(*question: str) -> str:
    """Return the key of ("search", keywords, region) or ("fetch", url, mode)."""
    return json.dumps(question, ensure_ascii=False)


def read_recording(file: Path) -> dict[str, Any]:
    """Return the answers by key of JSON lines `{"key", "result"}`; torn lines are left out."""
    answers: dict[str, Any] = {}
    if not file.exists():
        return answers
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            fields = json.loads(line)
            answers[fields["key"]] = fields["result"]
        except (ValueError, KeyError, TypeError):
            continue
    return answers


def corpus_files(folder: Path) -> list[Path]:
    """Return the files with pages: `documents.jsonl` of an imported corpus, or all `*.jsonl`."""
    imported = folder / "documents.jsonl"
    return [imported] if imported.is_file() else sorted(folder.glob("*.jsonl"))


def read_corpus(folder: Path) -> list[Page]:
    """Return the pages of a folder: objects with `url`, `text`, maybe `title`, a line each."""
    pages = []
    for file in corpus_files(folder):
        for line in file.read_text(encoding="utf-8").splitlines():
            fields = json.loads(line)
            pages.append(Page(fields["url"], fields.get("title") or "", fields["text"]))
    return pages


def synthetic_corpus(truths: Iterable[Mapping[str, Any]]) -> list[Page]:
    """Return a page for every source of the ground truth, which says the answer of its hop.

    It checks the plumbing. A score over it says nothing about searching the web.
    """
    return [
        Page(hop["source"], hop["subquestion"], f"{hop['subquestion']}: {hop['answer']}.")
        for truth in truths
        for hop in truth["source"]
    ]


def _without_fragment(url: str) -> str:
    return url.partition("#")[0]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
