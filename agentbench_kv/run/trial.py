"""Playing one trial: its session, its time limit, what it came to, its records.

From what a trial did to what the run store keeps.

A time limit that ends what is running, not only what comes next.
"""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from threading import Timer
from typing import Any, Self
from urllib.parse import quote

from agentbench_kv.adapters.base import (
    AgentClient,
    Message,
    Outcome,
    Reply,
    Sample,
    Task,
    TrialContext,
)
from agentbench_kv.engines.base import Engine
from agentbench_kv.errors import ContextLimitError, KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.gateway.client import InProcessClient
from agentbench_kv.gateway.gateway import AnyGateway
from agentbench_kv.gateway.session import SessionBusyError, SessionReport, TurnInfo
from agentbench_kv.results.records import (
    KVAccount,
    Timing,
    TrialRecord,
    TrialStatus,
    TurnRecord,
    Usage,
)
from agentbench_kv.results.store import RunDir
from agentbench_kv.run.spec import RunSpec


def trial_record(
    sample: Sample,
    context: TrialContext,
    outcome: Outcome,
    report: SessionReport,
    seconds: float,
    transcript: str,
    attempt: int,
) -> TrialRecord:
    """Build the record of one attempt."""
    scored = outcome.status is TrialStatus.SCORED
    return TrialRecord(
        sample_id=sample.id,
        trial=context.trial,
        seed=context.seed,
        cluster=sample.cluster,
        status=outcome.status,
        score=outcome.score if scored else None,
        metrics=_metrics(outcome, report),
        kv=KVAccount(**report.stats.recorded()),
        timing=_timing(report.turns, seconds) if scored else Timing(),
        usage=Usage(**report.usage),
        session_resets=report.resets,
        prompt_sha=report.prompt_sha,
        transcript=transcript,
        error=outcome.error,
        attempts=attempt,
    )


def turn_records(sample: Sample, trial: int, report: SessionReport) -> list[TurnRecord]:
    """Build the records of a session's turns."""
    return [TurnRecord(sample_id=sample.id, trial=trial, **turn.record()) for turn in report.turns]


def _metrics(outcome: Outcome, report: SessionReport) -> dict[str, float | int | str | None]:
    """Return the checker's figures, and what the trial was billed if it was."""
    return outcome.metrics if report.cost is None else {**outcome.metrics, "cost": report.cost}


def _timing(turns: Sequence[TurnInfo], seconds: float) -> Timing:
    """Medians over the trial's turns, and seconds from its start to its end."""
    first = [turn.ttft_ms for turn in turns if turn.ttft_ms is not None]
    later = [turn.tpot_ms for turn in turns if turn.tpot_ms is not None]
    return Timing(
        ttft_ms=statistics.median(first) if first else None,
        tpot_ms=statistics.median(later) if later else None,
        e2e_s=seconds,
    )


class Deadline:
    """Calls `end` once when the time of a `with` block is up; never after the block.

    Leaving the block waits for a call of `end` that has begun, so `passed` is final then, and no
    thread is left.

    Parameters
    ----------
    seconds : float
        From the start of the block; nothing or less is up at once.
    end : callable
        Makes the block's work stop soon. Called in a thread of its own, so it must not block.
    """

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        self.seconds = seconds
        self._end = end
        self._passed = threading.Event()
        self._timer = Timer(min(seconds, threading.TIMEOUT_MAX), self._fire)
        self._timer.name = "kvbench-deadline"
        # A process that is interrupted must not wait for a time limit.
        self._timer.daemon = True

    @property
    def passed(self) -> bool:
        """Whether the time was up before the block was left."""
        return self._passed.is_set()

    @property
    def message(self) -> str:
        """What to tell the user when it has passed."""
        return f"the trial took more than {self.seconds:g} s"

    def check(self) -> None:
        """Raise TimeoutError if the time is up."""
        if self.passed:
            raise TimeoutError(self.message)

    def __enter__(self) -> Self:
        """Start the clock."""
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the clock."""
        self._timer.cancel()
        self._timer.join()

    def _fire(self) -> None:
        # First of all: whoever sees the work end must see why.
        self._passed.set()
        self._end()


MAX_ATTEMPTS = 3


# With the longest run id, a session id stays within what the HTTP surface takes.
_LONGEST_KEY = 64


_ERRORS = frozenset({TrialStatus.ENGINE_ERROR, TrialStatus.INFRA_ERROR})


@dataclass(frozen=True)
class Stage:
    """What the trials of a run share."""

    spec: RunSpec
    task: Task
    engine: Engine
    gateway: AnyGateway
    endpoint: str | None


class TimedClient:
    """An agent client that has nothing more to say once the trial's time is up."""

    def __init__(self, client: AgentClient, deadline: Deadline) -> None:
        self._client = client
        self._deadline = deadline

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Pass the request on; raise TimeoutError before it or instead of a cut-off answer."""
        self._deadline.check()
        reply = self._client.chat(messages, tools, max_tokens, stop)
        self._deadline.check()
        return reply


def sample_key(sample: str) -> str:
    """Return a sample id as it appears in session ids: printable ASCII, short, without `|`."""
    quoted = quote(sample, safe="", errors="surrogatepass")
    if len(quoted) <= _LONGEST_KEY:
        return quoted
    return hashlib.sha256(quoted.encode()).hexdigest()


def session_id(run: str, sample: str, trial: int, attempt: int) -> str:
    """Name the session of one attempt at a trial; fit for an HTTP header."""
    return f"{run}|{trial}|{attempt}|{sample_key(sample)}"


def play_trial(stage: Stage, run: RunDir, sample: Sample, trial: int) -> TrialRecord:
    """Attempt a trial at most `MAX_ATTEMPTS` times, until what ends it is the agent's doing.

    Infrastructure and the simulated user may fail in passing. Every attempt leaves its record.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        record = _attempt(stage, run, sample, trial, attempt)
        if record.finished and record.status is not TrialStatus.USER_ERROR:
            break
    return record


@dataclass(frozen=True)
class Played:
    """One attempt, before anything is written down."""

    context: TrialContext
    outcome: Outcome
    report: SessionReport
    seconds: float


def _attempt(stage: Stage, run: RunDir, sample: Sample, trial: int, attempt: int) -> TrialRecord:
    played = play_session(stage, sample, trial, attempt)
    # A benchmark behind HTTP sees a failed request where the whole run has come to its end.
    stage.gateway.check()
    transcript = transcript_document(played.outcome, played.report)
    saved = run.save_transcript(sample.id, trial, transcript)
    record = trial_record(
        sample, played.context, played.outcome, played.report, played.seconds, saved, attempt
    )
    run.append_turns(turn_records(sample, trial, played.report))
    run.append_trial(record)
    return record


def play_session(stage: Stage, sample: Sample, trial: int, attempt: int = 1) -> Played:
    """Play one attempt at a trial and close its session; write nothing."""
    session = session_id(stage.spec.id, sample.id, trial, attempt)
    seed = stage.spec.trial_seed(sample.id, trial)
    client = _client(stage, session, seed)
    started = time.perf_counter()
    with Deadline(stage.spec.timeout_s, partial(stage.gateway.cancel, session)) as deadline:
        context = _context(stage, session, seed, trial, TimedClient(client, deadline))
        outcome = _outcome(stage.task, sample, context)
    seconds = time.perf_counter() - started
    report = _close(client)
    judged = _counted(stage.task, sample, _judged(outcome, deadline, report))
    return Played(context, judged, report, seconds)


def _client(stage: Stage, session: str, seed: int) -> InProcessClient:
    spec = stage.spec
    return InProcessClient(
        stage.gateway,
        session,
        seed=seed,
        temperature=spec.temperature,
        max_tokens=spec.max_tokens,
    )


def _context(
    stage: Stage, session: str, seed: int, trial: int, client: AgentClient
) -> TrialContext:
    spec = stage.spec
    return TrialContext(
        trial=trial,
        seed=seed,
        client=client,
        endpoint=stage.endpoint,
        session=session,
        temperature=spec.temperature,
        max_tokens=spec.max_tokens,
        timeout_s=spec.timeout_s,
    )


def _outcome(task: Task, sample: Sample, context: TrialContext) -> Outcome:
    """Play the trial; whatever breaks is a status, never the end of the run."""
    try:
        return task.run_trial(sample, context)
    except (UsageError, PrerequisiteError):
        raise
    except TimeoutError as error:
        return Outcome(TrialStatus.TIMEOUT, error=str(error))
    except ContextLimitError as error:
        return Outcome(TrialStatus.CONTEXT_LIMIT, error=str(error))
    except KVBenchError as error:
        return Outcome(TrialStatus.ENGINE_ERROR, error=str(error))
    except Exception:  # noqa: BLE001  one broken trial must not end the run
        return Outcome(TrialStatus.INFRA_ERROR, error=traceback.format_exc(limit=20))


def _judged(outcome: Outcome, deadline: Deadline, report: SessionReport) -> Outcome:
    """Name the cause where the task saw only a consequence.

    Once the time is up nothing is scored: the last answer was cut off. A worker that is refused
    at the model's last position knows only that a request failed.
    """
    if deadline.passed:
        return Outcome(TrialStatus.TIMEOUT, transcript=outcome.transcript, error=deadline.message)
    if outcome.status in _ERRORS and report.at_context_limit:
        return replace(outcome, status=TrialStatus.CONTEXT_LIMIT)
    if outcome.status in _ERRORS and report.endpoint_failed:
        return replace(outcome, status=TrialStatus.INFRA_ERROR)
    return outcome


def _counted(task: Task, sample: Sample, outcome: Outcome) -> Outcome:
    """Give a failed trial its parts of the score, unless the task has counted them."""
    if outcome.status is TrialStatus.SCORED or outcome.metrics:
        return outcome
    return replace(outcome, metrics=dict(task.nothing_right(sample)))


def _close(client: InProcessClient) -> SessionReport:
    """Close the trial's session; one that a slow engine will not let go of stays behind."""
    try:
        return client.close()
    except SessionBusyError:
        return client.report


def transcript_document(outcome: Outcome, report: SessionReport) -> dict[str, Any]:
    """Return what the transcript file of an attempt holds."""
    events = [asdict(event) for event in report.stats.events]
    facts = [asdict(fact) for fact in outcome.facts]
    return {
        "transcript": outcome.transcript,
        "error": outcome.error,
        "events": events,
        "facts": facts,
        "generated": [" ".join(map(str, ids)) for ids in report.outputs],
    }
