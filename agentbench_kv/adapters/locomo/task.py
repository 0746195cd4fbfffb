"""The task `locomo/qa`: long conversations, then questions, one session for a conversation.

The agent reads the dialogue turn by turn, then a question.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from agentbench_kv.adapters.agent_client import NULL_SENTENCE
from agentbench_kv.adapters.base import (
    Fact,
    Message,
    Outcome,
    Sample,
    ScriptedAgent,
    Task,
    TrialContext,
)
from agentbench_kv.adapters.locomo.data import SHA256, Dataset, Dialogue, Question, Utterance, load
from agentbench_kv.adapters.locomo.scoring import (
    NOT_AVAILABLE,
    Answered,
    BertScore,
    Compare,
    Similarity,
    marks,
    require_nltk,
    trial_metrics,
)
from agentbench_kv.params import param
from agentbench_kv.results.records import Metric, TrialStatus

SYSTEM = (
    "You will read what {0} and {1} said to each other in several sessions, each under its date, "
    "and then be asked about it. Give each answer as a short phrase and nothing else, in the "
    "words of the conversation where you can. Say when things happened by the sessions' dates."
)
QUESTION = "Question: {}\nAnswer with a short phrase."
CORRUPT = "qqwx"  # answer of the corrupt agent: a word in no gold answer
RIGHT_FROM = 0.5  # F1 from which an answer counts as known in an audit of its evidence
_PLAIN = re.compile(r"[\x20-\x7e]+")


def history(conversation: Dialogue) -> list[Message]:
    """Return a system message and one user message per turn; a session's first has its date."""
    messages: list[Message] = [{"role": "system", "content": SYSTEM.format(*conversation.speakers)}]
    for session in conversation.sessions:
        for at, utterance in enumerate(session.utterances):
            date = f"[{session.date}]\n" if at == 0 else ""
            messages.append({"role": "user", "content": date + _line(utterance)})
    return messages


def ask(question: Question) -> Message:
    return {"role": "user", "content": QUESTION.format(question.text)}


def _line(utterance: Utterance) -> str:
    shown = f" [image: {utterance.caption}]" if utterance.caption else ""
    return f"{utterance.speaker}: {utterance.text}{shown}"


def facts(conversation: Dialogue, question: Question, f1: float) -> list[Fact]:
    """Return the turns a question's answer comes from, for an audit of what was evicted.

    Each is represented by its longest stretch of ASCII: a token may hold part of another character,
    and then the text of single tokens does not add up to the text that was sent.
    """
    utterances = conversation.utterances
    texts = (max(_PLAIN.findall(_line(utterances[id])), key=len) for id in question.evidence)
    return [Fact(text, "others", "one_shot", f1 >= RIGHT_FROM) for text in texts]


@dataclass(kw_only=True)
class LocomoQA(Task):
    """Questions of categories 1 to 4; the score is F1 in Mem0's definition.

    With `ingest=conversation` a sample is a conversation: it is read once and its questions are
    asked one after the other in that session. With `ingest=question` a sample is a question: the
    conversation is read anew for each.
    """

    name = "locomo/qa"
    summary = "LoCoMo: questions about ten long conversations (data from the user)"

    ingest: str = param(
        "conversation",
        "a session for each conversation, or for each question",
        choices=("conversation", "question"),
    )
    check: str = param(
        "on", "off takes another file of the same form for locomo10.json", choices=("on", "off")
    )
    similarity_model: str = param("", "local sentence-transformers folder for the similarity")
    bertscore_model: str = param("", "local model folder (roberta-large) for BERTScore")

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        """Return conversations (`conv-26`) or questions (`conv-26/q-0`) in the file's order."""
        require_nltk()
        _ = self._encoders  # refuses models that are not there
        return [
            Sample(id=name, cluster=conversation.id)
            for conversation in self._data.conversations.values()
            for name in self._sample_ids(conversation)
        ][:limit]

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        conversation, questions = self._asked(sample)
        answered: list[Answered] = []
        status, error = TrialStatus.SCORED, None
        try:
            for each in self._play(conversation, questions, context):
                answered.append(each)  # noqa: PERF402  what was answered counts after a timeout
        except TimeoutError as reached:
            status, error = TrialStatus.TIMEOUT, str(reached)
        if status is TrialStatus.SCORED and len(answered) < len(questions):
            status = TrialStatus.CONTEXT_LIMIT
            error = (
                "the conversation does not fit into the model's context"
                if len(questions) == 1
                else f"the model's context was full after {len(answered)} of {len(questions)} "
                "questions; use a model with a longer one, or --set ingest=question"
            )
        f1s = [each.marks["f1"] or 0.0 for each in answered]
        known = zip(answered, f1s, strict=True)
        needed = [fact for each, f1 in known for fact in facts(conversation, each.question, f1)]
        answers = [each.document() for each in answered]
        transcript = {"conversation": conversation.id, "answers": answers}
        score = fmean(f1s) if status is TrialStatus.SCORED else None
        metrics = trial_metrics(questions, answered)
        return Outcome(status, score, metrics, transcript, error, tuple(needed))

    def nothing_right(self, sample: Sample) -> Mapping[str, Metric]:
        return trial_metrics(self._asked(sample)[1], [])

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        _, questions = self._asked(sample)
        if agent == "gold":
            return [question.answer for question in questions]
        return [CORRUPT if agent == "corrupt" else NULL_SENTENCE] * len(questions)

    def provenance(self) -> dict[str, Any]:
        return {
            "data_sha256": self._data.sha256,
            "published_data": self._data.sha256 == SHA256,
            "conversations": len(self._data.conversations),
            "questions": sum(len(each.questions) for each in self._data.conversations.values()),
            "nltk": version("nltk"),
            "similarity_model": Path(self.similarity_model).name or NOT_AVAILABLE,
            "bertscore_model": Path(self.bertscore_model).name or NOT_AVAILABLE,
        }

    @cached_property
    def _data(self) -> Dataset:
        return load(check=self.check == "on")

    @cached_property
    def _encoders(self) -> dict[str, Compare]:
        found: dict[str, Compare] = {}
        if self.similarity_model:
            found["similarity"] = Similarity(Path(self.similarity_model))
        if self.bertscore_model:
            found["bertscore"] = BertScore(Path(self.bertscore_model))
        return found

    def _sample_ids(self, conversation: Dialogue) -> list[str]:
        if self.ingest == "conversation":
            return [conversation.id] if conversation.questions else []
        return [f"{conversation.id}/q-{question.index}" for question in conversation.questions]

    def _asked(self, sample: Sample) -> tuple[Dialogue, Sequence[Question]]:
        name, one, index = sample.id.partition("/q-")
        conversation = self._data.conversations[name]
        if not one:
            return conversation, conversation.questions
        return conversation, [each for each in conversation.questions if each.index == int(index)]

    def _play(
        self, conversation: Dialogue, questions: Sequence[Question], context: TrialContext
    ) -> Iterator[Answered]:
        messages = history(conversation)
        for question in questions:
            messages.append(ask(question))
            started = time.perf_counter()
            reply = context.client.chat(messages, max_tokens=context.max_tokens)
            seconds = time.perf_counter() - started
            if reply.finish_reason == "context_limit":
                return
            messages.append(reply.message)
            answer = reply.content.strip()
            found = marks(question, answer, self._encoders)
            yield Answered(question, answer, reply.finish_reason, seconds, found)
