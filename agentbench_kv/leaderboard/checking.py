"""Checking a submission: its files, then what its records say of each other, then with the task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentbench_kv.engines.base import Capability
from agentbench_kv.errors import KVBenchError
from agentbench_kv.leaderboard import consistency, identity
from agentbench_kv.leaderboard.evidence import (
    OWN,
    Checks,
    Fault,
    Note,
    RunEvidence,
    Stop,
    check_files,
    check_listing,
    printable,
    read_manifest,
    read_run,
    shown,
)
from agentbench_kv.leaderboard.marking import check_marks
from agentbench_kv.leaderboard.replay import Replay
from agentbench_kv.registry import load_task
from agentbench_kv.results.submissions import Label, Manifest, SubmittedRun

_MOST_FINDINGS = 40  # of a run: a thousand wrong trials are one fault
_CHEAP = "micro/"  # tasks that are always re-scored
_NEVER_RESCORED = {
    "bfcl/memory": "the conversations before the questions are not in the records",
    "bfcl/web_search": "the task asks the web",
}
# The second stage assumes what the first one checks.
_STAGES: Sequence[Sequence[Callable[[RunEvidence], Checks]]] = (
    (
        identity.check_name,
        identity.check_status,
        identity.check_spec,
        identity.check_memory,
        identity.check_provenance,
        identity.check_model,
        identity.check_calibration,
        consistency.check_count,
        consistency.check_seeds,
        consistency.check_attempts,
        consistency.check_scores,
        consistency.check_unfounded,
    ),
    (
        consistency.check_turns,
        consistency.check_transcripts,
        consistency.check_validity,
        consistency.check_accounts,
        consistency.check_times,
        consistency.check_ingest,
    ),
)


@dataclass(frozen=True)
class RunVerdict:
    """What was found out about one run."""

    run_id: str
    findings: list[Fault]  # what is wrong
    label: Label  # how far it was checked; means nothing if there are findings
    notes: list[str]  # what could not be checked, and why


@dataclass(frozen=True)
class SubmissionVerdict:
    """What was found out about a submission."""

    manifest: Manifest
    runs: list[RunVerdict] = field(default_factory=list)
    general: list[Fault] = field(default_factory=list)

    @property
    def findings(self) -> list[Fault]:
        return [*self.general, *(each for run in self.runs for each in run.findings)]


def validate(
    folder: Path, *, rescore: bool = False, model: Path | None = None
) -> SubmissionVerdict:
    """Derive everything about a submission again that can be, and name what does not agree.

    `rescore` plays the recorded tokens through every task that is here; micro tasks always are.
    `model` is the folder of the model that was run, if it is none that ships: its tokenizer is
    needed. A UsageError if there is no manifest or it cannot be read as one.
    """
    manifest = read_manifest(folder)
    general = check_listing(folder, manifest)
    if general:
        return SubmissionVerdict(manifest, general=general)
    runs = [_check_run(folder, listed, rescore, model) for listed in manifest.runs]
    if not any(run.findings for run in runs):
        general = _check_method(folder, manifest)
    return SubmissionVerdict(manifest, runs, general)


def _check_run(folder: Path, listed: SubmittedRun, rescore: bool, model: Path | None) -> RunVerdict:
    path = folder / listed.run_id
    found = _safely("its files", check_files, path, listed)
    evidence: list[RunEvidence] = []
    if not found:
        found += _safely("its records", _read, path, evidence)
    for stage in _STAGES if evidence else ():
        if not _faults(found):
            for check in stage:
                name = check.__name__.removeprefix("check_")
                found += _safely(f"its {name}", check, *evidence)
    if evidence and not _faults(found):
        found += _safely("its task", _check_task, *evidence, rescore, model)
    return _verdict(listed.run_id, found)


def _read(path: Path, evidence: list[RunEvidence]) -> Checks:
    faults: list[Fault] = []
    run = read_run(path, faults)
    if run is not None:
        evidence.append(run)
    yield from faults


def _safely(what: str, check: Callable[..., Checks], *arguments: Any) -> list[Fault | Note]:
    """Run a check; records of strangers end in a refusal, never in a traceback."""
    try:
        return list(check(*arguments))
    except Exception as error:  # noqa: BLE001  whatever they made fail is their doing
        text = f"could not be checked: {type(error).__name__}: {shown(error)}"
        return [Fault(what, text)]


def _faults(found: Sequence[Fault | Note]) -> list[Fault]:
    return [each for each in found if isinstance(each, Fault)]


def _check_task(evidence: RunEvidence, rescore: bool, model: Path | None) -> Checks:
    """Check what needs the task; whatever keeps a run from being re-scored is a `Stop`."""
    spec = evidence.spec
    try:
        named, fit = identity.unfit(spec), identity.without_figures(spec)
        if reason := identity.unfit(fit):
            yield Stop(reason)
            return
        with identity.opened(fit) as task, ExitStack() as stack:
            # What it is told to mark with is not opened: samples and data are another's to give.
            marker = task if fit == spec else stack.enter_context(identity.opened(spec))
            samples = identity.find_samples(evidence, task)
            if not isinstance(samples, dict):
                yield samples
                return
            found = [
                *identity.check_samples(evidence, samples),
                *identity.check_data(evidence, task),
            ]
            if not found:
                found = list(check_marks(evidence, marker, samples))
            yield from found
            folder = identity.folder_of_model(spec, evidence.info.provenance, model)
            if named:
                yield Stop(named)
            elif obstacle := _obstacle(evidence, rescore):
                yield Stop(obstacle)
            elif folder is None:
                text = f"the tokenizer of {spec.model} is not here; name its folder with --model"
                yield Stop(text)
            elif not found:
                yield from Replay(evidence, task, folder).check(samples)
    except KVBenchError as error:
        yield Stop(f"{spec.task} cannot be played here: {error}")


def _obstacle(evidence: RunEvidence, rescore: bool) -> str:
    """Say why the run's tokens cannot be played again here; empty if they can."""
    spec = evidence.spec
    if not evidence.transcripts:
        return "without transcripts nothing can be re-scored"
    for name, reason in _NEVER_RESCORED.items():
        if spec.task.startswith(name):
            return f"cannot be re-scored: {reason}"
    if evidence.at_text_level:
        return "an endpoint's tokens are not known, so nothing can be re-scored"
    if spec.params.get("recovery") == "breadcrumb":
        return "reminders put words into the prompts that only the method knows"
    if (policy := evidence.policy) is not None and evidence.rewrites:
        if policy.asks:
            return (
                f"cannot be re-scored: what the model said beside the session, which {policy.name} "
                "writes the history by, is in no record"
            )
        if spec.engine not in OWN:
            return "cannot be re-scored: what left was decided by a server's own count of tokens"
    if Capability.FORCE.value in load_task(spec.task).needs:
        memory = ", and the memory" if evidence.keeps_banks else ""
        return (
            "cannot be re-scored: questions are asked in sessions beside the trial's, whose tokens "
            f"no record holds; kvbench leaderboard rerun plays them{memory}"
        )
    if not (rescore or spec.task.startswith(_CHEAP)):
        return "not re-scored; kvbench leaderboard validate --rescore does it"
    return ""


def _check_method(folder: Path, manifest: Manifest) -> list[Fault]:
    said = manifest.method.partition("@")[0]
    found = {run.run_id: read_run(folder / run.run_id, []) for run in manifest.runs}
    methods = {each.spec.method.partition("@")[0] for each in found.values() if each}
    if said in methods:
        return []
    return [Fault("method", f"is {manifest.method!r}, the runs are of {sorted(methods)}")]


def _verdict(name: str, found: Sequence[Fault | Note]) -> RunVerdict:
    faults = _faults(found)
    findings = [Fault(each.field, printable(each.text), name) for each in faults[:_MOST_FINDINGS]]
    if len(faults) > _MOST_FINDINGS:
        findings.append(Fault("", f"and {len(faults) - _MOST_FINDINGS} findings more", name))
    notes = list(dict.fromkeys(each.text for each in found if isinstance(each, Note)))
    stopped = faults or any(isinstance(each, Stop) for each in found)
    label = Label.SELF_REPORTED if stopped else Label.RESCORED
    return RunVerdict(name, findings, label, notes)
