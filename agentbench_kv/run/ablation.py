"""One method, one parameter at a time: every variant against the method as it is, paired."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentbench_kv.errors import PrerequisiteError, UsageError, unknown_name
from agentbench_kv.methods.agentkv import PHASELESS, SAMPLERS
from agentbench_kv.methods.base import KEPT_SETS
from agentbench_kv.registry import load_method, split_settings
from agentbench_kv.results.drift import find_drift
from agentbench_kv.results.runs import Run, RunGroup, asked_once, load_run
from agentbench_kv.results.stats import Change, Interval, change, holm, level
from agentbench_kv.results.store import RunStore
from agentbench_kv.run.calibration import identified
from agentbench_kv.run.runner import Progress, run_all
from agentbench_kv.run.spec import RunSpec, resolve

logger = logging.getLogger(__name__)


AXES: Mapping[str, tuple[Any, ...]] = {
    "representatives": (8, 16, 24, 32, 48, 64),
    "drop_phase": ("none", "think", "act", "tool", "others"),
    "sampler": (*SAMPLERS, *PHASELESS),
    "gqa": ("mean_prob", "max_prob", "max_logit"),
    "kept_set": KEPT_SETS,
    "keep_recent": (0, 8, 32, 128),
    "trigger": ("every", "slack", "turn", "prefill+every"),
}


"""Parameters that are varied if nothing else is asked for (AgentKV, tables 3 and 4, and what its
paper leaves open)."""


_IDLE = ("kept_set", "keep_recent")


"""What changes nothing about a method that ranks by position."""


@dataclass(frozen=True)
class Variant:
    """The method with one parameter changed."""

    axis: str  # what was changed, and to what; both empty for the baseline
    value: str
    spec: RunSpec
    level: Interval | None = None  # None before it has run
    difference: Change | None = None  # this variant minus the baseline
    adjusted_p: float | None = None  # Holm over all variants
    doubt: str = ""  # why the run proves nothing, so that it is compared with nothing


def variants(
    base: RunSpec, settings: Mapping[str, str], axes: Mapping[str, Sequence[Any]] | None = None
) -> list[Variant]:
    """List the baseline and every variant that differs from it.

    Without `axes` (parameter -> values) those of `AXES` that make a difference to the method, with
    the values that go with the budget. UsageError for what the method does not take.
    """
    name, own = split_settings(base.method)
    base, settings = replace(base, method=name), {**settings, **own}
    method = load_method(name.partition("@")[0])
    known = method.parameters()
    for name in axes or ():
        if name not in known:
            raise unknown_name(f"{base.method} parameter", name, known)
    idle = _IDLE if method.by_position else ()
    chosen = axes or {n: values for n, values in AXES.items() if n in known and n not in idle}
    arms = {resolve(base, settings).id: Variant("", "", resolve(base, settings))}
    for name, values in chosen.items():
        for value in values:
            try:
                spec = resolve(base, {**settings, name: str(value)})
            except UsageError as error:
                if axes:
                    raise
                logger.info("left out %s=%s: %s", name, value, error)
                continue
            arms.setdefault(spec.id, Variant(name, str(value), spec))
    if len(arms) < 2:
        raise UsageError("nothing to ablate: every variant is the baseline; name other values")
    return list(arms.values())


def ablate(
    arms: Sequence[Variant],
    out: Path,
    progress: Progress,
    metric: str = "score",
    banks: Path | None = None,
) -> list[Variant]:
    """Run what is missing and compare every variant with the first; `metric` may be a sub-score.

    A run that is not valid has no difference, and none has one where the baseline is not. `banks`
    is a folder for what memories read of the past.
    """
    arms = [replace(arm, spec=identified(arm.spec)) for arm in arms]
    summaries = run_all([arm.spec for arm in arms], out, progress, banks)
    if lost := sum(summary.lost for summary in summaries):
        raise PrerequisiteError(
            f"{lost} trials were lost to engine or infrastructure (kvbench show RUN says to what), "
            "so there is nothing to compare; the same command tries them again"
        )
    store = RunStore(out)
    runs = [load_run(store.find(arm.spec.id).path) for arm in arms]
    _refuse_unlike(runs)
    groups = [RunGroup(run.label, (run,)) for run in runs]
    asked = asked_once(groups, metric)
    scores = [group.scores(metric, asked) for group in groups]
    if all(each is None for each in scores):
        raise UsageError(f"the records have no sub-score {metric!r}; use --metric score")
    doubts = [(run.reason or "not valid") if not run.valid else "" for run in runs]
    gaps = [
        change(own, scores[0]) if own and scores[0] and not (doubt or doubts[0]) else None
        for own, doubt in zip(scores[1:], doubts[1:], strict=True)
    ]
    adjusted = iter(holm([gap.p_value for gap in gaps if gap is not None]))
    return [
        replace(
            arm,
            level=level(own) if own and own.parts else None,
            difference=gap,
            adjusted_p=None if gap is None else next(adjusted),
            doubt=doubt,
        )
        for arm, own, gap, doubt in zip(arms, scores, [None, *gaps], doubts, strict=True)
    ]


def _refuse_unlike(runs: Sequence[Run]) -> None:
    """Refuse arms, finished by another version perhaps, that differ in more than the parameter."""
    base, *others = runs
    for run in others:
        odd = [each for each in find_drift([base], [run]) if each.weight == "refuses"]
        if odd:
            raise UsageError(
                f"refused, {base.run_id} and {run.run_id} differ in more than the parameter: "
                f"{'; '.join(map(str, odd[:6]))}; with another --out all arms are played anew"
            )
