"""banking_knowledge in its own environment: known agents, retrieval, verdicts checked again."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.base import Outcome, Sample, TrialContext
from agentbench_kv.adapters.data import data_folder
from agentbench_kv.adapters.tau2.task import RETRIEVAL, V1, BankingKnowledge, git_id
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError

from . import banking_data
from .banking_data import READING, VERIFIED, internal

pytestmark = pytest.mark.engine
Said = tuple[str | None, list[dict[str, Any]]]  # one answer of the agent: its text, its calls
DONE: Said = ("All done.", [])
MADE = sorted(banking_data.ACTIONS)


@pytest.fixture
def made_domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "data" / V1.data / "tau2"
    folder = root / "domains" / "banking_knowledge"
    banking_data.write_domain(folder)
    (root / "user_simulator").mkdir()
    for name in ("simulation_guidelines.md", "simulation_guidelines_tools.md"):
        (root / "user_simulator" / name).write_text("Play a customer.")
    published = {path.name: git_id(path) for path in folder.iterdir()}
    assert isinstance(V1.published, dict)
    monkeypatch.setitem(V1.published, "banking_knowledge", published)
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


class Bank:
    """Plays simulations one at a time, in which the agent says what it is given."""

    def __init__(self, chats: Any) -> None:
        self._chats = chats
        self._tasks: dict[str, BankingKnowledge] = {}

    def task(self, retrieval: str = "bm25") -> BankingKnowledge:
        return self._tasks.setdefault(retrieval, BankingKnowledge(retrieval=retrieval))

    def play(self, sample: str, said: list[Said], retrieval: str = "bm25") -> Outcome:
        left = iter([*said, DONE])
        self._chats.answer = lambda _: (200, self._chats.say(*next(left)))
        client: Any = None
        where = {"client": client, "endpoint": self._chats.url, "session": sample}
        return self.task(retrieval).run_trial(
            Sample(sample), TrialContext(trial=0, seed=7, **where)
        )

    def gold(self, sample: str) -> list[Said]:
        """Return what the golden agent says before its last words."""
        return spoken(self.task().script(Sample(sample), "gold"))[:-1]

    def close(self) -> None:
        for task in self._tasks.values():
            task.close()


@pytest.fixture
def bank(chats: Any) -> Iterator[Bank]:
    try:
        python_of("tau2-v1")
    except PrerequisiteError as error:
        pytest.skip(str(error))
    made = Bank(chats)
    yield made
    made.close()


def call(action: dict[str, Any], number: int = 0) -> Said:
    function = {"name": action["name"], "arguments": json.dumps(action["arguments"])}
    return None, [{"id": f"call_{number}", "type": "function", "function": function}]


def spoken(texts: list[str]) -> list[Said]:
    """Read the answers of a scripted agent."""
    said: list[Said] = []
    for number, text in enumerate(texts):
        payload = text.partition("<tool_call>")[2].partition("</tool_call>")[0]
        plain = text.partition("</think>")[2].strip() or text
        said.append(call(json.loads(payload), number) if payload else (plain, []))
    return said


def heard(outcome: Outcome, role: str) -> list[str]:
    return [each["content"] for each in outcome.transcript["agent"] if each["role"] == role]


@pytest.mark.usefixtures("made_domain")
def test_known_agents(bank: Bank) -> None:
    assert [each.id for each in bank.task().samples(None, 0)] == MADE
    gold = {name: bank.play(name, bank.gold(name)) for name in MADE}
    assert {name: each.score for name, each in gold.items()} == dict.fromkeys(MADE, 1.0)
    short = {name: bank.play(name, bank.gold(name)[:-1]) for name in MADE}
    assert {name: each.score for name, each in short.items()} == dict.fromkeys(MADE, 0.0)
    silent = {name: bank.play(name, []) for name in MADE}
    assert {name: each.score for name, each in silent.items()} == dict.fromkeys(MADE, 0.0)
    assert gold["task_005"].metrics["reward_action"] == 1.0
    assert gold["task_001"].metrics["reward_db"] == 1.0


@pytest.mark.usefixtures("made_domain")
def test_only_demanded_reading_leaves_a_trace(bank: Bank) -> None:
    read = [call(each, 10 + i) for i, each in enumerate(internal(READING, user_id="ann"))]
    assert bank.play("task_006", [*read, call(VERIFIED)]).score == 1.0  # as the documents advise
    assert bank.play("task_003", read[:1]).score == 0.0
    assert bank.play("task_003", read).score == 1.0


@pytest.mark.usefixtures("made_domain")
@pytest.mark.parametrize("retrieval", RETRIEVAL)
def test_what_each_configuration_shows(bank: Bank, retrieval: str) -> None:
    search = call({"name": "KB_search", "arguments": {"query": "fee in March"}}, 1)
    grep = call({"name": "grep", "arguments": {"pattern": "change_.ser_email"}}, 2)
    outcome = bank.play("task_001", [search, grep], retrieval)
    (prompt,), (searched, grepped) = heard(outcome, "system"), heard(outcome, "tool")
    inlined = [title for title, _ in banking_data.DOCUMENTS.values() if title in prompt]
    # Sorted by id, whatever order the file system has.
    everything = ["Changing an email", "Internal tools", "Fees"]
    assert sorted(inlined, key=prompt.index) == {
        "full_kb": everything, "golden_retrieval": ["Changing an email"],
    }.get(retrieval, [])  # fmt: skip
    if retrieval.startswith("bm25"):
        assert searched.startswith("1. Fees\n")
        assert "five dollars" in searched
        assert searched.endswith("[Timing: retrieval=0ms, total=0ms]")
    else:
        assert "not found" in searched
    if "grep" in retrieval:
        assert "Changing an email" in grepped
        assert "Fees" not in grepped
    else:
        assert "not found" in grepped


@pytest.mark.usefixtures("made_domain")
def test_golden_documents_are_the_tasks_own(bank: Bank) -> None:
    (prompt,) = heard(bank.play("task_002", [], "golden_retrieval"), "system")
    assert "Internal tools" in prompt
    assert "Changing an email" not in prompt


def test_other_documents_are_refused(made_domain: Path) -> None:
    folder = made_domain / V1.data / "tau2" / "domains" / "banking_knowledge" / "documents"
    (folder / "doc_d.json").write_text("{}")
    with pytest.raises(PrerequisiteError, match="documents is not the published folder: git id"):
        BankingKnowledge().samples(None, 0)


def corrupted(said: list[Said], rng: random.Random) -> list[Said]:
    """Spoil one thing: leave out, repeat, swap, change an argument, call what is not there."""
    spoilt = [(text, json.loads(json.dumps(calls))) for text, calls in said]
    at = rng.randrange(len(spoilt))
    kind = rng.choice(("drop", "repeat", "swap", "change", "invent", "cut"))
    if kind == "drop":
        del spoilt[at]
    elif kind == "repeat":
        spoilt.insert(at, spoilt[at])
    elif kind == "swap":
        other = rng.randrange(len(spoilt))
        spoilt[at], spoilt[other] = spoilt[other], spoilt[at]
    elif kind == "change" and spoilt[at][1]:
        function = spoilt[at][1][0]["function"]
        arguments = json.loads(function["arguments"])
        name = rng.choice(sorted(arguments))
        arguments[name] = rng.choice(("", "other", "{}", 7))
        function["arguments"] = json.dumps(arguments)
    elif kind == "invent":
        spoilt.insert(at, call({"name": "no_such_tool", "arguments": {}}))
    else:
        del spoilt[at:]
    return [
        (text, [{**each, "id": f"c{i}_{j}"} for j, each in enumerate(calls)])
        for i, (text, calls) in enumerate(spoilt)
    ]


def check_verdicts(bank: Bank, samples: list[str], tmp_path: Path) -> Counter[float]:
    """Play 60 spoilt sessions and have the benchmark alone check them again."""
    rng, played = random.Random(24), []
    for number in range(60):
        sample = samples[number % len(samples)]
        outcome = bank.play(sample, corrupted(bank.gold(sample), rng))
        assert outcome.status == "scored", outcome.error
        ended, moves = outcome.transcript["verdict"]["ended_by"], outcome.transcript["trajectory"]
        played.append({"task": sample, "ended_by": ended, "trajectory": moves,
                       "score": outcome.score})  # fmt: skip
    file = tmp_path / "played.json"
    file.write_text(json.dumps(played))
    command = [str(python_of("tau2-v1")), str(Path(__file__).with_name("recheck.py")), str(file)]
    about = {"TAU2_DATA_DIR": str(data_folder() / V1.data), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment = {**os.environ, **about}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    scores = [each["score"] for each in played]
    assert json.loads(run.stdout.splitlines()[-1]) == scores
    return Counter(scores)


@pytest.mark.usefixtures("made_domain")
def test_verdicts_on_60_spoilt_sessions_are_the_benchmarks_own(bank: Bank, tmp_path: Path) -> None:
    found = check_verdicts(bank, MADE, tmp_path)
    assert min(found[0.0], found[1.0]) >= 5


@pytest.mark.nightly
def test_verdicts_on_60_spoilt_real_sessions(bank: Bank, tmp_path: Path) -> None:
    if not (data_folder() / V1.data / "tau2" / "domains" / "banking_knowledge").is_dir():
        pytest.skip(f"no banking_knowledge of {V1.data} in {data_folder()} (KVBENCH_DATA)")
    # The last one is judged by a model, too.
    judgeless = [each.id for each in bank.task().samples(None, 0)][:-1]
    found = check_verdicts(bank, random.Random(1).sample(judgeless, 60), tmp_path)
    assert found[0.0] >= 5
