"""Playing one trial: its session, its time limit, what it came to, its records."""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from threading import Timer
from typing import Any, Self
from urllib.parse import quote

from agentbench_kv.adapters.base import (
    Message,
    Outcome,
    PastSession,
    RememberingClient,
    Reply,
    Sample,
    Task,
    TrialContext,
)
from agentbench_kv.adapters.worker import WorkerError
from agentbench_kv.engines.base import Engine
from agentbench_kv.errors import (
    ContextLimitError,
    EngineGoneError,
    KVBenchError,
    MemoryLostError,
    PrerequisiteError,
    SessionFailedError,
    UsageError,
)
from agentbench_kv.gateway.base import AnyGateway
from agentbench_kv.gateway.client import InProcessClient
from agentbench_kv.gateway.reports import SessionReport, Spent, TurnInfo
from agentbench_kv.gateway.session import SessionBusyError
from agentbench_kv.results.records import (
    LOST,
    KVAccount,
    Metric,
    Timing,
    TrialRecord,
    TrialStatus,
    TurnRecord,
    Usage,
)
from agentbench_kv.results.store import RunDir
from agentbench_kv.run.foresight import last_uses
from agentbench_kv.run.ledger import answers, ledger
from agentbench_kv.run.spec import RunSpec

MAX_ATTEMPTS = 3

# With the longest run id, a session id stays within what the HTTP surface takes.
_LONGEST_KEY = 64
_AGAIN = frozenset({TrialStatus.INFRA_ERROR, TrialStatus.USER_ERROR})


@dataclass(frozen=True)
class TrialSetup:
    """What the trials of a run share."""

    spec: RunSpec
    task: Task
    engine: Engine
    gateway: AnyGateway
    endpoint: str | None
    foretold: bool = False  # whether the method is told what each session still needs
    deadlines: dict[str, Deadline] = field(default_factory=dict)  # of the sessions under way


@dataclass(frozen=True)
class Attempt:
    """One attempt at a trial, before anything is written down."""

    context: TrialContext
    outcome: Outcome
    report: SessionReport
    seconds: float
    answers: Sequence[Spent] = ()  # of a task with a past: what each took


def play_trial(setup: TrialSetup, run: RunDir, sample: Sample, trial: int) -> TrialRecord:
    """Attempt a trial at most `MAX_ATTEMPTS` times, until what ends it is the agent's doing.

    Infrastructure and the simulated user may fail in passing; what an engine failed at it would
    fail at again, until it is started anew. Every attempt leaves its record, but for one that was
    under way when the run came to its end.
    """
    for number in range(1, MAX_ATTEMPTS + 1):
        attempt = play_session(setup, sample, trial, number)
        # A benchmark behind HTTP sees a failed request where the whole run has come to its end.
        setup.gateway.check()
        record = _record(run, sample, attempt, number)
        if record.status not in _AGAIN:
            break
    if record.finished:
        run.drop_checkpoints([checkpoint_name(attempt.context.session)])
    return record


def play_session(setup: TrialSetup, sample: Sample, trial: int, attempt: int = 1) -> Attempt:
    """Play one attempt at a trial and close its session; write nothing."""
    spec = setup.spec
    session = session_id(spec.id, sample.id, trial, attempt)
    shared: dict[str, Any] = {
        "seed": spec.trial_seed(sample.id, trial),
        "temperature": spec.temperature,
        "max_tokens": spec.max_tokens,
    }
    client = InProcessClient(setup.gateway, session, **shared)
    if setup.foretold and (uses := last_uses(spec, setup.task, sample)) is not None:
        setup.gateway.foresee(session, uses)
    about = setup.gateway.provenance()
    started = time.perf_counter()
    deadline = Deadline(spec.timeout_s, client.cancel)
    setup.deadlines[session] = deadline
    with deadline:
        context = TrialContext(
            trial=trial,
            client=TimedClient(client, deadline),
            endpoint=setup.endpoint,
            session=session,
            timeout_s=spec.timeout_s,
            tool_syntax=about["tool_parser"],
            chat_format=about["phase_family"],
            **shared,
        )
        outcome = _outcome(setup.task, sample, context)
    if client.reading is not None:
        outcome = replace(outcome, reading=client.reading)
    seconds = time.perf_counter() - started
    report, problem = _close(client)
    del setup.deadlines[session]
    outcome = problem or _judged(outcome, deadline, report)
    if outcome.status is not TrialStatus.SCORED:
        outcome = replace(outcome, metrics=_failed_parts(setup, sample, outcome.metrics))
    spent = tuple(client.answers) if setup.task.remembers else ()
    return Attempt(context, outcome, report, seconds, spent)


def session_id(run: str, sample: str, trial: int, attempt: int) -> str:
    """Name the session of one attempt at a trial; fit for an HTTP header."""
    return f"{run}|{trial}|{attempt}|{sample_key(sample)}"


def checkpoint_name(session: str) -> str:
    """Name what is kept of a trial under way, from the session of any attempt at it."""
    _, trial, _, key = session.rsplit("|", 3)
    return f"t{trial}-{key}.gz"


def sample_key(sample: str) -> str:
    """Return a sample id as it appears in session ids: printable ASCII, short, without `|`."""
    quoted = quote(sample, safe="", errors="surrogatepass")
    if len(quoted) <= _LONGEST_KEY:
        return quoted
    return hashlib.sha256(quoted.encode()).hexdigest()


def _outcome(task: Task, sample: Sample, context: TrialContext) -> Outcome:
    """Play the trial; whatever breaks is a status, unless it breaks for all trials."""
    try:
        return task.run_trial(sample, context)
    except (UsageError, PrerequisiteError, EngineGoneError):
        raise
    except TimeoutError as error:
        return Outcome(TrialStatus.TIMEOUT, error=str(error))
    except ContextLimitError as error:
        return Outcome(TrialStatus.CONTEXT_LIMIT, error=str(error))
    except WorkerError as error:  # of a memory's package
        return Outcome(error.status, error=str(error))
    except KVBenchError as error:
        return _failed(error)
    except (Exception, SystemExit):  # noqa: BLE001  one broken trial must not end the run
        return Outcome(TrialStatus.INFRA_ERROR, error=traceback.format_exc(limit=20))


def _failed(error: KVBenchError) -> Outcome:
    """Return what an engine's failure comes to, with the way to it where code of others failed.

    A memory that went with its backend is told again in another attempt.
    """
    if isinstance(error, MemoryLostError):
        return Outcome(TrialStatus.INFRA_ERROR, error=str(error))
    cause = error.__cause__ if isinstance(error, SessionFailedError) else None
    where = "".join(traceback.format_exception(cause, limit=20)) if cause else ""
    return Outcome(TrialStatus.ENGINE_ERROR, error=f"{error}\n{where}".strip())


def _failed_parts(
    setup: TrialSetup, sample: Sample, known: Mapping[str, Metric]
) -> dict[str, Metric]:
    """Return a failed trial's metrics: it has its parts of the score too."""
    remembers = setup.gateway.memories is not None
    recalled = setup.task.nothing_recalled(sample) if remembers else {}
    return {**recalled, **(known or setup.task.nothing_right(sample))}


def _judged(outcome: Outcome, deadline: Deadline, report: SessionReport) -> Outcome:
    """Name the cause where the task saw only a consequence.

    Once the time is up nothing is scored: the last answer was cut off. A worker that is refused
    at the model's last position knows only that a request failed.
    """
    if deadline.passed:
        late = replace(outcome, status=TrialStatus.TIMEOUT, score=None, error=deadline.message)
        unseen = outcome.status is TrialStatus.SCORED  # its figures have the cut-off answer
        return replace(late, metrics={}, facts=()) if unseen else late
    if outcome.status in LOST and report.at_context_limit:
        return replace(outcome, status=TrialStatus.CONTEXT_LIMIT)
    if outcome.status in LOST and report.endpoint_failed:
        return replace(outcome, status=TrialStatus.INFRA_ERROR)
    return outcome


def _close(client: InProcessClient) -> tuple[SessionReport, Outcome | None]:
    """Close the trial's session; return its report, and what the trial comes to if that fails.

    A session that the engine does not let go of, though it was told to, stays behind.
    """
    try:
        return client.close(), None
    except EngineGoneError:
        raise
    except SessionBusyError:
        problem = KVBenchError(f"the engine did not let go of session {client.session}")
    except KVBenchError as error:  # no account, no trial
        problem = error
    return client.report, _failed(problem)


class Deadline:
    """Calls `end` once when the time of a `with` block is up; never after the block.

    Leaving the block waits for a call of `end` that has begun, so `passed` is final then, and no
    thread is left. `end` is called in a thread of its own and must not block; with no seconds or
    less it is called at once.
    """

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        self._end = end
        self._passed = threading.Event()
        self._timer = Timer(min(seconds, threading.TIMEOUT_MAX), self._fire)
        self._timer.name = "kvbench-deadline"
        # A process that is interrupted must not wait for a time limit.
        self._timer.daemon = True
        self.message = f"the trial took more than {seconds:g} s"

    @property
    def passed(self) -> bool:
        """Whether the time was up before the block was left."""
        return self._passed.is_set()

    def check(self) -> None:
        """Raise TimeoutError if the time is up."""
        if self.passed:
            raise TimeoutError(self.message)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()

    def _fire(self) -> None:
        # First of all: whoever sees the work end must see why.
        self._passed.set()
        self._end()


class TimedClient:
    """A trial's client that has nothing more to say once the trial's time is up."""

    def __init__(self, client: RememberingClient, deadline: Deadline) -> None:
        self._client = client
        self._deadline = deadline
        self.places, self.tokens, self.close = client.places, client.tokens, client.close

    @property
    def forks(self) -> bool:
        return self._client.forks

    def force(
        self,
        messages: Sequence[Message],
        said: Message,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._deadline.check()
        self._client.force(messages, said, tools)
        self._deadline.check()

    def fork(self) -> TimedClient:
        self._deadline.check()
        return TimedClient(self._client.fork(), self._deadline)

    def another(self) -> TimedClient:
        return TimedClient(self._client.another(), self._deadline)

    @property
    def remembers(self) -> bool:
        return self._client.remembers

    def remember(self, past: PastSession) -> None:
        self._deadline.check()
        self._client.remember(past)
        self._deadline.check()

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


def _record(run: RunDir, sample: Sample, attempt: Attempt, number: int) -> TrialRecord:
    """Write an attempt's transcript, turns and trial record."""
    trial = attempt.context.trial
    saved = run.save_transcript(sample.id, trial, transcript_document(attempt))
    record = trial_record(sample, attempt, saved, number)
    run.append_turns(turn_records(sample, trial, attempt.report))
    run.append_trial(record)
    return record


def trial_record(sample: Sample, attempt: Attempt, transcript: str, number: int) -> TrialRecord:
    """Build the record of an attempt, whose transcript lies in a file of that name."""
    outcome, report = attempt.outcome, attempt.report
    scored = outcome.status is TrialStatus.SCORED
    # The checker's figures, and what the trial was billed if it was.
    billed = {} if report.cost is None else {"cost": report.cost}
    spent = ledger(outcome.reading, attempt.answers or report.turns, timed=scored)
    spent |= answers(attempt.answers, timed=scored)
    unread = [turn.unread_syntax for turn in report.turns if turn.unread_syntax]
    missed: dict[str, Metric] = {}
    if unread:
        missed = {"calls_in_other_syntax": len(unread), "other_syntax": unread[-1]}
    return TrialRecord(
        sample_id=sample.id,
        trial=attempt.context.trial,
        seed=attempt.context.seed,
        cluster=sample.cluster,
        status=outcome.status,
        score=outcome.score if scored else None,
        metrics={**outcome.metrics, **spent, **billed, **missed},
        kv=KVAccount(**report.stats.recorded()),
        timing=_timing(report.turns, attempt.seconds) if scored else Timing(),
        usage=Usage(**report.usage),
        session_resets=report.resets,
        prompt_sha=report.prompt_sha,
        transcript=transcript,
        error=outcome.error,
        attempts=number,
    )


def turn_records(sample: Sample, trial: int, report: SessionReport) -> list[TurnRecord]:
    """Build the records of a session's turns."""
    return [TurnRecord(sample_id=sample.id, trial=trial, **turn.record()) for turn in report.turns]


def transcript_document(attempt: Attempt) -> dict[str, Any]:
    """Return what the transcript file of an attempt holds."""
    outcome, report = attempt.outcome, attempt.report
    return {
        "transcript": outcome.transcript,
        "error": outcome.error,
        "events": [asdict(event) for event in report.stats.events],
        "facts": [asdict(fact) for fact in outcome.facts],
        "generated": [" ".join(map(str, ids)) for ids in report.outputs],
    }


def _timing(turns: Sequence[TurnInfo], seconds: float) -> Timing:
    """Medians over the trial's turns, and seconds from its start to its end."""
    first = [turn.ttft_ms for turn in turns if turn.ttft_ms is not None]
    later = [turn.tpot_ms for turn in turns if turn.tpot_ms is not None]
    return Timing(
        ttft_ms=statistics.median(first) if first else None,
        tpot_ms=statistics.median(later) if later else None,
        e2e_s=seconds,
    )
