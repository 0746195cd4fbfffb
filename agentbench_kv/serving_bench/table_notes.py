"""What a reader of a table of measurements should know: a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import inf

from agentbench_kv.errors import KVBenchError
from agentbench_kv.registry import make_method
from agentbench_kv.results.stats import REPETITIONS
from agentbench_kv.results.tables.costs import runner_notes
from agentbench_kv.serving_bench.measurements import Quality, ServingPlan
from agentbench_kv.serving_bench.summary import ArmFigures, BestLoad, UnrankedLoad

DUMMY = "dummy weights: speed of these shapes only; nothing here says anything about accuracy"
SIMULATED = (
    "simulated: rows are quantised and dequantised when written, and counted at the bytes they "
    "would take; speed at lower precision is not what an engine with such a cache has"
)
_SHOWN = 5  # names of a list


def loads_notes(plan: ServingPlan, cells: Sequence[ArmFigures]) -> list[str]:
    """Return what there is to say of a table of all loads, but for what is not in it."""
    notes = [
        "load: cN is at most N sessions at once, N/s is sessions that begin per second (Poisson)"
        + ", schedule is the trace's own times" * (plan.trace is not None),
        "medians over repetitions with 95% intervals; ratios are paired by repetition",
        "TTFT, TPOT, E2E: median and p99 of requests; a request is one turn",
    ]
    notes += setting_notes(plan)
    if plan.pool_mb is not None and plan.engine == "embedded":
        notes.append(
            "sessions are admitted by their rows, and slots are powers of two, so that pool MB may "
            "come to twice as much"
        )
    if plan.goodput:
        kept = ", ".join(f"{name.upper()} {most:g} ms" for name, most in plan.goodput.items())
        notes.append(f"good: a request within {kept}; a session, if all of its requests are")
    if any("prefix_hit_rate" in cell.figures for cell in cells):
        notes.append(
            "prefix hits: prompt tokens that the server says it had cached; at most: those that "
            "an endless cache would have"
        )
    if plan.trace is not None:
        scale = f"; its gaps and clock x {plan.time_scale:g}" * (plan.time_scale != 1)
        notes += [plan.trace.sentence + scale, *plan.trace.notes]
        notes += _quality_notes(cells)
    notes += _kv_notes(cells)
    notes += _event_notes(cells)
    notes += runner_notes((cell.arm, cell.model_runner) for cell in cells)
    if dropping := [arm.name for arm in plan.arms if arm.drops]:
        notes.append(
            f"{', '.join(dropping)}: the recorded messages without what the method drops; what "
            "follows the first change is read again (prefilled, computed again: all sessions), "
            "with the recorded answers in it"
        )
    notes += few_notes(cells)
    notes += pairing_notes(cells)
    if plan.engine == "embedded" and any(arm.kv_dtype for arm in plan.arms):
        notes.append(SIMULATED)
    if plan.weights == "dummy":
        notes.append(DUMMY)
    if plan.weights == "unknown":
        notes.append("servers were given by URL: what they run is what their arms are called")
    return notes


def _kv_notes(cells: Sequence[ArmFigures]) -> list[str]:
    """Say what the columns of keys and values count."""
    counted = {name for cell in cells for name, count in cell.kv.items() if count}
    notes = []
    if any(cell.kv for cell in cells):
        notes.append(
            "peak live MB: keys and values of a session over all layers and heads; peak live, "
            "decode KV, logical: tokens per layer and KV head; medians over sessions, and the mean "
            "over decoded tokens"
        )
    if counted & {"pool_bytes", "bytes_read"}:
        notes.append(
            "pool MB: slots or blocks that all sessions, and what they share, took up together at "
            "the most; read MB a token: keys and values that a decoded token's attention read"
        )
    if "recomputed" in counted:
        notes.append(
            "computed again: rows that were lost, or read again; of a server as shipped these come "
            "on top of prefilled, else they are part of it"
        )
    return notes


def setting_notes(plan: ServingPlan) -> list[str]:
    """Say what changes every figure and stands in no row."""
    notes = []
    if plan.pool_mb is not None:
        moving = [arm.name for arm in plan.arms if arm.settings.get("offload")]
        more = f"; {', '.join(moving)} may move rows to the machine's own memory beside it"
        notes.append(
            f"equal memory: every arm has {plan.pool_mb:g} MB for cached rows{more * bool(moving)}"
        )
    if plan.engine_args:
        given = " ".join(f"{name}={value}" for name, value in plan.engine_args.items())
        notes.append(f"engine arguments of every arm: {given}")
    if chosen := list(_chosen(plan)):
        notes.append(f"settings other than the preset's: {'; '.join(chosen)}")
    if plan.together:
        notes.append("all arms' servers were up at once, and one of them was measured at a time")
    most = plan.open_at_most
    above = [load for load in plan.loads if load.startswith("c") and int(load[1:]) > (most or inf)]
    if above:
        notes.append(f"{', '.join(above)}: there are {most} sessions, so no more were open at once")
    return notes


def _chosen(plan: ServingPlan) -> Iterator[str]:
    """Yield the settings of arms that are not those of their methods' presets."""
    for arm in plan.arms:
        if not arm.method or not arm.settings:
            continue
        with suppress(KVBenchError):  # a plug-in's method that is not here
            usual = make_method(arm.method, arm.budget).settings()
            own = {name: arm.settings[name] for name in arm.settings.keys() & usual.keys()}
            said = [f"{name}={own[name]}" for name in sorted(own) if own[name] != usual[name]]
            if said:
                yield f"{arm.name} {' '.join(said)}"


def timeout_notes(cells: Sequence[ArmFigures]) -> list[str]:
    """Say after which time requests have failed, where it is not the same for all."""
    known: dict[float, list[str]] = {}
    for cell in cells:
        for timeout in cell.timeouts_s:
            known.setdefault(timeout, []).append(f"{cell.arm} {cell.load}")
    if len(known) < 2:
        return []
    said = "; ".join(f"{s:g} s ({', '.join(known[s])})" for s in sorted(known))
    return [f"requests failed after different times (--timeout): {said}"]


def missing_notes(names: Sequence[str]) -> list[str]:
    """Name measurements that were begun and are not there."""
    if not names:
        return []
    shown = ", ".join(names[:_SHOWN]) + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
    return [f"begun, and not there (running, interrupted or removed): {shown}"]


def unranked_notes(loads: Sequence[UnrankedLoad]) -> list[str]:
    """Name the loads at which arms are better than shown, but may not be ranked."""
    said = "; ".join(f"{each.arm} {each.load} ({each.reason})" for each in loads)
    return [f"better than the load shown, and not ranked: {said}"] * bool(said)


def end_notes(best: Sequence[BestLoad]) -> list[str]:
    """Name arms that may have a better load than was tried."""
    said = ", ".join(f"{each.arm} ({each.load}, the {each.end})" for each in best if each.end)
    return [f"best at the end of the loads tried, so another may be better: {said}"] * bool(said)


def _event_notes(cells: Sequence[ArmFigures]) -> list[str]:
    """Name arms of which some sessions had no event, and were the full cache all along."""
    some = [
        f"{cell.arm} {cell.load} ({cell.kv['compressed_sessions']:g} of {cell.kv['sessions']:g})"
        for cell in cells
        if 0 < cell.kv.get("compressed_sessions", 0) < cell.kv.get("sessions", 0)
    ]
    return [f"sessions with an event, where not all had one: {', '.join(some)}"] * bool(some)


def _quality_notes(cells: Sequence[ArmFigures]) -> list[str]:
    """Say what exact calls are, and why there are none."""
    found = {cell.arm: cell.quality for cell in cells if cell.quality is not None}
    if not found:
        return ["exact calls: not measured: no recorded answers came, or nobody asked for them"]
    behind = {
        arm: sum(asked for _, asked in quality.behind.values())
        for arm, quality in found.items()
        if quality.behind
    }
    counts = ", ".join(f"{count:,} ({arm})" for arm, count in behind.items())
    others = [f"calls behind an event, which are others for each arm: {counts}"] * bool(counts)
    said = _exact_note([each for each in found.values() if each.exact is not None])
    reasons: dict[str, list[str]] = {}
    for arm, quality in found.items():
        if quality.reason:
            reasons.setdefault(quality.reason, []).append(arm)
    later = {
        cell.arm
        for cell in cells
        if (own := cell.quality) and own.origin not in ("", *cell.origins)
    }
    return [
        *said,
        *others,
        *[
            f"exact calls of {', '.join(sorted(later))}: counted on another machine, or with other "
            "versions or code, than the speed"
        ]
        * bool(later),
        *(f"exact calls of {', '.join(arms)}: not measured: {r}" for r, arms in reasons.items()),
    ]


def _exact_note(found: Sequence[Quality]) -> list[str]:
    if not found:
        return []
    seconds, sessions = sum(each.seconds for each in found), len(found[0].parts)
    of = f"{found[0].calls:,} recorded tool calls" + f" in {sessions:,} sessions" * bool(sessions)
    return [
        f"exact calls: of {of} those whose every token is the arm's own best (fidelity's "
        "calls_exact; full's share is calls_exact_full), with 95% intervals over sessions, where "
        "there are enough; behind an event: of those in answers that had one before or with their "
        "first token; answers given, played once an arm after a measurement, in "
        f"{seconds:.1f} s beside the measured time"
    ]


def few_notes(known: Sequence[ArmFigures | BestLoad]) -> list[str]:
    """Say that there are few repetitions or pairs, and where not all repetitions have a pair."""
    fewest = min(each.repetitions for each in known)
    pairs = min((ratio.n for each in known for ratio in each.ratios.values()), default=fewest)
    what, least = ("pairs", pairs) if pairs < fewest else ("repetitions", fewest)
    notes = [f"fewest {what}: {least}; fewer than {REPETITIONS} decide nothing"]
    notes = notes * (least < REPETITIONS)
    lost = [
        f"{each.arm} {each.load} {ratio.n} of {each.repetitions}"
        for each in known
        for ratio in [min(each.ratios.values(), key=lambda ratio: ratio.n, default=None)]
        if ratio is not None and ratio.n < each.repetitions
    ]
    if lost:
        notes.append(f"repetitions that could be paired, where not all could: {', '.join(lost)}")
    return notes


def pairing_notes(cells: Sequence[ArmFigures | BestLoad]) -> list[str]:
    """Say that not all was measured in one place, and that pairs lie hours apart, if so."""
    notes = []
    origins = sorted({origin for cell in cells for origin in cell.origins})
    if len(origins) > 1:
        notes.append(
            f"measured with {len(origins)} machines or versions, of which repetitions are "
            f"not paired: {'; '.join(origins)}"
        )
    if (apart := max((cell.apart_h for cell in cells), default=0.0)) >= 1:
        notes.append(
            f"paired repetitions lie up to {apart:.1f} h apart: a machine that changed meanwhile "
            "looks like a difference"
        )
    return [*notes, *_begun_again(cells)]


def _begun_again(known: Sequence[ArmFigures | BestLoad]) -> list[str]:
    """Name arms whose repetitions were begun more than once: ends of slow ones make an arm fast."""
    again = [
        f"{each.arm} {each.load} ({each.again} of {each.repetitions})"
        for each in known
        if each.again
    ]
    said = (
        f"begun more than once (failed, interrupted or removed before): {', '.join(again)}; what "
        "was discarded might have been slower"
    )
    return [said] * bool(again)
