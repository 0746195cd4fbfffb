"""Whole tasks in AppWorld's own environment, on data made with its own classes."""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.appworld.task import TestNormal, Train
from agentbench_kv.adapters.base import Outcome, Sample, TrialContext
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.results.records import TrialStatus

pytestmark = [pytest.mark.engine, pytest.mark.slow]
Said = tuple[str | None, list[dict[str, Any]]]  # one answer of the agent: its text, its calls
TASKS = [f"abcdef{scenario}_{i}" for scenario in (0, 1) for i in (1, 2, 3)]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the data set once; return the folder of data sets."""
    try:
        python = python_of("appworld")
    except PrerequisiteError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("data")
    command = [str(python), str(HERE / "made_world.py"), str(folder / "appworld")]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    return folder


class Player:
    """Plays tasks, several at once, in which the agent says what it is given."""

    def __init__(self, chats: Any) -> None:
        self._tasks: dict[str, Train] = {}
        self._scripts: dict[tuple[str, str, str], list[str]] = {}
        self._left: dict[int, Iterator[Said]] = {}
        chats.answer = lambda body: (200, chats.say(*next(self._left[body["seed"]])))
        self.chats = chats

    def task(self, apis: str = "docs") -> Train:
        return self._tasks.setdefault(apis, Train(apis=apis))

    def play(self, sample: str, said: list[Said], apis: str = "docs") -> Outcome:
        client: Any = None
        for _ in range(3):  # as often as the runner plays a trial whose worker broke
            seed = len(self._left)  # the server knows the trial by it
            self._left[seed] = iter([*said, ("Done.", [])])
            where = {"client": client, "endpoint": self.chats.url, "session": f"{sample} {seed}"}
            context = TrialContext(trial=0, seed=seed, **where)
            outcome = self.task(apis).run_trial(Sample(sample), context)
            if outcome.status != TrialStatus.INFRA_ERROR:
                break
        return outcome

    def play_all(self, sessions: list[tuple[str, list[Said]]]) -> list[Outcome]:
        with ThreadPoolExecutor(6) as several:
            return list(several.map(lambda each: self.play(*each), sessions))

    def script(self, sample: str, agent: Any = "gold", apis: str = "docs") -> list[Said]:
        key = (sample, agent, apis)
        if key not in self._scripts:
            self._scripts[key] = self.task(apis).script(Sample(sample), agent)
        return spoken(self._scripts[key])

    def close(self) -> None:
        for task in self._tasks.values():
            task.close()


@pytest.fixture
def player(data: Path, chats: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Player]:
    monkeypatch.setenv("KVBENCH_DATA", str(data))
    made = Player(chats)
    yield made
    made.close()


def spoken(texts: list[str]) -> list[Said]:
    """Read the answers of a scripted agent."""
    said: list[Said] = []
    for number, text in enumerate(texts):
        payload = text.partition("<tool_call>")[2].partition("</tool_call>")[0]
        if not payload:
            said.append((text, []))
            continue
        call = json.loads(payload)
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        said.append((None, [{"id": f"c{number}", "type": "function", "function": function}]))
    return said


def call(name: str, arguments: str, number: int = 90) -> Said:
    function = {"name": name, "arguments": arguments}
    return None, [{"id": f"c{number}", "type": "function", "function": function}]


def heard(outcome: Outcome) -> list[str]:
    return [each["content"] for each in outcome.transcript["agent"] if each["role"] == "tool"]


def test_known_agents_and_what_is_counted(player: Player) -> None:
    samples = player.task().samples(None, 0)
    assert [each.id for each in samples] == TASKS
    assert [each.cluster for each in samples] == ["abcdef0"] * 3 + ["abcdef1"] * 3
    assert player.task().nothing_right(samples[0]) == {"tests_right": 0, "tests_asked": 3}
    for agent, score in (("gold", 1.0), ("corrupt", 0.0), ("null", 0.0)):
        said = [(each, player.script(each, agent)) for each in TASKS]
        played = dict(zip(TASKS, player.play_all(said), strict=True))
        assert {name: each.score for name, each in played.items()} == dict.fromkeys(TASKS, score)
        assert {each.status for each in played.values()} == {"scored"}
        if agent == "gold":
            metrics = played["abcdef1_3"].metrics
            assert (metrics["steps"], metrics["api_calls"]) == (4, 4)
            assert (metrics["tests_right"], metrics["tests_asked"]) == (3, 3)
    assert played["abcdef0_1"].metrics["tests_right"] == 2


@pytest.mark.parametrize("apis", ["needed", "all"])
def test_functions_as_tools_of_their_own(player: Player, apis: str) -> None:
    outcome = player.play("abcdef1_1", player.script("abcdef1_1", apis=apis), apis)
    assert outcome.score == 1.0
    names = [tool["function"]["name"] for tool in player.chats.bodies[-1]["tools"]]
    wanted = {"simple_note__login", "simple_note__create_note", "supervisor__complete_task"}
    assert wanted <= set(names)
    assert len(names) == len(set(names)) == (457 if apis == "all" else len(names))
    assert ("spotify__login" in names) == (apis == "all")


def test_what_agents_write_is_never_more_than_arguments(player: Player) -> None:
    login = player.script("abcdef1_1")[0]
    create = json.loads(player.script("abcdef1_1")[1][1][0]["function"]["arguments"])
    # Not the agent's to set: these are parameters of AppWorld's own functions.
    inner = {"client": None, "track": False, "raise_on_failure": True, "_app_name": "admin"}
    create["arguments"] |= inner
    bad = [
        call("call_api", json.dumps({"app_name": "admin", "api_name": "show_users"})),
        call("call_api", json.dumps({"app_name": "simple_note", "api_name": "__class__"})),
        call("call_api", "[" * 100_000),
        call("call_api", json.dumps({"app_name": ["x"], "api_name": {"a": 1}, "arguments": 7})),
        call("simple_note__create_note", "{}"),
        call("api_docs__show_api_doc", json.dumps({"app_name": 7, "api_name": [[]]})),
    ]
    done = player.script("abcdef1_1")[2]
    outcome = player.play("abcdef1_1", [*bad, login, call("call_api", json.dumps(create)), done])
    assert outcome.score == 1.0
    answers = heard(outcome)
    assert "no function admin__show_users" in answers[0]
    assert "no function simple_note____class__" in answers[1]
    assert "not a JSON object" in answers[2]
    assert "not a JSON object" in answers[3]
    assert "no function simple_note__create_note" in answers[4]
    assert outcome.metrics["steps"] == 9


@pytest.mark.usefixtures("player")
def test_a_task_that_never_ends_is_a_turn_limit(chats: Any) -> None:
    asked = call("supervisor__show_profile", "{}")
    task = Train(max_steps=3)
    chats.answer = lambda _: (200, chats.say(*asked))
    client: Any = None
    where = {"client": client, "endpoint": chats.url, "session": "s"}
    outcome = task.run_trial(Sample(TASKS[0]), TrialContext(trial=0, seed=0, **where))
    task.close()
    assert (outcome.status, outcome.score, outcome.metrics["steps"]) == ("turn_limit", None, 3)


@pytest.mark.usefixtures("player")
def test_sets_without_solutions_say_so() -> None:
    task = TestNormal()
    assert len(task.samples(None, 0)) == 6
    with pytest.raises(PrerequisiteError, match="publishes no solutions of appworld/test_normal"):
        task.script(Sample(TASKS[0]), "gold")
    assert task.script(Sample(TASKS[0]), "null")
    task.close()
    with pytest.raises(PrerequisiteError, match="apis=needed"):
        TestNormal(apis="needed").samples(None, 0)


def corrupted(said: list[Said], rng: random.Random) -> list[Said]:
    """Spoil one thing: leave out, repeat, swap, change an argument, stop early."""
    spoilt: list[Said] = json.loads(json.dumps(said))
    at = rng.randrange(len(spoilt))
    kind = rng.choice(("drop", "repeat", "swap", "change", "cut"))
    if kind == "drop":
        del spoilt[at]
    elif kind == "repeat":
        spoilt.insert(at, spoilt[at])
    elif kind == "swap":
        other = rng.randrange(len(spoilt))
        spoilt[at], spoilt[other] = spoilt[other], spoilt[at]
    elif kind == "cut":
        del spoilt[at:]
    else:
        function = spoilt[at][1][0]["function"]
        whole = json.loads(function["arguments"])
        arguments = whole.get("arguments", whole)
        name = rng.choice(sorted(arguments))
        arguments[name] = rng.choice(("", "other", 7, None, ["a"]))
        function["arguments"] = json.dumps(whole)
    return spoilt


def called(outcome: Outcome) -> list[tuple[str, str, dict[str, Any]]]:
    """Return what the apps were called with, by the session's own record."""
    calls = []
    for message in outcome.transcript["agent"]:
        for each in message.get("tool_calls", ()):
            name, arguments = each["function"]["name"], json.loads(each["function"]["arguments"])
            app, _, api = name.partition("__")
            if name == "call_api":
                app, api = arguments["app_name"], arguments["api_name"]
                arguments = arguments["arguments"]
            calls.append((app, api, arguments))
    return calls


@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.nightly)])
def test_verdicts_on_spoilt_sessions_are_the_benchmarks_own(
    data: Path, player: Player, tmp_path: Path, rounds: int
) -> None:
    rng, names = random.Random(24), TASKS * rounds
    sessions = [(each, corrupted(player.script(each)[:-1], rng)) for each in names]
    outcomes = player.play_all(sessions)
    assert {each.status for each in outcomes} == {"scored"}, [each.error for each in outcomes]
    scores = [each.score for each in outcomes]
    pairs = zip(names, outcomes, strict=True)
    file = tmp_path / "played.json"
    file.write_text(json.dumps([{"task": name, "calls": called(each)} for name, each in pairs]))
    command = [
        str(python_of("appworld")),
        str(HERE / "recheck.py"),
        str(data / "appworld"),
        str(file),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert [float(each) for each in json.loads(run.stdout.splitlines()[-1])] == scores
    found = Counter(scores)
    assert min(found[0.0], found[1.0]) >= rounds / 2
