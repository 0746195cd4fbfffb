"""Measuring servers under load: arms, one after the other in every repetition, order rotated."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from agentbench_kv.errors import UsageError
from agentbench_kv.loadgen.answers import Turn
from agentbench_kv.loadgen.jobs import Job, Load, Shape, Vocabulary, Workload
from agentbench_kv.loadgen.process import Result, measure_apart
from agentbench_kv.provenance import environment
from agentbench_kv.results.serving.folder import ServingFolder
from agentbench_kv.results.serving.records import Measurement, ServingArm, ServingPlan
from agentbench_kv.results.serving.summary import ServingSummary, summarize_serving
from agentbench_kv.results.store import run_id
from agentbench_kv.serving_arms import Standing, stand

__all__ = ["ServingRun", "folder_of", "measure_serving", "rotated"]

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
