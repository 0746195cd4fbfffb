"""LoCoMo's questions, each behind the conversation alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.base import Reply, Sample, TrialContext
from agentbench_kv.adapters.locomo.scoring import find_spec
from agentbench_kv.adapters.locomo.task import history
from agentbench_kv.adapters.probe.locomo import READ, ProbeLocomo
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve

pytestmark = pytest.mark.skipif(
    find_spec("nltk") is None, reason="nltk absent: pip install 'agentbench-kv[locomo]'"
)


class Steered:
    """Notes what is read and asked, of itself and of what is forked from it."""

    def __init__(self, log: list[Any], *, forks: bool) -> None:
        self.log, self.forks = log, forks

    def chat(
        self, messages: Any, tools: Any = None, max_tokens: Any = None, stop: Any = ()
    ) -> Reply:
        del tools, max_tokens, stop
        self.log.append(("asked", list(messages)))
        return Reply("Cairo", "", [], "stop", False, "Cairo", {})

    def force(self, messages: Any, said: Any, tools: Any = None) -> None:
        del tools
        self.log.append(("read", [*messages, said]))

    def fork(self) -> Steered:
        return Steered(self.log, forks=True)

    def another(self) -> Steered:
        return Steered(self.log, forks=self.forks)

    def tokens(self) -> int:
        return 1

    def places(self, texts: Any) -> list[list[int]]:
        return [[] for _ in texts]

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("forks", [True, False])
def test_no_question_sees_another(forks: bool) -> None:
    log: list[Any] = []
    task = ProbeLocomo.create({"check": "off"})
    context = TrialContext(0, 7, Steered(log, forks=forks), None, "s")
    outcome = task.run_trial(Sample("talk-1"), context)
    read = [messages for what, messages in log if what == "read"]
    asked = [messages for what, messages in log if what == "asked"]
    assert len(asked) == 5
    assert len(read) == (1 if forks else 5)
    before = history(task._data.conversations["talk-1"]).messages
    talk = [*before, {"role": "assistant", "content": READ}]
    assert all(messages == talk for messages in read)
    assert all(messages[:-1] == talk for messages in asked)
    assert len({messages[-1]["content"] for messages in asked}) == 5
    assert outcome.metrics["f1_asked"] == 5


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("agent", "score"), [("gold", 1.0), ("corrupt", 0.0)])
def test_known_agents_get_their_score(agent: str, score: float, tmp_path: Path) -> None:
    spec = RunSpec("scripted", agent, "full", None, "probe/locomo", limit=1)
    spec = resolve(replace(spec), {"check": "off"})
    run_one(spec, tmp_path, lambda *_: None)
    run = RunReader(tmp_path / spec.id)
    (trial,) = run.trials()
    assert trial.score == score
    assert trial.usage.requests == 1  # the conversation; the questions are in forks
    document = json.loads((run.path / str(trial.transcript)).read_text())
    assert len(document["transcript"]["answers"]) == 5
