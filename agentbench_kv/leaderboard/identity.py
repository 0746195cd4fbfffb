"""Whether a run is what it claims: its name, spec, provenance, model, its task's samples and data.

The task is this machine's own. Nothing that a submission names is opened or asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.base import Sample, Task
from agentbench_kv.adapters.browser.questions import MADE
from agentbench_kv.engines.base import spelled_arguments
from agentbench_kv.engines.embedded.model import SHIPPED, folder_sha, model_path
from agentbench_kv.errors import KVBenchError, PrerequisiteError
from agentbench_kv.leaderboard.evidence import (
    Checks,
    Fault,
    Note,
    RunEvidence,
    Stop,
    expect,
    place,
    shown,
)
from agentbench_kv.methods.kvpress import PREFIX as KVPRESS
from agentbench_kv.methods.memory.plain import PlainMemory
from agentbench_kv.registry import load_engine, load_task, names
from agentbench_kv.results.run_info import RunStatus
from agentbench_kv.results.run_names import prefix_parts, run_id
from agentbench_kv.run.engines import check_pair
from agentbench_kv.run.spec import RunSpec, resolve
from agentbench_kv.run.trained import check_trained

# Settings that name a server or a folder: a submission must not make this machine go there.
_ELSEWHERE = frozenset({
    "judge", "user", "user_model", "encoder", "similarity_model", "bertscore_model", "web",
    "recording",
})  # fmt: skip
_DATA = ("episodes_sha", "data_sha256", "data_hash", "corpus", "prompt_sha256")
_TEXTS = ("kvbench", "python", "engine", "model_sha", "device", "dtype", "determinism")
# A share grows until it is above what is always kept: one step for each token.
_MOST_KEPT = 1 << 20
_SCRIPTED = "scripted"  # the engine without a model
_HASH = re.compile(r"[0-9a-f]{64}")


def check_name(evidence: RunEvidence) -> Checks:
    """Derive the run's id from its spec."""
    info = evidence.info
    for derived in (run_id(prefix_parts(info.spec), info.spec), evidence.name):
        yield from expect("run.json: run_id", info.run_id, derived)


def check_status(evidence: RunEvidence) -> Checks:
    """Check that the run was played to its end, with one model."""
    info = evidence.info
    yield from expect("run.json: status", info.status.value, RunStatus.COMPLETE.value)
    if info.error is not None:
        yield Fault("run.json: error", f"the run failed: {info.error[:200]}")
    for resume in info.resumes:
        if "model_sha" in resume.changed:
            yield Fault("run.json: resumes", "the model changed on the way")
        elif resume.changed:
            changed = ", ".join(sorted(resume.changed))
            yield Note(f"resumed with another {changed[:100]}")


def check_spec(evidence: RunEvidence) -> Checks:
    """Resolve the spec again: every name known, every value allowed, every default filled in."""
    spec = evidence.spec
    known: dict[str, Any] = {}
    if not (spec.method.startswith(KVPRESS) or spec.method.partition("@")[0] in names("method")):
        yield Note(f"method {spec.method} is a plug-in that is not here")
        interval = spec.params.get("interval", 1)
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            text = f"is {interval!r}, expected an integer >= 1"
            yield Fault("run.json: spec.params.interval", text)
        known = {"method": "full", "budget": None, "params": {}, "calibration": ""}
    try:
        fit = without_figures(spec)
        if unfit(fit):  # what its settings name is not even looked for
            known["task_params"] = {}
            unknown = sorted(spec.task_params.keys() - load_task(spec.task).parameters().keys())
            yield from (
                Fault("run.json: spec.task_params", f"has {shown(name)}, no setting of {spec.task}")
                for name in unknown
            )
        elif fit != spec:  # a name of any folder will do, and nothing opens it
            load_task(spec.task).create(spec.task_params)
        # Runs of before may spell an engine's own arguments with underscores.
        wanted = replace(fit, engine_args=spelled_arguments(spec.engine_args), **known)
        resolved = resolve(wanted, wanted.params)
    except PrerequisiteError as error:
        yield Note(f"the spec cannot be resolved here: {error}")
        return
    except KVBenchError as error:
        yield Fault("run.json: spec", str(error))
        return
    method = resolved.built_method
    if method.share is not None and method.sinks + method.recent_kept(_MOST_KEPT) >= _MOST_KEPT:
        yield Fault("run.json: spec.params", "always keep more tokens than a session has")
    said, derived = wanted.document(), resolved.document()
    for name in sorted((said.keys() | derived.keys()) - known.keys()):
        yield from expect(f"run.json: spec.{name}", said.get(name), derived.get(name))


def check_provenance(evidence: RunEvidence) -> Checks:
    """Every run says what it was played with; what the spec says too must agree."""
    spec, found = evidence.spec, evidence.info.provenance
    for name, kind in {**dict.fromkeys(_TEXTS, str), "packages": dict, "hardware": dict}.items():
        if not isinstance(found.get(name), kind) or not found[name]:
            yield Fault(f"run.json: provenance.{name}", "is missing")
    if not isinstance(found.get("task"), dict):
        yield Fault("run.json: provenance.task", "is missing")
    expected = {"engine": spec.engine, "concurrency": spec.concurrency}
    if not evidence.at_text_level:
        expected["determinism"] = "greedy" if spec.temperature == 0 else "seeded sampling"
        if not isinstance(found.get("context_limit"), int) or found["context_limit"] < 1:
            yield Fault("run.json: provenance.context_limit", "is missing")
        if spec.engine != _SCRIPTED:
            expected["dtype"] = spec.dtype
    for name, value in expected.items():
        yield from expect(f"run.json: provenance.{name}", found.get(name), value)
    said = found.get("changed_settings", {})
    yield from expect("run.json: provenance.changed_settings", said, _changed(spec, said))


def _changed(spec: RunSpec, said: Any) -> dict[str, Any]:
    """Return the settings that a run's name must show.

    The defaults of a plug-in that is not here nobody knows: what is said may stand if it is in the
    spec.
    """
    try:
        return spec.changed_settings
    except KVBenchError:
        given = said if isinstance(said, dict) else {}
        own = {name: value for name, value in given.items() if spec.params.get(name, ...) == value}
    with suppress(KVBenchError):  # an unknown task, which the spec is refused for
        own |= spec.changed_task_settings
    return own


def check_memory(evidence: RunEvidence) -> Checks:
    """Refuse a memory that nothing here can play: its texts are a package's and a model's."""
    if reason := unplayable(evidence.spec):
        yield Fault("run.json: spec.method", reason)
    if evidence.keeps_banks:
        spec = evidence.spec
        try:
            check_pair(spec.engine, load_engine(spec.engine), spec.built_method)
        except KVBenchError as error:
            yield Fault("run.json: spec.engine", str(error))


def unplayable(spec: RunSpec) -> str:
    """Say why a memory cannot be played again for a check; empty if it can, or there is none."""
    try:
        method = spec.built_method
    except KVBenchError:  # a plug-in that is not here
        return ""
    if not isinstance(method, PlainMemory):
        return ""
    return (
        f"{method.name} finds its texts in an environment of its own (kvbench env create "
        f"{method.environment}), written by a model behind an endpoint: a check has neither, so "
        "its runs cannot be submitted"
    )


def check_calibration(evidence: RunEvidence) -> Checks:
    """Check that spec and provenance name the statistics a method scores with, and the same."""
    spec, used = evidence.spec, evidence.info.provenance.get("calibration")
    try:
        needed = spec.built_method.needs_calibration
    except KVBenchError:  # a plug-in that is not here
        needed = bool(spec.calibration)
    if not needed:
        if used is not None:
            yield Fault("run.json: provenance.calibration", f"is of no use to {spec.method}")
        return
    if not _HASH.fullmatch(spec.calibration):
        yield Fault("run.json: spec.calibration", "is missing: the figures depend on it")
    if not isinstance(used, dict):
        yield Fault("run.json: provenance.calibration", "is missing")
        return
    said = evidence.info.provenance.get("model_sha")
    expected = {"sha256": spec.calibration, "model_sha": said}
    for name, value in expected.items():
        yield from expect(f"run.json: provenance.calibration.{name}", used.get(name), value)
    for name in ("source", "text_sha256", "tokens"):
        if not isinstance(used.get(name), str) or not used[name]:
            yield Fault(f"run.json: provenance.calibration.{name}", "is missing")
    yield Note(f"calibrated on {shown(used.get('source'))}, as its submitter says")


def check_model(evidence: RunEvidence) -> Checks:
    """Compare the hash of a model that ships with kvbench; that of others is only stated."""
    spec, said = evidence.spec, evidence.info.provenance.get("model_sha")
    if spec.engine == _SCRIPTED or evidence.at_text_level:
        return
    if spec.model in SHIPPED and evidence.policy is not None:
        try:
            check_trained(spec.model, evidence.policy)
        except KVBenchError as error:
            yield Fault("run.json: spec.model", str(error))
    shipped = _shipped()
    if spec.model in shipped:
        yield from expect("run.json: provenance.model_sha", said, shipped[spec.model])
    elif said in shipped.values():
        yield Fault("run.json: spec.model", f"is {spec.model!r}, its hash is that of a shipped one")
    else:
        yield Note(f"model {spec.model} is not here; its hash is only stated")


@cache
def _shipped() -> dict[str, str]:
    return {name: folder_sha(model_path(name)) for name in SHIPPED}


def folder_of_model(
    spec: RunSpec, provenance: Mapping[str, Any], model: Path | None
) -> Path | None:
    """Return a folder on this machine that holds the run's very model; None if there is none."""
    # `model` is where the keeper has it: a path from a submission is never opened.
    if spec.engine == _SCRIPTED:
        return model_path(SHIPPED[0])
    if spec.model in SHIPPED:
        return model_path(spec.model)
    known = model is not None and folder_sha(model) == provenance.get("model_sha")
    return model if known else None


def unfit(spec: RunSpec) -> str:
    """Say why a task is not to be started with a submission's settings; empty if it may be."""
    defaults = load_task(spec.task).create({}).settings()
    # What a task has not is no reason to leave it alone: its settings are refused.
    known = {name: spec.task_params[name] for name in defaults.keys() & spec.task_params.keys()}
    named = [name for name in known.keys() & _ELSEWHERE if known[name] != defaults[name]]
    if any(sign in str(known.get("corpus", "")) for sign in ("/", "\\", "..", "~")):
        named.append("corpus")
    if not named:
        return ""
    names = ", ".join(sorted(named))
    return f"the task was played with {names}, which is not started for a submission"


def without_figures(spec: RunSpec) -> RunSpec:
    """Return the spec without the encoders of figures beside its task's score."""
    kind = load_task(spec.task)
    defaults = kind.create({}).settings()
    unset = {name: defaults[name] for name in kind.figures_by & spec.task_params.keys()}
    return replace(spec, task_params={**spec.task_params, **unset})


@contextmanager
def opened(spec: RunSpec) -> Iterator[Task]:
    """Give the run's task, and free what it held."""
    task = load_task(spec.task).create(spec.task_params)
    try:
        yield task
    finally:
        task.close()


def find_samples(evidence: RunEvidence, task: Task) -> dict[str, Sample] | Stop | Fault:
    """Return the samples the run must have had, or why they are not known here."""
    spec = evidence.spec
    try:
        recorded = evidence.info.provenance.get("task")
        said = isinstance(recorded, dict) and recorded.get("questions") == MADE
        here = task.provenance().get("questions") == MADE
        if said != here and "source" not in task.settings():
            return Fault("run.json: provenance.task.questions", "are made, and the task makes none")
        if said != here:
            what = "made questions" if said else "the benchmark's"
            return Stop(f"what {spec.task} needs is not here: the run had {what}")
        return {sample.id: sample for sample in task.samples(spec.limit, spec.seed)}
    except PrerequisiteError as error:
        return Stop(f"what {spec.task} needs is not here: {error}")
    except KVBenchError as error:
        return Fault("samples", str(error))


def check_samples(evidence: RunEvidence, samples: Mapping[str, Sample]) -> Checks:
    """Compare the run's samples with the task's own."""
    said = {sample for sample, _ in evidence.trials}
    for name in sorted(said - samples.keys())[:5]:
        yield Fault(f"sample {name}", f"is not among those that {evidence.spec.task} gives here")
    for name in sorted(samples.keys() - said)[:5]:
        yield Fault(f"sample {name}", "is missing")
    trials = len(samples) * evidence.spec.trials
    yield from expect("run.json: expected_trials", evidence.info.expected_trials, trials)
    for key, record in evidence.trials.items():
        if key[0] in samples:
            yield from expect(place(key, "cluster"), record.cluster, samples[key[0]].cluster)


def check_data(evidence: RunEvidence, task: Task) -> Checks:
    """Compare the hashes of the benchmark's data with those of the data on this machine."""
    said: dict[str, Any] = evidence.info.provenance["task"]
    for name, derived in sorted(task.provenance().items()):
        if name in _DATA or name.endswith(("sha", "sha256", "hash")):
            yield from expect(f"run.json: provenance.task.{name}", said.get(name), derived)
