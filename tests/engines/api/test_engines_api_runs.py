"""Whole runs over an endpoint: records, money, faults, resuming, and no key anywhere."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.base import ScriptedAgent
from agentbench_kv.adapters.micro.episode import Environment
from agentbench_kv.adapters.micro.task import Recall1k
from agentbench_kv.cli import main
from agentbench_kv.gateway.parsing import OutputParser
from agentbench_kv.phases.syntax import SYNTAXES
from agentbench_kv.results.records import TrialStatus
from agentbench_kv.results.store import RunStore

KEY = "sk-local-secret-0123456789"
Run = Callable[..., tuple[int, str, str]]


def micro_agent(agent: ScriptedAgent, samples: int) -> Callable[..., dict[str, Any]]:
    """Answer as a scripted agent of the micro task would; the first request names the sample."""
    task = Recall1k()
    scripts: dict[tuple[str, str], list[str]] = {}
    for sample in task.samples(samples, 0):
        episode = task._episode(sample)
        request = Environment(episode).request
        scripts[episode.system, request] = task.script(sample, agent)

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        texts = scripts[messages[0]["content"], messages[1]["content"]]
        turn = sum(message["role"] == "assistant" for message in messages)
        parser = OutputParser(SYNTAXES["hermes"], lambda: f"call_{turn}")
        parser.feed(texts[turn])
        parser.finish()
        return {
            "content": parser.content or None,
            "reasoning_content": parser.reasoning,
            "tool_calls": parser.tool_calls,
        }

    return answer


@pytest.fixture
def run(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the micro task over the server, as a user does."""
    monkeypatch.setenv("KVBENCH_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai-never-sent-to-others")
    monkeypatch.setenv("KVBENCH_API_BACKOFF", "0.01")
    monkeypatch.setenv("KVBENCH_API_RETRIES", "2")

    def call(*args: str, limit: int = 2, verb: str = "run") -> tuple[int, str, str]:
        common = ["--engine", "api", "--model", f"{server.url}#fake", "--task", "micro/recall-1k"]
        sizes = ["--limit", str(limit), "--out", str(tmp_path), "--quiet", "--concurrency", "1"]
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["kvbench", verb, *common, *sizes, *args])
            with pytest.raises(SystemExit) as ended:
                main()
        return int(ended.value.code or 0), out.getvalue(), err.getvalue()

    return call


def only_run(folder: Path) -> Any:
    store = RunStore(folder)
    (name,) = store.names()
    return store.find(name)


def test_a_whole_session_over_an_endpoint_with_faults(
    server: Any, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_API_PRICES", "2,10")
    server.answers = micro_agent("gold", 2)
    server.faults = [429, None, "rubbish", 500]
    code, out, err = run("--json")
    assert (code, err) == (0, "")
    (summary,) = json.loads(out)
    assert summary["validity"]["state"] == "valid"
    trials = only_run(tmp_path).trials()
    for trial in trials:
        requests = trial.usage.requests
        assert (trial.score, requests > 3) == (1.0, True)
        assert trial.usage.prompt_tokens == 100 * requests
        assert trial.metrics["cost"] == pytest.approx(requests * (200 + 100) / 1e6)
        assert (trial.session_resets, trial.kv.evicted, trial.kv.logical) == (0, 0, 110)
        assert trial.prompt_sha
    info = json.loads((tmp_path / summary["run_id"] / "run.json").read_text())
    provenance = json.dumps(info)
    assert server.url in provenance
    assert "not promised" in provenance
    assert set(server.keys) == {f"Bearer {KEY}"}


def test_keys_are_in_no_file_and_no_message(server: Any, run: Run, tmp_path: Path) -> None:
    server.answers = micro_agent("null", 2)
    # A server that tells what it was sent.
    server.faults = [None, (500, f"bad key {KEY} in Authorization")] * 2
    code, out, err = run()
    assert code == 0
    server.always = (400, f"what is {KEY}?")
    other, more, wrong = run("--seed", "1")
    assert other == 2
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    texts = [out, err, more, wrong, *(path.read_text() for path in files)]
    assert not [text for text in texts if KEY in text or "never-sent" in text]
    assert "[KVBENCH_API_KEY]" in wrong
    assert not [key for key in server.keys if "never-sent" in key]


def test_money_stops_a_run_and_more_money_goes_on(
    server: Any, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = micro_agent("gold", 3)
    code, _, err = run("--max-cost", "1", limit=3)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "KVBENCH_API_PRICES" in err
    monkeypatch.setenv("KVBENCH_API_PRICES", "10000,0")
    task = Recall1k()
    most = len(task.script(task.samples(1, 0)[0], "gold")) + 2  # one unit a request: one trial
    code, _, err = run("--max-cost", str(most), limit=3)
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"--max-cost {most} is reached: {most} spent on {most} requests" in err
    done = {trial.sample_id for trial in only_run(tmp_path).trials()}
    assert len(done) == 1
    asked = len(server.bodies)
    code, _, _ = run(limit=3)
    trials = only_run(tmp_path).trials()
    assert (code, len(trials), {trial.score for trial in trials}) == (0, 3, {1.0})
    per_trial = {trial.sample_id: trial.usage.requests for trial in trials}
    again = sum(count for sample, count in per_trial.items() if sample not in done)
    assert len(server.bodies) - asked == again


def test_an_endpoint_that_fails_costs_no_score(server: Any, run: Run, tmp_path: Path) -> None:
    server.answers = micro_agent("gold", 2)
    server.always = 429
    code, _, err = run()
    assert (code, len(err.splitlines())) == (2, 1)
    assert "HTTP 429" in err
    failed = only_run(tmp_path).trials()
    assert {trial.status for trial in failed} <= {TrialStatus.INFRA_ERROR}
    assert not [trial for trial in failed if trial.score is not None]
    server.always = None
    code, _, _ = run()
    assert (code, {trial.score for trial in only_run(tmp_path).trials()}) == (0, {1.0})


def test_a_dead_endpoint_is_one_line(server: Any, run: Run, tmp_path: Path) -> None:
    server.stop()
    code, _, err = run()
    assert (code, len(err.splitlines())) == (2, 1)
    assert "start or mend the endpoint" in err
    assert only_run(tmp_path).trials() == []


def test_a_hanging_endpoint_is_a_timeout(server: Any, run: Run, tmp_path: Path) -> None:
    server.always = "hang"
    code, _, err = run("--timeout", "0.3", limit=1)
    assert code == 0, err
    assert [trial.status for trial in only_run(tmp_path).trials()] == [TrialStatus.TIMEOUT]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--method", "agentkv", "--budget", "512"], "does not compress"),
        (["--model", "gpt-4"], "expected openai/NAME"),
        (["--model", "http://u:p@host/v1#m"], "put the key into"),
        (["--model", "http://host/v1"], "names no model"),
        (["--model", "litellm/x"], "pip install 'agentbench-kv[api]'"),
        (["--engine", "embedded", "--model", "micro", "--max-cost", "1"], "is free"),
        (["--max-cost", "0"], "max-cost"),
    ],
)
def test_wrong_requests_are_one_line(args: list[str], said: str, run: Run) -> None:
    if "litellm/x" in args:
        from importlib.util import find_spec

        if find_spec("litellm"):
            pytest.skip("litellm is installed")
    code, _, err = run(*args)
    assert (code, len(err.splitlines())) == (2, 1), err
    assert said in err
    assert "u:p" not in err


def test_openai_needs_its_key(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.delenv("KVBENCH_API_KEY")
    code, _, err = run("--model", "openai/gpt-4.1-mini")
    assert (code, "OPENAI_API_KEY" in err) == (2, True)
    for name, value, said in (
        ("KVBENCH_API_PRICES", "cheap", "money per million"),
        ("KVBENCH_API_TIMEOUT", "-1", "expected a number"),
        ("KVBENCH_API_BASE", "ftp://x", "not an http"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv("OPENAI_API_KEY", KEY)
            patch.setenv(name, value)
            code, _, err = run("--model", "openai/gpt-4.1-mini")
        assert (code, said in err, KEY in err) == (2, True, False)
