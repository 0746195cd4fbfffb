"""Measuring servers under load: arms, one after the other in every repetition, order rotated.

An arm is an engine with a method, started here behind the gateway, or a server by URL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from agentbench_kv.budget import Budget
from agentbench_kv.engines.base import Capability, Engine, EngineOptions
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.engines.serving.engine import ServingEngine
from agentbench_kv.engines.serving.wire import read_model
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.gateway import open_gateway
from agentbench_kv.gateway.http import BackgroundServer, ServerSettings
from agentbench_kv.registry import load_engine, make_method, split_settings
from agentbench_kv.results.store import RunReader, run_id
from agentbench_kv.run.calibration import calibrated, calibration_used
from agentbench_kv.run.engines import check_pair, start_engine
from agentbench_kv.run.exact_calls import exact_calls
from agentbench_kv.run.provenance import environment
from agentbench_kv.run.recordings import (
    RecordedRun,
    Recording,
    record_file,
    refuse_unplayable,
)
from agentbench_kv.run.spec import RunSpec
from agentbench_kv.serving_bench import jobs
from agentbench_kv.serving_bench.endpoints import authorization
from agentbench_kv.serving_bench.loadgen import measure_apart
from agentbench_kv.serving_bench.measurements import (
    LoadMeasurement,
    Quality,
    ServingArm,
    ServingFolder,
    ServingPlan,
    TraceFigures,
)
from agentbench_kv.serving_bench.pool import PoolWatch
from agentbench_kv.serving_bench.prompts import read_vocabulary
from agentbench_kv.serving_bench.summary import ServingSummary, summarize_serving
from agentbench_kv.serving_bench.trace import LoadTrace, ReadMessages

_QUEUE = 4096
_ANSWER_S = 20.0
_ENDLESS = 1 << 24  # a context that is not known
_OF_RUN = "run: its prompts, to the token; timed answers are the server's own, as long as its"
_CHANGED = "its transcripts or its model are no longer those of the run; take it as it was written"
_MOST_RUNNING = 1024  # sessions in which something is read or generated; more may be open
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

    A KVBenchError if a server does not start or cannot be reached, or a session is longer than its
    context.
    """
    plan = run.plan
    here = environment()
    folder = ServingFolder.create(path, plan, here)
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
                    for workload, load in missing:
                        measured = _measure(run, arm, server, workload, load, order)
                        measured = measured.model_copy(update={"provenance": here})
                        known[measured.key] = measured
                        folder.add(measured)
                        told(measured, False)
                    if asked:
                        judged.add(arm.name)
                        _judge(run, server, folder, known, arm.name, repetition)
    summary = summarize_serving(plan, folder.measurements())
    folder.write_summary(summary.model_dump(mode="json"))
    return summary


def _judge(
    run: ServingRun,
    server: RunningServer,
    folder: ServingFolder,
    known: Mapping[tuple[str, str, str, int], LoadMeasurement],
    arm: str,
    repetition: int,
) -> None:
    """Note an arm's exact calls in the file of one of its measurements, all of which are kept."""
    key = (arm, run.workloads[0].label, run.loads[0].label, repetition)
    folder.add(known[key].model_copy(update={"quality": _quality(run, server)}))


class MeasurementOrder(NamedTuple):
    """When an arm is measured, and what no prompt of it was drawn with before."""

    repetition: int
    place: int  # of the arm in it
    fresh: tuple[object, ...] = ()


def _freshness(folder: ServingFolder, repetition: int) -> tuple[object, ...]:
    """Return what makes a repetition's prompts new, for servers that may know those before."""
    return (folder.salt, folder.attempt(repetition)) if folder.salt else ()


def rotated(arms: Sequence[ServingArm], repetition: int) -> list[ServingArm]:
    """Return the arms in the order of a repetition: each is first equally often."""
    first = repetition % len(arms)
    return [*arms[first:], *arms[:first]]


@contextmanager
def _all_served(
    run: ServingRun, known: Mapping[tuple[str, str, str, int], LoadMeasurement]
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
    seed = _seed(plan.seed, order.repetition, workload.label, load.label, *order.fresh)
    job = jobs.LoadJob(
        target, sessions, load, vocabulary, seed, run.timeout_s, plan.time_scale, plan.goodput
    )
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
        backend=f"{plan.engine}/{plan.wire}",
        model_id=target.model,
        num_prompts=sum(len(session.calls) for session in sessions),
        max_concurrency=load.concurrency,
        request_rate=load.rate or "inf",
        server=server.about,
        pool_bytes=pool.peak,
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
        about = (server.protect, run.plan.tool_syntax, server.closing)
        found = exact_calls(engine, recordings, *about)
    except (KVBenchError, OSError, httpx.HTTPError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        return Quality(reason=said, failed=not isinstance(error, UsageError))
    if not found.asked:
        return Quality(reason="no recorded answer calls a tool", seconds=found.seconds)
    return Quality(
        calls_right=found.right,
        calls=found.asked,
        parts=dict(found.parts),
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


def engine_arms(
    engine: str,
    model: str,
    arms: Sequence[tuple[str, Budget | None]],
    settings: Mapping[str, str],
    *,
    dtype: str,
    device: str,
    dummy: bool = False,
    kv_dtypes: Sequence[str] = ("",),
    messages: bool = False,
) -> list[ServingArm]:
    """Check methods and budgets against an engine, before anything starts.

    Settings go to the methods with a budget; `dummy` asks for random weights; `messages` are what
    is sent, so that a method may drop some. Every arm comes at each precision of cached rows, but
    for the base that only differs in flags. A UsageError or PrerequisiteError for a pair that
    cannot run, or an engine that takes no token ids.
    """
    cls = load_engine(engine)
    if Capability.TEXT in cls.capabilities:
        raise UsageError(f"engine {engine!r} takes messages, and this sends token ids")
    if dummy and not issubclass(cls, ServingEngine):
        raise UsageError(f"engine {engine!r} loads real weights only; leave --load-format away")
    cls.check_model(model)
    cls.check_compute(dtype, device)
    made: dict[str, ServingArm] = {}
    for kv_dtype, (name, budget) in product(kv_dtypes, arms):
        if kv_dtype and name == "full-constrained":
            continue
        method = make_method(name, budget, _own(name, budget, settings))
        refuse_unplayable(method)
        if method.messages and not messages:
            raise UsageError(
                f"method {method.label!r} drops messages, and these sessions are token ids; "
                "name recorded messages: --trace FILE"
            )
        check_pair(engine, cls, method)
        if kv_dtype or "offload" in method.settings():
            options = EngineOptions(model, method, device, dtype, kv_dtype=kv_dtype)
            cls.check_kv_dtype(options)
            cls.check_options(options)
        known = budget.spelled if budget is not None and method.takes_budget else None
        label = method.label if known is None else f"{method.label} {known}"
        label += "".join(f" {key}={value}" for key, value in split_settings(name)[1].items())
        if kv_dtype:
            label += f" kv={kv_dtype}" + " simulated" * (engine == "embedded")
        made[label] = ServingArm(
            name=label,
            method=method.label,
            budget=known,
            settings=method.settings(),
            kv_dtype=kv_dtype,
        )
    if "offload" in settings and not any("offload" in arm.settings for arm in made.values()):
        raise UsageError("--set offload: only --method full@offload has it")
    return list(made.values())


def _own(name: str, budget: Budget | None, settings: Mapping[str, str]) -> dict[str, str]:
    """Return those settings that are for a method: with a budget, or an offload's size."""
    plain = make_method(name, budget)
    theirs = settings.keys() - {"offload"} if plain.compresses else plain.settings().keys()
    return {key: value for key, value in settings.items() if key in theirs}


def trace_figures(trace: LoadTrace) -> TraceFigures:
    """Return what a plan records of its trace."""
    return TraceFigures(
        form=trace.form,
        sha256=trace.sha256,
        sessions=len(trace.sessions),
        calls=trace.calls,
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
        prefix_hits=trace.prefix_hits,
        notes=list(trace.notes),
    )


def recorded_messages(
    model: str, gap_s: float = 0.0, kept: list[Recording] | None = None
) -> ReadMessages:
    """Return what reads recorded chat messages in a model's tokens, with a gap between calls.

    `kept` gets the sessions, in their order.
    """

    def read(path: Path) -> list[jobs.TraceSession]:
        found = record_file(path, model)
        if kept is not None:
            kept.extend(found)
        return sessions_of(found, gap_s)

    return read


def run_trace(folder: Path, recorded: RecordedRun, gap_s: float) -> LoadTrace:
    """Return a run's own sessions to be played, with a gap between calls.

    UsageError if they are not what it played: a method that drops messages, or adds some, does so
    on its way from the agent to the engine, where nobody recorded it.
    """
    reader, recordings = RunReader(folder), recorded.recordings
    changes = RunSpec.of(reader.info.spec).built_method.messages
    lengths = {each.sample_id: each.kv.logical for each in reader.trials() if not each.trial}
    for recording in recordings:
        if recording.tokens != (found := lengths[recording.sample]):
            raise UsageError(
                f"{folder}: played again, session {recording.sample} has {recording.tokens} tokens "
                f"and not {found}; "
                + ("take a run whose method leaves messages as they are" if changes else _CHANGED)
            )
    count = f"{len(recordings)} of the {recorded.sessions} sessions of the run"
    notes = (_OF_RUN, count) if len(recordings) < recorded.sessions else (_OF_RUN,)
    sha = hashlib.sha256("".join(recording.sha for recording in recordings).encode()).hexdigest()
    return LoadTrace(folder.name, "run", sha, tuple(sessions_of(recordings, gap_s)), notes)


def sessions_of(recordings: Sequence[Recording], gap_s: float) -> list[jobs.TraceSession]:
    """Return recorded sessions to be played, with a gap between calls."""
    sessions = []
    for recording in recordings:
        calls = [
            jobs.TraceCall(
                len(turn.prompt) - turn.again,
                len(turn.answer),
                gap_s if number else 0.0,
                ids=[token for token, _ in turn.prompt],
                keep=turn.keep,
                again=turn.again,
            )
            for number, turn in enumerate(recording.turns)
        ]
        sessions.append(jobs.TraceSession(recording.sample, calls))
    return sessions


def url_arms(urls: Sequence[str]) -> list[ServingArm]:
    """Read `NAME=URL` or `URL`; a server without a name is called `server`.

    A UsageError if two servers have one name, or something is no URL.
    """
    arms: dict[str, ServingArm] = {}
    for text in urls:
        name, separator, url = text.partition("=")
        if not separator or "://" in name:
            name, url = "server", text
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url {text!r}: expected NAME=URL or URL, e.g. full=http://…:8000")
        if name in arms:
            raise UsageError(f"--url names {name!r} twice")
        arms[name] = ServingArm(name=name, method=name, url=url.rstrip("/").removesuffix("/v1"))
    return list(arms.values())


@dataclass(frozen=True)
class RunningServer:
    """A server that can be asked."""

    target: jobs.Target
    vocabulary: jobs.Vocabulary | None = None  # of the engine's model; None of a server by URL
    context: int | None = None  # last position + 1 a session may reach, as far as it is known
    about: dict[str, Any] = field(default_factory=dict)  # what the engine says of itself
    engine: Engine | None = None  # None of a server by URL
    protect: str = ""  # the method's
    closing: str = ""  # how the method reads closing markers
    # What it is sent of a trace of messages, where its method drops some.
    shortened: tuple[Recording, ...] | None = None


def pool_tokens(plan: ServingPlan, arm: ServingArm, *, per_query_head: bool) -> int | None:
    """Return how many cached tokens an arm's pool has room for; None: the engine decides.

    A UsageError where rows do not all take the same, or the pool has no room for one.
    """
    if plan.pool_mb is None:
        return None
    if arm.kv_dtype.startswith("kivi"):
        raise UsageError(f"--pool-mb: rows of {arm.name} take less as they age; leave it out")
    facts = read_model(model_path(plan.model))
    heads = facts.q_heads if per_query_head else facts.kv_heads
    size = facts.pool_bytes(arm.kv_dtype or plan.dtype or "float32") * heads // facts.kv_heads
    tokens = int(plan.pool_mb * 1e6) // size
    if not tokens:
        raise UsageError(f"--pool-mb {plan.pool_mb:g} has no room for a token, which takes {size}")
    return tokens


@contextmanager
def serve_arm(plan: ServingPlan, arm: ServingArm, at_once: int) -> Iterator[RunningServer]:
    """Start an arm's engine for `at_once` sessions, or reach its server; else a KVBenchError."""
    if arm.url:
        yield _reached(arm.url, plan.wire)
        return
    device = plan.device or "auto"
    plain = make_method(arm.method or "full", arm.budget, arm.settings)
    method = calibrated(plain, plan.model, device)
    running = min(at_once, _MOST_RUNNING)
    room = pool_tokens(plan, arm, per_query_head=method.per_query_head)
    with ExitStack() as stack:
        options = EngineOptions(
            plan.model,
            method,
            max_live_tokens=room,
            device=device,
            dtype=plan.dtype or "float32",
            kv_dtype=arm.kv_dtype,
            concurrency=running,
            load_format="dummy" if plan.weights == "dummy" else "auto",
            engine_args=plan.engine_args,
            allow_untested=plan.allow_untested,
        )
        engine = start_engine(plan.engine, options)
        stack.callback(engine.shutdown)
        info = engine.info
        vocabulary = read_vocabulary(info.model_path)
        # A session that just ended may still be closing when the next one begins.
        sessions = 2 * at_once + 1
        syntax = plan.tool_syntax
        gateway = open_gateway(engine, method, tool_syntax=syntax, max_sessions=sessions)
        settings = ServerSettings(queue=_QUEUE)
        server = BackgroundServer(gateway, concurrency=running, settings=settings)
        stack.enter_context(server)
        about: dict[str, Any] = {
            "model_sha": info.model_sha,
            "device": info.device,
            "dtype": info.dtype,
        }
        about |= calibration_used(method)
        about |= {"max_live_tokens": room} if room is not None else {}
        target = jobs.Target(server.url.removesuffix("/v1"), "gateway", info.model, arm.drops)
        about |= info.details
        own = (engine, method.protect, method.closing_markers)
        yield RunningServer(target, vocabulary, info.context_limit, about, *own)


def _reached(base: str, wire: str) -> RunningServer:
    try:
        response = httpx.get(f"{base}/v1/models", headers=authorization(), timeout=_ANSWER_S)
        response.raise_for_status()
        model = response.json()["data"][0]
        target = jobs.Target(base, wire, str(model["id"]))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise PrerequisiteError(
            f"no model server answers at {base}/v1/models ({error}); start one, e.g. kvbench serve"
        ) from error
    limit = model.get("max_model_len")
    return RunningServer(target, context=limit if isinstance(limit, int) else None)
