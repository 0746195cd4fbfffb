"""The tasks as the runner sees them, and every way they cannot start."""

from __future__ import annotations

import importlib.metadata
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.base import Sample, TrialContext
from agentbench_kv.adapters.tau2.task import (
    V0,
    V1,
    Airline,
    AirlineV1,
    BankingKnowledge,
    Retail,
    RetailV1,
    Telecom,
    TelecomV1,
)
from agentbench_kv.adapters.tau2.worker.main import SUMMARIES, WrongPackageError, require_tau2_bench
from agentbench_kv.adapters.worker import (
    RemoteError,
    TrialLimitError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from agentbench_kv.environments import PROFILES
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.registry import load_task
from agentbench_kv.results.records import TrialStatus

PLAYED = {
    "status": "scored", "score": 1.0, "error": None, "agent": [], "trajectory": [{}, {}, {}],
    "steps": [
        {"calls": 2, "unparsable": 0, "finish_reason": "stop", "prompt_tokens": 50},
        {"calls": 0, "unparsable": 1, "finish_reason": "length", "prompt_tokens": 70},
    ],
    "verdict": {"ended_by": "user_stop", "reward_breakdown": {"DB": 1.0, "COMMUNICATE": 1.0}},
    "user": {"requests": 4, "prompt_tokens": 900, "completion_tokens": 30},
}  # fmt: skip


class Pool:
    """Answers every command with one value, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[tuple[str, Any]] = []

    def call(self, command: str, args: Any = None, **_: Any) -> Any:
        self.asked.append((command, args))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        pass


def context(endpoint: str | None = "http://127.0.0.1:1") -> TrialContext:
    client: Any = None
    return TrialContext(trial=0, seed=7, client=client, endpoint=endpoint, session="s")


def play(answer: Any, task: Any = None) -> tuple[Any, Pool]:
    task = task or Retail()
    task._started = pool = Pool(answer)
    return task.run_trial(Sample("3"), context()), pool


def test_settings_are_declared() -> None:
    assert set(Telecom.parameters()) == {"user", "user_model", "max_steps"}
    made = Airline.create({"max_steps": "30", "user": "http://h/v1", "user_model": "m"})
    assert made.settings() == {"max_steps": 30, "user": "http://h/v1", "user_model": "m"}
    with pytest.raises(UsageError, match="max_steps=0"):
        Airline.create({"max_steps": "0"})


def test_a_played_trial_becomes_an_outcome_with_the_users_tokens_apart() -> None:
    outcome, pool = play(PLAYED)
    assert (outcome.status, outcome.score) == (TrialStatus.SCORED, 1.0)
    assert outcome.metrics == {
        "steps": 2, "messages": 3, "calls": 2, "unparsable_calls": 1, "truncated_answers": 1,
        "first_prompt_tokens": 50, "ended_by": "user_stop", "reward_db": 1.0,
        "reward_communicate": 1.0, "user_requests": 4, "user_prompt_tokens": 900,
        "user_completion_tokens": 30,
    }  # fmt: skip
    ((command, args),) = pool.asked
    assert (command, args["sample"], args["sampling"]["seed"]) == ("run", "3", 7)
    assert args["user"] == {"kind": "scripted", "url": None, "model": "", "key": None}


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (WorkerTimeoutError("late"), TrialStatus.TIMEOUT),
        (RemoteError("ServerError", "HTTP 500"), TrialStatus.ENGINE_ERROR),
        (RemoteError("ValueError", "x"), TrialStatus.INFRA_ERROR),
        (WorkerDiedError("gone"), TrialStatus.INFRA_ERROR),
        ({**PLAYED, "status": "user_error", "score": None}, TrialStatus.USER_ERROR),
        ({**PLAYED, "status": "turn_limit", "score": None}, TrialStatus.TURN_LIMIT),
    ],
)
def test_failures_keep_their_cause(failure: Any, status: TrialStatus) -> None:
    outcome, _ = play(failure)
    assert (outcome.status, outcome.score) == (status, None)


def test_a_trial_that_meets_a_limit_twice_is_the_agents_failure_and_no_other() -> None:
    task = Retail()

    def status(failure: Exception) -> str:
        outcome, _ = play(failure, task)
        return f"{outcome.status}: {outcome.error}"

    def met() -> TrialLimitError:
        return TrialLimitError("it met a limit")

    assert status(WorkerDiedError("gone")) == "infra_error: gone"
    assert status(met()) == "infra_error: it met a limit"
    assert status(WorkerDiedError("gone")) == "infra_error: gone"
    task._started = Pool(met())
    assert task.run_trial(Sample("4"), context()).status == TrialStatus.INFRA_ERROR
    assert task.run_trial(Sample("3"), replace(context(), trial=1)).status == "infra_error"
    again = "timeout: it met a limit, and did so again when it was played once more"
    assert status(met()) == again


def test_the_users_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_USER_API_KEY", "secret")
    _, pool = play(PLAYED, Retail(user="http://h:1", user_model="m"))
    wanted = {"kind": "llm", "url": "http://h:1/v1", "model": "m", "key": "secret"}
    assert pool.asked[0][1]["user"] == wanted
    assert "secret" not in str(Retail(user="http://h:1", user_model="m").settings())


def test_a_user_that_is_gone_ends_the_run() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    gone = Retail(user=url, user_model="m")
    with pytest.raises(PrerequisiteError, match=r"user simulator at .* does not answer") as caught:
        gone.samples(None, 0)
    assert "--set user=URL" in str(caught.value)
    with pytest.raises(PrerequisiteError, match="does not answer"):
        play({**PLAYED, "status": "user_error", "score": None}, gone)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"user": "litellm"}, "--set user_model=NAME"),
        ({"user": "http://h:1"}, "--set user_model=NAME"),
        ({"user": "gpt-5", "user_model": "m"}, r"expected scripted, litellm or the http\(s\) URL"),
    ],
)
def test_a_badly_named_user_is_a_usage_error(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Retail(**settings).samples(None, 0)


def test_no_endpoint_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="talks to an endpoint and was given none"):
        Retail().run_trial(Sample("0"), context(None))


@pytest.mark.usefixtures("made_data")
def test_a_missing_environment_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    monkeypatch.delenv("KVBENCH_ENV_TAU2", raising=False)
    with pytest.raises(PrerequisiteError) as caught:
        Retail().samples(None, 0)
    wanted = "kvbench env create tau2 --from https://github.com/sierra-research/tau2-bench"
    assert str(caught.value) == f"tau2 environment not found; create it with: {wanted}"


@pytest.mark.usefixtures("made_data")
def test_an_interpreter_without_tau2_bench_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_ENV_TAU2", sys.executable)
    task = Retail()
    try:
        with pytest.raises(PrerequisiteError, match="is not tau2-bench but: nothing") as caught:
            task.samples(None, 0)
    finally:
        task.close()
    assert "kvbench env check tau2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_project_of_that_name_on_pypi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"Summary": "Magnetic relaxation", "Version": "1.0.1"}
    monkeypatch.setattr(importlib.metadata, "metadata", lambda _: other)
    with pytest.raises(WrongPackageError, match="is not tau2-bench but: Magnetic relaxation"):
        require_tau2_bench("1.0.1")


@pytest.mark.parametrize(
    ("found", "wanted"), [("0.2.1.dev0", "1.0.1"), ("1.0.1", "0.2.1.dev0"), ("1.0.0", "1.0.1")]
)
def test_another_release_is_refused(
    found: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = SUMMARIES["0.2.1.dev0" if found.startswith("0") else "1.0.1"]
    about = {"Summary": summary, "Version": found}
    monkeypatch.setattr(importlib.metadata, "metadata", lambda _: about)
    with pytest.raises(WrongPackageError, match=f"{found} is installed .* need {wanted}"):
        require_tau2_bench(wanted)
    about["Version"], about["Summary"] = wanted, SUMMARIES[wanted]
    require_tau2_bench(wanted)


def test_the_domains_of_each_release() -> None:
    for release, prefix, classes in (
        (V0, "tau2/", (Airline, Retail, Telecom)),
        (V1, "tau2-v1/", (AirlineV1, RetailV1, TelecomV1, BankingKnowledge)),
    ):
        assert {cls.name for cls in classes} == {f"{prefix}{cls.domain}" for cls in classes}
        assert {cls.domain for cls in classes} == set(release.published)
        assert all(cls.release is release for cls in classes)
        assert [load_task(cls.name) for cls in classes] == list(classes)
        assert PROFILES[classes[0].environment].source.tag == release.tag


def test_v1_names_its_own_environment(made_data_v1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(made_data_v1))
    monkeypatch.delenv("KVBENCH_ENV_TAU2_V1", raising=False)
    with pytest.raises(PrerequisiteError, match="create it with: kvbench env create tau2-v1 --fr"):
        RetailV1().samples(None, 0)


def test_the_judge_is_named_once_a_model_plays_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    talks = {"user": "litellm", "user_model": "m"}
    with pytest.raises(UsageError, match=r"agrees to everything: --set judge='URL\|MODEL'"):
        RetailV1(**talks).samples(None, 0)
    with pytest.raises(UsageError, match=r"expected URL\|MODEL"):
        RetailV1(**talks, judge="gpt").samples(None, 0)
    monkeypatch.setenv("KVBENCH_JUDGE_KEY", "secret")
    task = RetailV1(judge="http://127.0.0.1:1/v1|m")
    _, pool = play(PLAYED, task)
    wanted = {"kind": "llm", "url": "http://127.0.0.1:1/v1", "model": "m", "key": "secret"}
    assert pool.asked[0][1]["judge"] == wanted
    assert "secret" not in str(task.settings())
    _, pool = play(PLAYED, AirlineV1(judge="http://127.0.0.1:1/v1|m"))
    assert pool.asked[0][1]["judge"]["kind"] == "scripted"
    _, pool = play(PLAYED)
    assert pool.asked[0][1]["judge"] is None


def test_a_judge_that_is_gone_ends_the_run_and_one_that_fails_does_not(chats: Any) -> None:
    failure = RemoteError("JudgeFailedError", "the judge gave 0 verdicts on 1 assertions")
    outcome, _ = play(failure, RetailV1(judge=f"{chats.url}|m"))
    assert (outcome.status, outcome.score) == (TrialStatus.INFRA_ERROR, None)
    chats.close()
    gone = RetailV1(judge=f"{chats.url}|m")
    with pytest.raises(PrerequisiteError, match=r"the judge at .* does not answer"):
        play(failure, gone)
    with pytest.raises(PrerequisiteError, match="--set judge='URL"):
        gone.samples(None, 0)


def test_how_documents_are_reached_is_a_setting_of_one_domain() -> None:
    assert BankingKnowledge.create({"retrieval": "full_kb"}).settings()["retrieval"] == "full_kb"
    assert BankingKnowledge().settings()["retrieval"] == "bm25"
    # The benchmark's default asks a provider for embeddings.
    with pytest.raises(UsageError, match="retrieval=alltools"):
        BankingKnowledge.create({"retrieval": "alltools"})
    assert "retrieval" not in RetailV1.parameters()
    with pytest.raises(UsageError, match="agrees to everything"):
        BankingKnowledge(user="litellm", user_model="m").samples(None, 0)
