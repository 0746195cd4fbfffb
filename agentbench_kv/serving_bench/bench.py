"""Measuring servers under load: arms, one after the other in every repetition, order rotated."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from agentbench_kv.engines.base import Capability
from agentbench_kv.engines.serving.engine import ServingEngine
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.registry import load_engine, make_method
from agentbench_kv.results.files import held
from agentbench_kv.results.run_names import run_id
from agentbench_kv.run.exact_calls import exact_calls
from agentbench_kv.run.provenance import environment
from agentbench_kv.run.recordings import Recording, record_file
from agentbench_kv.serving_bench import jobs
from agentbench_kv.serving_bench.loadgen import measure_apart
from agentbench_kv.serving_bench.measurements import (
    Key,
    LoadMeasurement,
    Quality,
    ServingArm,
    ServingFolder,
    ServingPlan,
    of_method,
)
from agentbench_kv.serving_bench.pool import PoolWatch
from agentbench_kv.serving_bench.recorded import sessions_of
from agentbench_kv.serving_bench.servers import RunningServer, serve_arm
from agentbench_kv.serving_bench.summary import ServingSummary, summarize_serving
from agentbench_kv.serving_bench.trace import LoadTrace

_ENDLESS = 1 << 24  # a context that is not known
_DETAILS = (
    "session", "turn", "start", "new_tokens", "prompt_tokens", "output_tokens", "ttft_s",
    "latency_s", "error",
)  # fmt: skip

# Called with a measurement, and whether it is from an earlier call.
Told = Callable[[LoadMeasurement, bool], None]


@dataclass(frozen=True)
class ServingRun:
    """A plan with what to run it needs and no figure depends on."""

    plan: ServingPlan
    workloads: tuple[
        jobs.Workload | LoadTrace, ...
    ]  # the plan's shapes, or its trace; as the loads
    loads: tuple[jobs.Load, ...]
    vocabulary: jobs.Vocabulary | None = None  # for servers by URL
    timeout_s: float = 1800.0
    detailed: bool = False  # whether files keep every request
    recordings: tuple[Recording, ...] = ()  # the trace's sessions, if it has what was answered
    messages: Path | None = None  # the trace's file, if it has recorded messages

    @property
    def at_once(self) -> int:
        """Most sessions open at the same time."""
        return max(load.at_once for load in self.loads)


def folder_of(plan: ServingPlan, out: Path) -> Path:
    """Return the plan's own folder below `out`: the same plan finds it again."""
    return out / run_id(["serving", plan.engine, plan.model_name], plan.document())


def measure_serving(run: ServingRun, path: Path, told: Told) -> ServingSummary:
    """Measure what is missing of a plan or failed, write each as it ends, then the summary.

    A KVBenchError if a server does not start or cannot be reached, a session is longer than its
    context, or another command is measuring into the folder.
    """
    here = environment(run.plan.device or "auto")
    folder = ServingFolder.create(path, run.plan, here)
    with held(path):
        _measure_missing(run, folder, here, told)
        summary = summarize_serving(run.plan, folder.measurements(), folder.missing())
        folder.write_summary(summary.model_dump(mode="json"))
    return summary


def _measure_missing(
    run: ServingRun, folder: ServingFolder, here: Mapping[str, Any], told: Told
) -> None:
    plan = run.plan
    known = {measured.key: measured for measured in folder.measurements()}
    known = {key: measured for key, measured in known.items() if not measured.failed}
    judged = {each.arm for each in known.values() if each.quality and not each.quality.failed}
    fresh: dict[int, tuple[object, ...]] = {}
    with ExitStack() as all_servers:
        kept = all_servers.enter_context(_all_served(run, known)) if plan.together else {}
        for repetition in range(plan.repeats):
            for place, arm in enumerate(rotated(plan.arms, repetition)):
                missing = []
                for workload, load in product(run.workloads, run.loads):
                    before = known.get((arm.name, workload.label, load.label, repetition))
                    if before is None:
                        missing.append((workload, load))
                    else:
                        told(before, True)
                asked = bool(run.recordings) and arm.name not in judged
                if not missing and not asked:
                    continue
                if missing and repetition not in fresh:
                    fresh[repetition] = _freshness(folder, repetition)
                order = MeasurementOrder(repetition, place, fresh.get(repetition, ()))
                with ExitStack() as own:
                    server = kept.get(arm.name) or own.enter_context(_served(run, arm))
                    _refuse_other_method(folder, arm, server, known.values())
                    for workload, load in missing:
                        measured = _measure(run, folder, arm, server, workload, load, order)
                        measured = measured.model_copy(update={"provenance": here})
                        known[measured.key] = measured
                        folder.add(measured)
                        told(measured, False)
                    if asked:
                        judged.add(arm.name)
                        key = (arm.name, run.workloads[0].label, run.loads[0].label, repetition)
                        folder.add(_judged(run, server, known[key], here))


def _refuse_other_method(
    folder: ServingFolder,
    arm: ServingArm,
    server: RunningServer,
    known: Iterable[LoadMeasurement],
) -> None:
    """Refuse to go on with an arm whose method has other code or another calibration by now."""
    now = of_method(server.about)
    for each in known:
        was = of_method(each.server)
        changed = [name for name in was if each.arm == arm.name and was[name] != now.get(name)]
        if changed:
            raise UsageError(
                f"the {changed[0]} of method {arm.method} changed since {folder.path} was begun; "
                "choose another --out"
            )


def _judged(
    run: ServingRun, server: RunningServer, measured: LoadMeasurement, here: Mapping[str, Any]
) -> LoadMeasurement:
    """Return one of an arm's measurements with its exact calls, which may be counted later."""
    now = measured.model_copy(update={"server": server.about, "provenance": here})
    quality = _quality(run, server).model_copy(update={"origin": now.origin})
    return measured.model_copy(update={"quality": quality})


class MeasurementOrder(NamedTuple):
    """When an arm is measured, and what no prompt of it was drawn with before."""

    repetition: int
    place: int  # of the arm in it
    fresh: tuple[object, ...] = ()


def _freshness(folder: ServingFolder, repetition: int) -> tuple[object, ...]:
    """Return what makes a repetition's prompts new, for servers that may know those before."""
    return (folder.salt, folder.begun(repetition)) if folder.salt else ()


def rotated(arms: Sequence[ServingArm], repetition: int) -> list[ServingArm]:
    """Return the arms in the order of a repetition: each is first equally often."""
    first = repetition % len(arms)
    return [*arms[first:], *arms[:first]]


@contextmanager
def _all_served(
    run: ServingRun, known: Mapping[Key, LoadMeasurement]
) -> Iterator[dict[str, RunningServer]]:
    """Start the servers of all arms of which something is missing, serving engines at once."""
    plan = run.plan
    cells = list(product(run.workloads, run.loads, range(plan.repeats)))
    waiting = {
        arm.name: _served(run, arm)
        for arm in plan.arms
        if any((arm.name, w.label, load.label, n) not in known for w, load, n in cells)
    }
    # An engine in this process loads its model under settings of the whole process.
    apart = not any(arm.url for arm in plan.arms) and issubclass(
        load_engine(plan.engine), ServingEngine
    )
    with ExitStack() as stack:
        with ThreadPoolExecutor(max(len(waiting), 1) if apart else 1) as pool:
            started = {name: pool.submit(server.__enter__) for name, server in waiting.items()}
        for name, start in started.items():
            if start.exception() is None:
                stack.push(waiting[name])
        yield {name: start.result() for name, start in started.items()}


@contextmanager
def _served(run: ServingRun, arm: ServingArm) -> Iterator[RunningServer]:
    """Start an arm's server; plan what it is sent, where its method drops messages."""
    plan = run.plan
    with serve_arm(plan, arm, run.at_once) as server:
        if arm.drops and run.messages is not None:
            made = (str(arm.method), arm.budget, tuple(arm.settings.items()))
            asked = (run.messages, plan.model, server.context or _ENDLESS)
            server = replace(server, shortened=_shortened(*asked, *made))
        yield server


@lru_cache(maxsize=32)
def _shortened(
    path: Path,
    model: str,
    context: int,
    name: str,
    budget: int | str | None,
    settings: tuple[tuple[str, Any], ...],
) -> tuple[Recording, ...]:
    """Return recorded messages as they are sent without what a method drops."""
    method = make_method(name, budget, dict(settings))
    return tuple(record_file(path, model, method=method, context=context))


def _measure(
    run: ServingRun,
    folder: ServingFolder,
    arm: ServingArm,
    server: RunningServer,
    workload: jobs.Workload | LoadTrace,
    load: jobs.Load,
    order: MeasurementOrder,
) -> LoadMeasurement:
    """Measure an arm at one workload and load."""
    plan, target = run.plan, server.target
    sessions = _planned(workload, load.sessions)
    if server.shortened is not None:
        sessions = sessions_of(server.shortened[: load.sessions], plan.think_time_s)
    longest = max(sessions, key=lambda session: session.length)
    if server.context is not None and longest.length > server.context:
        raise UsageError(
            f"a session of {workload.label} in {len(longest.calls)} turns has {longest.length} "
            f"tokens; {target.model} has room for {server.context}"
        )
    vocabulary = server.vocabulary or run.vocabulary
    if vocabulary is None:
        raise UsageError("--url needs --tokenizer FOLDER or --vocab SIZE, to draw token ids from")
    drawn = (plan.seed, order.repetition, workload.label, load.label)
    seeds = _seed(*drawn, *order.fresh), _seed(*drawn)  # arrivals need not be new
    job = jobs.LoadJob(
        *(target, sessions, load, vocabulary, *seeds),
        *(run.timeout_s, plan.time_scale, plan.goodput),
    )
    begun = folder.begin((arm.name, workload.label, load.label, order.repetition))
    with PoolWatch(server.engine) as pool:
        result = measure_apart(job, pool.begin)
    details = [{name: getattr(turn, name) for name in _DETAILS} for turn in result.requests]
    return LoadMeasurement(
        arm=arm.name,
        shape=workload.label,
        load=load.label,
        repetition=order.repetition,
        place=order.place,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        begun=begun,
        backend=f"{plan.engine}/{plan.wire}",
        model_id=target.model,
        num_prompts=sum(len(session.calls) for session in sessions),
        max_concurrency=load.concurrency,
        request_rate=load.rate or "inf",
        server=server.about,
        pool_bytes=pool.peak,
        prefixes_kept=pool.kept,
        restarts=pool.restarts,
        timeout_s=run.timeout_s,
        random_prompts=not any(call.ids for session in sessions for call in session.calls),
        **msgspec.structs.asdict(result) | {"requests": details if run.detailed else None},
    )


def _quality(run: ServingRun, server: RunningServer) -> Quality:
    """Play the trace's own answers on a server that nothing is measured on now."""
    engine = server.engine
    if engine is None:
        return Quality(reason="a server by URL takes no given answers")
    if run.plan.weights == "dummy":
        return Quality(reason="the weights are random")
    if Capability.FORCE not in engine.info.capabilities:
        return Quality(reason=f"engine {run.plan.engine!r} takes no given answers")
    recordings = run.recordings
    if server.shortened is not None:
        recordings = server.shortened[: len(recordings)]
    try:
        found = exact_calls(engine, recordings, run.plan.tool_syntax, server.closing)
    except (KVBenchError, OSError, httpx.HTTPError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        return Quality(reason=said, failed=not isinstance(error, UsageError))
    if not found.asked:
        return Quality(reason="no recorded answer calls a tool", seconds=found.seconds)
    return Quality(
        calls_right=found.right,
        calls=found.asked,
        parts=dict(found.parts),
        behind=dict(found.behind),
        events=found.events,
        seconds=found.seconds,
    )


def _planned(workload: jobs.Workload | LoadTrace, count: int) -> list[jobs.TraceSession]:
    if isinstance(workload, jobs.Workload):
        return workload.sessions(count)
    return list(workload.first(count).sessions)


def _seed(*parts: object) -> int:
    """Return the seed of a measurement: the same for all arms, else no prompt is sent twice."""
    # A server that caches prefixes (`full` as shipped) would answer from its cache otherwise.
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
