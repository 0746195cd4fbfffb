"""What a reader of a run's figures should know besides their validity: a sentence each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from agentbench_kv.accounting import KVAccount, LayerReach
from agentbench_kv.budget import Budget
from agentbench_kv.results.lines import Lines
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_info import RunInfo

_UNREAD = ("other_syntax", "calls_in_other_syntax")  # metrics of a trial


def notes(info: RunInfo, lines: Lines[TrialRecord], trials: Sequence[TrialRecord]) -> list[str]:
    """Return them for a run's lines, of which `trials` are those that count."""
    accounts = [record.kv for record in trials if record.kv.logical]
    return [
        *_resumes(info),
        *_unread_lines(lines),
        *_calibration(info),
        *_unread_calls(info, trials),
        *_failure(info),
        *_reach(info, accounts),
        *_protected(info, accounts),
        *_bytes(info, trials),
    ]


def _resumes(info: RunInfo) -> list[str]:
    return [
        f"resumed with another {name}: {'not recorded' if old is None else old} -> {new}"
        for resume in info.resumes
        for name, (old, new) in sorted(resume.changed.items())
    ]


def _unread_lines(lines: Lines[TrialRecord]) -> list[str]:
    found = [f"samples.jsonl line {odd.line}: {odd.reason}" for odd in lines.unreadable[:5]]
    if lines.torn:
        found.append("samples.jsonl: the torn last line was dropped; resuming runs its trial again")
    return found


def _calibration(info: RunInfo) -> list[str]:
    used = info.provenance.get("calibration")
    if not isinstance(used, dict):
        return []
    return [f"calibrated on {used.get('tokens')} tokens of {used.get('source')}"]


def _failure(info: RunInfo) -> list[str]:
    return [] if info.error is None else [f"the run failed: {info.error}"]


def _unread_calls(info: RunInfo, trials: Sequence[TrialRecord]) -> list[str]:
    """Say how many answers write their calls in a syntax that was not read, and what mends it."""
    written: Counter[str] = Counter()
    for record in trials:
        syntax, answers = (record.metrics.get(name) for name in _UNREAD)
        if isinstance(syntax, str) and isinstance(answers, int):
            written[syntax] += answers
    read = info.provenance.get("tool_parser")
    if not written:
        return _no_calls(info, trials, str(read))
    most = written.most_common(1)[0][0]
    cure = f"to read them: --tool-syntax {most}"
    if read == "endpoint":
        cure = "switch on the tool parser of the endpoint"
    elif read == most:
        cure = "they stand where this syntax has none, amid other text"
    return [
        f"warning: {written.total()} answers call tools as {most} writes calls, and calls were "
        f"read as {read}, so none of these was run; {cure}"
    ]


def _no_calls(info: RunInfo, trials: Sequence[TrialRecord], read: str) -> list[str]:
    """Say that a model makes no calls at all where a task counts them."""
    counted = [r.metrics["calls"] for r in trials if "calls" in r.metrics]
    if not counted or any(counted) or info.spec.get("engine") == "scripted":
        return []
    cure = {
        "endpoint": "the endpoint's tool parser may be off",
        "none": "--tool-syntax none reads none",
        "json": "the model writes none",
    }.get(read, "a model that was not trained to write them so needs --tool-syntax json")
    return [f"warning: no call of a tool in {len(counted)} trials, read as {read}; {cure}"]


def _reach(info: RunInfo, accounts: Sequence[KVAccount]) -> list[str]:
    """Say how much of the KV a method could reach, where some layers keep windows."""
    details = info.provenance.get("engine_details")
    found = LayerReach.read(details) if isinstance(details, dict) else None
    return [found.sentence(round(_logical(accounts)))] if found and accounts else []


def _logical(accounts: Sequence[KVAccount]) -> float:
    return median(kv.logical for kv in accounts)


def _protected(info: RunInfo, accounts: Sequence[KVAccount]) -> list[str]:
    """Say what of a budget is left to choose, where some of it is protected."""
    protected = median(kv.protected for kv in accounts) if accounts else 0
    if not protected or info.spec.get("budget") is None:
        return []
    size = Budget.parse(info.spec["budget"]).at(round(_logical(accounts)))
    free = max(0, size - round(protected))
    return [
        f"of the budget, {size} tokens, a median of {protected:g} are protected: {free} beyond them"
    ]


def _bytes(info: RunInfo, trials: Sequence[TrialRecord]) -> list[str]:
    """Say where bytes are not recorded throughout, or do not follow from the tokens."""
    held = [kv for each in trials if (kv := each.kv).peak_live]
    known = [kv.peak_bytes / kv.peak_live for kv in held if kv.peak_bytes]
    if not known:
        return []
    if len(known) < len(held):
        return [f"bytes are recorded in {len(known)} of {len(held)} sessions, so the run has none"]
    details = info.provenance.get("engine_details")
    # Rows of windows, and those that age, are not all of one size.
    windows = isinstance(details, dict) and LayerReach.read(details) is not None
    if windows or str(info.spec.get("kv_dtype") or "").startswith("kivi"):
        return []
    least, most = min(known), max(known)
    # What a method asks beside a session is counted in whole bytes.
    if most - least <= 1:
        return []
    return [
        f"warning: peak_bytes do not follow from peak_live: {least:,.0f} to {most:,.0f} bytes a "
        "token, which are one number where every row has one size"
    ]
