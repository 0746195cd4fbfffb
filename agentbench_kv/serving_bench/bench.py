"""Measuring servers under load: arms, one after the other in every repetition, order rotated.

What is measured under load: engines started here behind the gateway, or servers by URL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import httpx

from agentbench_kv.budget import Budget
from agentbench_kv.engines.base import Capability, EngineOptions
from agentbench_kv.engines.serving.engine import ServingEngine
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.gateway import open_gateway
from agentbench_kv.gateway.http import BackgroundServer, ServerSettings
from agentbench_kv.registry import load_engine, make_method
from agentbench_kv.results.store import run_id
from agentbench_kv.run.provenance import environment
from agentbench_kv.run.runner import check_pair, start_engine
from agentbench_kv.serving_bench.loadgen import Result, measure_apart
from agentbench_kv.serving_bench.prompts import read_vocabulary
from agentbench_kv.serving_bench.records import Job, Load, Shape, Target, Turn, Vocabulary, Workload
from agentbench_kv.serving_bench.results import (
    Measurement,
    ServingArm,
    ServingFolder,
    ServingPlan,
    ServingSummary,
    summarize_serving,
)
from agentbench_kv.serving_bench.wires import authorization

_QUEUE = 4096


_ANSWER_S = 20.0


@dataclass(frozen=True)
class Standing:
    """A server that can be asked.

    Attributes
    ----------
    vocabulary : Vocabulary or None
        Of the engine's model; None of a server by URL.
    context : int or None
        Last position + 1 a session may reach, as far as it is known.
    about : dict
        What the engine says of itself.
    """

    target: Target
    vocabulary: Vocabulary | None = None
    context: int | None = None
    about: dict[str, Any] = field(default_factory=dict)


def engine_arms(
    engine: str,
    model: str,
    arms: Sequence[tuple[str, Budget | None]],
    settings: Mapping[str, str],
    *,
    dtype: str,
    device: str,
    dummy: bool = False,
) -> list[ServingArm]:
    """Check methods and budgets against an engine, before anything starts.

    Parameters
    ----------
    arms : sequence of (str, Budget or None)
        Method and budget. Settings go to the methods with a budget.
    dummy : bool
        Whether the weights are to be random ones.

    Raises
    ------
    UsageError, PrerequisiteError
        For a pair that cannot run, or an engine that takes no token ids.
    """
    cls = load_engine(engine)
    if Capability.TEXT in cls.capabilities:
        raise UsageError(f"engine {engine!r} takes messages, and this sends token ids")
    if dummy and not issubclass(cls, ServingEngine):
        raise UsageError(f"engine {engine!r} loads real weights only; leave --load-format away")
    cls.check_model(model)
    cls.check_compute(dtype, device)
    made: dict[str, ServingArm] = {}
    for name, budget in arms:
        plain = make_method(name, budget)
        method = make_method(name, budget, settings if plain.compresses else {})
        check_pair(engine, cls, method)
        known = budget.spelled if budget is not None and method.compresses else None
        label = method.label if known is None else f"{method.label} {known}"
        made[label] = ServingArm(
            name=label, method=method.label, budget=known, settings=method.settings()
        )
    return list(made.values())


def url_arms(urls: Sequence[str]) -> list[ServingArm]:
    """Read `NAME=URL` or `URL`; a server without a name is called `server`.

    Raises
    ------
    UsageError
        If two servers have one name, or something is no URL.
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


@contextmanager
def stand(plan: ServingPlan, arm: ServingArm, at_once: int) -> Iterator[Standing]:
    """Start an arm's engine, or reach its server.

    Parameters
    ----------
    at_once : int
        Most sessions open at the same time.

    Raises
    ------
    KVBenchError
        If it does not start, or does not answer.
    """
    if arm.url:
        yield _reached(arm.url, plan.wire)
        return
    with ExitStack() as stack:
        options = EngineOptions(
            plan.model,
            make_method(arm.method or "full", arm.budget, arm.settings),
            device=plan.device or "auto",
            dtype=plan.dtype or "float32",
            concurrency=at_once,
            load_format="dummy" if plan.weights == "dummy" else "auto",
            engine_args=plan.engine_args,
            allow_untested=plan.allow_untested,
        )
        engine = start_engine(plan.engine, options)
        stack.callback(engine.shutdown)
        info = engine.info
        vocabulary = read_vocabulary(info.model_path)
        # A session that just ended may still be closing when the next one begins.
        gateway = open_gateway(engine, max_sessions=2 * at_once + 1)
        settings = ServerSettings(queue=_QUEUE)
        server = BackgroundServer(gateway, concurrency=at_once, settings=settings)
        stack.enter_context(server)
        about = {"model_sha": info.model_sha, "device": info.device, "dtype": info.dtype}
        about |= info.details
        target = Target(server.url.removesuffix("/v1"), "gateway", info.model)
        yield Standing(target, vocabulary, info.context_limit, about)


def _reached(base: str, wire: str) -> Standing:
    """Ask a server for its model."""
    try:
        response = httpx.get(f"{base}/v1/models", headers=authorization(), timeout=_ANSWER_S)
        response.raise_for_status()
        model = response.json()["data"][0]
        target = Target(base, wire, str(model["id"]))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise PrerequisiteError(
            f"no model server answers at {base}/v1/models ({error}); start one, e.g. kvbench serve"
        ) from error
    limit = model.get("max_model_len")
    return Standing(target, context=limit if isinstance(limit, int) else None)


Told = Callable[[Measurement, bool], None]


"""Called with a measurement, and whether it is from an earlier call."""


@dataclass(frozen=True)
class ServingRun:
    """A plan with what to run it needs and no figure depends on.

    Attributes
    ----------
    shapes, loads
        The plan's, read.
    vocabulary : Vocabulary or None
        For servers by URL.
    detailed : bool
        Whether files keep every request.
    """

    plan: ServingPlan
    shapes: tuple[Shape, ...]
    loads: tuple[Load, ...]
    vocabulary: Vocabulary | None = None
    timeout_s: float = 1800.0
    detailed: bool = False

    @property
    def at_once(self) -> int:
        """Most sessions open at the same time."""
        return max(load.at_once for load in self.loads)


def folder_of(plan: ServingPlan, out: Path) -> Path:
    """Return the plan's own folder below `out`: the same plan finds it again."""
    return out / run_id(["serving", plan.engine, plan.model_name], plan.model_dump())


def measure_serving(run: ServingRun, path: Path, told: Told) -> ServingSummary:
    """Measure what is missing of a plan, write every measurement as it ends, then the summary.

    Raises
    ------
    KVBenchError
        If a server does not start or cannot be reached, or a session is longer than its context.
    """
    folder = ServingFolder.create(path, run.plan, environment())
    with ExitStack() as stack:
        measuring = _Measuring(run, folder, told, stack)
        for repetition in range(run.plan.repeats):
            for place, arm in enumerate(rotated(run.plan.arms, repetition)):
                measuring.arm(arm, repetition, place)
    summary = summarize_serving(run.plan, folder.measurements())
    folder.write_summary(summary.model_dump(mode="json"))
    return summary


def rotated(arms: Sequence[ServingArm], repetition: int) -> list[ServingArm]:
    """Return the arms in the order of a repetition: each is first equally often."""
    first = repetition % len(arms)
    return [*arms[first:], *arms[:first]]


class _Measuring:
    """Measures arms; what the folder has already is only told.

    Parameters
    ----------
    run : ServingRun
    folder : ServingFolder
    told : callable
    stack : ExitStack
        Ends the servers that stand for the whole time.
    """

    def __init__(
        self, run: ServingRun, folder: ServingFolder, told: Told, stack: ExitStack
    ) -> None:
        self._run = run
        self._folder = folder
        self._told = told
        self._stack = stack
        self._known = {measured.key: measured for measured in folder.measurements()}
        self._kept: dict[str, Standing] = {}

    def arm(self, arm: ServingArm, repetition: int, place: int) -> None:
        """Measure one arm at every shape and load, in one repetition."""
        missing = []
        for shape, load in product(self._run.shapes, self._run.loads):
            known = self._known.get((arm.name, shape.label, load.label, repetition))
            if known is None:
                missing.append((shape, load))
            else:
                self._told(known, True)
        if not missing:
            return
        with self._server(arm) as standing:
            for shape, load in missing:
                job = _job(self._run, standing, shape, load, repetition)
                result = measure_apart(job)
                measured = _measurement(self._run, arm, standing, job, result, (repetition, place))
                self._folder.add(measured)
                self._told(measured, False)

    @contextmanager
    def _server(self, arm: ServingArm) -> Iterator[Standing]:
        """Give a server for this turn of its arm, or for the whole time."""
        plan, at_once = self._run.plan, self._run.at_once
        if not plan.together:
            with stand(plan, arm, at_once) as standing:
                yield standing
            return
        if arm.name not in self._kept:
            self._kept[arm.name] = self._stack.enter_context(stand(plan, arm, at_once))
        yield self._kept[arm.name]


def _job(run: ServingRun, standing: Standing, shape: Shape, load: Load, repetition: int) -> Job:
    plan = run.plan
    workload = Workload(shape, plan.turns, plan.tool_tokens, plan.think_time_s)
    if standing.context is not None and workload.length > standing.context:
        raise UsageError(
            f"a session of {shape.label} in {plan.turns} turns has {workload.length} tokens; "
            f"{standing.target.model} has room for {standing.context}"
        )
    vocabulary = standing.vocabulary or run.vocabulary
    if vocabulary is None:
        raise UsageError("--url needs --tokenizer FOLDER or --vocab SIZE, to draw token ids from")
    seed = _seed(plan.seed, repetition, shape.label, load.label)
    return Job(standing.target, workload, load, vocabulary, seed, run.timeout_s)


def _seed(*parts: object) -> int:
    """Return the seed of a measurement: the same for all arms, else no prompt is sent twice.

    A server that caches prefixes (`full` as shipped) would answer from its cache otherwise.
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def _measurement(
    run: ServingRun,
    arm: ServingArm,
    standing: Standing,
    job: Job,
    result: Result,
    order: tuple[int, int],
) -> Measurement:
    requests = [_plain_request(turn) for turn in result.requests] if run.detailed else None
    return Measurement(
        arm=arm.name,
        shape=job.workload.shape.label,
        load=job.load.label,
        repetition=order[0],
        place=order[1],
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        backend=f"{run.plan.engine}/{run.plan.wire}",
        model_id=job.target.model,
        num_prompts=job.load.sessions * job.workload.turns,
        max_concurrency=job.load.concurrency,
        request_rate=job.load.rate or "inf",
        figures=result.figures,
        kv=result.kv,
        errors=result.errors,
        warmup_errors=result.warmup_errors,
        server=standing.about,
        requests=requests,
    )


def _plain_request(turn: Turn) -> dict[str, Any]:
    names = ("session", "turn", "start", "new_tokens", "prompt_tokens", "output_tokens")
    more = ("ttft_s", "latency_s", "error")
    return {name: getattr(turn, name) for name in (*names, *more)}
