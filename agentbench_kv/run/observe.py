"""Playing one session again with an observer: captures, traces, audits of its evidence."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.adapters.base import Fact, Sample, Task
from agentbench_kv.analysis.audit import TokenAudit, audit
from agentbench_kv.analysis.captures import Capture
from agentbench_kv.analysis.rings import RingEvent, ring_events
from agentbench_kv.analysis.traces import ScoredEvent, Trace
from agentbench_kv.budget import Budget
from agentbench_kv.engines.base import Capability
from agentbench_kv.engines.embedded.model import LoadedModel, load_model, tokenizer_path
from agentbench_kv.engines.embedded.observer import EventLog, Observer, QkvRecorder
from agentbench_kv.errors import PrerequisiteError, UsageError, unknown_name
from agentbench_kv.methods.base import Method, Selection
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.phases import PhaseTable, system_tokens
from agentbench_kv.phases.machine import PLAIN
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.registry import load_task
from agentbench_kv.results.records import TrialStatus
from agentbench_kv.run.calibration import calibration_used, identified
from agentbench_kv.run.runner import trial_setup
from agentbench_kv.run.spec import RunSpec, resolve
from agentbench_kv.run.trial import Attempt, play_session

BYTES = {torch.float16: 2, torch.float32: 4}


@dataclass(frozen=True)
class Watched:
    """A session that was played, and its sample."""

    sample: Sample
    attempt: Attempt


def watch(spec: RunSpec, sample: str, observer: Observer) -> Watched:
    """Play the first trial of a sample with an observer; greedy sessions repeat a run's exactly.

    `sample` is an id, or a number from 0, among those that the resolved spec's limit leaves.
    """
    if spec.built_method.spans:  # no selection would show what has left
        raise UsageError(
            f"method {spec.method!r} ranks no rows, and only what a ranking keeps is followed here"
        )
    with _task(spec) as task:
        if Capability.FORCE in task.needs:
            raise UsageError(f"{task.name} asks in forks of a session, and only one is watched")
        chosen = _find(task.samples(spec.limit, spec.seed), sample)
        with trial_setup(replace(spec, concurrency=1), task, [chosen], observer) as setup:
            return Watched(chosen, play_session(setup, chosen, 0))


@contextmanager
def _task(spec: RunSpec) -> Iterator[Task]:
    task = load_task(spec.task).create(spec.task_params)
    try:
        yield task
    finally:
        task.close()


def _find(samples: list[Sample], name: str) -> Sample:
    by_id = {sample.id: sample for sample in samples}
    if name in by_id:
        return by_id[name]
    if name.isdecimal() and int(name) < len(samples):
        return samples[int(name)]
    if name.isdecimal():
        raise UsageError(f"sample {name}: the task has samples 0 to {len(samples) - 1} here")
    raise unknown_name("sample", name, by_id)


def capture_size(model: LoadedModel, layers: int, heads: int, tokens: int, bits: int) -> int:
    """Return the bytes a capture of so many tokens takes: Q, K and V of the chosen heads."""
    group = model.shape.q_heads // model.shape.kv_heads
    return layers * heads * (group + 2) * model.shape.head_dim * tokens * bits // 8


def capture_session(
    spec: RunSpec, sample: str, layers: list[int], heads: list[int], dtype: torch.dtype
) -> Capture:
    """Record queries, keys and values of a whole session, as float16 or float32.

    Without `layers` and `heads` (KV heads), of all. It holds the calibration that a run of the task
    would score with; none if only the user can give the text for it.
    """
    model = load_model(spec.model, spec.dtype, spec.device)
    layers = _checked("layer", layers, model.shape.layers)
    heads = _checked("KV head", heads, model.shape.kv_heads)
    recorder = QkvRecorder(layers, heads, dtype)
    watched = watch(spec, sample, recorder)
    _refuse_broken(watched)
    q, k, v = recorder.arrays()
    method = _with_calibration(spec)
    group = model.shape.q_heads // model.shape.kv_heads
    chosen = [head * group + i for head in heads for i in range(group)]
    return Capture(
        q=q,
        k=k,
        v=v,
        positions=torch.arange(len(recorder.tokens)),
        now=len(recorder.tokens),
        prompt=recorder.prompt,
        system=_system_tokens(spec.model, recorder.tokens),
        phases=torch.tensor(recorder.phases),
        tokens=torch.tensor(recorder.tokens),
        decoded=torch.tensor(recorder.decoded),
        calibration=_part(getattr(method, "calibration", None), layers, chosen),
        meta=_meta(spec, watched)
        | {"layers": layers, "kv_heads": heads, **calibration_used(method)},
    )


def _system_tokens(model: str, tokens: Sequence[int]) -> int | None:
    table = PhaseTable.for_tokenizer(load_tokenizer(tokenizer_path(model)))
    return None if table.family is PLAIN else system_tokens(table, tokens)


def _with_calibration(spec: RunSpec) -> Method:
    """Return a method with all of a calibration that there is; the run's own if there is none."""
    for name in ("expected-attention", "triattention"):
        asked = replace(spec, method=name, budget=Budget(tokens=1 << 20), params={})
        with suppress(PrerequisiteError):
            return identified(resolve(asked, {})).built_method
    return spec.built_method


def _part(whole: Calibration | None, layers: list[int], heads: list[int]) -> Calibration | None:
    return None if whole is None else whole.part(layers, heads).to(torch.device("cpu"))


def trace_session(spec: RunSpec, sample: str) -> tuple[Trace, EventLog, Watched]:
    """Play a session again and record every event: what was there, was kept, and scored."""
    events: list[ScoredEvent] = []

    def keep(logical: int, positions: Tensor, selection: Selection) -> None:
        events.append(ScoredEvent.from_selection(logical, positions, selection))

    log = EventLog(keep)
    watched = watch(spec, sample, log)
    trace = Trace(events, torch.tensor(log.phases), _meta(spec, watched))
    return trace, log, watched


def ring_session(spec: RunSpec, sample: str) -> tuple[str, list[RingEvent]]:
    """Play a session again; return its sample, and where the rings were at every event."""
    points: list[int] = []
    log = EventLog(lambda logical, _positions, _selection: points.append(logical))
    watched = watch(spec, sample, log)
    _refuse_broken(watched)
    return watched.sample.id, ring_events(spec.built_method, log.phases, points)


def _checked(what: str, chosen: list[int], count: int) -> list[int]:
    for index in chosen:
        if not 0 <= index < count:
            raise UsageError(f"{what} {index}: the model has {count}, numbered from 0")
    return sorted(set(chosen)) or list(range(count))


def _refuse_broken(watched: Watched) -> None:
    outcome = watched.attempt.outcome
    if outcome.status in (TrialStatus.ENGINE_ERROR, TrialStatus.INFRA_ERROR):
        raise UsageError(f"the session of sample {watched.sample.id} broke: {outcome.error}")


def _meta(spec: RunSpec, watched: Watched) -> dict[str, object]:
    return {
        "model": Path(spec.model).name,
        "task": spec.task,
        "sample": watched.sample.id,
        "seed": spec.seed,
        "method": spec.method,
        "budget": spec.document()["budget"],
        "score": watched.attempt.outcome.score,
    }


@dataclass(frozen=True)
class AuditedFact:
    """A fact, the tokens that first stated it, and what became of them."""

    fact: Fact
    positions: tuple[int, ...]  # logical, of its tokens where it was first stated
    tokens: list[TokenAudit]  # one per position

    @property
    def held(self) -> float:
        """Share of (layer, head, token)s that held it at the session's end; 0 if never stated."""
        if not self.tokens:
            return 0.0
        return fmean(token.held / token.heads if token.heads else 1.0 for token in self.tokens)

    @property
    def first_eviction(self) -> int | None:
        """Tokens ever seen when the first of it was evicted."""
        moments = [e.logical for token in self.tokens for e in token.evictions]
        return min(moments, default=None)

    @property
    def rank_over_places(self) -> float | None:
        """Mean of rank / places over its evictions: 1 is the last token that was kept."""
        ratios = [
            rank / max(1, place)
            for token in self.tokens
            for event in token.evictions
            for rank, place in zip(event.ranks.tolist(), event.places.tolist(), strict=True)
        ]
        return fmean(ratios) if ratios else None

    def document(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "text": self.fact.text,
            "source": self.fact.source,
            "kind": self.fact.kind,
            "right": self.fact.right,
            "positions": list(self.positions),
            "held": self.held,
            "first_eviction": self.first_eviction,
            "rank_over_places": self.rank_over_places,
        }


@dataclass(frozen=True)
class SessionAudit:
    """One session, played again."""

    sample: str
    score: float | None
    events: int
    facts: list[AuditedFact]


def audit_session(spec: RunSpec, sample: str) -> tuple[SessionAudit, Trace]:
    """Play a session of a greedy run again and follow the tokens of every fact it needed."""
    if spec.temperature:
        raise UsageError("an audit plays sessions again, so it needs a greedy run: --temperature 0")
    trace, log, watched = trace_session(spec, sample)
    facts = watched.attempt.outcome.facts
    if not facts:
        raise UsageError(f"task {spec.task} does not say what its answers need; audit a micro task")
    codec = TokenCodec(load_tokenizer(tokenizer_path(spec.model)))
    pieces = [codec.decode([token]) for token in log.tokens]
    audited = [_audited(fact, pieces, trace) for fact in facts]
    score = watched.attempt.outcome.score
    return SessionAudit(watched.sample.id, score, len(trace.events), audited), trace


def by_outcome(audits: Sequence[SessionAudit]) -> dict[tuple[str, str, bool], dict[str, float]]:
    """Average over facts of one source, kind and outcome: how many, held, rank over places."""
    groups: dict[tuple[str, str, bool], list[AuditedFact]] = {}
    for session in audits:
        for found in session.facts:
            key = (found.fact.source, found.fact.kind, found.fact.right)
            groups.setdefault(key, []).append(found)
    return {key: _average(group) for key, group in sorted(groups.items())}


def _average(group: Sequence[AuditedFact]) -> dict[str, float]:
    ranks = [r for r in (found.rank_over_places for found in group) if r is not None]
    return {
        "facts": len(group),
        "held": fmean(found.held for found in group),
        "rank_over_places": fmean(ranks) if ranks else float("nan"),
    }


def _audited(fact: Fact, pieces: Sequence[str], trace: Trace) -> AuditedFact:
    positions = find_text(pieces, fact.text)
    return AuditedFact(fact, positions, audit(trace.events, positions))


def find_text(pieces: Sequence[str], text: str) -> tuple[int, ...]:
    """Return which tokens hold the first occurrence of a text; none if it never occurs."""
    start = "".join(pieces).find(text)
    if start < 0:
        return ()
    ends = list(accumulate(map(len, pieces)))
    first = bisect_right(ends, start)
    last = bisect_right(ends, start + len(text) - 1)
    return tuple(range(first, last + 1))
