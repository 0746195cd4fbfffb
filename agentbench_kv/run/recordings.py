"""Sessions whose every token is known, turn by turn: what fidelity and probes play again.

The task runs as ever, with its own environment and checker; the engine says what is given and
notes what it was fed. So prompts are those of the model's own template, and labels the gateway's.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.base import Sample, Task
from agentbench_kv.adapters.probe.gold import said_in
from agentbench_kv.adapters.probe.session import ChatSession, read_sessions
from agentbench_kv.engines.base import Capability, Generation, KVStats, PhaseLabeller, Sampling
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.engines.scripted import ScriptedEngine, ScriptedGeneration, ScriptedSession
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.client import InProcessClient
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.methods.base import CLOSINGS, Method, Phase
from agentbench_kv.methods.dropping.policy import DropMethod
from agentbench_kv.methods.dropping.sidequest import SideQuestPrompted
from agentbench_kv.phases.syntax import ToolSyntax
from agentbench_kv.phases.tokens import TokenCodec
from agentbench_kv.registry import load_task
from agentbench_kv.results.records import LOST, TrialStatus
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.run.kinds import Kind, Labelled, kinds_of
from agentbench_kv.run.spec import RunSpec, resolve
from agentbench_kv.run.trial import TrialSetup, play_session, sample_key

_Answered = tuple[Labelled, Labelled, int | None]  # a prompt, its answer, what stayed before it
Answers = Callable[[str], Sequence[Sequence[int]]]  # session id -> ids of its answers, in order
LONGEST_ANSWER = 1 << 16
_CUT_OFF = LOST | {TrialStatus.TIMEOUT, TrialStatus.USER_ERROR}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordedTurn:
    """What a session was fed, then what it answered, with its end."""

    prompt: Labelled
    answer: Labelled
    kinds: tuple[Kind, ...]  # of the answer's tokens
    # Under a method that drops messages: how much of the session stayed before the prompt, where
    # the rest of it was written anew, and the tokens of the prompt that were not new then.
    keep: int | None = None
    again: int = 0


@dataclass(frozen=True)
class Recording:
    """A session, token by token."""

    sample: str
    cluster: str | None
    turns: tuple[RecordedTurn, ...]

    @property
    def tokens(self) -> int:
        return sum(len(turn.prompt) + len(turn.answer) for turn in self.turns)

    @property
    def sha(self) -> str:
        """Hash of every id and label."""
        parts = [[turn.prompt, turn.answer] for turn in self.turns]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class RecordingEngine(ScriptedEngine):
    """Answers with given ids, and keeps every session's turns beyond its end."""

    # No forks.
    capabilities = frozenset({Capability.CONSTRAIN, Capability.FORCE, Capability.REWIND})

    def __init__(
        self, answers: Answers, tokenizer_path: Path, context_limit: int, *, ends: bool = False
    ) -> None:
        super().__init__(lambda _: (), tokenizer_path=tokenizer_path, context_limit=context_limit)
        self._answers = answers
        self._ends_there = ends  # whether what lies behind the last answer is nobody's
        self._states: dict[str, ScriptedSession] = {}
        self._begins: dict[str, list[int]] = {}  # of every answer, in the session's tokens
        self._ends: dict[str, list[int]] = {}
        self._answered: dict[str, list[_Answered]] = {}  # turns whose answer has ended
        self._read: dict[str, int] = {}  # where what is read since the last answer begins
        self._kept: dict[str, int] = {}  # where that was written anew

    def open(self, session: str, labeller: PhaseLabeller) -> None:
        if session in self._states:
            raise UsageError(f"session {session} started over: what it was fed is not one text")
        super().open(session, labeller)
        self._states[session] = self._sessions[session]
        self._begins[session], self._ends[session] = [], []
        self._answered[session], self._read[session] = [], 0

    def rewind(self, session: str, length: int) -> None:
        self._end_answer(session)
        state = self._sessions[session]
        del state.tokens[length:], state.phases[length:]
        self._read[session] = self._kept[session] = length

    def extend(self, session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        self._end_answer(session)
        super().extend(session, tokens, phases)

    def force(self, session: str, tokens: Sequence[int], *, predict: bool = False) -> Generation:
        self._end_answer(session)
        self._begins[session].append(len(self._states[session].tokens))
        return super().force(session, tokens, predict=predict)

    def generate(self, session: str, sampling: Sampling) -> Generation:
        self._end_answer(session)
        state, turn = self._states[session], len(self._begins[session])
        self._begins[session].append(len(state.tokens))
        answers = self._answers(session)
        ids = answers[turn] if turn < len(answers) else self._tokenizer.encode("Done.")
        return ScriptedGeneration(state, ids, sampling, self.info.context_limit - len(state.tokens))

    def close(self, session: str) -> KVStats:
        self._end_answer(session)
        return super().close(session)

    def turns(self, session: str, codec: TokenCodec, syntax: ToolSyntax) -> Iterator[RecordedTurn]:
        """Yield the turns of a closed session; those without an answer are left out."""
        known = len(self._answers(session)) if self._ends_there else None
        for prompt, answer, keep in islice(self._answered[session], known):
            if answer:
                yield RecordedTurn(prompt, answer, kinds_of(codec, answer, syntax), keep)

    def _end_answer(self, session: str) -> None:
        if session not in self._ends or len(self._ends[session]) == len(self._begins[session]):
            return
        state, begin = self._states[session], self._begins[session][-1]
        first, end = self._read[session], len(state.tokens)
        self._ends[session].append(end)
        whole = tuple(zip(state.tokens[first:], state.phases[first:], strict=True))
        prompt, answer = whole[: begin - first], whole[begin - first :]
        # What comes before an empty answer is read with what follows.
        keep = self._kept.pop(session, None) if answer else None
        self._read[session] = end if answer else first
        self._answered[session].append((prompt, answer, keep))


@dataclass(frozen=True)
class AnswerSource:
    """Samples of a task, and what is answered in the session of each, in a model's tokens."""

    spec: RunSpec
    task: Task
    samples: Sequence[Sample]
    answers: Answers
    model: str  # `micro` or a Hugging Face folder
    tool_syntax: str
    ends: bool = False  # whether a session ends with the last of its answers
    sessions: int | None = None  # of the run that they are from, with those that are left out


@dataclass(frozen=True)
class RecordedRun:
    """A run's sessions that can be played again, and how it read and wrote them."""

    recordings: list[Recording]
    model: str
    tool_syntax: str
    sessions: int  # with those that are left out


@contextmanager
def gold_source(
    task: str,
    model: str,
    limit: int | None,
    settings: Mapping[str, str],
    tool_syntax: str = "auto",
    seed: int = 0,
) -> Iterator[AnswerSource]:
    """Give golden answers of a task, in a model's own tokens and tool syntax."""
    asked = RunSpec("scripted", "gold", "full", None, task, limit=limit, seed=seed, tool_syntax="")
    spec = resolve(asked, settings)
    played = load_task(spec.task).create(spec.task_params)
    nobody = RecordingEngine(lambda _: [], model_path(model), 1 << 24)
    writer = Gateway(nobody, tool_syntax=tool_syntax)
    try:
        samples = {sample_key(sample.id): sample for sample in played.samples(limit, spec.seed)}
        end = [int(writer.codec.tokenizer.eos_token_id)]

        def answers(session: str) -> list[list[int]]:
            texts = played.script(samples[session.rpartition("|")[2]], "gold")
            if writer.syntax.name == "hermes":  # which scripts are written in
                return [writer.codec.encode(text) + end for text in texts]
            return [writer.written(said_in(text, number)) for number, text in enumerate(texts)]

        yield AnswerSource(spec, played, list(samples.values()), answers, model, tool_syntax)
    finally:
        played.close()


@contextmanager
def run_source(folder: Path, limit: int | None = None) -> Iterator[AnswerSource]:
    """Give the answers of a run's trials, the first of each sample.

    What cannot be played again is left out, and said. UsageError if nothing can, or the folder is
    not as a run leaves it.
    """
    reader = RunReader(folder)
    spec = RunSpec.of(reader.info.spec)
    trials = [trial for trial in reader.trials() if not trial.trial]
    found: dict[str, list[list[int]]] = {}
    for trial in trials:
        if trial.status not in _CUT_OFF and trial.transcript is not None:
            found[trial.sample_id] = answered_ids(folder / trial.transcript)
    bare = [name for name, ids in found.items() if not ids]
    _leave_out("were cut off", [t.sample_id for t in trials if t.status in _CUT_OFF])
    _leave_out("have no transcript", [t.sample_id for t in trials if t.transcript is None])
    _leave_out("have no tokens in their transcripts", bare)
    given = {sample_key(name): ids for name, ids in found.items() if ids}
    if not given:
        raise UsageError(
            f"{folder} has no whole trial with its tokens; name a run of a local engine"
        )
    task = load_task(spec.task).create(spec.task_params)
    try:
        samples = [s for s in task.samples(spec.limit, spec.seed) if sample_key(s.id) in given]
        known = {sample.id for sample in samples}
        _leave_out("are not of the run's samples", [n for n in found if n not in {*known, *bare}])

        def answers(session: str) -> list[list[int]]:
            return given[session.rpartition("|")[2]]

        about = (answers, spec.model, spec.tool_syntax or "auto")
        count = max(len(trials), (reader.info.expected_trials or 0) // spec.trials)
        yield AnswerSource(spec, task, samples[:limit], *about, ends=True, sessions=count)
    finally:
        task.close()


def answered_ids(path: Path) -> list[list[int]]:
    """Return the ids of every answer in a transcript; none where it has none (of fidelity, say).

    UsageError for what is no transcript.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
        parts = document.get("generated", [])
        found = [[int(each) for each in part.split()] for part in parts]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no transcript of a run: {error}") from error
    if any(each < 0 for ids in found for each in ids):
        raise UsageError(f"{path} is no transcript of a run: a token has a number below 0")
    return found


def _leave_out(why: str, samples: Sequence[str], of: str = "the run's trials") -> None:
    if samples:
        said = ", ".join(samples[:3])
        _log.warning("%d of %s %s and are left out: %s", len(samples), of, why, said)


def record_gold(
    task: str, model: str, limit: int | None, settings: Mapping[str, str], tool_syntax: str = "auto"
) -> list[Recording]:
    """Play a task's golden answers, in a model's own tokens; samples whose gold fails are left out.

    `model` is `micro` or a Hugging Face folder.
    """
    with gold_source(task, model, limit, settings, tool_syntax) as source:
        return _record(source)


def record_run(folder: Path, limit: int | None = None) -> RecordedRun:
    """Play a run's trials again, the first of each sample."""
    with run_source(folder, limit) as source:
        found = _record(source)
        count = len(found) if source.sessions is None else source.sessions
        return RecordedRun(found, source.model, source.tool_syntax, count)


def record_file(
    path: Path,
    model: str,
    limit: int | None = None,
    tool_syntax: str = "auto",
    method: Method | None = None,
    context: int = 1 << 24,
) -> list[Recording]:
    """Read trajectories of any agent, one JSON object with `messages` and `tools` a line.

    At most `limit` of those in which an agent answers; the others are left out. Their answers are
    written as the model's template and tool syntax write them. Under a `method` that drops messages
    as text, every request is what a gateway would make of it; a UsageError for one that no gateway
    could play ahead.
    """
    if method is not None:
        refuse_unplayable(method)
    policy = method if isinstance(method, DropMethod) else None
    engine = RecordingEngine(lambda _: [], model_path(model), context)
    limits: dict[str, Any] = {"tool_syntax": tool_syntax, "default_max_tokens": LONGEST_ANSWER}
    gateway = Gateway(engine, policy=policy, **limits)
    found: list[Recording] = []
    for number, session in enumerate(read_sessions(path)):
        if len(found) == limit:
            break
        turns = _said(engine, gateway, session, f"{number}|{session.id}")
        if turns:
            found.append(Recording(session.id, session.cluster, turns))
    if not found:
        raise UsageError(f"{path} has no session with an answer of the agent")
    if len({recording.sample for recording in found}) < len(found):
        raise UsageError(f"{path}: two sessions have the same `id`; give each its own")
    return found


def refuse_other_labels(closing: str) -> None:
    """Refuse a method that reads closing markers otherwise than recordings are labelled."""
    if closing != CLOSINGS[0]:
        raise UsageError(f"closing={closing}: sessions are labelled once for all")


def refuse_unplayable(method: Method) -> None:
    """Refuse a policy whose requests are not known before a model has answered."""
    if not isinstance(method, DropMethod):
        return
    if method.exec != "text":
        raise UsageError(
            f"method {method.label!r} with exec={method.exec}: recorded messages are sent without "
            "what is dropped, which is exec=text"
        )
    if method.foresees:
        raise UsageError(
            f"method {method.label!r} must know which results are needed later, and of recorded "
            "messages nobody does"
        )
    if method.summary_tokens or isinstance(method, SideQuestPrompted):
        raise UsageError(
            f"method {method.label!r} asks the model what to drop, and recorded messages are "
            "planned before it has answered"
        )


def _said(
    engine: RecordingEngine, gateway: Gateway, session: ChatSession, name: str
) -> tuple[RecordedTurn, ...]:
    """Return the turns of a recorded session."""
    if not session.answers:
        return ()
    again = [0]
    with InProcessClient(gateway, name) as client:
        for at in session.answers:
            client.force(session.messages[:at], session.messages[at], session.tools or None)
            again.append(client.report.stats.recomputed)
    turns = engine.turns(name, gateway.codec, gateway.syntax)
    return tuple(
        replace(turn, again=now - before)
        for turn, (before, now) in zip(turns, pairwise(again), strict=True)
    )


def _record(source: AnswerSource) -> list[Recording]:
    engine = RecordingEngine(source.answers, model_path(source.model), 1 << 24, ends=source.ends)
    gateway = Gateway(engine, tool_syntax=source.tool_syntax, default_max_tokens=LONGEST_ANSWER)
    found: list[Recording] = []
    anew: list[str] = []
    with recording_endpoint(source.task, gateway) as url:
        setup = TrialSetup(source.spec, source.task, engine, gateway, url)
        for sample in source.samples:
            attempt = play_session(setup, sample, trial=0)
            turns = tuple(engine.turns(attempt.report.session, gateway.codec, gateway.syntax))
            whole = source.ends or attempt.outcome.status is TrialStatus.SCORED
            if turns and whole and attempt.report.resets == 0:
                found.append(Recording(sample.id, sample.cluster, turns))
            else:
                anew.append(sample.id)
    if found and source.ends:
        _leave_out("came to no one session, played again,", anew)
    elif found:
        _leave_out("were not answered to their end", anew, "the golden sessions")
    if not found:
        raise PrerequisiteError(
            f"no session of {source.spec.task} could be recorded: {attempt.outcome}"
        )
    return found


@contextmanager
def recording_endpoint(task: Task, gateway: Gateway) -> Iterator[str | None]:
    """Serve a gateway to a task that asks an endpoint; None for any other."""
    if not task.needs_endpoint:
        yield None
        return
    with BackgroundServer(gateway, concurrency=1) as server:
        yield server.url
