"""AppWorld: everyday tasks in nine apps with 457 functions, some 45 calls each.

Apps, databases and checks are the benchmark's own and run in a worker; the data is the user's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agentbench_kv.adapters.base import Outcome, Sample, ScriptedAgent, TrialContext
from agentbench_kv.adapters.data import data_file
from agentbench_kv.adapters.worker import WorkerPool
from agentbench_kv.adapters.worker_task import PlayedTrial, WorkerTask, step_metrics
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.params import param
from agentbench_kv.results.records import Metric, TrialStatus

FOLDER = "appworld"
_WORKER = Path(__file__).parent / "worker" / "main.py"


@dataclass(kw_only=True)
class AppWorldTask(WorkerTask):
    """One of the benchmark's sets; a trial is a task, scored by its tests of the final state."""

    environment = "appworld"
    # Where the last change is one that no test sees.
    corrupt_score: ClassVar[float | None] = None
    dataset: ClassVar[str]
    solved: ClassVar[bool] = True  # whether the data has solutions, which known agents play

    apis: str = param(
        "docs",
        "which functions the agent is given: docs (it looks them up and calls them by name), "
        "needed (those of the solution, each a tool), all (457 tools)",
        choices=("docs", "needed", "all"),
    )
    max_steps: int = param(100, "answers after which a task is given up", low=1)

    _tests: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        self._require_solutions(self.apis == "needed", "apis=needed gives the solution's functions")
        found = self._ask("samples")
        self._tests = {each["id"]: each["tests"] for each in found}
        return [Sample(each["id"], each["scenario"]) for each in found[:limit]]

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        self._require_solutions(agent != "null", f"the {agent} agent plays the solution")
        args = {"sample": sample.id, "agent": agent, "apis": self.apis}
        return list(self._ask("script", args))

    def nothing_right(self, sample: Sample) -> dict[str, Metric]:
        asked = self._tests.get(sample.id)
        return {} if asked is None else {"tests_right": 0, "tests_asked": asked}

    def provenance(self) -> dict[str, Any]:
        return {**self._ask("about"), "data_sha256": data_sha256(require_data(self.dataset))}

    def _require_solutions(self, wanted: bool, why: str) -> None:
        if wanted and not self.solved:
            raise PrerequisiteError(
                f"AppWorld publishes no solutions of {self.name}, and {why}; "
                "use appworld/train or appworld/dev"
            )

    def _start(self) -> WorkerPool:
        environment = {
            "APPWORLD_ROOT": str(require_data(self.dataset).parent),
            "APPWORLD_CACHE": "{scratch}/cache",
            "KVBENCH_APPWORLD": self.dataset,
        }
        python, limits = python_of(self.environment), self._limits()
        return WorkerPool(python, _WORKER, environment=environment, limits=limits)

    def _line(self, context: TrialContext) -> dict[str, Any]:
        return {**super()._line(context), "apis": self.apis, "max_steps": self.max_steps}

    def _outcome(self, played: PlayedTrial) -> Outcome:
        status, score, error = (played[key] for key in ("status", "score", "error"))
        transcript = {key: played[key] for key in ("agent", "steps", "verdict")}
        return Outcome(TrialStatus(status), score, _metrics(played), transcript, error)


class Train(AppWorldTask):
    """`train`: with solutions."""

    name = "appworld/train"
    summary = "AppWorld, train: tasks in nine apps, tests of the final state; data from you"
    dataset = "train"


class Dev(AppWorldTask):
    """`dev`: with solutions."""

    name = "appworld/dev"
    summary = "AppWorld, dev: as appworld/train"
    dataset = "dev"


class TestNormal(AppWorldTask):
    """`test_normal`: 168 tasks, without solutions."""

    __test__ = False  # it is no test of pytest's
    name = "appworld/test_normal"
    summary = "AppWorld, test_normal: what papers report; no solutions, so no gold agent"
    dataset = "test_normal"
    solved = False


class TestChallenge(AppWorldTask):
    """`test_challenge`: 417 tasks with apps that the others do not have, without solutions."""

    __test__ = False
    name = "appworld/test_challenge"
    summary = "AppWorld, test_challenge: apps that train and dev do not have; no gold agent"
    dataset = "test_challenge"
    solved = False


def require_data(dataset: str) -> Path:
    """Return the folder `data` of AppWorld; PrerequisiteError if the set is not in it."""
    hint = (
        f"get it with AppWorld's own command, APPWORLD_ROOT=$KVBENCH_DATA/{FOLDER} "
        "appworld download data, in the environment appworld (kvbench env list)"
    )
    for name in (f"datasets/{dataset}.txt", "tasks", "base_dbs", "api_docs"):
        data_file(f"{FOLDER}/data/{name}", None, hint)
    return data_file(f"{FOLDER}/data", None, hint)


def data_sha256(data: Path) -> str:
    """Hash names and sizes of all files, and the contents of what tasks say and demand."""
    digest = hashlib.sha256()
    for path in sorted(each for each in data.rglob("*") if each.is_file()):
        digest.update(f"{path.relative_to(data).as_posix()} {path.stat().st_size}\n".encode())
        if path.name in ("specs.json", "evaluation.py", "answer.json"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _metrics(played: PlayedTrial) -> dict[str, Metric]:
    counted = {**step_metrics(played["steps"]), "api_calls": played["api_calls"]}
    if verdict := played["verdict"]:
        right = {"tests_right": len(verdict["passes"]), "tests_asked": verdict["num_tests"]}
        counted |= {"difficulty": verdict["difficulty"], **right}
    return counted
