"""Questions answered by browsing a corpus: what FRAMES and BrowseComp-Plus have in common.

The agent calls browser tools in a ReAct loop (`play`) until it answers or runs into a limit.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar
from urllib.parse import unquote

from agentbench_kv.adapters.agent_client import NULL_SENTENCE, call_text, think_block
from agentbench_kv.adapters.base import (
    AgentClient,
    Message,
    Outcome,
    Sample,
    ScriptedAgent,
    Task,
    TrialContext,
)
from agentbench_kv.adapters.browser.answers import final_answer, matches
from agentbench_kv.adapters.browser.browser import (
    RESULTS,
    TOOLS,
    VIEW_TOKENS,
    Browser,
    call_tool,
    estimate_tokens,
)
from agentbench_kv.adapters.browser.corpus import Corpus, Document, corpus_folder, pinned
from agentbench_kv.adapters.browser.judge import EVALUATION, Judge
from agentbench_kv.adapters.browser.questions import MADE, BrowsingQuestion, made_questions
from agentbench_kv.adapters.data import data_folder, file_sha256
from agentbench_kv.errors import ContextLimitError, PrerequisiteError, UsageError
from agentbench_kv.params import param
from agentbench_kv.results.records import Metric, TrialStatus

_MOST = 200  # characters of a scripted query or pattern
_PADDING_LINES = 120
_NOTICE = "This page was made by kvbench to test its browser. It is not an article."
_SYSTEM = """\
You answer questions with the help of a browser over a fixed collection of documents.
Use search to find documents, open to read them and find to look for a text in an open document.
Every result is a page with a cursor, shown as [cursor]; refer to earlier pages by their cursors.
Base the answer on what you read. When you know it, write no further call but one line:
Final answer: <the answer, as short as possible>"""
_End = tuple[TrialStatus, str | None]


@dataclass(kw_only=True, eq=False)
class BrowsingTask(Task):
    """A ReAct loop over the local browser; the score is EM-norm, an LLM judge a second column."""

    file: ClassVar[str]  # of the benchmark's questions, in the data folder
    synthetic: ClassVar[bool] = False

    corpus: str = param("", "imported corpus: a folder, or a name in the data folder")
    turns: int = param(40, "most assistant messages", low=1)
    context: int = param(
        0, "most estimated tokens of a conversation; 0: the model's own limit", low=0
    )
    view_tokens: int = param(VIEW_TOKENS, "most estimated tokens of a browser view", low=64)
    results: int = param(RESULTS, "search results a query", low=1, high=100)
    encoder: str = param("", "wordllama, or a local encoder's folder: dense search, not BM25")
    judge: str = param("", "URL|MODEL of an LLM judge, for a column beside the score")

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
    def questions(self) -> list[BrowsingQuestion]:
        """Read the benchmark's questions from the data folder, in their order."""

    def made_documents(self) -> list[Document]:
        """Make the synthetic variant's pages: filler, and the answers that need them."""
        found: dict[str, list[str]] = {}
        for question in self._questions.values():
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

    def data_provenance(self) -> dict[str, Any]:
        """Return hashes of the data and which split of it was taken."""
        return {}

    def transcript(self, entries: list[Message]) -> Any:
        """Return a transcript as it may be stored."""
        return entries

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        found = [Sample(id=name) for name in self._questions][:limit]
        _ = self._corpus  # refuses one that cannot be used
        return found

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        question = self._questions[sample.id]
        browser = Browser(self._corpus, view_tokens=self.view_tokens, results=self.results)
        opening: list[Message] = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": question.question},
        ]
        episode = play(context.client, browser, opening, turns=self.turns, context=self.context)
        return self._outcome(question, browser, episode)

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        """Return an agent's texts, with only the calls that fit into `turns`.

        `gold` searches, opens each page, looks the answer up and gives it; `corrupt` does the same
        and gives another answer; `null` answers nothing.
        """
        if agent == "null":
            return [NULL_SENTENCE]
        question = self._questions[sample.id]
        calls = [_use("search", query=question.question[:_MOST])]
        for page in question.pages:
            if self._corpus.number(page) is not None:
                calls += [_use("open", id=page), _use("find", pattern=question.answer[:_MOST])]
        said = " ".join(question.answer.split())
        given = said if agent == "gold" else f"certainly not {said}"
        return [*calls[: self.turns - 1], think_block("That is enough.") + f"Final answer: {given}"]

    def provenance(self) -> dict[str, Any]:
        return {
            "corpus": self._corpus.provenance(),
            **({"questions": MADE} if self._made else self.data_provenance()),
            "metric": "em_norm",
            "system_prompt_sha256": hashlib.sha256(_SYSTEM.encode()).hexdigest(),
            "judge": Judge.parse(self.judge).provenance() if self.judge else None,
        }

    @cached_property
    def _questions(self) -> dict[str, BrowsingQuestion]:
        found = made_questions() if self._made else self.questions()
        return {each.id: each for each in found}

    @property
    def _made(self) -> bool:
        """Whether the questions are made, too."""
        return False

    @cached_property
    def _corpus(self) -> Corpus:
        if self.corpus:
            corpus = Corpus.load(corpus_folder(self.corpus), self.encoder or None)
            family, name = self.name.partition("/")[0], corpus.info.name
            if self.synthetic and not corpus.info.synthetic:
                raise UsageError(f"corpus {name!r} is not synthetic; use --task {family}/test")
            if corpus.info.synthetic and not self.synthetic:
                raise UsageError(
                    f"corpus {name!r} is synthetic, and what is measured on it must not be "
                    f"called {self.name}; use --task {family}/synthetic"
                )
            return corpus
        if not self.synthetic:
            raise PrerequisiteError(
                f"{self.name} needs a corpus: kvbench data import-corpus SOURCE --name NAME, then "
                "--set corpus=NAME"
            )
        name = f"made-for-{self.name}"
        return Corpus.from_documents(self.made_documents(), name, synthetic=True)

    def _outcome(
        self, question: BrowsingQuestion, browser: Browser, episode: BrowsingEpisode
    ) -> Outcome:
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
        transcript = self.transcript([*episode.messages, entry])
        score = right if scored else None
        return Outcome(episode.status, score, metrics, transcript, episode.reason)


@dataclass(kw_only=True, eq=False)
class SyntheticTask(BrowsingTask):
    """The variant over made pages. Its questions are the benchmark's where their file is there."""

    synthetic = True

    source: str = param("", "made, or the hash of the questions' file: what is there if not given")

    def settings(self) -> dict[str, Any]:
        """Return every setting; what the questions are of, so that others are another run."""
        return super().settings() | {"source": self.source or self._source}

    @property
    def _made(self) -> bool:
        if self.source and self.source != self._source:
            raise PrerequisiteError(
                f"the questions of {self.name} are {self._source} now, not {self.source}; leave "
                "out source, or bring the file back"
            )
        return self._source == MADE

    @cached_property
    def _source(self) -> str:
        path = data_folder() / self.file
        return file_sha256(path)[:12] if path.is_file() else MADE


def _metrics(
    question: BrowsingQuestion, browser: Browser, episode: BrowsingEpisode
) -> dict[str, Metric]:
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


@dataclass
class BrowsingEpisode:
    """What was said and how it ended."""

    messages: list[Message]
    status: TrialStatus = TrialStatus.TURN_LIMIT  # `scored` if there is an answer to check
    reason: str | None = None  # why there is none
    answer: str = ""  # the agent's last message
    turns: int = 0
    calls: Counter[str] = field(default_factory=Counter)  # by tool; `errors`: calls not answered


def play(
    client: AgentClient, browser: Browser, messages: list[Message], *, turns: int, context: int = 0
) -> BrowsingEpisode:
    """Let the agent browse until it answers, cannot be read, or reaches a limit.

    An assistant message without a call is the answer. A call that the browser cannot answer gets
    an error as its result, and the episode goes on. `context` limits the conversation's estimated
    tokens; 0 leaves the model's own limit.
    """
    episode = BrowsingEpisode(messages, reason=f"no answer in {turns} turns")
    end: _End | None
    while episode.turns < turns:
        if context and sum(map(_tokens, messages)) > context:
            end = TrialStatus.CONTEXT_LIMIT, f"more than {context} estimated tokens"
        else:
            end = _step(client, browser, episode)
        if end:
            episode.status, episode.reason = end
            break
    return episode


def _step(client: AgentClient, browser: Browser, episode: BrowsingEpisode) -> _End | None:
    """Take one assistant message and run its calls; how the episode ended, if it did."""
    try:
        reply = client.chat(episode.messages, TOOLS)
    except ContextLimitError as error:
        return TrialStatus.CONTEXT_LIMIT, str(error)
    episode.turns += 1
    episode.messages.append(reply.message)
    if reply.finish_reason == "context_limit":
        return TrialStatus.CONTEXT_LIMIT, "the model's own limit"
    if reply.finish_reason == "length":
        return TrialStatus.UNPARSABLE, "the message was cut off at max_tokens"
    if reply.unparsable:
        return TrialStatus.UNPARSABLE, "a tool call that is not JSON"
    for call in reply.tool_calls:
        function = call["function"]
        seen = call_tool(browser, function["name"], function["arguments"])
        episode.calls[str(function["name"])] += 1
        episode.calls["errors"] += seen.failed
        answer = {"role": "tool", "tool_call_id": call["id"], "content": seen.text}
        episode.messages.append(answer)
    if reply.tool_calls:
        return None
    if not reply.content.strip():
        return TrialStatus.UNPARSABLE, "neither a call nor an answer"
    episode.answer = reply.content
    return TrialStatus.SCORED, None


def _tokens(message: Message) -> int:
    calls = message.get("tool_calls") or ()
    parts = [message.get("content"), message.get("reasoning_content")]
    parts += [f"{call['function']['name']} {call['function']['arguments']}" for call in calls]
    return estimate_tokens("\n".join(str(part) for part in parts if part))


def _use(tool: str, **arguments: str) -> str:
    return think_block(f"I use {tool}.") + call_text(tool, arguments)
