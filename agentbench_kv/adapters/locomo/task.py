"""The task `locomo/qa`: long conversations, then questions, one session for a conversation.

The agent reads the dialogue turn by turn, then a question.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from agentbench_kv.adapters.base import (
    Fact,
    MarkedAnswers,
    Message,
    Outcome,
    Reading,
    Recalled,
    Reply,
    Sample,
    ScriptedAgent,
    Task,
    TrialContext,
)
from agentbench_kv.adapters.locomo.abstention import abstains
from agentbench_kv.adapters.locomo.data import (
    ABSENT,
    ADVERSARIAL,
    SHA256,
    Dataset,
    Dialogue,
    Question,
    Utterance,
    load,
)
from agentbench_kv.adapters.locomo.disputed import Disputed, all_disputed
from agentbench_kv.adapters.locomo.evidence import recalled_shares, sent_share, share
from agentbench_kv.adapters.locomo.figures import (
    BY_MODEL,
    NOT_AVAILABLE,
    Answered,
    by_words,
    marks,
    nothing_recalled,
    trial_metrics,
)
from agentbench_kv.adapters.locomo.scoring import BertScore, Compare, Similarity, require_nltk
from agentbench_kv.encoders.loading import encoder_sha
from agentbench_kv.errors import UsageError
from agentbench_kv.params import param
from agentbench_kv.results.records import Metric, TrialStatus, number_of

SYSTEM = (
    "You will read what {0} and {1} said to each other in several sessions, each under its date, "
    "and then be asked about it. Give each answer as a short phrase and nothing else, in the "
    "words of the conversation where you can. Say when things happened by the sessions' dates."
)
# Where questions with false premises are asked, the way out is offered, as the authors offer it.
WAY_OUT = f" If the conversation does not tell, answer: {ABSENT}"
QUESTION = "Question: {}\nAnswer with a short phrase."
CORRUPT = "qqwx"  # answer of the corrupt agent: a word in no gold answer
RIGHT_FROM = 0.5  # F1 from which an answer counts as known in an audit of its evidence
_PAIR = ("right", "asked")
_PLAIN = re.compile(r"[\x20-\x7e]+")


@dataclass(frozen=True)
class DialogueHistory:
    """What is read before the questions."""

    messages: list[Message]  # a system message and one user message per turn
    spots: dict[str, int]  # ids of the turns that are read, and the numbers of their messages


def history(
    conversation: Dialogue,
    read: Collection[str] | None = None,
    way_out: bool = False,
) -> DialogueHistory:
    """Return a conversation, or those of its turns that are to be read; sessions have dates."""
    system = SYSTEM.format(*conversation.speakers) + WAY_OUT * way_out
    messages: list[Message] = [{"role": "system", "content": system}]
    spots: dict[str, int] = {}
    for session in conversation.sessions:
        date = f"[{session.date}]\n"
        for utterance in session.utterances:
            if read is not None and utterance.id not in read:
                continue
            spots[utterance.id] = len(messages)
            messages.append({"role": "user", "content": date + spoken(utterance)})
            date = ""
    return DialogueHistory(messages, spots)


def ask(question: Question) -> Message:
    return {"role": "user", "content": QUESTION.format(question.text)}


def spoken(utterance: Utterance) -> str:
    shown = f" [image: {utterance.caption}]" if utterance.caption else ""
    return f"{utterance.speaker}: {utterance.text}{shown}"


def facts(
    conversation: Dialogue, question: Question, f1: float, read: Collection[str]
) -> list[Fact]:
    """Return the turns a question's answer comes from, for an audit of what was evicted.

    Each is represented by its longest stretch of ASCII: a token may hold part of another character,
    and then the text of single tokens does not add up to the text that was sent.
    """
    utterances = conversation.utterances
    known = [utterances[id] for id in question.evidence if id in read]
    texts = (max(_PLAIN.findall(spoken(each)), key=len) for each in known)
    return [Fact(text, "others", "one_shot", f1 >= RIGHT_FROM) for text in texts]


@dataclass(kw_only=True)
class LocomoQA(Task):
    """Questions of categories 1 to 4; the score is F1 in Mem0's definition.

    With `ingest=conversation` a sample is a conversation: it is read once and its questions are
    asked one after the other in that session. With `ingest=question` a sample is a question: the
    conversation is read anew for each. Questions of the fifth category have figures of their own;
    with `adversarial=only` their share of right answers is the score, and nothing else is asked.
    """

    name = "locomo/qa"
    summary = "LoCoMo: questions about ten long conversations (data from the user)"
    figures_by: ClassVar[frozenset[str]] = frozenset({"similarity_model", "bertscore_model"})

    ingest: str = param(
        "conversation",
        "a session for each conversation, or for each question",
        choices=("conversation", "question"),
    )
    check: str = param(
        "on", "off takes another file of the same form for locomo10.json", choices=("on", "off")
    )
    similarity_model: str = param(
        "", "encoder for the similarity: wordllama, or a local encoder's folder"
    )
    bertscore_model: str = param("", "local model folder (roberta-large) for BERTScore")
    adversarial: str = param(
        "off",
        "the fifth category's questions: none, after the others and in figures of their own, alone",
        choices=("off", "apart", "only"),
        rare=True,
    )
    context: str = param(
        "full",
        "what is read before the questions: all, the last sessions, the last turns, nothing",
        choices=("full", "sessions", "turns", "none"),
        rare=True,
    )
    last: int = param(0, "how many last sessions or turns are read", low=0, rare=True)

    def __post_init__(self) -> None:
        """Refuse settings that do not go together."""
        self._check_settings()

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
        if status is TrialStatus.SCORED and not self._whole(questions, answered):
            status = TrialStatus.CONTEXT_LIMIT
            error = _no_room(len(answered), len(questions))
        disputed = self._disputed(conversation)
        known = {} if disputed is None else disputed
        answers = [each.document(known.get(each.question.index)) for each in answered]
        transcript = {"conversation": conversation.id, "answers": answers}
        metrics = trial_metrics(questions, answered, disputed)
        return Outcome(
            status,
            self.score_of(sample, metrics) if status is TrialStatus.SCORED else None,
            metrics,
            transcript,
            error,
            tuple(self._facts(conversation, answered)),
            self._reading(),
        )

    def nothing_right(self, sample: Sample) -> Mapping[str, Metric]:
        conversation, questions = self._asked(sample)
        return trial_metrics(questions, [], self._disputed(conversation))

    def nothing_recalled(self, sample: Sample) -> Mapping[str, Metric]:
        if self.context == "none":
            return {}
        conversation, questions = self._asked(sample)
        return nothing_recalled(questions, self._disputed(conversation))

    def mark(self, sample: Sample, transcript: Any) -> MarkedAnswers:
        """Mark recorded answers: by words, as models may not be here; evidence as it was said."""
        conversation, questions = self._asked(sample)
        if transcript is None:
            return MarkedAnswers(None, self.nothing_right(sample), None)
        said_of_all = transcript["answers"]
        spots = self._history(conversation).spots
        answered = [
            Answered(
                question,
                said["answer"],
                said["finish_reason"],
                0.0,
                marks(question, said["answer"], {}),
                sent_share(question, spots),
                said.get("evidence_recalled"),
            )
            for question, said in zip(questions[: len(said_of_all)], said_of_all, strict=True)
        ]
        disputed = self._disputed(conversation)
        known = {} if disputed is None else disputed
        named = [name for name in BY_MODEL if getattr(self, f"{name}_model")]
        documents = [each.document(known.get(each.question.index)) for each in answered]
        metrics = trial_metrics(questions, answered, disputed)
        whole = self._whole(questions, answered)
        return MarkedAnswers(
            self.score_of(sample, metrics) if whole else None,
            {
                **dict.fromkeys(nothing_recalled(questions, disputed)),
                **{f"{n}_{end}": None for n in BY_MODEL if n not in named for end in _PAIR},
                **by_words(metrics, named),
            },
            {
                "conversation": conversation.id,
                "answers": [by_words(each, named) for each in documents],
            },
        )

    def score_of(self, sample: Sample, metrics: Mapping[str, Metric]) -> float | None:
        column = "adversarial" if self.adversarial == "only" else "f1"
        counted = [each for each in self._asked(sample)[1] if self._counts(each)]
        return number_of(metrics, f"{column}_right") / len(counted)

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        return [_scripted(question, agent) for question in self._asked(sample)[1]]

    def provenance(self) -> dict[str, Any]:
        talks = self._data.conversations.values()
        return {
            "data_sha256": self._data.sha256,
            "published_data": self._data.sha256 == SHA256,
            "conversations": len(talks),
            "questions": sum(len(self._questions(each)) for each in talks),
            "nltk": version("nltk"),
            "similarity_model": Path(self.similarity_model).name or NOT_AVAILABLE,
            **({"similarity_sha256": encoder_sha(name)} if (name := self.similarity_model) else {}),
            "bertscore_model": Path(self.bertscore_model).name or NOT_AVAILABLE,
        }

    @cached_property
    def _data(self) -> Dataset:
        return load(check=self.check == "on")

    @cached_property
    def _encoders(self) -> dict[str, Compare]:
        found: dict[str, Compare] = {}
        if self.similarity_model:
            found["similarity"] = Similarity(self.similarity_model)
        if self.bertscore_model:
            found["bertscore"] = BertScore(Path(self.bertscore_model))
        return found

    def _check_settings(self) -> None:
        counted = self.context in ("sessions", "turns")
        if counted and not self.last:
            raise UsageError(f"context={self.context} needs --set last=N: how many of the last")
        if self.last and not counted:
            raise UsageError(f"last={self.last} needs --set context=sessions or context=turns")
        if self.ingest == "question" and self.adversarial == "apart":
            raise UsageError(
                "adversarial=apart needs ingest=conversation: a question that is a sample has a "
                "score, and these have none beside the others; --set adversarial=only asks them"
            )

    def _sample_ids(self, conversation: Dialogue) -> list[str]:
        questions = self._questions(conversation)
        if self.ingest == "conversation":
            return [conversation.id] if questions else []
        return [f"{conversation.id}/q-{question.index}" for question in questions]

    def _questions(self, conversation: Dialogue) -> tuple[Question, ...]:
        """Return what is asked, in order; what comes last changes no answer before it."""
        if self.adversarial == "only":
            return conversation.adversarial
        apart = conversation.adversarial if self.adversarial == "apart" else ()
        return conversation.questions + apart

    def _asked(self, sample: Sample) -> tuple[Dialogue, Sequence[Question]]:
        name, one, index = sample.id.partition("/q-")
        conversation = self._data.conversations[name]
        questions = self._questions(conversation)
        if not one:
            return conversation, questions
        return conversation, [each for each in questions if each.index == int(index)]

    def _counts(self, question: Question) -> bool:
        """Whether an answer to a question is part of the score."""
        return self.adversarial == "only" or question.category != ADVERSARIAL

    def _whole(self, questions: Sequence[Question], answered: Sequence[Answered]) -> bool:
        """Whether everything that counts was answered."""
        return not any(self._counts(each) for each in questions[len(answered) :])

    def _disputed(self, conversation: Dialogue) -> Mapping[int, Disputed] | None:
        """Return the disputed questions by their indices; None for another file."""
        if self._data.sha256 != SHA256:
            return None
        return all_disputed().get(conversation.id, {})

    def _facts(self, conversation: Dialogue, answered: Sequence[Answered]) -> Iterator[Fact]:
        read = self._read(conversation)
        ids = conversation.utterances.keys() if read is None else read
        for each in answered:
            if "f1" in each.marks:
                yield from facts(conversation, each.question, each.marks["f1"] or 0.0, ids)

    def _read(self, conversation: Dialogue) -> frozenset[str] | None:
        """Return the ids of the turns that are read; None if all are."""
        if self.context == "full":
            return None
        if self.context == "none":
            return frozenset()
        if self.context == "turns":
            return frozenset([*conversation.utterances][-self.last :])
        held = conversation.sessions[-self.last :]
        return frozenset(each.id for session in held for each in session.utterances)

    def _history(self, conversation: Dialogue) -> DialogueHistory:
        read = self._read(conversation)
        return history(conversation, read, way_out=self.adversarial != "off")

    def _reading(self) -> Reading | None:
        """Say that the first request of a session reads the conversation, with a question."""
        return None if self.context == "none" else Reading(turns=1)

    def _play(
        self, conversation: Dialogue, questions: Sequence[Question], context: TrialContext
    ) -> Iterator[Answered]:
        before = self._history(conversation)
        messages = [*before.messages]
        for question in questions:
            messages.append(ask(question))
            started = time.perf_counter()
            reply = context.client.chat(messages, max_tokens=context.max_tokens)
            seconds = time.perf_counter() - started
            if reply.finish_reason == "context_limit":
                return
            messages.append(reply.message)
            yield self._answered(conversation, question, reply, seconds, before.spots)

    def _answered(
        self,
        conversation: Dialogue,
        question: Question,
        reply: Reply,
        seconds: float,
        spots: Mapping[str, int],
    ) -> Answered:
        """Mark a reply; `spots` are the messages of the turns that were read."""
        recalled: Recalled | None = reply.recalled
        shares = recalled_shares(recalled, spots, conversation.utterances)
        answer = reply.content.strip()
        return Answered(
            question,
            answer,
            reply.finish_reason,
            seconds,
            marks(question, answer, self._encoders),
            sent_share(question, spots),
            share(question, shares),
            None if recalled is None else len(recalled.texts),
            None if shares is None else sum(shares.values()),
            spots,
            None if recalled is None else recalled.layers,
        )


def _no_room(answered: int, asked: int) -> str:
    if asked == 1:
        return "the conversation does not fit into the model's context"
    return (
        f"the model's context was full after {answered} of {asked} questions; use a model with a "
        "longer one, or --set ingest=question"
    )


def _scripted(question: Question, agent: ScriptedAgent) -> str:
    """Return what an agent says; the null agent gives every question the one same answer."""
    if agent == "null":
        return ABSENT
    adversarial = question.category == ADVERSARIAL
    if agent == "gold":
        return ABSENT if adversarial else question.answer
    return question.trap if question.trap and not abstains(question.trap) else CORRUPT
