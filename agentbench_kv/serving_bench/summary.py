"""What a folder of measurements says: medians, paired ratios, what may not be ranked.

Figures are medians over repetitions, ratios are paired by repetition.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise, product
from math import inf
from statistics import median as middle
from typing import Any

from pydantic import BaseModel

from agentbench_kv.errors import UsageError
from agentbench_kv.results.stats import Median, median
from agentbench_kv.serving_bench.measurements import (
    GOODPUT,
    SPEED,
    LoadMeasurement,
    Quality,
    ServingArm,
    ServingPlan,
    of_method,
    read_per_token,
    served_model,
)

STANDARD = ("full", "full-constrained")  # arms of every plan that does not leave them out
BASES = (*STANDARD, "full@prefix")  # arms that the others are compared with
_KV = (
    "median_peak_bytes", "median_peak_live", "median_logical", "mean_decode_kv", "events",
    "prefill_tokens", "recomputed", "sessions", "compressed_sessions",
)  # fmt: skip
_SCHEDULE, _RATE = "schedule", "/s"  # in a load's label
_ALIKE = 16  # tokens that a chat format and chance make the same in a prompt, a cache's page apart
# Repetitions by shape, load and arm.
Groups = Mapping[tuple[str, str, str], Sequence[LoadMeasurement]]


class ArmFigures(BaseModel, frozen=True):
    """One arm at one shape and load; figures are medians over repetitions."""

    arm: str
    shape: str
    load: str
    repetitions: int
    figures: dict[str, Median]
    ratios: dict[str, Median]  # output tokens/s over another arm's in the same repetition; by arm
    kv: dict[str, float]  # empty without accounting
    reasons: list[str]  # why it may not be ranked
    model_runner: str = ""  # vLLM's, where the engine says it
    quality: Quality | None = None  # the arm's, at whatever load it was measured
    origins: list[str] = []  # machines and versions that it was measured with
    apart_h: float = 0.0  # most hours between the two measurements of a pair
    again: int = 0  # repetitions that were begun more than once
    timeouts_s: list[float] = []  # seconds after which a request has failed

    @property
    def answered(self) -> bool:
        """Whether most repetitions completed anything."""
        completed = self.figures.get("completed")
        return completed is None or completed.point > 0


class BestLoad(BaseModel, frozen=True):
    """The load at which an arm is best, and its ratios to others at theirs.

    Best is most good requests a second where the plan has targets, else most output tokens.
    """

    arm: str
    shape: str
    load: str
    repetitions: int
    speed: Median
    goodput: Median | None = None
    ratios: dict[str, Median]  # of what is best, over another arm's at its own best load; by arm
    origins: list[str] = []
    apart_h: float = 0.0
    again: int = 0  # repetitions that were begun more than once
    end: str = ""  # of the arm's loads, if it is at one: `lowest`, `highest` or `only one`


class UnrankedLoad(BaseModel, frozen=True):
    """A load at which an arm is better than at its best one, and may not be ranked."""

    arm: str
    shape: str
    load: str
    reason: str


class ServingSummary(BaseModel, frozen=True):
    """What a folder of measurements says."""

    plan: ServingPlan
    cells: list[ArmFigures]
    best: list[BestLoad]
    unranked: list[UnrankedLoad] = []
    missing: list[str] = []  # files of measurements that were begun and are not there


def summarize_serving(
    plan: ServingPlan, measured: Sequence[LoadMeasurement], missing: Sequence[str] = ()
) -> ServingSummary:
    """Sum up what there is of a plan; cells in its order of shapes, loads and arms."""
    plan = plan.model_copy(update={"model": served_model(plan, measured)})
    groups: dict[tuple[str, str, str], list[LoadMeasurement]] = defaultdict(list)
    for each in measured:
        groups[each.shape, each.load, each.arm].append(each)
    quality = _qualities(measured)
    sent = _sent(plan, measured)
    cells: list[ArmFigures] = []
    best: list[BestLoad] = []
    unranked: list[UnrankedLoad] = []
    by = GOODPUT if plan.goodput else SPEED
    for shape in plan.shapes:
        made = []
        for load, arm in product(plan.loads, plan.arms):
            if runs := groups.get((shape, load, arm.name)):
                bases = {base: groups.get((shape, load, base), []) for base in BASES}
                found = _arm_figures(arm, runs, bases, quality.get(arm.name))
                known = _maybe_known(arm, runs, sent[arm.name])
                made.append(found.model_copy(update={"reasons": [*found.reasons, *known]}))
        cells += made
        best += _best(made, groups, by, plan.open_at_most)
        unranked += _unranked(made, by)
    return ServingSummary(
        plan=plan, cells=cells, best=best, unranked=unranked, missing=list(missing)
    )


def _sent(plan: ServingPlan, measured: Iterable[LoadMeasurement]) -> Counter[str]:
    """Count how often each arm's server was sent a load; those of one URL are one server."""
    where = {arm.name: arm.url or arm.name for arm in plan.arms}
    servers = Counter[str]()
    for each in measured:
        servers[where[each.arm]] += each.begun
    return Counter({name: servers[server] for name, server in where.items()})


def _qualities(measured: Iterable[LoadMeasurement]) -> dict[str, Quality]:
    """Return each arm's; a UsageError if they are not of the same recorded calls."""
    found: dict[str, Quality] = {}
    for each in measured:
        if each.quality is not None and (each.arm not in found or found[each.arm].failed):
            found[each.arm] = each.quality
    asked = {quality.calls: arm for arm, quality in found.items() if quality.exact is not None}
    if len(asked) > 1:
        said = ", ".join(f"{arm} of {calls}" for calls, arm in asked.items())
        raise UsageError(
            f"exact calls are not of the same calls ({said}): measure again into another --out"
        )
    known = {arm: q for arm, q in found.items() if q.exact is not None and q.parts}
    sessions = {arm: {name: n for name, (_, n) in q.parts.items()} for arm, q in known.items()}
    for (arm, own), (other, theirs) in pairwise(sessions.items()):
        if own != theirs:
            raise UsageError(
                f"exact calls of {arm} and {other} are not of the same sessions' calls: measure "
                "again into another --out"
            )
    return found


def _arm_figures(
    arm: ServingArm,
    runs: Sequence[LoadMeasurement],
    bases: Mapping[str, Sequence[LoadMeasurement]],
    quality: Quality | None,
) -> ArmFigures:
    # A figure that some repetition lacks (nothing completed) has no median over repetitions.
    names = [name for name in runs[0].figures if all(name in run.figures for run in runs)]
    accounts = [run.kv for run in runs if run.kv]
    kv = {n: middle(float(account.get(n) or 0) for account in accounts) for n in _KV if accounts}
    kv |= _bytes(runs)
    return ArmFigures(
        arm=arm.name,
        shape=runs[0].shape,
        load=runs[0].load,
        repetitions=len(runs),
        figures={name: median([run.figures[name] for run in runs]) for name in names},
        ratios=_ratios(arm.name, runs, bases),
        apart_h=_apart_h(runs, bases),
        again=sum(run.begun > 1 for run in runs),
        kv=kv,
        reasons=_reasons(arm, runs),
        quality=quality,
        origins=sorted({run.origin for run in runs}),
        model_runner=str(runs[0].server.get("model_runner", "")),
        timeouts_s=sorted({run.timeout_s for run in runs if run.timeout_s is not None}),
    )


def _bytes(runs: Sequence[LoadMeasurement]) -> dict[str, float]:
    """Return medians of what every repetition knows: of the pool, and read for a decoded token."""
    found: dict[str, list[float | None]] = {
        "pool_bytes": [run.pool_bytes for run in runs],
        "bytes_read": [read_per_token(run) for run in runs],
    }
    return {
        name: middle(value for value in values if value is not None)
        for name, values in found.items()
        if None not in values
    }


def _ratios(
    arm: str,
    runs: Sequence[LoadMeasurement],
    bases: Mapping[str, Sequence[LoadMeasurement]],
    by: str = SPEED,
) -> dict[str, Median]:
    """Pair the repetitions, measured in one place, in which neither side was disturbed.

    None to a base that has nothing of it in one of them.
    """
    found = {}
    own = _undisturbed(runs, by)
    for base, others in bases.items():
        theirs = _undisturbed(others, by)
        pairs = [(value, theirs[at]) for at, value in own.items() if at in theirs]
        if pairs and base != arm and all(other for _, other in pairs):
            found[base] = median([value / other for value, other in pairs])
    return found


def _apart_h(
    runs: Sequence[LoadMeasurement], bases: Mapping[str, Sequence[LoadMeasurement]]
) -> float:
    """Return the most hours between two measurements that are paired, where both say when."""
    times = {_place(run): when for run in runs if (when := _when(run)) is not None}
    gaps = [
        abs((times[_place(other)] - when).total_seconds())
        for others in bases.values()
        for other in others
        if (when := _when(other)) is not None and _place(other) in times
    ]
    return max(gaps, default=0.0) / 3600


def _when(run: LoadMeasurement) -> datetime | None:
    with suppress(ValueError):
        when = datetime.fromisoformat(run.date)
        return when if when.tzinfo else when.replace(tzinfo=UTC)
    return None


def _place(run: LoadMeasurement) -> tuple[int, str]:
    return run.repetition, run.origin


def _undisturbed(runs: Sequence[LoadMeasurement], by: str) -> dict[tuple[int, str], float]:
    """Return a figure of those repetitions that nothing speaks against by itself."""
    return {_place(run): run.figures[by] for run in runs if not disturbances([run])}


def _best(
    cells: Sequence[ArmFigures], groups: Groups, by: str, open_at_most: int | None
) -> list[BestLoad]:
    """Pick each arm's best load of one shape among those that may be ranked."""
    fastest: dict[str, ArmFigures] = {}
    for cell in cells:
        held = fastest.get(cell.arm)
        if cell.reasons or (held and _worth(cell, by) <= _worth(held, by)):
            continue
        fastest[cell.arm] = cell
    runs = {arm: groups[cell.shape, cell.load, arm] for arm, cell in fastest.items()}
    # Who has no good request at any load has no best one to be compared at.
    bases = {base: runs[base] for base in BASES if base in runs and _worth(fastest[base], by)[0]}
    return [
        BestLoad(
            arm=arm,
            shape=cell.shape,
            load=cell.load,
            repetitions=cell.repetitions,
            speed=cell.figures[SPEED],
            goodput=cell.figures.get(GOODPUT),
            ratios=_ratios(arm, runs[arm], bases, by) if _worth(cell, by)[0] else {},
            origins=cell.origins,
            apart_h=_apart_h(runs[arm], bases),
            again=cell.again,
            end=_end(cell.load, [each.load for each in cells if each.arm == arm], open_at_most),
        )
        for arm, cell in fastest.items()
    ]


def _unranked(cells: Sequence[ArmFigures], by: str) -> Iterator[UnrankedLoad]:
    """Yield the loads of one shape that would have been an arm's best."""
    ranked: dict[str, tuple[float, float]] = {}
    for cell in cells:
        if not cell.reasons:
            ranked[cell.arm] = max(_worth(cell, by), ranked.get(cell.arm, (0.0, 0.0)))
    for cell in cells:
        if cell.reasons and _worth(cell, by) > ranked.get(cell.arm, (0.0, 0.0)):
            yield UnrankedLoad(
                arm=cell.arm, shape=cell.shape, load=cell.load, reason="; ".join(cell.reasons)
            )


def _worth(cell: ArmFigures, by: str) -> tuple[float, float]:
    """Return what loads are ordered by; alike ones by their output."""
    return cell.figures[by].point, cell.figures[SPEED].point


def _end(load: str, tried: Sequence[str], open_at_most: int | None) -> str:
    """Return at which end of an arm's loads a load is; empty if no other can be better."""
    if load == _SCHEDULE:
        return ""
    rate = load.endswith(_RATE)
    alike = [each for each in tried if each != _SCHEDULE and each.endswith(_RATE) == rate]
    own, *sizes = (size_of(each, open_at_most) for each in (load, *alike))
    if len({*sizes}) == 1:
        return "only one"
    if own == max(sizes):
        return "highest"
    return "lowest" if own == min(sizes) and load != "c1" else ""


def size_of(load: str, open_at_most: int | None) -> float:
    """Return a load's sessions a second, or those at once: no more than there are."""
    if load.endswith(_RATE):
        return float(load.removesuffix(_RATE))
    return min(float(load.removeprefix("c")), open_at_most or inf)


def _reasons(arm: ServingArm, runs: Sequence[LoadMeasurement]) -> list[str]:
    unproved = _unproved(arm, runs)
    return [*disturbances(runs), *_mixed(runs), *([unproved] if unproved else [])]


def _mixed(runs: Sequence[LoadMeasurement]) -> list[str]:
    """Say that an arm's method changed between its repetitions."""
    known = [of_method(run.server) for run in runs]
    return [
        f"measured with {len(states)} states of the method's {name}"
        for name in ("code", "calibration")
        if len(states := {each[name] for each in known if name in each}) > 1
    ]


def disturbances(runs: Sequence[LoadMeasurement]) -> list[str]:
    """Say what speaks against some repetitions, whatever was asked for."""
    reasons = []
    if failed := sum(run.failed for run in runs):
        sent = failed + sum(int(run.figures.get("completed", 0)) for run in runs)
        said = next((error for run in runs for error in run.errors), "no reason given")
        reasons.append(f"{failed} of {sent} requests failed: {said}")
    if cold := sum(run.warmup_errors for run in runs):
        reasons.append(f"{cold} requests of the warm-up failed, so that it was measured cold")
    if resets := sum(int((run.kv or {}).get("session_resets", 0)) for run in runs):
        reasons.append(f"{resets} session resets: prompts were prefilled again")
    if restarts := sum(run.restarts for run in runs):
        reasons.append(f"the backend died and was started again, {restarts} times in all")
    if kept := next((run.prefixes_kept for run in runs if run.prefixes_kept), ""):
        reasons.append(f"the prefix cache was not emptied before: {kept}")
    if known := max(map(_known_before, runs)):
        reasons.append(
            f"{known:.0%} of the prompt tokens were cached beyond what one measurement makes: the "
            "server knew its prompts; start it anew"
        )
    return reasons


def _maybe_known(arm: ServingArm, runs: Sequence[LoadMeasurement], sent: int) -> list[str]:
    """Say that nobody knows whether a server by URL had cached prompts that it got before."""
    silent = any(
        run.random_prompts is False and "prefix_hit_rate" not in run.figures for run in runs
    )
    if not arm.url or not silent or sent < 2:
        return []
    return [
        f"recorded prompts were sent {sent} times, and the server does not say what it had cached "
        "of them (vLLM does with --enable-prompt-tokens-details)"
    ]


def _known_before(run: LoadMeasurement) -> float:
    """Return the share of the prompts that a server cannot have cached in a measurement."""
    figures = run.figures
    if run.failed or "prefix_hit_rate" not in figures or "prefix_hit_bound" not in figures:
        return 0.0
    excess = figures["prefix_hit_rate"] - figures["prefix_hit_bound"]
    alike = _ALIKE * figures.get("completed", 0) / (figures.get("total_prompt_tokens") or 1)
    return excess if excess > alike else 0.0


def _unproved(arm: ServingArm, runs: Sequence[LoadMeasurement]) -> str | None:
    """Say why nobody can know that the budget was applied: the arm's, or the one a server says."""
    accounts: list[Mapping[str, Any]] = [run.kv for run in runs if run.kv]
    said = next((account["budget"] for account in accounts if account.get("budget")), None)
    budget = said if arm.budget is None else arm.budget
    if budget is None:
        if arm.drops and not all(account.get("events") for account in accounts):
            return f"never triggered: no session came to trigger={arm.settings.get('trigger')}"
        return None
    if len(accounts) < len(runs):
        return "no KV accounting: this endpoint does not prove that the budget was applied"
    if refused := sum(account.get("refused", 0) for account in accounts):
        return (
            f"{refused} events had no room: what is always kept leaves none of the budget of "
            f"{budget}; raise --budget or protect less"
        )
    if not all(account.get("events") for account in accounts):
        return f"never triggered at budget {budget}{_cure(arm)}"
    over = max(account.get("max_over_budget") or 0 for account in accounts)
    if over > arm.interval:
        return (
            f"budget not applied: a session held {over} tokens above budget and longest prefill, "
            f"more than the interval of {arm.interval}{_cure(arm)}"
        )
    return None


def _cure(arm: ServingArm) -> str:
    """Say what makes a method fire that waits for generated tokens, of which there may be few."""
    if arm.settings.get("trigger") != "every":
        return ""
    return (
        f"; an event is due at every {arm.interval}th generated token only: longer answers, or "
        "--set trigger=prefill+every"
    )
