"""Playing recorded sessions under many methods at once, and a run's records of what came out.

Every (method, budget) is a run like any other, on the embedded engine: a sample is a session, its
score the share of tokens on which both caches have the same best (`top1`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentbench_kv.analysis.fidelity import FidelityCounts, compare, distance_group
from agentbench_kv.budget import Budget
from agentbench_kv.engines.base import KVStats
from agentbench_kv.engines.embedded.forced import ForcedPlay, Stretch
from agentbench_kv.engines.embedded.model import LoadedModel, load_model
from agentbench_kv.errors import ContextLimitError, UsageError, unknown_name
from agentbench_kv.methods.base import CLOSINGS, PHASE_NAMES, Method, Phase
from agentbench_kv.methods.spans import SpanMethod
from agentbench_kv.registry import load_method, make_method
from agentbench_kv.results.records import KVAccount, TrialRecord, TrialStatus, Usage
from agentbench_kv.results.store import RunDir, RunStore
from agentbench_kv.results.summary import Summary, summarize
from agentbench_kv.run.calibration import calibrated, calibration_used
from agentbench_kv.run.provenance import environment
from agentbench_kv.run.recordings import RecordedTurn, Recording
from agentbench_kv.run.spec import RunSpec

PREFIX = "fidelity/"
Progress = Callable[[str, int, int], None]  # session, sessions done, sessions in all


@dataclass(frozen=True)
class FidelityArm:
    """One method at one budget, with its settings."""

    method: str
    budget: Budget | None
    settings: Mapping[str, str]

    def spec(self, model: str, source: str, dtype: str, device: str) -> RunSpec:
        built = make_method(self.method, self.budget, self.settings)
        if isinstance(built, SpanMethod) or built.offline:
            raise UsageError(f"method {built.label!r} ranks no rows of a live cache; leave it out")
        if built.closing_markers != CLOSINGS[0]:
            raise UsageError(f"closing={built.closing_markers}: sessions are labelled once for all")
        spec = RunSpec(
            "embedded", model, built.label, self.budget if built.compresses else None,
            PREFIX + source, params=built.settings(), dtype=dtype, device=device,
            max_tokens=1, concurrency=1,
        )  # fmt: skip
        vars(spec)["built_method"] = built
        return spec


def fidelity_arms(
    methods: Sequence[str], budgets: Sequence[Budget], settings: Mapping[str, str]
) -> list[FidelityArm]:
    """Return every method at every budget, each with those settings that it has.

    UsageError for a setting that none of them has, and for a method without its budget.
    """
    known = {name: load_method(name.partition("@")[0]) for name in methods}
    for key in settings:
        if not any(key in cls.parameters() for cls in known.values()):
            raise unknown_name("parameter", key, next(iter(known.values())).parameters())
    arms = []
    for name, cls in known.items():
        own = {key: value for key, value in settings.items() if key in cls.parameters()}
        if cls.compresses and not budgets:
            raise UsageError(f"{name} needs a budget: add --budget TOKENS")
        sizes: Sequence[Budget | None] = budgets if cls.compresses else [None]
        arms += [FidelityArm(name, size, own) for size in sizes]
    return arms


def play_fidelity(
    specs: Sequence[RunSpec],
    recordings: Sequence[Recording],
    out: Path,
    provenance: Mapping[str, Any],
    progress: Progress = lambda *_: None,
) -> list[Summary]:
    """Play what is missing of every spec and summarize them; the specs differ by method only."""
    first = specs[0]
    model = load_model(first.model, first.dtype, first.device)
    with ExitStack() as stack:
        runs = []
        for spec in specs:
            opened = RunStore(out).open(spec.id, spec.document(), environment(), len(recordings))
            runs.append(stack.enter_context(opened))
            _check_sessions(opened, recordings)
            opened.annotate(_provenance(model, spec, provenance))
        methods = [calibrated(spec.built_method, spec.model, spec.device) for spec in specs]
        arms = list(zip(runs, methods, strict=True))
        for done, recording in enumerate(recordings):
            progress(recording.sample, done, len(recordings))
            missing = [
                (run, method)
                for run, method in arms
                if (recording.sample, 0) not in run.finished_trials()
            ]
            if missing:
                _play(model, recording, missing)
        return [summarize(run) for run in runs]


def _check_sessions(run: RunDir, recordings: Sequence[Recording]) -> None:
    """Refuse to go on with a run of other sessions: arms are compared token by token."""
    known = {recording.sample: recording.sha for recording in recordings}
    for record in run.trials():
        if record.sample_id in known and record.prompt_sha != known[record.sample_id]:
            raise UsageError(
                f"run {run.info.run_id} holds another session {record.sample_id!r} (other task "
                "settings, tool syntax, template or data); choose another --out"
            )


def _play(model: LoadedModel, recording: Recording, arms: Sequence[tuple[RunDir, Method]]) -> None:
    counts = [FidelityCounts() for _ in arms]
    started = time.perf_counter()
    play = ForcedPlay(model, [method for _, method in arms])
    spent = 0.0
    error = None
    try:
        for number, turn in enumerate(recording.turns):
            for stretch in play.turn(turn.prompt, turn.answer):
                began = time.perf_counter()
                _count(stretch, turn, number, play.stats(), counts)
                spent += time.perf_counter() - began
            for each in counts:
                each.end_call()
    except ContextLimitError as found:
        error = str(found)
    finally:
        stats = play.stats()
        play.close()
    seconds = time.perf_counter() - started
    shared = {"seconds": seconds / len(arms), "figures_s": spent / len(arms)}
    for (run, _), own, account in zip(arms, counts, stats, strict=True):
        run.append_trial(_record(recording, own, account, shared, error))


def _count(
    stretch: Stretch,
    turn: RecordedTurn,
    number: int,
    stats: Sequence[KVStats],
    counts: Sequence[FidelityCounts],
) -> None:
    part = slice(stretch.first, stretch.first + len(stretch.full))
    labels = turn.answer[part]
    tokens = torch.tensor([token for token, _ in labels], device=stretch.full.device)
    in_call = [phase is Phase.ACT for _, phase in labels]
    common = [
        (f"_{PHASE_NAMES[phase]}", f"_{kind}", f"_turn{min(number, 9)}")
        for (_, phase), kind in zip(labels, turn.kinds[part], strict=True)
    ]
    for logits, account, own in zip(stretch.of_methods, stats, counts, strict=True):
        since = _since(account, len(common))
        groups = [
            (*names, distance_group(None if since is None else since + at + 1))
            for at, names in enumerate(common)
        ]
        own.add(compare(stretch.full, logits, tokens), groups, in_call)


def _since(account: KVStats, rows: int) -> int | None:
    """Return the tokens drawn from the last event to a stretch of so many rows, fed just now.

    The stretch's own tokens count as drawn by now, but for the last one, which it predicts.
    """
    if not account.events:
        return None
    return account.decode_tokens - (rows - 1) - account.events[-1].decoded


def _record(
    recording: Recording,
    counts: FidelityCounts,
    account: KVStats,
    shared: Mapping[str, float],
    error: str | None,
) -> TrialRecord:
    same, asked = counts.sums["top1"]
    scored = error is None and asked > 0
    return TrialRecord(
        sample_id=recording.sample,
        trial=0,
        seed=0,
        status=TrialStatus.SCORED if scored else TrialStatus.CONTEXT_LIMIT,
        score=same / asked if scored else None,
        metrics={**counts.metrics(), **shared} if scored else {},
        kv=KVAccount(**account.recorded()),
        usage=Usage(),
        prompt_sha=recording.sha,
        error=error,
        cluster=recording.cluster,
    )


def _provenance(model: LoadedModel, spec: RunSpec, more: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "engine": "embedded",
        "model_sha": model.sha,
        "device": model.shape.device.type,
        "dtype": str(model.shape.dtype).removeprefix("torch."),
        "context_limit": model.context_limit,
        "determinism": "given tokens",
        **calibration_used(spec.built_method),
        **more,
    }
