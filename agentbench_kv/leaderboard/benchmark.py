"""The run's task on this machine: its samples, its data, and whether it can be played offline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentbench_kv.adapters.base import Sample, Task
from agentbench_kv.errors import KVBenchError, PrerequisiteError
from agentbench_kv.leaderboard.evidence import Evidence, place
from agentbench_kv.leaderboard.findings import Checks, Stop, Wrong, differs
from agentbench_kv.registry import load_task
from agentbench_kv.spec import RunSpec

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
