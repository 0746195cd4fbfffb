"""Questions answered by browsing a corpus: what FRAMES and BrowseComp-Plus have in common.

Agents whose score is known in advance, as raw assistant texts for the browsing loop.

Documents made from questions, for testing the plumbing: they hold the answers in plain words.
"""

from __future__ import annotations

import hashlib
import json
import threading
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import unquote

from agentbench_kv.adapters.base import Message, Outcome, Sample, ScriptedAgent, Task, TrialContext
from agentbench_kv.adapters.browser.answers import final_answer, matches
from agentbench_kv.adapters.browser.browser import RESULTS, VIEW_TOKENS, Browser
from agentbench_kv.adapters.browser.corpus import (
    Corpus,
    CorpusInfo,
    Document,
    corpus_folder,
    pinned,
)
from agentbench_kv.adapters.browser.episode import Episode, play
from agentbench_kv.adapters.browser.judge import Judge
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.params import param
from agentbench_kv.results.records import Metric, TrialStatus

NULL_ANSWER = "I would rather not."
_MOST = 200


def script(
    agent: ScriptedAgent, question: str, answer: str, pages: Sequence[str], turns: int
) -> list[str]:
    """Write what an agent says, one text a turn, with only the calls that fit into `turns`.

    `gold` searches, opens each of `pages` (URLs), looks the answer up and gives it; `corrupt` does
    the same and gives another answer; `null` answers nothing.
    """
    if agent == "null":
        return [NULL_ANSWER]
    calls = [_call("search", {"query": question[:_MOST]})]
    for page in pages:
        calls += [_call("open", {"id": page}), _call("find", {"pattern": answer[:_MOST]})]
    said = " ".join(answer.split())
    given = said if agent == "gold" else f"certainly not {said}"
    last = f"<think>\nThat is enough.\n</think>\n\nFinal answer: {given}"
    return [*calls[: turns - 1], last]


def _call(name: str, arguments: dict[str, str]) -> str:
    payload = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<think>\nI use {name}.\n</think>\n\n<tool_call>\n{payload}\n</tool_call>"


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


EVALUATION = "evaluation"
"""Role of the transcript's last entry: question, gold answer, what was judged."""

_SYSTEM = """\
You answer questions with the help of a browser over a fixed collection of documents.
Use search to find documents, open to read them and find to look for a text in an open document.
Every result is a page with a cursor, shown as [cursor]; refer to earlier pages by their cursors.
Base the answer on what you read. When you know it, write no further call but one line:
Final answer: <the answer, as short as possible>"""


class _Loaded(NamedTuple):
    questions: dict[str, Question]
    corpus: Corpus


@dataclass(kw_only=True, eq=False)
class BrowsingTask(Task):
    """A ReAct loop over the local browser; the score is EM-norm, an LLM judge a second column."""

    synthetic: ClassVar[bool] = False

    corpus: str = param("", "imported corpus: a folder, or a name in the data folder")
    turns: int = param(40, "most assistant messages", low=1)
    context: int = param(
        0, "most estimated tokens of a conversation; 0: the model's own limit", low=0
    )
    view_tokens: int = param(VIEW_TOKENS, "most estimated tokens of a browser view", low=64)
    results: int = param(RESULTS, "search results a query", low=1, high=100)
    encoder: str = param("", "folder of a local encoder: dense search instead of BM25")
    judge: str = param("", "URL|MODEL of an LLM judge, for a column beside the score")
    _held: _Loaded | None = field(default=None, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse a judge that cannot be one, and an encoder of no corpus."""
        if self.judge:
            Judge.parse(self.judge)
        if self.encoder and not self.corpus:
            raise UsageError("encoder is for an imported corpus; set corpus too")

    @classmethod
    def stand_in(cls, settings: Mapping[str, str]) -> str | None:
        """Return the synthetic variant, which makes its corpus itself, if no corpus is named."""
        if cls.synthetic or settings.get("corpus"):
            return None
        return f"{cls.name.partition('/')[0]}/synthetic"

    def settings(self) -> dict[str, Any]:
        """Return every setting; the corpus with its hash, so that another one is another run."""
        return super().settings() | {"corpus": pinned(self.corpus)}

    @abstractmethod
    def questions(self) -> list[Question]:
        """Read the benchmark's questions from the data folder, in their order."""

    def made_documents(self, questions: Sequence[Question]) -> list[Document]:
        """Make documents for the synthetic variant when no corpus is named."""
        return made_documents(questions)

    def data_provenance(self) -> dict[str, Any]:
        """Return hashes of the data and which split of it was taken."""
        return {}

    def transcript(self, entries: list[Message]) -> Any:
        """Return a transcript as it may be stored."""
        return entries

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        return [Sample(id=name) for name in self._loaded().questions][:limit]

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        questions, corpus = self._loaded()
        question = questions[sample.id]
        browser = Browser(corpus, view_tokens=self.view_tokens, results=self.results)
        opening: list[Message] = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": question.question},
        ]
        episode = play(context.client, browser, opening, turns=self.turns, context=self.context)
        return self._outcome(question, browser, episode)

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        questions, corpus = self._loaded()
        question = questions[sample.id]
        pages = [page for page in question.pages if corpus.number(page) is not None]
        return script(agent, question.question, question.answer, pages, self.turns)

    def provenance(self) -> dict[str, Any]:
        """Return the corpus by name, hash and kind, the data's hashes, the metric, the judge."""
        return {
            "corpus": self._loaded().corpus.provenance(),
            **self.data_provenance(),
            "metric": "em_norm",
            "system_prompt_sha256": hashlib.sha256(_SYSTEM.encode()).hexdigest(),
            "judge": Judge.parse(self.judge).provenance() if self.judge else None,
        }

    def _loaded(self) -> _Loaded:
        with self._lock:
            if self._held is None:
                questions = self.questions()
                corpus = self._open_corpus(questions)
                self._held = _Loaded({each.id: each for each in questions}, corpus)
            return self._held

    def _open_corpus(self, questions: Sequence[Question]) -> Corpus:
        if self.corpus:
            encoder = Path(self.encoder).expanduser() if self.encoder else None
            corpus = Corpus.load(corpus_folder(self.corpus), encoder)
            self._check_kind(corpus.info)
            return corpus
        if not self.synthetic:
            raise PrerequisiteError(
                f"{self.name} needs a corpus: kvbench data import-corpus SOURCE --name NAME, then "
                "--set corpus=NAME"
            )
        made = self.made_documents(questions)
        return Corpus.from_documents(made, f"made-for-{self.name}", synthetic=True)

    def _check_kind(self, info: CorpusInfo) -> None:
        """Keep made corpora and the benchmark's name apart."""
        family = self.name.partition("/")[0]
        if self.synthetic and not info.synthetic:
            raise UsageError(f"corpus {info.name!r} is not synthetic; use --task {family}/test")
        if info.synthetic and not self.synthetic:
            raise UsageError(
                f"corpus {info.name!r} is synthetic, and what is measured on it must not be "
                f"called {self.name}; use --task {family}/synthetic"
            )

    def _outcome(self, question: Question, browser: Browser, episode: Episode) -> Outcome:
        scored = episode.status is TrialStatus.SCORED
        answer, marked = final_answer(episode.answer)
        right = float(scored and matches(answer, question.answer))
        metrics = _metrics(question, browser, episode)
        if scored:
            metrics |= {"em_norm": right, "answer_marked": int(marked)}
        if scored and self.judge:
            judge = Judge.parse(self.judge)
            verdict = judge.verdict(question.question, question.answer, episode.answer)
            metrics["judge"] = None if verdict.correct is None else float(verdict.correct)
            metrics["judge_error"] = verdict.error
        entry: Message = {
            "role": EVALUATION,
            "content": f"EM-norm {right:g}: {answer!r} against {question.answer!r}",
            "question": question.question,
            "gold": question.answer,
            "response": episode.answer,
            "answer": answer,
        }
        return Outcome(
            episode.status,
            score=right if scored else None,
            metrics=metrics,
            transcript=self.transcript([*episode.messages, entry]),
            error=episode.reason,
        )


def _metrics(question: Question, browser: Browser, episode: Episode) -> dict[str, Metric]:
    corpus = browser.corpus
    needed = {number for page in question.pages if (number := corpus.number(page)) is not None}
    seen = {corpus.number(url) for url in browser.opened}
    return {
        "corpus": corpus.info.label,
        "ended_by": episode.reason,
        "turns": episode.turns,
        "searches": episode.calls["search"],
        "opens": episode.calls["open"],
        "finds": episode.calls["find"],
        "tool_errors": episode.calls["errors"],
        "pages_right": len(needed & seen),
        "pages_asked": len(needed),
    }
