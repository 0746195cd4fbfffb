"""Running specs: engine, gateway, trials in parallel, records as each trial ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.base import Sample, ScriptedAgent, Task
from agentbench_kv.engines.base import Capability, Engine, EngineOptions, ScriptSource
from agentbench_kv.engines.core.spans import BlockEngine
from agentbench_kv.errors import UsageError
from agentbench_kv.gateway import open_gateway
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.spans import SpanMethod
from agentbench_kv.registry import load_engine, load_task, make_method
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.store import RunDir, RunStore
from agentbench_kv.results.summary import Summary, summarize
from agentbench_kv.run.calibration import calibrated, calibration_used
from agentbench_kv.run.provenance import environment
from agentbench_kv.run.spec import RunSpec, check_arguments
from agentbench_kv.run.trial import Stage, play_trial, sample_key

Progress = Callable[[RunSpec, int, int, TrialRecord | None], None]


"""Called with the spec, finished and expected trials, and the trial that just ended; with None when
a run starts, and again when its engine stands and its first trial begins."""


def build_engine(
    engine: str,
    model: str,
    method: str,
    budget: int | str | None,
    settings: Mapping[str, Any],
    *,
    device: str = "auto",
    dtype: str = "float32",
    concurrency: int = 16,
    scripts: ScriptSource | None = None,
    observer: Any = None,
    load_format: str = "auto",
    engine_args: Mapping[str, str] | None = None,
    allow_untested: bool = False,
) -> Engine:
    """Start an engine with a method, after checking that the two fit.

    Parameters
    ----------
    observer : object, optional
        What an engine that can be looked into calls, such as `engines.embedded.Observer`.
    load_format, engine_args, allow_untested
        See `EngineOptions`.

    Raises
    ------
    UsageError, PrerequisiteError
        If a name is unknown, the pair is impossible, or the model cannot be loaded.
    """
    cls = load_engine(engine)
    check_arguments(engine, engine_args or {})
    built = make_method(method, budget, settings)
    check_pair(engine, cls, built)
    options = EngineOptions(
        model=model,
        method=calibrated(built, model, dtype, device),
        device=device,
        dtype=dtype,
        concurrency=concurrency,
        scripts=scripts,
        load_format=load_format,
        engine_args=dict(engine_args or {}),
        allow_untested=allow_untested,
    )
    if observer is not None and Capability.CAPTURE not in cls.capabilities:
        raise UsageError(f"engine {engine!r} cannot be looked into; use --engine embedded")
    extra = {} if observer is None else {"recorder": observer}
    if isinstance(built, SpanMethod):
        below: Engine = cls.create(replace(options, method=built.below()), **extra)
        return BlockEngine(below, built)
    made: Engine = cls.create(options, **extra)
    return made


def check_pair(name: str, engine: type[Engine], method: Method) -> None:
    """Refuse a method the engine cannot run."""
    if method.offline:
        raise UsageError(
            f"method {method.label!r} ranks by what happens later, so no engine can run it; "
            "use it on a capture: kvbench select --method oracle --capture FILE"
        )
    missing = sorted(method.needs - {capability.value for capability in engine.capabilities})
    if missing:
        lacks = "does not compress a cache" if "compress" in missing else f"has no {missing[0]}"
        raise UsageError(
            f"engine {name!r} cannot run method {method.label!r}: it {lacks}; "
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
    task = load_task(spec.task).create(spec.task_params)
    try:
        samples = task.samples(spec.limit, spec.seed)
        expected = len(samples) * spec.trials
        with RunStore(out).open(spec.id, spec.document(), environment(), expected) as run:
            done = run.finished_trials()
            todo = [
                (sample, trial)
                for trial in range(spec.trials)
                for sample in samples
                if (sample.id, trial) not in done
            ]
            start = partial(progress, spec, expected - len(todo), expected, None)
            start()
            if todo:
                report = _counted(spec, expected - len(todo), expected, progress)
                _play(spec, task, todo, run, start, report)
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
    start: Callable[[], None],
    report: Callable[[TrialRecord], None],
) -> None:
    with open_stage(spec, task, [sample for sample, _ in todo]) as stage:
        _note_provenance(run, stage)
        jobs = ((stage, run, sample, trial) for sample, trial in todo)
        start()
        with run.playing():
            for record in _in_parallel(jobs, spec.concurrency):
                report(record)


@contextmanager
def open_stage(
    spec: RunSpec, task: Task, samples: Sequence[Sample], observer: Any = None
) -> Iterator[Stage]:
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
            observer=observer,
            engine_args=spec.engine_args,
            allow_untested=spec.allow_untested,
        )
        stack.callback(engine.shutdown)
        gateway = open_gateway(engine, default_max_tokens=spec.max_tokens)
        endpoint = None
        if task.needs_endpoint:
            server = stack.enter_context(BackgroundServer(gateway, concurrency=spec.concurrency))
            endpoint = server.url
        yield Stage(spec, task, engine, gateway, endpoint)


def _scripts(spec: RunSpec, task: Task, samples: Sequence[Sample]) -> ScriptSource:
    """Give the scripted engine a session's texts: the session id names the sample."""
    by_key = {sample_key(sample.id): sample for sample in samples}

    def texts(session: str) -> list[str]:
        sample = by_key[session.rpartition("|")[2]]
        agent: ScriptedAgent = spec.model  # type: ignore[assignment]  # checked by check_model
        return task.script(sample, agent)

    return texts


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
            **({"engine_details": dict(info.details)} if info.details else {}),
            "determinism": "greedy" if stage.spec.temperature == 0 else "seeded sampling",
            "concurrency": stage.spec.concurrency,
            "task": stage.task.provenance(),
            "changed_settings": _changed_settings(stage.spec),
            **calibration_used(stage.spec.make_method(), info.model_sha),
            **stage.gateway.provenance(),
        }
    )
    changed = run.info.resumes[-1].changed if run.info.resumes else {}
    if "model_sha" in changed:
        raise UsageError(
            f"the model {stage.spec.model} changed since run {run.info.run_id} began; "
            "choose another --out"
        )


def _changed_settings(spec: RunSpec) -> dict[str, Any]:
    """Return the method's and the task's parameters that are not the defaults."""
    defaults = make_method(spec.method, spec.budget).settings()
    defaults |= load_task(spec.task).create({}).settings()
    given = {**spec.params, **spec.task_params}
    return {name: value for name, value in given.items() if value != defaults.get(name)}


def _in_parallel(
    jobs: Iterable[tuple[Stage, RunDir, Sample, int]], width: int
) -> Iterator[TrialRecord]:
    """Run trials `width` at a time; the first error that is not a trial's own ends the run."""
    queue = iter(jobs)
    with ThreadPoolExecutor(width, thread_name_prefix="kvbench-trial") as pool:
        running = {pool.submit(play_trial, *job) for job in islice(queue, width)}
        while running:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            # All of them first: after an error nothing more is started.
            records = [future.result() for future in finished]
            running |= {pool.submit(play_trial, *job) for job in islice(queue, len(finished))}
            yield from records
