"""Running specs: engine, gateway, trials in parallel, records as each trial ends."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.base import (
    AgentClient,
    Message,
    Outcome,
    Reply,
    Sample,
    ScriptedAgent,
    Task,
    TrialContext,
)
from agentbench_kv.engines.base import Capability, Engine
from agentbench_kv.engines.options import EngineOptions, ScriptSource
from agentbench_kv.errors import CapacityError, KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.gateway.accounting import SessionReport
from agentbench_kv.gateway.client import InProcessClient
from agentbench_kv.gateway.gateway import Gateway
from agentbench_kv.gateway.server import BackgroundServer
from agentbench_kv.methods.base import Method
from agentbench_kv.provenance import environment
from agentbench_kv.records import trial_record, turn_records
from agentbench_kv.registry import load_engine, load_task, make_method
from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.results.rundir import RunDir
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.summary import Summary, summarize
from agentbench_kv.spec import RunSpec

MAX_ATTEMPTS = 3

Progress = Callable[[RunSpec, int, int, TrialRecord | None], None]
"""Called with the spec, finished and expected trials, and the trial that just ended."""


def build_engine(
    engine: str,
    model: str,
    method: str,
    budget: int | None,
    settings: Mapping[str, Any],
    *,
    device: str = "auto",
    dtype: str = "float32",
    concurrency: int = 16,
    scripts: ScriptSource | None = None,
) -> Engine:
    """Start an engine with a method, after checking that the two fit.

    Raises
    ------
    UsageError, PrerequisiteError
        If a name is unknown, the pair is impossible, or the model cannot be loaded.
    """
    cls = load_engine(engine)
    built = make_method(method, budget, settings)
    check_pair(engine, cls, built)
    options = EngineOptions(
        model=model,
        method=built,
        device=device,
        dtype=dtype,
        concurrency=concurrency,
        scripts=scripts,
    )
    made: Engine = cls.create(options)
    return made


def check_pair(name: str, engine: type[Engine], method: Method) -> None:
    """Refuse a method the engine cannot run."""
    if method.compresses and Capability.COMPRESS not in engine.capabilities:
        raise UsageError(
            f"engine {name!r} cannot run method {method.label!r}: it does not compress a cache; "
            "use --method full or another engine (kvbench ls methods --engine NAME)"
        )


def run_all(specs: Sequence[RunSpec], out: Path, progress: Progress) -> list[Summary]:
    """Run specs one after the other; finished ones only report.

    Parameters
    ----------
    specs : sequence of RunSpec
        As `spec.grid` returns them.
    out : Path
        Folder of runs.
    progress : callable
        Told about every finished trial.
    """
    for spec in specs:
        cls = load_engine(spec.engine)
        check_pair(spec.engine, cls, spec.make_method())
        cls.check_model(spec.model)
        cls.check_compute(spec.dtype, spec.device)
    return [run_one(spec, out, progress) for spec in specs]


def run_one(spec: RunSpec, out: Path, progress: Progress) -> Summary:
    """Run what is missing of one spec and summarize it."""
    task = load_task(spec.task)()
    try:
        samples = task.samples(spec.limit, spec.seed)
        expected = len(samples) * spec.trials
        with RunStore(out).open(spec.id, asdict(spec), environment(), expected) as run:
            done = run.finished_trials()
            todo = [
                (sample, trial)
                for trial in range(spec.trials)
                for sample in samples
                if (sample.id, trial) not in done
            ]
            progress(spec, expected - len(todo), expected, None)
            if todo:
                _play(
                    spec, task, todo, run, _counted(spec, expected - len(todo), expected, progress)
                )
        return summarize(run)
    finally:
        task.close()


def _counted(
    spec: RunSpec, done: int, expected: int, progress: Progress
) -> Callable[[TrialRecord], None]:
    finished = [done]

    def report(record: TrialRecord) -> None:
        finished[0] += record.finished
        progress(spec, finished[0], expected, record)

    return report


def _play(
    spec: RunSpec,
    task: Task,
    todo: Sequence[tuple[Sample, int]],
    run: RunDir,
    report: Callable[[TrialRecord], None],
) -> None:
    with _stage(spec, task, [sample for sample, _ in todo]) as stage:
        _note_provenance(run, stage)
        jobs = ((stage, run, sample, trial) for sample, trial in todo)
        for record in _in_parallel(jobs, spec.concurrency):
            report(record)


@dataclass(frozen=True)
class Stage:
    """What the trials of a run share."""

    spec: RunSpec
    task: Task
    engine: Engine
    gateway: Gateway
    endpoint: str | None


@contextmanager
def _stage(spec: RunSpec, task: Task, samples: Sequence[Sample]) -> Iterator[Stage]:
    """Start engine, gateway and, if the task needs one, the loopback server."""
    with ExitStack() as stack:
        engine = build_engine(
            spec.engine,
            spec.model,
            spec.method,
            spec.budget,
            spec.params,
            device=spec.device,
            dtype=spec.dtype,
            concurrency=spec.concurrency,
            scripts=_scripts(spec, task, samples),
        )
        stack.callback(engine.shutdown)
        gateway = Gateway(engine, default_max_tokens=spec.max_tokens)
        endpoint = None
        if task.needs_endpoint:
            server = stack.enter_context(BackgroundServer(gateway, concurrency=spec.concurrency))
            endpoint = server.url
        yield Stage(spec, task, engine, gateway, endpoint)


def _scripts(spec: RunSpec, task: Task, samples: Sequence[Sample]) -> ScriptSource:
    """Give the scripted engine a session's texts: the session id names the sample."""
    by_id = {sample.id: sample for sample in samples}

    def texts(session: str) -> list[str]:
        sample = by_id[_sample_of(session)]
        agent: ScriptedAgent = spec.model  # type: ignore[assignment]  # checked by check_model
        return task.script(sample, agent)

    return texts


def session_id(run: str, sample: str, trial: int, attempt: int) -> str:
    """Name the session of one attempt at a trial."""
    return f"{run}|{trial}|{attempt}|{sample}"


def _sample_of(session: str) -> str:
    return session.split("|", 3)[3]


def _note_provenance(run: RunDir, stage: Stage) -> None:
    """Record what only the running engine knows; refuse to mix two models in one run."""
    info = stage.engine.info
    run.annotate(
        {
            "engine": info.name,
            "model_sha": info.model_sha,
            "device": info.device,
            "dtype": info.dtype,
            "context_limit": info.context_limit,
            "determinism": "greedy" if stage.spec.temperature == 0 else "seeded sampling",
            "concurrency": stage.spec.concurrency,
            "task": stage.task.provenance(),
            **stage.gateway.provenance(),
        }
    )
    changed = run.info.resumes[-1].changed if run.info.resumes else {}
    if "model_sha" in changed:
        raise UsageError(
            f"the model {stage.spec.model} changed since run {run.info.run_id} began; "
            "choose another --out"
        )


class TimedClient:
    """An agent client that refuses another message once the trial's time is up."""

    def __init__(self, client: AgentClient, seconds: float) -> None:
        self._client = client
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Pass the request on, or raise TimeoutError."""
        if time.monotonic() > self._end:
            raise TimeoutError(f"the trial took more than {self._seconds:g} s")
        return self._client.chat(messages, tools, max_tokens, stop)


def _in_parallel(
    jobs: Iterable[tuple[Stage, RunDir, Sample, int]], width: int
) -> Iterator[TrialRecord]:
    """Run trials `width` at a time; the first error that is not a trial's own ends the run."""
    queue = iter(jobs)
    with ThreadPoolExecutor(width, thread_name_prefix="kvbench-trial") as pool:
        running: set[Future[TrialRecord]] = set()
        try:
            running |= {pool.submit(_trial, *job) for job in islice(queue, width)}
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(_trial, *job) for job in islice(queue, len(finished))}
                for future in finished:
                    yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _trial(stage: Stage, run: RunDir, sample: Sample, trial: int) -> TrialRecord:
    """Attempt a trial until it is not an infrastructure failure, at most `MAX_ATTEMPTS` times."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        record = _attempt(stage, run, sample, trial, attempt)
        if record.finished:
            break
    return record


def _attempt(stage: Stage, run: RunDir, sample: Sample, trial: int, attempt: int) -> TrialRecord:
    spec = stage.spec
    session = session_id(spec.id, sample.id, trial, attempt)
    seed = spec.trial_seed(sample.id, trial)
    client = InProcessClient(
        stage.gateway,
        session,
        seed=seed,
        temperature=spec.temperature,
        max_tokens=spec.max_tokens,
    )
    context = TrialContext(
        trial=trial,
        seed=seed,
        client=TimedClient(client, spec.timeout_s),
        endpoint=stage.endpoint,
        session=session,
        temperature=spec.temperature,
        max_tokens=spec.max_tokens,
        timeout_s=spec.timeout_s,
    )
    started = time.perf_counter()
    outcome = _outcome(stage.task, sample, context)
    seconds = time.perf_counter() - started
    report = client.close()
    saved = run.save_transcript(sample.id, trial, _transcript(outcome, report))
    record = trial_record(sample, context, outcome, report, seconds, saved, attempt)
    run.append_turns(turn_records(sample, trial, report))
    run.append_trial(record)
    return record


def _outcome(task: Task, sample: Sample, context: TrialContext) -> Outcome:
    """Play the trial; whatever breaks is a status, never the end of the run."""
    try:
        return task.run_trial(sample, context)
    except (UsageError, PrerequisiteError):
        raise
    except TimeoutError as error:
        return Outcome(TrialStatus.TIMEOUT, error=str(error))
    except (CapacityError, KVBenchError) as error:
        return Outcome(TrialStatus.ENGINE_ERROR, error=str(error))
    except Exception:  # noqa: BLE001  one broken trial must not end the run
        return Outcome(TrialStatus.INFRA_ERROR, error=traceback.format_exc(limit=20))


def _transcript(outcome: Outcome, report: SessionReport) -> dict[str, Any]:
    events = [asdict(event) for event in report.stats.events]
    return {"transcript": outcome.transcript, "error": outcome.error, "events": events}
