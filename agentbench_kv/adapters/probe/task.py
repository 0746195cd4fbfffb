"""The tasks `probe/...`: a real session is read, its answers given, then asked about.

A sample is a session; its score is the share of its questions whose value stands in the answer.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agentbench_kv.adapters.agent_client import NULL_SENTENCE
from agentbench_kv.adapters.base import (
    Fact,
    MarkedAnswers,
    Outcome,
    Sample,
    ScriptedAgent,
    SteeredClient,
    Task,
    TrialContext,
)
from agentbench_kv.adapters.bfcl.task import (
    BfclTask,
    MultiTurnBase,
    MultiTurnLongContext,
    MultiTurnMissFunc,
    MultiTurnMissParam,
)
from agentbench_kv.adapters.data import file_sha256
from agentbench_kv.adapters.probe.asking import AskedProbe, Floor, Place, ask_all, stands
from agentbench_kv.adapters.probe.gold import GoldSessions
from agentbench_kv.adapters.probe.questions import Probe, make_probes, sample_of
from agentbench_kv.adapters.probe.session import ChatSession, read_sessions, refuse_repeated
from agentbench_kv.adapters.probe.values import contains, may_be_exact
from agentbench_kv.adapters.tau2.task import Airline, Retail, Telecom
from agentbench_kv.errors import ContextLimitError, PrerequisiteError, UsageError
from agentbench_kv.params import param
from agentbench_kv.results.records import Metric, TrialStatus, number_of

CORRUPT = "qqwx"  # answer of the corrupt agent: in no session
FLOORS: tuple[Floor, ...] = ("off", "none", "removed")
# Tokens between evidence and question, for parts of the score by distance.
DISTANCES = ((1024, "to1k"), (4096, "to4k"))
_BFCL: dict[str, type[BfclTask]] = {
    "base": MultiTurnBase,
    "miss_func": MultiTurnMissFunc,
    "miss_param": MultiTurnMissParam,
    "long_context": MultiTurnLongContext,
}


@dataclass(kw_only=True)
class ProbeTask(Task):
    """Questions about recorded sessions. Sample ids end in the hash of their questions."""

    needs: ClassVar[frozenset[str]] = frozenset({"force"})

    questions: int = param(8, "questions about a session, as far as it yields them", low=1, high=64)
    floor: str = param(
        "off", "what is read before: the session, nothing, or all but what is asked for",
        choices=FLOORS,
    )  # fmt: skip
    answer_tokens: int = param(32, "tokens of an answer; its beginning counts", low=4, high=1024)

    _chosen: dict[str, tuple[ChatSession, list[Probe]]] = field(
        default_factory=dict, init=False, repr=False
    )

    @abstractmethod
    def sessions(self, seed: int) -> Iterator[ChatSession]:
        """Yield the sessions that may be asked about, in the order of this seed."""

    def samples(self, limit: int | None, seed: int) -> list[Sample]:
        """Return sessions that yield questions; with seed 0 in the benchmark's order."""
        found: list[Sample] = []
        for session in self.sessions(seed):
            probes = make_probes(session, self.questions, f"{self.name}/{seed}")
            if not probes:
                continue
            sample = Sample(sample_of(session.id, probes), session.cluster)
            self._chosen[sample.id] = session, probes
            found.append(sample)
            if len(found) == limit:
                break
        if not found:
            raise PrerequisiteError(f"no session of {self.name} yields a question")
        return found

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        client = steered(self.name, context)
        session, probes = self._asked_about(sample)
        asked: list[AskedProbe] = []
        status, error = TrialStatus.SCORED, None
        try:
            for each in ask_all(client, session, probes, self.floor, self.answer_tokens):  # type: ignore[arg-type]  # one of FLOORS
                asked.append(each)  # noqa: PERF402  what was answered is shown after a failure
        except ContextLimitError as reached:
            status, error = TrialStatus.CONTEXT_LIMIT, str(reached)
        asked.sort(key=lambda each: each.rank)
        how = {"asked_in": self._asked_in(client)}
        scored = status is TrialStatus.SCORED
        metrics = {
            **(_metrics(session, asked) if scored else self.nothing_right(sample)),
            **how,
        }
        transcript = {"session": session.id, "floor": self.floor, "probes": _documents(asked)}
        score = self.score_of(sample, metrics) if scored else None
        return Outcome(status, score, metrics, transcript, error, _facts(asked))

    def nothing_right(self, sample: Sample) -> Mapping[str, Metric]:
        session, probes = self._asked_about(sample)
        found: dict[str, Metric] = {"session_sha": session.sha}
        for probe in probes:
            for name in ("contains", "exact", probe.phase):
                found[f"{name}_right"] = 0
                found[f"{name}_asked"] = int(str(found.get(f"{name}_asked", 0))) + 1
        return found

    def mark(self, sample: Sample, transcript: Any) -> MarkedAnswers:
        """Mark recorded answers; where the values stood is as it was said."""
        session, probes = self._asked_about(sample)
        if transcript is None:
            return MarkedAnswers(None, self.nothing_right(sample), None)
        said = transcript["probes"]
        ranks = [each["rank"] for each in said]
        if ranks != sorted({*ranks} & {*range(len(probes))}):
            raise ValueError(f"the ranks of its questions are {ranks}")
        asked = [
            _marked(rank, probes[rank], each, placed=self.floor == "off")
            for rank, each in zip(ranks, said, strict=True)
        ]
        whole = len(asked) == len(probes)
        metrics = _metrics(session, asked) if whole else self.nothing_right(sample)
        return MarkedAnswers(
            self.score_of(sample, metrics) if whole else None,
            metrics,
            {"session": session.id, "floor": self.floor, "probes": _documents(asked)},
            tuple(
                f"probes[{number}].place"
                for number, each in enumerate(asked)
                if self.floor == "off" and each.place is None and stands(session, each.probe)
            ),
        )

    def score_of(self, sample: Sample, metrics: Mapping[str, Metric]) -> float | None:
        return number_of(metrics, "contains_right") / len(self._asked_about(sample)[1])

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        probes = self._asked_about(sample)[1]
        if agent == "gold":
            return [probe.value for probe in probes]
        return [CORRUPT if agent == "corrupt" else NULL_SENTENCE] * len(probes)

    def _asked_in(self, client: SteeredClient) -> str:
        if self.floor == "none":
            return "empty sessions"
        return "forks" if client.forks else "replays"

    def _asked_about(self, sample: Sample) -> tuple[ChatSession, list[Probe]]:
        if sample.id not in self._chosen:
            raise UsageError(f"sample {sample.id!r} is none of those that {self.name} has chosen")
        return self._chosen[sample.id]


@dataclass(kw_only=True)
class GoldProbes(ProbeTask):
    """Questions about the golden agent's sessions of a benchmark."""

    _inner: Task | None = field(default=None, init=False, repr=False)

    @abstractmethod
    def _benchmark(self) -> Task:
        """Build the task whose sessions they are."""

    def sessions(self, seed: int) -> Iterator[ChatSession]:
        benchmark = self._played()
        samples = benchmark.samples(None, 0)
        if seed:
            random.Random(f"{self.name}/{seed}").shuffle(samples)
        played = GoldSessions(benchmark)
        for sample in samples:
            if session := played.of(sample):
                yield session

    def provenance(self) -> dict[str, Any]:
        return {"sessions": f"{self._played().name}, gold", **self._played().provenance()}

    def close(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()

    def _played(self) -> Task:
        self._inner = self._inner or self._benchmark()
        return self._inner


@dataclass(kw_only=True)
class ProbeBfcl(GoldProbes):
    """BFCL's multi-turn conversations."""

    name = "probe/bfcl"
    summary = "questions about golden sessions of BFCL v4 multi-turn, made by rule"

    category: str = param("base", "which of the multi-turn categories", choices=tuple(_BFCL))

    def _benchmark(self) -> Task:
        return _BFCL[self.category].create({"route": "chat"})


class ProbeAirline(GoldProbes):
    """Customer service of an airline."""

    name = "probe/tau2/airline"
    summary = "questions about golden sessions of tau2-bench, airline"

    def _benchmark(self) -> Task:
        return Airline.create({})


class ProbeRetail(GoldProbes):
    """Customer service of a shop."""

    name = "probe/tau2/retail"
    summary = "questions about golden sessions of tau2-bench, retail"

    def _benchmark(self) -> Task:
        return Retail.create({})


class ProbeTelecom(GoldProbes):
    """Customer service of a telephone company."""

    name = "probe/tau2/telecom"
    summary = "questions about golden sessions of tau2-bench, telecom"

    def _benchmark(self) -> Task:
        return Telecom.create({})


@dataclass(kw_only=True)
class ProbeFile(ProbeTask):
    """Recorded trajectories of any agent."""

    name = "probe/file"
    summary = "questions about sessions from a JSONL file (--set file=PATH)"

    file: str = param("", "JSON lines with messages and tools, as an OpenAI client has them")

    def sessions(self, seed: int) -> Iterator[ChatSession]:
        found = list(read_sessions(self._path()))
        names = [session.id for session in found]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"{self.file}: the id {twice!r} comes twice")
        refuse_repeated(self._path(), found)
        if seed:
            random.Random(f"{self.name}/{seed}").shuffle(found)
        return iter(found)

    def provenance(self) -> dict[str, Any]:
        return {"file": self._path().name, "data_sha256": file_sha256(self._path())}

    def _path(self) -> Path:
        if not self.file:
            raise UsageError("probe/file asks about recorded sessions: --set file=PATH.jsonl")
        path = Path(self.file).expanduser()
        if not path.is_file():
            raise PrerequisiteError(f"there is no file {path}")
        return path


def steered(name: str, context: TrialContext) -> SteeredClient:
    """Return a trial's client, which must be able to give answers."""
    if not isinstance(context.client, SteeredClient):
        raise UsageError(f"{name} gives the agent its answers, and this client takes none")
    return context.client


def _marked(rank: int, probe: Probe, said: Mapping[str, Any], *, placed: bool) -> AskedProbe:
    """Mark a recorded answer; it has a place only where the session was read with its evidence."""
    answer, where = said["answer"], said["place"]
    return AskedProbe(
        rank,
        probe,
        Place(**where) if placed and where is not None else None,
        answer,
        bool(said["exact"]) and may_be_exact(answer, probe.value),
        contains(answer, probe.value),
    )


def _metrics(session: ChatSession, asked: Sequence[AskedProbe]) -> dict[str, Metric]:
    # Runs over other sessions are not compared, also if the questions are the same.
    counts: dict[str, Metric] = {"session_sha": session.sha}

    def count(name: str, right: bool) -> None:
        counts[f"{name}_right"] = int(str(counts.get(f"{name}_right", 0))) + right
        counts[f"{name}_asked"] = int(str(counts.get(f"{name}_asked", 0))) + 1

    for each in asked:
        count("contains", each.contains)
        count("exact", each.exact)
        count(each.probe.phase, each.contains)
        if each.place is not None:
            count("recurring" if each.place.seen_again else "one_shot", each.contains)
            near = (name for most, name in DISTANCES if each.place.distance <= most)
            count(next(near, "farther"), each.contains)
    return counts


def _facts(asked: Sequence[AskedProbe]) -> tuple[Fact, ...]:
    return tuple(
        Fact(
            each.probe.value,
            each.probe.phase,
            "recurring" if each.place and each.place.seen_again else "one_shot",
            each.contains,
        )
        for each in asked
    )


def _documents(asked: Sequence[AskedProbe]) -> list[dict[str, Any]]:
    return [asdict(each) for each in asked]
