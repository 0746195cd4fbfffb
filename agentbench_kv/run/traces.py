"""Traces that became right answers, played again as SideQuest would have played them.

Each is played twice. First as it was: the task's own checker must find it right, and its messages
tell in hindsight when every result was last used. Then under `sidequest`, whose forks are answered
in hindsight, so that what the model is trained on is what the gateway will show it: the cursors,
the question, the rows that have left.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.base import Message, Sample
from agentbench_kv.adapters.probe.session import ChatSession
from agentbench_kv.engines.base import Capability, Generation, PhaseLabeller, Sampling
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.engines.scripted import ScriptedGeneration
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.base import Request
from agentbench_kv.gateway.exchange import Answer, ChatResult
from agentbench_kv.gateway.session import Session
from agentbench_kv.methods.dropping.sidequest import SideQuest
from agentbench_kv.methods.spans import SpanRange
from agentbench_kv.results.files import json_bytes
from agentbench_kv.run.recordings import (
    LONGEST_ANSWER,
    Answers,
    AnswerSource,
    RecordingEngine,
    recording_endpoint,
)
from agentbench_kv.run.trial import Attempt, TrialSetup, play_session, sample_key
from agentbench_kv.training.sidequest.annotation import Annotator, ExpiryQuestion, verdict
from agentbench_kv.training.sidequest.hindsight import CursorUse, Habit, awaited, cursor_uses, told
from agentbench_kv.training.sidequest.rows import SideQuestFork, SideQuestRow, held_out


@dataclass
class TraceCounts:
    """What became of the traces."""

    played: int = 0
    wrong: int = 0
    without_results: int = 0
    repeated: int = 0  # and not played: another source had the same


class TraceEngine(RecordingEngine):
    """Answers with given ids; its forks are asked for expired cursors."""

    capabilities = RecordingEngine.capabilities | {Capability.FORK, Capability.EVICT_SPANS}

    def __init__(
        self,
        answers: Answers,
        tokenizer_path: Path,
        ask: Callable[[int], list[int]],
    ) -> None:
        super().__init__(answers, tokenizer_path, 1 << 24)
        self._ask = ask
        self._asked: dict[str, int] = {}  # fork -> the request of its session that it is asked at
        # Request, ids of the session and the question, and those of them that had not left.
        self.asked: list[tuple[int, list[int], list[int]]] = []
        self.left: list[tuple[int, int, int]] = []  # begin, end, the session's tokens at that time

    def fork(self, session: str, new: str, labeller: PhaseLabeller) -> None:
        super().fork(session, new, labeller)
        self._asked[new] = len(self._begins[session]) + 1

    def evict_spans(self, session: str, spans: Sequence[SpanRange]) -> int:
        length = len(self._states[session].tokens)
        self.left += [(begin, end, length) for begin, end in spans]
        return sum(end - begin for begin, end in spans)

    def generate(self, session: str, sampling: Sampling) -> Generation:
        if session not in self._asked:
            return super().generate(session, sampling)
        state, request = self._sessions[session], self._asked[session]
        gone = {at for begin, end, _ in self.left for at in range(begin, end)}
        seen = [token for at, token in enumerate(state.tokens) if at not in gone]
        self.asked.append((request, list(state.tokens), seen))
        return ScriptedGeneration(state, self._ask(request), sampling, LONGEST_ANSWER)

    def whole(self, session: str) -> tuple[list[int], list[bool]]:
        """Return a closed session's ids, and which of them it answered with."""
        tokens = list(self._states[session].tokens)
        answered = [False] * len(tokens)
        for begin, end in zip(self._begins[session], self._ends[session], strict=True):
            answered[begin:end] = [True] * (end - begin)
        return tokens, answered


@dataclass
class _Hindsight:
    """A trace's cursors, as far as they have been closed."""

    session: ChatSession
    uses: list[CursorUse]
    habits: frozenset[Habit]
    lots: random.Random
    closed: set[int] = field(default_factory=set)
    asked: dict[int, ExpiryQuestion] = field(default_factory=dict)  # by request

    def question(self, request: int) -> ExpiryQuestion:
        left = [
            use for use in self.uses if use.brought <= request and use.cursor not in self.closed
        ]
        gone = told(left, request, self.habits)
        found = ExpiryQuestion(self.session, request, tuple(left), tuple(sorted(gone)))
        self.asked[request] = found
        return found

    def close_some(self, question: ExpiryQuestion) -> tuple[int, ...]:
        """Draw how many of the cursors to name are closed now (line 17); the rest stay open.

        Those are closed that expired first, as a model would have closed them: what shows that a
        result was used leaves after it.
        """
        count = self.lots.randint(0, len(question.told))
        order = sorted((use.last, use.cursor) for use in question.open)
        drawn = [cursor for _, cursor in order if cursor in question.told][:count]
        self.closed.update(drawn)
        return tuple(sorted(drawn))


def trace_rows(
    sources: Sequence[AnswerSource],
    every: int,
    annotate: Annotator,
    seed: int,
    counts: TraceCounts,
) -> Iterator[SideQuestRow]:
    """Yield the row of every trace whose answer is right; of traces that are the same, one.

    `every` is how many requests lie between two questions; `seed` draws which cursors are closed.
    """
    traces = []
    for source, sample in _distinct(sources, counts):
        counts.played += 1
        session = _right_session(source, sample)
        uses = cursor_uses(session) if session else []
        counts.wrong += session is None
        counts.without_results += session is not None and not uses
        if session and uses:
            traces.append((source, sample, session, uses))
    habits = awaited(uses for _, sample, _, uses in traces if not held_out(sample.id))
    for source, sample, session, uses in traces:
        lots = random.Random(f"{seed}/{sample.id}")
        hindsight = _Hindsight(session, uses, habits, lots)
        yield _row(source, sample, hindsight, every, annotate)


def _distinct(
    sources: Sequence[AnswerSource], counts: TraceCounts
) -> Iterator[tuple[AnswerSource, Sample]]:
    """Yield traces, the first of those that are the same: of one task and sample, token by token.

    Other answers to the same sample, or the same under other settings of the task, are another.
    """
    seen: set[str] = set()
    for source in sources:
        for sample in source.samples:
            answers = [list(ids) for ids in source.answers(sample_key(sample.id))]
            told = [source.spec.task, source.task.settings(), sample.id, answers]
            sha = hashlib.sha256(json_bytes(told)).hexdigest()
            if sha in seen:
                counts.repeated += 1
                continue
            seen.add(sha)
            yield source, sample


class HearingGateway(Gateway):
    """Keeps the last request's messages, its answer with them, and its tools."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    def _answer(self, state: Session, request: Request) -> Answer:
        for item in super()._answer(state, request):
            if isinstance(item, ChatResult):
                self.messages = (*map(dict, request.messages), item.message)
                self.tools = tuple(request.tools or ())
            yield item


def _right_session(source: AnswerSource, sample: Sample) -> ChatSession | None:
    """Play a trace as it was; None unless the task's checker finds it right."""
    engine = RecordingEngine(source.answers, model_path(source.model), 1 << 24)
    gateway = HearingGateway(engine, **_how(source))
    attempt = _play(source, sample, engine, gateway)
    if attempt.outcome.score != 1.0 or attempt.report.resets:
        return None
    return ChatSession(sample.id, gateway.messages, gateway.tools)


def _row(
    source: AnswerSource, sample: Sample, hindsight: _Hindsight, every: int, annotate: Annotator
) -> SideQuestRow:
    def answer(reasoning: str, command: str) -> list[int]:
        return gateway.written(_message(gateway, reasoning, command))

    def closes(request: int) -> list[int]:
        return answer("", verdict(hindsight.close_some(hindsight.question(request))))

    engine = TraceEngine(source.answers, model_path(source.model), closes)
    policy = SideQuest(fork_every=every, fork_tokens=LONGEST_ANSWER)
    gateway = Gateway(engine, policy=policy, **_how(source))
    attempt = _play(source, sample, engine, gateway)
    ids, answered = engine.whole(attempt.report.session)
    forks = []
    for request, read, seen in engine.asked:
        if request == len(hindsight.session.answers):
            continue  # nobody waits for what is asked at the last one
        at = _common(ids, read)
        asked = replace(hindsight.asked[request], shown=gateway.codec.decode(seen))
        learnt = answer(annotate(asked), verdict(asked.told))
        cursors = [use.cursor for use in asked.open]
        fork = (at, [*read[at:], *learnt], len(read) - at)
        forks.append(SideQuestFork(*fork, cursors, list(asked.expired), list(asked.told)))
    return SideQuestRow(sample.id, ids, answered, engine.left, forks, source.spec.task)


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return how many ids are the same at the beginning."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ids), len(others)))


def _message(gateway: Gateway, reasoning: str, command: str) -> dict[str, str]:
    """Return the answer to a question; a model without thoughts reasons in its text."""
    if gateway.codec.ids_of(("<think>",)):
        return {"role": "assistant", "reasoning_content": reasoning, "content": command}
    return {"role": "assistant", "content": f"{reasoning}\n{command}".strip()}


def _how(source: AnswerSource) -> dict[str, Any]:
    return {"tool_syntax": source.tool_syntax, "default_max_tokens": LONGEST_ANSWER}


def _play(
    source: AnswerSource, sample: Sample, engine: RecordingEngine, gateway: Gateway
) -> Attempt:
    with recording_endpoint(source.task, gateway) as url:
        return play_session(TrialSetup(source.spec, source.task, engine, gateway, url), sample, 0)
