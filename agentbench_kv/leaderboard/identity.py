"""Is the run what its spec says: its name, its parts, its status, where it came from.

The run's task on this machine: its samples, its data, and whether it can be played offline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.base import Sample, Task
from agentbench_kv.engines.embedded.model import SHIPPED, folder_sha, model_path
from agentbench_kv.errors import KVBenchError, PrerequisiteError
from agentbench_kv.leaderboard.evidence import Checks, Evidence, Note, Stop, Wrong, differs, place
from agentbench_kv.methods.kvpress import PREFIX as KVPRESS
from agentbench_kv.registry import load_task, names
from agentbench_kv.results.store import RunStatus, prefix_parts, run_id
from agentbench_kv.run.spec import RunSpec, resolve

_ELSEWHERE = frozenset(
    {
        "judge",
        "user",
        "user_model",
        "encoder",
        "similarity_model",
        "bertscore_model",
        "web",
        "recording",
    }
)


"""Settings that name a server or a folder: a submission must not make this machine go there."""


_DATA = ("episodes_sha", "data_sha256", "data_hash", "corpus", "prompt_sha256")


def unfit(spec: RunSpec) -> str:
    """Say why a task is not to be started with a submission's settings; empty if it may be."""
    defaults = load_task(spec.task).create({}).settings()
    named = [n for n in spec.task_params if n in _ELSEWHERE and spec.task_params[n] != defaults[n]]
    if any(sign in str(spec.task_params.get("corpus", "")) for sign in ("/", "\\", "..", "~")):
        named.append("corpus")
    return f"the task was played with {', '.join(sorted(named))}" if named else ""


@contextmanager
def opened(spec: RunSpec) -> Iterator[Task]:
    """Give the run's task, and free what it held."""
    task = load_task(spec.task).create(spec.task_params)
    try:
        yield task
    finally:
        task.close()


def find_samples(evidence: Evidence, task: Task) -> dict[str, Sample] | Stop | Wrong:
    """Return the samples the run must have had, or why they are not known here."""
    spec = evidence.spec
    try:
        return {sample.id: sample for sample in task.samples(spec.limit, spec.seed)}
    except PrerequisiteError as error:
        return Stop(f"what {spec.task} needs is not here: {error}")
    except KVBenchError as error:
        return Wrong("samples", str(error))


def check_samples(evidence: Evidence, samples: dict[str, Sample]) -> Checks:
    """Compare the run's samples with the task's own."""
    said = {sample for sample, _ in evidence.trials}
    for name in sorted(said - samples.keys())[:5]:
        yield Wrong(f"sample {name}", f"is not among those that {evidence.spec.task} gives here")
    for name in sorted(samples.keys() - said)[:5]:
        yield Wrong(f"sample {name}", "is missing")
    expected = len(samples) * evidence.spec.trials
    if evidence.info.expected_trials != expected:
        yield differs("run.json: expected_trials", evidence.info.expected_trials, expected)
    for key, record in evidence.trials.items():
        known = samples.get(key[0])
        if known is not None and record.cluster != known.cluster:
            yield differs(place(key, "cluster"), record.cluster, known.cluster)


def check_data(evidence: Evidence, task: Task) -> Checks:
    """Compare the hashes of the benchmark's data with those of the data on this machine."""
    said: dict[str, Any] = evidence.info.provenance["task"]
    derived = task.provenance()
    for name in sorted(derived):
        of_data = name in _DATA or name.endswith(("sha", "sha256", "hash"))
        if of_data and said.get(name) != derived[name]:
            yield differs(f"run.json: provenance.task.{name}", said.get(name), derived[name])


_TEXTS = ("kvbench", "python", "engine", "model_sha", "device", "dtype", "determinism")


_GROUPS = ("packages", "hardware")


_SCRIPTED_MODEL = "scripted"


# A share grows until it is above what is always kept: one step for each token.
_MOST_KEPT = 1 << 20


def check_name(evidence: Evidence) -> Checks:
    """Derive the run's id from its spec."""
    info = evidence.info
    derived = run_id(prefix_parts(info.spec), info.spec)
    if info.run_id != derived:
        yield differs("run.json: run_id", info.run_id, derived)
    if info.run_id != evidence.name:
        yield differs("run.json: run_id", info.run_id, evidence.name)


def check_status(evidence: Evidence) -> Checks:
    """Check that the run was played to its end, with one model."""
    info = evidence.info
    if info.status is not RunStatus.COMPLETE:
        yield differs("run.json: status", info.status.value, RunStatus.COMPLETE.value)
    if info.error is not None:
        yield Wrong("run.json: error", f"the run failed: {info.error[:200]}")
    for resume in info.resumes:
        if "model_sha" in resume.changed:
            yield Wrong("run.json: resumes", "the model changed on the way")
        elif resume.changed:
            changed = ", ".join(sorted(resume.changed))
            yield Note(f"resumed with another {changed[:100]}")


def check_spec(evidence: Evidence) -> Checks:
    """Resolve the spec again: every name known, every value allowed, every default filled in."""
    spec = evidence.spec
    known: dict[str, Any] = {}
    if not _method_is_here(spec.method):
        yield Note(f"method {spec.method} is a plug-in that is not here")
        yield from _plain_interval(spec)
        known = {"method": "full", "budget": None, "params": {}}
    try:
        if unfit(spec):  # what its settings name is not even looked for
            known["task_params"] = {}
        wanted = replace(spec, **known)
        resolved = resolve(wanted, wanted.params)
    except PrerequisiteError as error:
        yield Note(f"the spec cannot be resolved here: {error}")
        return
    except KVBenchError as error:
        yield Wrong("run.json: spec", str(error))
        return
    method = resolved.built_method
    if method.share is not None and method.sinks + method.recent_kept(_MOST_KEPT) >= _MOST_KEPT:
        yield Wrong("run.json: spec.params", "always keep more tokens than a session has")
    said, derived = wanted.document(), resolved.document()
    for name in sorted((said.keys() | derived.keys()) - known.keys()):
        if said.get(name) != derived.get(name):
            yield differs(f"run.json: spec.{name}", said.get(name), derived.get(name))


def check_provenance(evidence: Evidence) -> Checks:
    """Every run says what it was played with; what the spec says too must agree."""
    found = evidence.info.provenance
    yield from _absent(found, _TEXTS, lambda value: isinstance(value, str) and value != "")
    yield from _absent(found, _GROUPS, lambda value: isinstance(value, dict) and value != {})
    yield from _absent(found, ("task",), lambda value: isinstance(value, dict))
    spec = evidence.spec
    if found.get("engine") != spec.engine:
        yield differs("run.json: provenance.engine", found.get("engine"), spec.engine)
    if found.get("concurrency") != spec.concurrency:
        yield differs(
            "run.json: provenance.concurrency", found.get("concurrency"), spec.concurrency
        )
    if evidence.at_text_level:
        return
    greedy = "greedy" if spec.temperature == 0 else "seeded sampling"
    if found.get("determinism") != greedy:
        yield differs("run.json: provenance.determinism", found.get("determinism"), greedy)
    if not isinstance(found.get("context_limit"), int) or found["context_limit"] < 1:
        yield Wrong("run.json: provenance.context_limit", "is missing")
    if spec.engine != _SCRIPTED_MODEL and found.get("dtype") != spec.dtype:
        yield differs("run.json: provenance.dtype", found.get("dtype"), spec.dtype)


def check_model(evidence: Evidence) -> Checks:
    """Compare the hash of a model that ships with kvbench; that of others is only stated."""
    spec, said = evidence.spec, evidence.info.provenance.get("model_sha")
    if spec.engine == _SCRIPTED_MODEL or evidence.at_text_level:
        return
    shipped = _shipped()
    if spec.model in shipped:
        if said != shipped[spec.model]:
            yield differs("run.json: provenance.model_sha", said, shipped[spec.model])
    elif said in shipped.values():
        yield Wrong("run.json: spec.model", f"is {spec.model!r}, its hash is that of a shipped one")
    else:
        yield Note(f"model {spec.model} is not here; its hash is only stated")


def folder_of_model(
    spec: RunSpec, provenance: Mapping[str, Any], model: Path | None
) -> Path | None:
    """Return a folder on this machine that holds the run's very model; None if there is none.

    Parameters
    ----------
    model : Path or None
        Where the keeper has it. A path from a submission is never opened.
    """
    if spec.engine == _SCRIPTED_MODEL:
        return model_path(SHIPPED[0])
    if spec.model in SHIPPED:
        return model_path(spec.model)
    if model is None or folder_sha(model) != provenance.get("model_sha"):
        return None
    return model


@cache
def _shipped() -> dict[str, str]:
    return {name: folder_sha(model_path(name)) for name in SHIPPED}


def _method_is_here(label: str) -> bool:
    return label.startswith(KVPRESS) or label.partition("@")[0] in names("method")


def _plain_interval(spec: RunSpec) -> Checks:
    interval = spec.params.get("interval", 1)
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        yield Wrong("run.json: spec.params.interval", f"is {interval!r}, expected an integer >= 1")


def _absent(
    found: Mapping[str, Any], fields: tuple[str, ...], is_there: Callable[[Any], bool]
) -> Checks:
    for name in fields:
        if not is_there(found.get(name)):
            yield Wrong(f"run.json: provenance.{name}", "is missing")
