"""tau2-bench: customer-service simulations in the domains of v0.2.0 and of v1.0.1.

The releases have other task texts, and v1.0.1 a judge in one domain: their figures are never in
one table. Their data is the user's, known by the hashes in tau2-bench's own repository.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx

from agentbench_kv.adapters.agent_client import base_url
from agentbench_kv.adapters.base import Outcome, Sample, ScriptedAgent, TrialContext
from agentbench_kv.adapters.browser.judge import KEY_VARIABLE, Judge
from agentbench_kv.adapters.data import data_file
from agentbench_kv.adapters.worker import RemoteError, WorkerPool
from agentbench_kv.adapters.worker_task import PlayedTrial, WorkerTask, step_metrics
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.params import param
from agentbench_kv.results.records import Metric, TrialStatus

USER_KEY = "KVBENCH_USER_API_KEY"
SCRIPTED = "scripted"
_WORKER = Path(__file__).parent / "worker" / "main.py"
_PROBE_S = 10.0
_USER_FILES = ("simulation_guidelines.md", "simulation_guidelines_tools.md")


@dataclass(frozen=True)
class Release:
    """One release: what is installed, and the data that goes with it."""

    tag: str  # in its repository
    installed: str  # version of the distribution `tau2`
    data: str  # folder, among the user's data sets
    # Domain -> file or folder -> git's id at the tag: what `git rev-parse TAG:PATH` prints.
    published: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, tag: str, installed: str) -> Release:
        published: dict[str, dict[str, str]] = {}
        with Path(__file__).with_name("published.csv").open(encoding="utf-8", newline="") as table:
            for row in csv.DictReader(table):
                if row["release"] == tag:
                    published.setdefault(row["domain"], {})[row["file"]] = row["git_id"]
        return cls(tag, installed, f"tau2_{tag}", published)


# Those of the benchmark's configurations of retrieval that run offline, by its own names.
RETRIEVAL = ("bm25", "bm25_grep", "grep_only", "full_kb", "golden_retrieval", "no_knowledge")
V0 = Release.of("v0.2.0", "0.2.1.dev0")
V1 = Release.of("v1.0.1", "1.0.1")


def require_data(release: Release, domain: str) -> Path:
    """Return the data folder (`TAU2_DATA_DIR`) once it holds what the domain needs.

    PrerequisiteError if something is missing, or tasks or policies are not the published ones.
    """
    hint = (
        f"it is the folder data/ of tau2-bench {release.tag} "
        f"(https://github.com/sierra-research/tau2-bench/tree/{release.tag}/data) under that name"
    )
    root = data_file(release.data, None, hint)
    for name in _USER_FILES:
        data_file(f"{release.data}/tau2/user_simulator/{name}", None, hint)
    for name, blob in release.published[domain].items():
        path = data_file(f"{release.data}/tau2/domains/{domain}/{name}", None, hint)
        found = git_id(path)
        # Another database is allowed, because the airline's had to be rebuilt in some copies;
        # `data_state` tells it.
        if found != blob and Path(name).stem not in ("db", "user_db"):
            raise PrerequisiteError(
                f"{path} is not the published {'folder' if path.is_dir() else 'file'}: "
                f"git id {found[:12]}, expected {blob[:12]}; "
                f"{hint}"
            )
    return root


def data_state(release: Release, domain: str, root: Path) -> dict[str, Any]:
    """Return the hash of every file in use, and which ones are not the published ones."""
    folder = root / "tau2" / "domains" / domain
    published = release.published[domain]
    found = {name: git_id(folder / name) for name in published}
    other = sorted(name for name, blob in published.items() if found[name] != blob)
    return {"data_git_blobs": found, "data_not_as_published": other}


def git_id(path: Path) -> str:
    """Return the id that git gives to a file, or to a folder of plain files and folders."""
    if path.is_file():
        kind, content = b"blob", path.read_bytes()
    else:
        # Git sorts a folder as if its name ended with a slash.
        entries = sorted(path.iterdir(), key=lambda each: each.name + "/" * each.is_dir())
        modes = {each: b"40000" if each.is_dir() else b"100644" for each in entries}
        kind = b"tree"
        content = b"".join(
            b"%b %b\0%b" % (mode, each.name.encode(), bytes.fromhex(git_id(each)))
            for each, mode in modes.items()
        )
    packed = b"%b %d\0%b" % (kind, len(content), content)
    return hashlib.sha1(packed, usedforsecurity=False).hexdigest()


@dataclass(kw_only=True)
class Simulations(WorkerTask):
    """One domain over the chat route, scored by the benchmark's own checker.

    A trial is one simulation: the agent, a user simulator and the domain's environment. One
    session serves the agent's side; the user is never the model under test unless it is named so.
    """

    environment = "tau2"
    # Where the dropped action only reads, the database is right all the same.
    corrupt_score: ClassVar[float | None] = None
    release: ClassVar[Release] = V0  # tasks of different ones have different names
    domain: ClassVar[str]

    user: str = param(
        "scripted",
        "scripted (replays the golden user actions; for tests), the base URL of an "
        "OpenAI-compatible server, or litellm for a provider's model",
    )
    user_model: str = param("", "model that plays the user; fixed for all methods of a comparison")
    max_steps: int = param(200, "messages after which a simulation is given up", low=1)

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        self._require_partners()
        return [Sample(id=each) for each in self._ask("samples")[:limit]]

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        return list(self._ask("script", {"sample": sample.id, "agent": agent}))

    def provenance(self) -> dict[str, Any]:
        state = data_state(self.release, self.domain, require_data(self.release, self.domain))
        return {**self._ask("about"), **state, "user": self.user, "user_model": self.user_model}

    def _play(self, sample: Sample, context: TrialContext) -> PlayedTrial:
        try:
            played = super()._play(sample, context)
        except RemoteError as error:
            if error.kind == "JudgeFailedError":
                self._require_partners()
            raise
        if played["status"] == TrialStatus.USER_ERROR:
            # A user that is gone for good would fail every trial to come.
            self._require_partners()
        return played

    def _outcome(self, played: PlayedTrial) -> Outcome:
        status, score, error = (played[key] for key in ("status", "score", "error"))
        transcript = {key: played[key] for key in ("agent", "trajectory", "steps", "verdict")}
        return Outcome(TrialStatus(status), score, _metrics(played), transcript, error)

    def _start(self) -> WorkerPool:
        data = require_data(self.release, self.domain)
        environment = {
            "TAU2_DATA_DIR": str(data),
            "KVBENCH_TAU2_DOMAIN": self.domain,
            "KVBENCH_TAU2_VERSION": self.release.installed,
            "KVBENCH_TAU2_NETWORK": "any" if self.user == "litellm" else "named",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        environment |= self._more_environment()
        python = python_of(self.environment)
        return WorkerPool(python, _WORKER, environment=environment, limits=self._limits())

    def _more_environment(self) -> dict[str, str]:
        """Return variables that only this domain's worker reads."""
        return {}

    def _require_partners(self) -> None:
        if self.user == SCRIPTED:
            return
        if not self.user_model:
            raise UsageError(f"user={self.user} needs a model: --set user_model=NAME")
        if self.user == "litellm":
            return
        if urlsplit(self.user).scheme not in ("http", "https"):
            raise UsageError(
                f"user={self.user}: expected scripted, litellm or the http(s) URL of a server"
            )
        require_server(self.user, "user simulator", "user=URL")

    def _line(self, context: TrialContext) -> dict[str, Any]:
        named = self.user not in (SCRIPTED, "litellm")
        user = {
            "kind": "scripted" if self.user == SCRIPTED else "llm",
            "url": base_url(self.user) if named else None,
            "model": self.user_model,
            "key": os.environ.get(USER_KEY),
        }
        more = {"max_steps": self.max_steps, "user": user, "judge": self._judge_arguments()}
        return {**super()._line(context), **more}

    def _judge_arguments(self) -> dict[str, Any] | None:
        """Return who judges what the agent said; None where nobody does."""
        return None


class Airline(Simulations):
    """50 simulations."""

    name = "tau2/airline"
    summary = "tau2-bench v0.2.0, airline: 50 customer-service simulations"
    domain = "airline"


class Retail(Simulations):
    """114 simulations."""

    name = "tau2/retail"
    summary = "tau2-bench v0.2.0, retail: 114 customer-service simulations"
    domain = "retail"


class Telecom(Simulations):
    """114 simulations in which the user has tools, too."""

    name = "tau2/telecom"
    summary = "tau2-bench v0.2.0, telecom: 114 simulations, the user acts, too"
    domain = "telecom"
    corrupt_score = 0.0


def require_server(url: str, who: str, setting: str) -> None:
    try:
        httpx.get(f"{base_url(url)}/models", timeout=_PROBE_S)
    except httpx.HTTPError as error:
        raise PrerequisiteError(
            f"the {who} at {url} does not answer ({type(error).__name__}); "
            f"start it, or name another with --set {setting}"
        ) from error


def _metrics(played: PlayedTrial) -> dict[str, Metric]:
    verdict, user = played["verdict"], played["user"]
    parts = verdict.get("reward_breakdown") or {}
    return {
        **step_metrics(played["steps"]),
        "messages": len(played["trajectory"]),
        "ended_by": verdict.get("ended_by"),
        **{f"reward_{name.lower()}": value for name, value in parts.items()},
        **{f"user_{name}": count for name, count in user.items()},
    }


@dataclass(kw_only=True)
class SimulationsV1(Simulations):
    """A domain of v1.0.1."""

    environment = "tau2-v1"
    release: ClassVar[Release] = V1
    # Whether some tasks demand that a model finds assertions about the conversation true.
    judged: ClassVar[bool] = False

    judge: str = param(
        SCRIPTED,
        "who judges assertions about the conversation, where there are any: URL|MODEL of an "
        "OpenAI-compatible server, or scripted (agrees to everything; for tests)",
    )

    def provenance(self) -> dict[str, Any]:
        return {**super().provenance(), "judge": self.judge if self.judged else "none is asked"}

    def _require_partners(self) -> None:
        super()._require_partners()
        if not self.judged:
            return
        if self.judge != SCRIPTED:
            require_server(Judge.parse(self.judge).endpoint, "judge", "judge='URL|MODEL'")
        elif self.user != SCRIPTED:
            raise UsageError(
                f"{self.name} asks a model whether the agent said what it had to, and "
                "judge=scripted agrees to everything: --set judge='URL|MODEL'"
            )

    def _judge_arguments(self) -> dict[str, Any]:
        if self.judge == SCRIPTED or not self.judged:
            return {"kind": SCRIPTED, "url": None, "model": "", "key": None}
        judge = Judge.parse(self.judge)
        key = os.environ.get(KEY_VARIABLE)
        return {"kind": "llm", "url": base_url(judge.endpoint), "model": judge.model, "key": key}


class AirlineV1(SimulationsV1):
    """50 simulations."""

    name = "tau2-v1/airline"
    summary = "tau2-bench v1.0.1, airline: 50 simulations; not tau2/airline"
    domain = "airline"


class RetailV1(SimulationsV1):
    """114 simulations, 40 of them judged by a model as well."""

    name = "tau2-v1/retail"
    summary = "tau2-bench v1.0.1, retail: 114 simulations, a judge; not tau2/retail"
    domain = "retail"
    judged = True


class TelecomV1(SimulationsV1):
    """114 simulations in which the user has tools, too."""

    name = "tau2-v1/telecom"
    summary = "tau2-bench v1.0.1, telecom: 114 simulations; not tau2/telecom"
    domain = "telecom"
    corrupt_score = 0.0


@dataclass(kw_only=True)
class BankingKnowledge(SimulationsV1):
    """97 simulations in which the agent must find the rules and its tools in 698 documents."""

    name = "tau2-v1/banking_knowledge"
    summary = "tau2-bench v1.0.1, banking_knowledge: 97 simulations, rules in 698 documents"
    domain = "banking_knowledge"
    judged = True  # one of the 97

    retrieval: str = param(
        "bm25",
        "how the agent reaches the documents: bm25, bm25_grep or grep_only (tools that search), "
        "full_kb (all in its prompt), golden_retrieval (those that the task needs in its prompt), "
        "no_knowledge (not at all); the benchmark's other ways need a provider or a sandbox",
        choices=RETRIEVAL,
    )

    def _more_environment(self) -> dict[str, str]:
        return {"KVBENCH_TAU2_RETRIEVAL": self.retrieval}
