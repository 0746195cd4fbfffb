"""Running specs: engine, gateway, trials in parallel, records as each trial ends."""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from agentbench_kv.adapters.base import Sample, ScriptedAgent, Task
from agentbench_kv.engines.base import Capability, Engine, EngineOptions, ScriptSource
from agentbench_kv.errors import EngineGoneError, KVBenchError, UsageError
from agentbench_kv.gateway import AnyGateway, open_gateway
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.methods.base import Method, QueryKind
from agentbench_kv.methods.dropping.policy import DropMethod
from agentbench_kv.methods.memory.plain import PlainMemory
from agentbench_kv.phases.machine import PLAIN
from agentbench_kv.registry import load_engine, load_task
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.store import RunDir, RunStore
from agentbench_kv.results.summary import Summary, summarize
from agentbench_kv.results.validity import FORESEES, REMEMBERS
from agentbench_kv.run.calibration import calibration_used, identified
from agentbench_kv.run.engines import EngineShelf, check_pair
from agentbench_kv.run.foresight import check_foresight
from agentbench_kv.run.memories import attach_memory, check_memory, open_banks, server_settings
from agentbench_kv.run.provenance import environment, method_code, refuse_other_model
from agentbench_kv.run.spec import RunSpec
from agentbench_kv.run.trained import check_trained, refuse_trained_on
from agentbench_kv.run.trial import TrialSetup, checkpoint_name, play_trial, sample_key, session_id

_log = logging.getLogger(__name__)
# Called with the spec, finished and expected trials, and the trial that just ended; with None when
# a run starts, and again when its engine is ready and its first trial begins; with words about the
# trials under way while none ends.
Progress = Callable[[RunSpec, int, int, TrialRecord | str | None], None]


def refuse_without_messages(family: str) -> None:
    """Refuse what goes by the system message where nobody can tell messages apart."""
    if family == PLAIN.name:
        raise UsageError(
            "protect=system, prefix=shared: this model's chat format is none that is known "
            "(phase_family: plain; docs/models.md), so nobody can tell where its system message "
            "ends; use --set protect=prompt or a number of tokens, and prefix=own"
        )


def check_task(name: str, engine: type[Engine], task: type[Task], method: Method) -> None:
    """Refuse a task that asks what the engine cannot do."""
    # What is past is told to a memory of plain text, not read into a cache.
    needs = frozenset[str]() if isinstance(method, PlainMemory) else task.needs
    missing = sorted(needs - {capability.value for capability in engine.capabilities})
    if missing:
        raise UsageError(
            f"task {task.name!r} needs {missing[0]}, which engine {name!r} has not; "
            "kvbench ls engines shows who has"
        )


def check_messages(spec: RunSpec, engine: type[Engine]) -> None:
    """Refuse a task that sends no messages where a method or an engine needs them."""
    if load_task(spec.task).create(spec.task_params).sends_messages:
        return
    if isinstance(spec.built_method, DropMethod):
        found = f"method {spec.method!r} drops messages"
    elif Capability.TEXT in engine.capabilities:
        found = f"engine {spec.engine!r} takes messages only"
    else:
        return
    raise UsageError(f"{found}, and task {spec.task!r} sends raw completions; use --set route=chat")


def warn_without_phases(method: Method, gateway: AnyGateway) -> None:
    """Say that a method goes by phases which nobody can tell in this model's format.

    A method that must know where the system message ends is refused.
    """
    if method.asks_for_system:
        refuse_without_messages(str(gateway.provenance()["phase_family"]))
    by_phase = method.query_plan().kind is QueryKind.PER_PHASE
    if by_phase and gateway.provenance()["phase_family"] == PLAIN.name:
        _log.warning(
            "kvbench: %s goes by the phase of every token, and this model's chat format is none "
            "that is known (phase_family: plain): all tokens count as others; formats are in "
            "docs/models.md", method.label,
        )  # fmt: skip


def check_all(specs: Sequence[RunSpec]) -> None:
    """Refuse what can run nowhere, before anything starts and without loading weights."""
    for spec in specs:
        cls = load_engine(spec.engine)
        check_pair(spec.engine, cls, spec.built_method)
        check_trained(spec.model, spec.built_method)
        check_task(spec.engine, cls, load_task(spec.task), spec.built_method)
        check_foresight(spec)
        check_memory(spec)
        check_messages(spec, cls)
        cls.check_model(spec.model)
        cls.check_options(engine_options(spec))
        cls.check_kv_dtype(engine_options(spec))


def run_all(
    specs: Sequence[RunSpec], out: Path, progress: Progress, banks: Path | None = None
) -> list[Summary]:
    """Run specs, as `spec.grid` returns them, one after the other; finished ones only report.

    `banks` is a folder for what memories read of the past.
    """
    check_all(specs)
    for spec in specs:
        load_engine(spec.engine).check_compute(spec.dtype, spec.device)
    with EngineShelf(banks) as shelf:
        return [run_one(spec, out, progress, shelf) for spec in specs]


def run_one(
    spec: RunSpec,
    out: Path,
    progress: Progress,
    shelf: EngineShelf | None = None,
) -> Summary:
    """Run what is missing of one spec and summarize it; `shelf` may have its engine ready.

    A run that misses nothing is not opened, so its record stays what it was.
    """
    spec = identified(spec)
    task = load_task(spec.task).create(spec.task_params)
    try:
        samples = task.samples(spec.limit, spec.seed)
        refuse_trained_on(spec.model, spec.task, samples)
        trials = [(sample, trial) for trial in range(spec.trials) for sample in samples]
        made = environment(spec.device) | method_code(spec.built_method)
        store, keys = RunStore(out), [(sample.id, trial) for sample, trial in trials]
        whole = store.whole(spec.id, spec.document(), made, keys)
        if whole is not None:
            progress(spec, len(trials), len(trials), None)
            return summarize(whole)
        with store.open(spec.id, spec.document(), made, len(trials)) as run:
            done = run.finished_trials()
            todo = [(sample, trial) for sample, trial in trials if (sample.id, trial) not in done]
            left = [sample for sample, _ in todo]
            going_on = {checkpoint_name(session_id(spec.id, s.id, trial, 1)) for s, trial in todo}
            run.drop_checkpoints({*run.checkpoints()} - going_on)
            progress(spec, len(trials) - len(todo), len(trials), None)
            if todo:
                with trial_setup(spec, task, left, shelf=shelf, run=run) as setup:
                    _play(setup, todo, run, partial(progress, spec), len(trials))
        return summarize(run)
    finally:
        task.close()


def _play(
    setup: TrialSetup,
    todo: Sequence[tuple[Sample, int]],
    run: RunDir,
    progress: Callable[[int, int, TrialRecord | str | None], None],
    expected: int,
) -> None:
    finished = expected - len(todo)
    _note_provenance(run, setup)
    progress(finished, expected, None)
    with run.playing(), TrialThreads(setup, run, todo) as trials:
        for record in trials:
            finished += isinstance(record, TrialRecord) and record.finished
            progress(finished, expected, record)


@contextmanager
def trial_setup(
    spec: RunSpec,
    task: Task,
    samples: Sequence[Sample],
    observer: Any = None,
    shelf: EngineShelf | None = None,
    run: RunDir | None = None,
) -> Iterator[TrialSetup]:
    """Start engine, gateway and, if the task needs one, the loopback server.

    An engine from a `shelf` goes back to it. With a `run`, a memory keeps there what it holds of
    trials that are interrupted.
    """
    spec = identified(spec)
    scripts = _scripts(spec, task, samples)
    with ExitStack() as stack:
        engines = shelf or stack.enter_context(EngineShelf())
        if engines.banks is not None:
            open_banks(engines.banks, spec.built_method)
        options = replace(engine_options(spec), scripts=scripts, banks=engines.banks)
        engine = stack.enter_context(engines.lend(spec.engine, options, observer))
        gateway = open_gateway(
            engine,
            spec.built_method,
            default_max_tokens=spec.max_tokens,
            tool_syntax=spec.tool_syntax or "auto",
        )
        warn_without_phases(spec.built_method, gateway)
        endpoint, method = None, spec.built_method
        if task.needs_endpoint or isinstance(method, PlainMemory):
            served = server_settings(method)
            server = BackgroundServer(gateway, concurrency=spec.concurrency, settings=served)
            endpoint = stack.enter_context(server).url
        if isinstance(method, PlainMemory) and endpoint is not None:
            attach_memory(stack, gateway, method, endpoint, run)
        foretold = spec.built_method.foresees
        yield TrialSetup(spec, task, engine, gateway, endpoint, foretold)


def engine_options(spec: RunSpec) -> EngineOptions:
    """Return what a spec asks of its engine, but for a scripted agent's texts."""
    return EngineOptions(
        spec.model,
        spec.built_method,
        device=spec.device,
        dtype=spec.dtype,
        kv_dtype=spec.kv_dtype,
        concurrency=spec.concurrency,
        max_live_tokens=spec.max_live_tokens or None,
        context_limit=spec.context_limit,
        engine_args=spec.engine_args,
        allow_untested=spec.allow_untested,
    )


def _scripts(spec: RunSpec, task: Task, samples: Sequence[Sample]) -> ScriptSource:
    """Give the scripted engine a session's texts: the session id names the sample."""
    by_key = {sample_key(sample.id): sample for sample in samples}

    def texts(session: str) -> list[str]:
        sample = by_key[session.rpartition("|")[2]]
        agent: ScriptedAgent = spec.model  # type: ignore[assignment]  # checked by check_model
        return task.script(sample, agent)

    return texts


def _note_provenance(run: RunDir, setup: TrialSetup) -> None:
    """Record what only the running engine knows; refuse to mix two models in one run."""
    info = setup.engine.info
    refuse_other_model(run, info.model_sha)
    run.annotate(
        {
            "engine": info.name,
            "model_sha": info.model_sha,
            "device": info.device,
            "dtype": info.dtype,
            "context_limit": info.context_limit,
            **({"engine_details": dict(info.details)} if info.details else {}),
            **({REMEMBERS: True} if setup.spec.built_method.remembers else {}),
            **({FORESEES: True} if setup.spec.built_method.foresees else {}),
            "determinism": "greedy" if setup.spec.temperature == 0 else "seeded sampling",
            "concurrency": setup.spec.concurrency,
            "task": setup.task.provenance(),
            "changed_settings": setup.spec.changed_settings,
            **calibration_used(setup.spec.built_method),
            **setup.gateway.provenance(),
        }
    )


_STOP_S = 3.0  # for cancelled trials to end before the engine is shut down under them
_LOOK_S = 5.0
HUNG = "KVBENCH_HUNG"  # seconds
_HUNG_S = 1800.0
THREADS = "threads.txt"


class TrialThreads:
    """Plays trials side by side; iterate for their records as they end, words while none does.

    The first error that is not a trial's own is raised. Leaving the block by an error, Ctrl-C
    included, cancels the trials under way, and nothing is recorded of them.
    """

    def __init__(self, setup: TrialSetup, run: RunDir, todo: Sequence[tuple[Sample, int]]) -> None:
        self._setup = setup
        self._run = run
        self._count = len(todo)
        self._todo = iter(todo)
        self._taking = threading.Lock()
        self._stopped = threading.Event()
        self._ended: queue.SimpleQueue[TrialRecord | BaseException] = queue.SimpleQueue()
        self._watchdog = Watchdog(setup)
        # Daemons: the process must be able to end though one of them hangs.
        self._threads = [
            threading.Thread(target=self._play, name="kvbench-trial", daemon=True)
            for _ in range(min(setup.spec.concurrency, len(todo)))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._stopped.set()
            self._setup.gateway.stop(KVBenchError("the run has ended"))
        latest = time.monotonic() + _STOP_S
        for thread in self._threads:
            thread.join(max(0.0, latest - time.monotonic()))

    def __iter__(self) -> Iterator[TrialRecord | str]:
        left = self._count
        while left:
            ended = self._next()
            if isinstance(ended, BaseException):
                raise ended
            left -= isinstance(ended, TrialRecord)
            yield ended

    def _play(self) -> None:
        while not self._stopped.is_set():
            with self._taking:
                job = next(self._todo, None)
            if job is None:
                return
            try:
                self._ended.put(play_trial(self._setup, self._run, *job))
            except BaseException as error:  # noqa: BLE001  raised where the run is
                self._stopped.set()  # after an error nothing more is started
                self._ended.put(error)

    def _next(self) -> TrialRecord | BaseException | str:
        try:
            return self._ended.get(timeout=_LOOK_S)
        except queue.Empty:
            if hung := self._watchdog.look():
                raise self._hung(hung) from None
            return self._under_way()

    def _under_way(self) -> str:
        """Say what the trials that have not ended have done so far."""
        sessions, written, read = list(self._setup.deadlines), 0, 0
        for session in sessions:
            with suppress(KVBenchError, KeyError, OSError):  # it may end meanwhile
                stats = self._setup.engine.stats(session)
                # `logical` has what waits for its prefill, too.
                fed = min(stats.logical, stats.live + stats.evicted - stats.restored)
                written += stats.decode_tokens
                read += max(fed - stats.decode_tokens, 0)
        said = f"{len(sessions)} under way, {read:,} tokens read, {written:,} written"
        return said + self._past_of(sessions)

    def _past_of(self, sessions: Sequence[str]) -> str:
        """Say how much of a past the memories of sessions under way have taken in."""
        memories = self._setup.gateway.memories
        if memories is None:
            return ""
        taken = [memories.taken(session) for session in sessions]
        past, tokens = (sum(column) for column in zip(*taken, strict=True)) if taken else (0, 0)
        return f"; {past:,} past sessions taken in, {tokens:,} tokens" if tokens else ""

    def _hung(self, what: str) -> EngineGoneError:
        path = self._run.path / THREADS
        with suppress(OSError), path.open("w") as file:
            faulthandler.dump_traceback(file)
        return EngineGoneError(
            f"the run hangs: {what}; the stacks of all threads are in {path}; "
            "the same command goes on where it stopped"
        )


class Watchdog:
    """Tells a run that hangs from one that is slow.

    It counts its looks, `_LOOK_S` apart: a clock would go on while the process is stopped.
    """

    def __init__(self, setup: TrialSetup) -> None:
        self.seconds = _hung_s()
        self._setup = setup
        self._progress: int | None = None
        self._still = 0  # looks since the engine, which has work, last moved
        self._late: dict[str, int] = {}  # looks since the time of a session under way was up

    def look(self) -> str | None:
        """Return what hangs, in words; None if nothing has for long enough."""
        before, self._progress = self._progress, self._setup.engine.progress()
        moved = self._progress is None or self._progress != before
        self._still = 0 if moved else self._still + 1
        deadlines = list(self._setup.deadlines.items())
        late = [session for session, deadline in deadlines if deadline.passed]
        self._late = {session: self._late.get(session, 0) + 1 for session in late}
        if self._still * _LOOK_S >= self.seconds:
            name = self._setup.engine.info.name
            return f"engine {name!r} has work and has done nothing for {self.seconds:g} s"
        for session, looks in self._late.items():
            if looks * _LOOK_S >= self.seconds:
                return f"session {session} goes on {self.seconds:g} s after its time limit"
        return None


def _hung_s() -> float:
    text = os.environ.get(HUNG, "")
    try:
        seconds = float(text or _HUNG_S)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{HUNG}={text!r}: expected seconds above 0")
    return seconds
