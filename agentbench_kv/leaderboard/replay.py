"""Playing the recorded tokens through the task again: prompts, answers, scores, KV accounts.

Gateway, task and checker are those of a run; the engine says what the record says, and keeps the
account that follows. Lengths under a token-level method follow from the method alone
(`SessionLedger`), so a recorded session has only one honest account, and no model is needed.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.adapters.base import Sample, Task
from agentbench_kv.engines import base
from agentbench_kv.engines.core.ledger import SessionLedger
from agentbench_kv.engines.core.memory import memory_method
from agentbench_kv.engines.serving.model_facts import read_model
from agentbench_kv.errors import ContextLimitError, KVBenchError
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.aside import Aside
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.gateway.reports import Spent
from agentbench_kv.gateway.session import Session
from agentbench_kv.leaderboard.evidence import (
    CUT_OFF,
    OWN,
    Checks,
    Fault,
    Note,
    RunEvidence,
    Stop,
    differs,
    expect,
    place,
    shown,
)
from agentbench_kv.leaderboard.recalling import RecallCheck, RecordedBanks
from agentbench_kv.methods.base import CLOSINGS, Phase
from agentbench_kv.methods.full import Full
from agentbench_kv.methods.spans import SpanRange, TurnNotes
from agentbench_kv.registry import load_engine
from agentbench_kv.results.records import Metric, TrialRecord, TrialStatus, TurnRecord
from agentbench_kv.results.run_reader import TrialKey
from agentbench_kv.run.ledger import answers, ledger
from agentbench_kv.run.trial import (
    Attempt,
    TrialSetup,
    play_session,
    sample_key,
    transcript_document,
    trial_record,
    turn_records,
)

# What of an account follows from method, lengths and tokens alone, and from the tokens alone.
DERIVED = (
    "peak_live", "logical", "events", "evicted", "bytes_read", "prefill_tokens", "longest_prefill",
    "decode_tokens", "mean_decode_kv", "restored", "recomputed", "budget", "peak_bytes",
)  # fmt: skip
# Of a method that drops messages, too.
_DROPPED = (
    "rewrites", "peak_alone", "auxiliary_calls", "auxiliary_tokens", "auxiliary_s",
    "auxiliary_bytes_read",
)  # fmt: skip
_PROTECTION = ("protected", "refused", "refused_recent", "refused_budget")
_REPLAYED = frozenset({base.Capability.REWIND, base.Capability.EVICT_SPANS})
_COUNTED = ("logical", "prefill_tokens", "longest_prefill", "decode_tokens")
_OF_THE_CLOCK = frozenset({"seconds"})
# Of a memory's ledger: times, and what of the past came from files.
_INGEST_CLOCK = frozenset({"ingest_s", "ingest_files", "ingest_files_s", "append_s"})
_TOLERANCE = 1e-9
_FEW_CUT_OFF = 0.05  # share of the trials that may have ended by the clock or an error

# From a session's id to the ids of its generations, in order.
Recorded = Callable[[str], list[list[int]]]


@dataclass
class _RecordedSession:
    labeller: base.PhaseLabeller
    ledger: SessionLedger
    taken: int = 0  # positions before its own, which a memory's rows have
    passes: int = 1  # in which its prompts are read
    waiting: int = 0  # tokens the cache does not hold yet: a prompt, and what was generated last
    prompt: int = 0
    gone: set[int] = field(default_factory=set)  # positions that were evicted
    begun: int = 0  # tokens of system messages that it began with: the most that others had

    @property
    def length(self) -> int:
        return self.ledger.fed + self.waiting


class RecordedEngine(base.Engine):
    """Replays recorded ids; the k-th generation of a session id is its k-th record.

    `info` is of the engine that is stood in for; `ledger` makes the account of a session; `banks`
    are those of a method with a memory. With `shares` accounts say the most that a session can have
    found in a shared prefix: what it did hangs on who came before.
    """

    def __init__(
        self,
        recorded: Recorded,
        info: base.EngineInfo,
        ledger: Callable[[], SessionLedger],
        banks: RecordedBanks | None = None,
        *,
        shares: bool = False,
    ) -> None:
        self.info = info
        self._shares = shares
        self._banks = banks
        self._recorded = recorded
        self._ledger = ledger
        self._sessions: dict[str, _RecordedSession] = {}
        self.wants_notes = True
        self._turns: Counter[str] = Counter()
        self._lock = threading.Lock()

    def open(self, session: str, labeller: base.PhaseLabeller) -> None:
        """Start an empty session; after a reset its records go on where they were."""
        self._sessions[session] = _RecordedSession(labeller, self._ledger())
        if self._banks is not None:
            self._banks.open(session)

    def note(self, session: str, tokens: Sequence[int], notes: TurnNotes) -> None:
        super().note(session, tokens, notes)
        self._sessions[session].ledger.opens_with(system=notes.system)

    def extend(self, session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        del phases
        state = self._sessions[session]
        if state.taken + state.length + len(tokens) > self.info.context_limit:
            raise ContextLimitError(f"the limit is {self.info.context_limit} tokens")
        state.waiting += len(tokens)
        state.prompt += len(tokens)
        if self._banks is not None:
            self._banks.extend(session, tokens)

    def generate(self, session: str, sampling: base.Sampling) -> base.Generation:
        with self._lock:
            turn = self._turns[session]
            self._turns[session] += 1
        generations = self._recorded(session)
        if turn >= len(generations):
            raise KVBenchError(f"the record has {len(generations)} generations, one more was asked")
        if self._banks is not None:
            self._banks.answer(session, generations[turn])
        return self._generation(session, generations[turn], sampling)

    def force(
        self, session: str, tokens: Sequence[int], *, predict: bool = False
    ) -> base.Generation:
        """Take tokens as an answer: of a past session, which no record holds."""
        if self._banks is None:
            return super().force(session, tokens, predict=predict)
        self._banks.answer(session, tokens)
        return self._generation(session, list(tokens), base.Sampling(max_tokens=len(tokens)))

    def _generation(
        self, session: str, ids: list[int], sampling: base.Sampling
    ) -> _RecordedGeneration:
        limit = self.info.context_limit
        return _RecordedGeneration(self._sessions[session], ids, sampling, limit)

    def rewind(self, session: str, length: int) -> None:
        state = self._sessions[session]
        state.waiting = max(0, length - state.ledger.fed)
        state.prompt = min(state.prompt, state.waiting)
        state.gone = {position for position in state.gone if position < length}
        if length < state.ledger.fed:
            state.ledger.rewind(length, length - len(state.gone))

    def evict_spans(self, session: str, spans: Sequence[SpanRange]) -> int:
        state = self._sessions[session]
        fed = state.ledger.fed
        leaving = {n for begin, end in spans for n in range(begin, min(end, fed))} - state.gone
        if leaving:
            state.gone |= leaving
            state.ledger.evict(state.ledger.live - len(leaving))
        return len(leaving)

    def memorise(self, session: str, bank: str, tokens: int | None = None, start: int = 0) -> int:
        if self._banks is None:
            return super().memorise(session, bank, tokens, start)
        seen = self._sessions[session].ledger.fed
        return self._banks.memorise(session, bank, seen if tokens is None else tokens, start)

    def attach(self, session: str, bank: str) -> None:
        if self._banks is None:
            return super().attach(session, bank)
        state = self._sessions[session]
        state.taken, state.passes = self._banks.attach(session, bank), self._banks.passes
        return state.ledger.restore(state.taken)

    def recalled(self, session: str) -> NDArray[np.int64]:
        return super().recalled(session) if self._banks is None else self._banks.recalled(session)

    def forget(self, bank: str) -> None:
        return super().forget(bank) if self._banks is None else self._banks.forget(bank)

    def stats(self, session: str) -> base.KVStats:
        state = self._sessions[session]
        stats = replace(state.ledger.snapshot(), logical=state.length)
        if self._shares:
            stats.cached_tokens, stats.shared = state.begun, state.ledger.system
        # The engine without a model holds what it wrote last, too.
        return replace(stats, live=state.length) if self.info.name == "scripted" else stats

    def close(self, session: str) -> base.KVStats:
        stats = self.stats(session)
        del self._sessions[session]
        if self._banks is not None:
            self._banks.close(session)
        return stats

    def unsaid(self, session: str) -> int:
        """Return how many recorded generations nobody asked for."""
        return len(self._recorded(session)) - self._turns[session]


class _ReplayGateway(Gateway):
    """A gateway in which the model answers nothing that it is asked beside a session."""

    def _aside(self, state: Session, *rest: Any) -> Aside:
        del state, rest
        return Aside(lambda: "")


@dataclass(eq=False)
class _RecordedGeneration(base.Generation):
    """One generation being replayed; it ends where the record does, for a reason that must be."""

    state: _RecordedSession
    ids: list[int]
    sampling: base.Sampling
    limit: int
    started: float = field(default_factory=time.perf_counter)

    def __iter__(self) -> Iterator[int]:
        state = self.state
        if not state.ledger.fed:
            state.begun += state.ledger.system
        state.ledger.begin_turn(state.prompt, state.passes)
        state.prompt = 0
        for count, token in enumerate(self.ids, start=1):
            if self.finish_reason is not None:
                raise KVBenchError(f"the record goes on after {self.finish_reason.value}")
            state.ledger.forward(state.waiting)
            state.ledger.sampled()
            state.labeller.label(token)
            state.waiting = 1
            self.finish_reason = self.sampling.ends(token, count) or self._at_limit()
            self.last_token_s = time.perf_counter() - self.started
            self.first_token_s = self.first_token_s or self.last_token_s
            yield token
        if not self.ids:
            self.finish_reason = self._at_limit()
        if self.finish_reason is None:
            raise KVBenchError(f"the record ends after {len(self.ids)} tokens for no reason")
        state.ledger.end_turn()

    def cancel(self) -> None:
        """Do nothing: a record is as long as it is."""

    def _at_limit(self) -> base.FinishReason | None:
        length = self.state.taken + self.state.length
        return base.FinishReason.CONTEXT_LIMIT if length >= self.limit else None


class Replay:
    """The trials of a run, played again with its task and the config and tokenizer of its model."""

    def __init__(self, evidence: RunEvidence, task: Task, folder: Path) -> None:
        spec = evidence.spec
        self._evidence = evidence
        self._task = task
        self._exact = account_is_known(evidence)
        self._facts = facts = read_model(folder)
        limit = int(evidence.info.provenance["context_limit"])
        info = base.EngineInfo(
            *(spec.engine, spec.model, folder, "", "cpu", spec.dtype, limit, facts.eos_token_ids),
            load_engine(spec.engine).capabilities & _REPLAYED,
        )
        banks = RecordedBanks(memory_method(spec.built_method)) if evidence.keeps_banks else None
        self._recall = None if banks is None else RecallCheck(evidence, folder, banks)
        self._engine = RecordedEngine(
            self._recorded, info, self._ledger, banks, shares=evidence.shares
        )
        # What the model says beside a session is in no record: it said nothing.
        self._gateway = _ReplayGateway(
            self._engine,
            policy=evidence.policy,
            default_max_tokens=spec.max_tokens,
            tool_syntax=spec.tool_syntax or "auto",
            # Not the method's own word: a plug-in may not be here.
            closing=str(spec.params.get("closing", CLOSINGS[0])),
            remembers=banks is not None,
            appends=banks is not None and banks.method.append == "turns",
        )
        self._records = {
            (trial, sample_key(sample)): transcript.tokens
            for (sample, trial), transcript in evidence.transcripts.items()
        }

    def check(self, samples: Mapping[str, Sample]) -> Checks:
        """Play every trial and compare what comes out with what was recorded."""
        trials = self._evidence.trials
        ended = sum(record.status in CUT_OFF for record in trials.values())
        if ended:
            kind = Note if ended <= _FEW_CUT_OFF * len(trials) else Stop
            yield kind(f"{ended} trials ended by the clock or an error, which no record can prove")
        if not self._exact and self._evidence.spec.engine != "scripted":
            yield Note("what the cache held is as reported: lengths alone do not tell it here")
        vocabulary = len(self._gateway.codec.tokenizer)
        with self._setup() as setup, self._recall or nullcontext() as recall:
            if recall is not None:
                recall.start()
            for key, record in trials.items():
                ids = [each for part in self._evidence.transcripts[key].tokens for each in part]
                if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
                    yield Fault(place(key, "transcript: generated"), "holds ids of no token")
                    continue
                if recall is not None:
                    recall.begin(key)
                # Lots are drawn by the name of a session, which has the attempt.
                attempt = play_session(setup, samples[key[0]], key[1], record.attempts)
                yield from self._compare(key, record, samples[key[0]], attempt)
            if recall is not None:
                yield from recall.verdict()

    @contextmanager
    def _setup(self) -> Iterator[TrialSetup]:
        spec = replace(self._evidence.spec, timeout_s=3600.0)
        with ExitStack() as stack:
            endpoint = None
            if self._task.needs_endpoint:
                server = BackgroundServer(self._gateway, concurrency=1)
                endpoint = stack.enter_context(server).url
            foretold = self._evidence.policy is not None and self._evidence.policy.foresees
            yield TrialSetup(spec, self._task, self._engine, self._gateway, endpoint, foretold)

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
        # What reading cost follows from the turns that are said, which have a machine's times.
        scored = record.status is TrialStatus.SCORED
        turns = self._evidence.turns.get(key, [])
        spent = ledger(attempt.outcome.reading, turns, timed=scored)
        if attempt.answers:
            took = [Spent(turn.prefill_tokens, turn.live_after, turn.ttft_ms) for turn in turns]
            spent |= answers(took, timed=scored)
        parts = {**again.metrics, **spent}
        if self._recall is not None:
            parts = {**self._recall.compared(key, record, parts), **_clocked(record, parts)}
        wrong = list(self._compare_records(key, record, again, parts))
        if not any(isinstance(each, Stop) for each in wrong):
            wrong += self._compare_turns(key, turn_records(sample, key[1], report))
            if left := self._engine.unsaid(report.session):
                text = f"holds {left} generations that the task does not ask for"
                wrong.append(Fault(place(key, "transcript: generated"), text))
        yield from wrong or self._compare_transcripts(key, attempt)

    def _compare_records(
        self,
        key: TrialKey,
        said: TrialRecord,
        derived: TrialRecord,
        parts: Mapping[str, Metric],
    ) -> Checks:
        if said.status is not derived.status:
            if derived.status is TrialStatus.INFRA_ERROR and self._task.needs_endpoint:
                yield Stop(f"the replay broke in {place(key, 'status')}: {shown(derived.error)}")
            else:
                reason = f"{derived.status.value} ({derived.error})"
                yield differs(place(key, "status"), said.status.value, reason)
            return
        names = ["score", "session_resets", "cluster"]
        if said.status is TrialStatus.SCORED and not self._task.needs_endpoint:
            names.append("error")
        # A server's own account may or may not have the token that was generated last.
        counted = self._evidence.spec.engine in OWN and not said.kv.recomputed
        of_account: tuple[str, ...] = ()
        if self._exact or counted:
            of_account = DERIVED if self._exact else _COUNTED
        if self._exact and "protect" in self._evidence.spec.params:
            of_account += _PROTECTION
        if self._exact and self._evidence.policy is not None:
            of_account += _DROPPED
        metrics = sorted(said.metrics.keys() | parts.keys())
        pairs = [
            *((name, getattr(said, name), getattr(derived, name)) for name in names),
            *((f"metrics.{n}", said.metrics.get(n), parts.get(n)) for n in metrics),
            *(
                (f"usage.{name}", getattr(said.usage, name), getattr(derived.usage, name))
                for name in ("prompt_tokens", "completion_tokens", "requests")
            ),
            *((f"kv.{n}", getattr(said.kv, n), getattr(derived.kv, n)) for n in of_account),
        ]
        if not said.kv.peak_bytes:  # unknown: played before bytes were counted
            pairs = [pair for pair in pairs if pair[0] != "kv.peak_bytes"]
        if said.status is not TrialStatus.SCORED:  # may be older than recall of failed trials
            pairs = [pair for pair in pairs if pair[:2] != ("metrics.evidence_recall_asked", None)]
        for name, one, other in pairs:
            if not alike(one, other):
                yield differs(place(key, name), one, other)
        for name in () if said.kv.recomputed else ("cached_tokens", "shared"):
            if (value := getattr(said.kv, name)) > (most := getattr(derived.kv, name)):
                text = f"is {value}, more than the {most} of the system message"
                yield Fault(place(key, f"kv.{name}"), text)

    def _compare_turns(self, key: TrialKey, derived: list[TurnRecord]) -> Checks:
        names = ["prompt_tokens", "output_tokens", "phases"]
        if self._exact:
            names += ["live_before", "live_after", "events", "evicted", "kv_bytes_read"]
        for one, other in zip(self._evidence.turns.get(key, []), derived, strict=False):
            for name in names:
                field = place(key, f"turn {one.turn}: {name}")
                yield from expect(field, getattr(one, name), getattr(other, name))

    def _compare_transcripts(self, key: TrialKey, attempt: Attempt) -> Checks:
        said = self._evidence.transcripts[key]
        derived = json.loads(json.dumps(transcript_document(attempt)))
        if not self._task.needs_endpoint:  # a worker's conversation holds times and ids of its own
            for name in ("transcript", "facts"):
                if timeless(getattr(said, name)) != timeless(derived[name]):
                    text = "is not what the generated tokens say"
                    yield Fault(place(key, f"transcript: {name}"), text)
        if not self._exact:
            return
        fields = ("decoded", "logical", "live_before", "live_after")
        events = zip(said.events, derived["events"], strict=False)
        for number, (event, expected) in enumerate(events):
            one = {name: getattr(event, name) for name in fields}
            other = {name: expected[name] for name in fields}
            yield from expect(place(key, f"transcript: event {number}"), one, other)

    def _recorded(self, session: str) -> list[list[int]]:
        parts = session.split("|")
        known = len(parts) == 4 and parts[1].isdecimal()
        return self._records.get((int(parts[1]), parts[3]), []) if known else []

    def _ledger(self) -> SessionLedger:
        if not self._exact:
            return SessionLedger(Full(), 0)
        policy, facts = self._evidence.policy, self._facts
        method = self._evidence.spec.built_method if policy is None else policy.below()
        heads = facts.q_heads if method.per_query_head else facts.kv_heads
        spec = self._evidence.spec
        precision = spec.kv_dtype or spec.dtype
        per_token = facts.bytes_per_token(precision)
        windows = facts.window_bytes(precision)
        held = facts.held_bytes(spec.kv_dtype, spec.dtype)
        return SessionLedger(method, per_token * heads // facts.kv_heads, windows, held)


def account_is_known(evidence: RunEvidence) -> bool:
    """Whether lengths alone say what the session held."""
    # Not where whole spans leave and come back, which the model's embeddings decide, nor on a
    # server, which may lose a session's rows, nor for a method that is not here.
    if evidence.spec.engine != "embedded":
        return False
    if (policy := evidence.policy) is not None:
        return not policy.asks
    try:
        return evidence.keeps_banks or not evidence.spec.built_method.spans
    except KVBenchError:
        return False


def _clocked(said: TrialRecord, parts: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return what taking the past in took by the clock, and from which files, as it was said."""
    names = _INGEST_CLOCK & said.metrics.keys() if "ingest_calls" in parts else ()
    return {name: said.metrics[name] for name in names}


def differing_metric(said: TrialRecord, again: TrialRecord) -> str:
    """Name the first metric, those of the clock aside, that another play of a trial has not."""
    for name in sorted(said.metrics.keys() | again.metrics.keys()):
        one, other = said.metrics.get(name), again.metrics.get(name)
        clock = name in _INGEST_CLOCK or name == "answer_s" or "ttft_ms" in name
        if not clock and not alike(one, other):
            return f"{name} is {shown(one)}, {shown(other)} here"
    return ""


def alike(one: Any, other: Any) -> bool:
    if {type(one), type(other)} in ({float}, {int, float}):
        return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(one == other)


def timeless(value: Any) -> Any:
    """Return JSON data without what the clock said."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in _OF_THE_CLOCK}
    return [timeless(each) for each in value] if isinstance(value, list) else value
