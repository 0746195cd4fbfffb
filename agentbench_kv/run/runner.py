"""Running specs: engine, gateway, trials in parallel, records as each trial ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.base import Sample, ScriptedAgent, Task
from agentbench_kv.engines.base import Capability, Engine, EngineOptions, ScriptSource
from agentbench_kv.engines.core.block_engine import BlockEngine
from agentbench_kv.errors import UsageError
from agentbench_kv.gateway import open_gateway
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.spans import SpanMethod
from agentbench_kv.registry import load_engine, load_task
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.store import RunDir, RunStore
from agentbench_kv.results.summary import Summary, summarize
from agentbench_kv.run.calibration import calibrated, calibration_used, identified
from agentbench_kv.run.provenance import environment
from agentbench_kv.run.spec import RunSpec, check_arguments
from agentbench_kv.run.trial import TrialSetup, play_trial, sample_key

# Called with the spec, finished and expected trials, and the trial that just ended; with None when
# a run starts, and again when its engine is ready and its first trial begins.
Progress = Callable[[RunSpec, int, int, TrialRecord | None], None]


def start_engine(name: str, options: EngineOptions, observer: Any = None) -> Engine:
    """Start an engine with a method, after checking that the two fit.

    `observer` is what an engine that can be looked into calls, such as
    `engines.embedded.observer.Observer`. UsageError or PrerequisiteError if the name is unknown,
    the pair is impossible, or the model cannot be loaded.
    """
    cls, method = load_engine(name), options.method
    check_arguments(name, options.engine_args)
    check_pair(name, cls, method)
    if observer is not None and Capability.CAPTURE not in cls.capabilities:
        raise UsageError(f"engine {name!r} cannot be looked into; use --engine embedded")
    extra = {} if observer is None else {"recorder": observer}
    options = replace(options, method=calibrated(method, options.model, options.device))
    if isinstance(method, SpanMethod):
        below: Engine = cls.create(replace(options, method=method.below()), **extra)
        return BlockEngine(below, method)
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
    """Run specs, as `spec.grid` returns them, one after the other; finished ones only report."""
    for spec in specs:
        cls = load_engine(spec.engine)
        check_pair(spec.engine, cls, spec.built_method)
        cls.check_model(spec.model)
        cls.check_compute(spec.dtype, spec.device)
    return [run_one(spec, out, progress) for spec in specs]


def run_one(spec: RunSpec, out: Path, progress: Progress) -> Summary:
    """Run what is missing of one spec and summarize it."""
    spec = identified(spec)
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
            if todo:
                _play(spec, task, todo, run, partial(progress, spec), expected)
            else:
                progress(spec, expected, expected, None)
        return summarize(run)
    finally:
        task.close()


def _play(
    spec: RunSpec,
    task: Task,
    todo: Sequence[tuple[Sample, int]],
    run: RunDir,
    progress: Callable[[int, int, TrialRecord | None], None],
    expected: int,
) -> None:
    finished = expected - len(todo)
    progress(finished, expected, None)
    with trial_setup(spec, task, [sample for sample, _ in todo]) as setup:
        _note_provenance(run, setup)
        jobs = ((setup, run, sample, trial) for sample, trial in todo)
        progress(finished, expected, None)
        with run.playing():
            for record in _in_parallel(jobs, spec.concurrency):
                finished += record.finished
                progress(finished, expected, record)


@contextmanager
def trial_setup(
    spec: RunSpec, task: Task, samples: Sequence[Sample], observer: Any = None
) -> Iterator[TrialSetup]:
    """Start engine, gateway and, if the task needs one, the loopback server."""
    spec = identified(spec)
    options = EngineOptions(
        spec.model,
        spec.built_method,
        device=spec.device,
        dtype=spec.dtype,
        concurrency=spec.concurrency,
        scripts=_scripts(spec, task, samples),
        engine_args=spec.engine_args,
        allow_untested=spec.allow_untested,
    )
    with ExitStack() as stack:
        engine = start_engine(spec.engine, options, observer)
        stack.callback(engine.shutdown)
        gateway = open_gateway(engine, default_max_tokens=spec.max_tokens)
        endpoint = None
        if task.needs_endpoint:
            server = stack.enter_context(BackgroundServer(gateway, concurrency=spec.concurrency))
            endpoint = server.url
        yield TrialSetup(spec, task, engine, gateway, endpoint)


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
    run.annotate(
        {
            "engine": info.name,
            "model_sha": info.model_sha,
            "device": info.device,
            "dtype": info.dtype,
            "context_limit": info.context_limit,
            **({"engine_details": dict(info.details)} if info.details else {}),
            "determinism": "greedy" if setup.spec.temperature == 0 else "seeded sampling",
            "concurrency": setup.spec.concurrency,
            "task": setup.task.provenance(),
            "changed_settings": _changed_settings(setup.spec),
            **calibration_used(setup.spec.built_method),
            **setup.gateway.provenance(),
        }
    )
    changed = run.info.resumes[-1].changed if run.info.resumes else {}
    if "model_sha" in changed:
        raise UsageError(
            f"the model {setup.spec.model} changed since run {run.info.run_id} began; "
            "choose another --out"
        )


def _changed_settings(spec: RunSpec) -> dict[str, Any]:
    """Return the method's and the task's parameters that are not the defaults."""
    method = spec.built_method
    defaults = {name: known.default for name, known in method.parameters().items()}
    defaults |= method.presets.get(method.preset, {})
    defaults |= load_task(spec.task).create({}).settings()
    given = {**spec.params, **spec.task_params}
    return {name: value for name, value in given.items() if value != defaults.get(name)}


def _in_parallel(
    jobs: Iterable[tuple[TrialSetup, RunDir, Sample, int]], width: int
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
