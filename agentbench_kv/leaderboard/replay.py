"""Playing the recorded tokens through the task again: prompts, answers, scores, accounts.

No model is computed. Gateway, task and checker are those of a run, and the engine says what the
record says. What comes out is the only record that these tokens can have.

An engine that says what a record holds, token by token, and keeps the account that follows.

Lengths under a token-level method follow from the method alone (`SessionLedger`), so a recorded
session has only one honest KV account, and no model is needed to derive it.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.base import Sample, Task
from agentbench_kv.engines.base import (
    Engine,
    EngineInfo,
    FinishReason,
    Generation,
    KVStats,
    PhaseLabeller,
    Sampling,
)
from agentbench_kv.engines.core.session import SessionLedger
from agentbench_kv.engines.serving.wire import ModelFacts, read_model
from agentbench_kv.errors import ContextLimitError, KVBenchError
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.leaderboard.evidence import (
    CUT_OFF,
    Checks,
    Evidence,
    Note,
    Stop,
    Wrong,
    differs,
    place,
    shown,
)
from agentbench_kv.leaderboard.physics import account
from agentbench_kv.methods.base import Method, Phase
from agentbench_kv.methods.full import Full
from agentbench_kv.methods.spans import SpanMethod
from agentbench_kv.registry import make_method
from agentbench_kv.results.records import TrialRecord, TrialStatus, TurnRecord
from agentbench_kv.results.store import TrialKey
from agentbench_kv.run.trial import (
    Attempt,
    TrialSetup,
    play_session,
    sample_key,
    transcript_document,
    trial_record,
    turn_records,
)

Recorded = Callable[[str], list[list[int]]]


"""From a session's id to the ids of its generations, in order."""


@dataclass
class _Session:
    labeller: PhaseLabeller
    ledger: SessionLedger
    length: int = 0
    waiting: int = 0
    """Tokens the cache does not hold yet: a prompt, and what was generated last."""
    prompt: int = 0


class RecordedEngine(Engine):
    """Replays recorded ids; the k-th generation of a session id is its k-th record.

    Parameters
    ----------
    recorded : callable
    info : EngineInfo
        Of the engine that is stood in for: its tokenizer's folder, its limits.
    ledger : callable
        Makes the account of a session.
    """

    def __init__(
        self, recorded: Recorded, info: EngineInfo, ledger: Callable[[], SessionLedger]
    ) -> None:
        self.info = info
        self._recorded = recorded
        self._ledger = ledger
        self._sessions: dict[str, _Session] = {}
        self._turns: dict[str, int] = {}
        self._lock = threading.Lock()

    def open(self, session: str, labeller: PhaseLabeller) -> None:
        """Start an empty session; after a reset its records go on where they were."""
        self._sessions[session] = _Session(labeller, self._ledger())

    def extend(self, session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        """Append prompt tokens."""
        del phases
        state = self._sessions[session]
        if state.length + len(tokens) > self.info.context_limit:
            raise ContextLimitError(f"the limit is {self.info.context_limit} tokens")
        state.length += len(tokens)
        state.waiting += len(tokens)
        state.prompt += len(tokens)

    def generate(self, session: str, sampling: Sampling) -> Generation:
        """Replay the session's next generation."""
        with self._lock:
            turn = self._turns.get(session, 0)
            self._turns[session] = turn + 1
        generations = self._recorded(session)
        if turn >= len(generations):
            raise KVBenchError(f"the record has {len(generations)} generations, one more was asked")
        limit = self.info.context_limit
        return _RecordedGeneration(self._sessions[session], generations[turn], sampling, limit)

    def stats(self, session: str) -> KVStats:
        """Return a snapshot of the account."""
        state = self._sessions[session]
        return replace(state.ledger.snapshot(), logical=state.ledger.fed + state.waiting)

    def close(self, session: str) -> KVStats:
        """Forget the session and return its account."""
        stats = self.stats(session)
        del self._sessions[session]
        return stats

    def unsaid(self, session: str) -> int:
        """Return how many recorded generations nobody asked for."""
        return len(self._recorded(session)) - self._turns.get(session, 0)


class _RecordedGeneration(Generation):
    """One generation being replayed; it ends where the record does, for a reason that must be."""

    def __init__(self, state: _Session, ids: list[int], sampling: Sampling, limit: int) -> None:
        self._state = state
        self._ids = ids
        self._sampling = sampling
        self._limit = limit
        self._start = time.perf_counter()

    def __iter__(self) -> Iterator[int]:
        """Yield the recorded ids."""
        state = self._state
        state.ledger.begin_turn(state.prompt)
        state.prompt = 0
        for count, token in enumerate(self._ids, start=1):
            if self.finish_reason is not None:
                raise KVBenchError(f"the record goes on after {self.finish_reason.value}")
            state.ledger.forward(state.waiting)
            state.ledger.sampled()
            state.labeller.label(token)
            state.length, state.waiting = state.length + 1, 1
            self.finish_reason = self._reason(token, count)
            self.last_token_s = time.perf_counter() - self._start
            self.first_token_s = self.first_token_s or self.last_token_s
            yield token
        if not self._ids and state.length >= self._limit:
            self.finish_reason = FinishReason.CONTEXT_LIMIT
        if self.finish_reason is None:
            raise KVBenchError(f"the record ends after {len(self._ids)} tokens for no reason")
        state.ledger.end_turn()

    def cancel(self) -> None:
        """Do nothing: a record is as long as it is."""

    def _reason(self, token: int, count: int) -> FinishReason | None:
        asked = self._sampling.stop is not None and self._sampling.stop(token)
        if asked or token in self._sampling.stop_token_ids:
            return FinishReason.STOP
        if count >= self._sampling.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.CONTEXT_LIMIT if self._state.length >= self._limit else None


_OF_THE_CLOCK = frozenset({"seconds"})


_COUNTED = ("logical", "prefill_tokens", "longest_prefill", "decode_tokens")


_RELATIVE = 1e-9


_FEW_CUT_OFF = 0.05


class Replay:
    """The trials of a run, played again from their records.

    Parameters
    ----------
    evidence : Evidence
        With transcripts.
    task : Task
        Of the run's spec, on this machine.
    folder : Path
        The run's model, of which config and tokenizer are read.
    """

    def __init__(self, evidence: Evidence, task: Task, folder: Path) -> None:
        self._evidence = evidence
        self._task = task
        self._exact = account_is_known(evidence)
        facts = read_model(folder)
        self._engine = RecordedEngine(self._recorded, self._info(facts, folder), self._ledger)
        self._facts = facts
        self._gateway = Gateway(self._engine, default_max_tokens=evidence.spec.max_tokens)
        self._records = {
            (trial, sample_key(sample)): transcript.tokens
            for (sample, trial), transcript in evidence.transcripts.items()
        }

    def check(self, samples: Mapping[str, Sample]) -> Checks:
        """Play every trial and compare what comes out with what was recorded."""
        spec = replace(self._evidence.spec, timeout_s=3600.0)
        if not self._task.needs_endpoint:
            setup = TrialSetup(spec, self._task, self._engine, self._gateway, None)
            yield from self._check_all(setup, samples)
            return
        with BackgroundServer(self._gateway, concurrency=1) as server:
            setup = TrialSetup(spec, self._task, self._engine, self._gateway, server.url)
            yield from self._check_all(setup, samples)

    def _check_all(self, setup: TrialSetup, samples: Mapping[str, Sample]) -> Checks:
        vocabulary = len(self._gateway.codec.tokenizer)
        trials = self._evidence.trials
        ended = sum(record.status in CUT_OFF for record in trials.values())
        if ended:
            kind = Note if ended <= _FEW_CUT_OFF * len(trials) else Stop
            yield kind(f"{ended} trials ended by the clock or an error, which no record can prove")
        if not self._exact and self._evidence.spec.engine != "scripted":
            yield Note("what the cache held is as reported: lengths alone do not tell it here")
        for key, record in trials.items():
            ids = [each for part in self._evidence.transcripts[key].tokens for each in part]
            if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
                yield Wrong(place(key, "transcript: generated"), "holds ids of no token")
                continue
            attempt = play_session(setup, samples[key[0]], key[1])
            yield from self._compare(key, record, samples[key[0]], attempt)

    def _compare(
        self, key: TrialKey, record: TrialRecord, sample: Sample, attempt: Attempt
    ) -> Checks:
        report = attempt.report
        if report.prompt_sha != record.prompt_sha and record.usage.requests:
            yield differs(place(key, "prompt_sha"), record.prompt_sha, report.prompt_sha)
            return
        if record.status in CUT_OFF:
            return
        again = trial_record(sample, attempt, record.transcript or "", 1)
        wrong = list(self._differences(key, record, again))
        if any(isinstance(each, Stop) for each in wrong):
            yield from wrong
            return
        wrong += self._turns(key, turn_records(sample, key[1], report))
        if left := self._engine.unsaid(report.session):
            text = f"holds {left} generations that the task does not ask for"
            wrong.append(Wrong(place(key, "transcript: generated"), text))
        yield from wrong or self._transcript(key, attempt)

    def _differences(self, key: TrialKey, said: TrialRecord, derived: TrialRecord) -> Checks:
        broke = derived.status is TrialStatus.INFRA_ERROR and self._task.needs_endpoint
        if broke and said.status is not derived.status:
            yield Stop(f"the replay broke in {place(key, 'status')}: {shown(derived.error)}")
            return
        if said.status is not derived.status:
            reason = f"{derived.status.value} ({derived.error})"
            yield differs(place(key, "status"), said.status.value, reason)
            return
        worded = said.status is TrialStatus.SCORED and not self._task.needs_endpoint
        names = ("score", "session_resets", "cluster", *(("error",) if worded else ()))
        for name in names:
            if not _alike(getattr(said, name), getattr(derived, name)):
                yield differs(place(key, name), getattr(said, name), getattr(derived, name))
        for name in sorted(said.metrics.keys() | derived.metrics.keys()):
            one, other = said.metrics.get(name), derived.metrics.get(name)
            if not _alike(one, other):
                yield differs(place(key, f"metrics.{name}"), one, other)
        for name in ("prompt_tokens", "completion_tokens", "requests"):
            if getattr(said.usage, name) != getattr(derived.usage, name):
                one, other = getattr(said.usage, name), getattr(derived.usage, name)
                yield differs(place(key, f"usage.{name}"), one, other)
        found, expected = account(said.kv), account(derived.kv)
        for name in expected if self._exact else self._counted(said):
            if not _alike(found[name], expected[name]):
                yield differs(place(key, f"kv.{name}"), found[name], expected[name])

    def _turns(self, key: TrialKey, derived: list[TurnRecord]) -> list[Wrong]:
        said = self._evidence.turns.get(key, [])
        names = ["prompt_tokens", "output_tokens", "phases"]
        if self._exact:
            names += ["live_before", "live_after", "events", "evicted", "kv_bytes_read"]
        return [
            differs(place(key, f"turn {one.turn}: {n}"), getattr(one, n), getattr(other, n))
            for one, other in zip(said, derived, strict=False)
            for n in names
            if getattr(one, n) != getattr(other, n)
        ]

    def _transcript(self, key: TrialKey, attempt: Attempt) -> Checks:
        """Compare the conversation; that of a worker holds times and ids of its own."""
        said = self._evidence.transcripts[key]
        derived = json.loads(json.dumps(transcript_document(attempt)))
        stored = {"transcript": said.transcript, "facts": said.facts}
        for name in stored if not self._task.needs_endpoint else ():
            if _timeless(stored[name]) != _timeless(derived[name]):
                text = "is not what the generated tokens say"
                yield Wrong(place(key, f"transcript: {name}"), text)
        if not self._exact:
            return
        for number, (event, expected) in enumerate(
            zip(said.events, derived["events"], strict=False)
        ):
            fields = ("decoded", "logical", "live_before", "live_after")
            one = {name: getattr(event, name) for name in fields}
            other = {name: expected[name] for name in fields}
            if one != other:
                yield differs(place(key, f"transcript: event {number}"), one, other)

    def _counted(self, said: TrialRecord) -> tuple[str, ...]:
        """Return which counts no engine can have otherwise: all if it never lost a session's rows.

        A server's own account may or may not have the token that was generated last.
        """
        own = self._evidence.spec.engine in ("embedded", "scripted")
        return _COUNTED if own and not said.kv.recomputed else ()

    def _recorded(self, session: str) -> list[list[int]]:
        parts = session.split("|")
        known = len(parts) == 4 and parts[1].isdecimal()
        return self._records.get((int(parts[1]), parts[3]), []) if known else []

    def _ledger(self) -> SessionLedger:
        spec = self._evidence.spec
        method: Method = Full()
        if self._exact:
            method = make_method(spec.method, spec.budget, spec.params)
        heads = self._facts.q_heads if method.per_query_head else self._facts.kv_heads
        per_token = self._facts.bytes_per_token(spec.dtype) if self._exact else 0
        return SessionLedger(method, per_token * heads // self._facts.kv_heads)

    def _info(self, facts: ModelFacts, folder: Path) -> EngineInfo:
        provenance, spec = self._evidence.info.provenance, self._evidence.spec
        return EngineInfo(
            name=spec.engine,
            model=spec.model,
            model_path=folder,
            model_sha="",
            device="cpu",
            dtype=spec.dtype,
            context_limit=int(provenance["context_limit"]),
            eos_token_ids=facts.eos_token_ids,
        )


def account_is_known(evidence: Evidence) -> bool:
    """Whether lengths alone say what the session held.

    Not where whole spans leave and come back, which the model's embeddings decide, nor on a server,
    which may lose a session's rows, nor for a method that is not here.
    """
    spec = evidence.spec
    if spec.engine != "embedded":
        return False
    try:
        method = make_method(spec.method, spec.budget, spec.params)
    except KVBenchError:
        return False
    return not isinstance(method, SpanMethod)


def _alike(one: Any, other: Any) -> bool:
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    if not numbers or isinstance(one, bool) or isinstance(other, bool):
        return bool(one == other)
    return math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=_RELATIVE)


def _timeless(value: Any) -> Any:
    """Return JSON data without what the clock said."""
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if k not in _OF_THE_CLOCK}
    return [_timeless(each) for each in value] if isinstance(value, list) else value
