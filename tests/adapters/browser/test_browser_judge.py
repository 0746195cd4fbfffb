"""The LLM judge: its verdicts, its failures, and judging a run again without running it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.browser.frames import FramesTest
from agentbench_kv.adapters.browser.judge import Judge, judge_run
from agentbench_kv.errors import UsageError
from agentbench_kv.results.store import RunStore
from agentbench_kv.run import runner
from agentbench_kv.run.spec import RunSpec, resolve

from .browsing_data import QUESTIONS, write_browsecomp, write_frames

pytest.importorskip("bm25s", reason="the extra [browser] is not installed")

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


@contextmanager
def endpoint(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve chat completions from a function; yield the base URL and the requests so far."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append({**body, "key": self.headers.get("authorization")})
            status, document = answer(body)
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def said(text: str) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"content": text}}]}


def honest(body: dict[str, Any]) -> tuple[int, Any]:
    """Judge by what stands in the prompt: a refusal is wrong, all else is right."""
    wrong = "Response: I would rather not." in body["messages"][0]["content"]
    return said(f"Let me see.\nVerdict: {'wrong' if wrong else 'correct'}")


@pytest.mark.parametrize(
    ("reply", "correct"),
    [
        ("Verdict: correct", True),
        ("**Verdict:** Wrong.", False),
        ("Verdict: correct\nNo: verdict: wrong", False),
        ("That is incorrect.", None),
        ("", None),
    ],
)
def test_reading_a_verdict(reply: str, correct: bool | None) -> None:
    with endpoint(lambda _: said(reply)) as (url, _):
        verdict = Judge(url, "m").verdict("q", "a", "r")
    assert verdict.correct is correct
    assert (verdict.error is None) == (correct is not None)


def test_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_JUDGE_KEY", "secret")
    with endpoint(honest) as (url, seen):
        judge = Judge.parse(f"{url}/|some-model")
        assert judge.verdict("Which {bird}?", "a heron", "A heron.").correct is True
    (request,) = seen
    assert (request["model"], request["temperature"]) == ("some-model", 0.0)
    assert request["key"] == "Bearer secret"
    prompt = request["messages"][0]["content"]
    assert "Which {bird}?" in prompt
    assert "Correct answer: a heron" in prompt
    assert "secret" not in json.dumps(judge.provenance())


def test_failures_that_pass_are_tried_again() -> None:
    codes = iter([429, 500, 200])
    with endpoint(lambda _: (next(codes), said("Verdict: correct")[1])) as (url, seen):
        assert Judge(url, "m", pause_s=0.0).verdict("q", "a", "r").correct is True
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("answer", "requests", "error"),
    [
        ((503, {}), 3, "answered 503"),
        ((401, {}), 1, "answered 401"),
        ((200, {"choices": []}), 3, "not answer with a chat completion"),
        ((200, [1]), 3, "not answer with a chat completion"),
    ],
)
def test_failures_that_stay(answer: tuple[int, Any], requests: int, error: str) -> None:
    with endpoint(lambda _: answer) as (url, seen):
        verdict = Judge(url, "m", pause_s=0.0).verdict("q", "a", "r")
    assert verdict.correct is None
    assert error in str(verdict.error)
    assert len(seen) == requests


def test_a_dead_endpoint() -> None:
    with endpoint(honest) as (url, _):
        pass
    verdict = Judge(url, "m", pause_s=0.0).verdict("q", "a", "r")
    assert verdict.correct is None
    assert "cannot be asked: ConnectError" in str(verdict.error)


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that plays a scripted agent and returns the run directory."""
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(FramesTest, "published_sha256", None)
    write_frames(tmp_path / "data")
    write_browsecomp(tmp_path / "data")

    def run(task: str, agent: str, **settings: str) -> Path:
        spec = resolve(RunSpec("scripted", agent, "full", None, task), settings)
        runner.run_one(spec, tmp_path / "runs", lambda *_: None)
        return RunStore(tmp_path / "runs").find(spec.id).path

    return run


def test_a_run_is_judged_once_and_its_records_stay(finished: Callable[..., Path]) -> None:
    run = finished("frames/synthetic", "corrupt")
    before = (run / "samples.jsonl").read_bytes()
    with endpoint(honest) as (url, seen):
        judge = Judge(url, "m")
        first = judge_run(run, judge)
        again = judge_run(run, judge)
        assert len(seen) == first.asked == first.judged == first.trials == len(QUESTIONS)
        other = judge_run(run, Judge(url, "another"))
    assert (first.mean, again.mean, again.asked) == (1.0, 1.0, 0)
    assert other.path != first.path
    assert (run / "samples.jsonl").read_bytes() == before
    document = json.loads(first.path.read_text())
    assert {row["score"] for row in document["trials"]} == {0.0}
    assert {row["judge"] for row in document["trials"]} == {1.0}
    assert document["judge"]["model"] == "m"


def test_missing_verdicts_are_asked_for_again(finished: Callable[..., Path]) -> None:
    run = finished("frames/synthetic", "null")
    broken = True

    def moody(body: dict[str, Any]) -> tuple[int, Any]:
        return (401, {}) if broken and "swans" in str(body) else honest(body)

    with endpoint(moody) as (url, _):
        judge = Judge(url, "m", pause_s=0.0)
        first = judge_run(run, judge)
        assert (first.mean, first.judged) == (None, len(QUESTIONS) - 1)
        assert first.errors == ("the judge answered 401",)
        broken = False
        second = judge_run(run, judge)
    assert (second.mean, second.asked, second.errors) == (0.0, 1, ())


def test_sealed_runs_are_judged_and_nothing_is_written_in_plain(
    finished: Callable[..., Path],
) -> None:
    run = finished("browsecomp-plus/synthetic", "gold")
    with endpoint(lambda body: said(f"{body} Verdict: correct")) as (url, seen):
        result = judge_run(run, Judge(url, "m"))
    assert result.mean == 1.0
    assert any(QUESTIONS[0][0] in str(request) for request in seen)
    assert QUESTIONS[0][0] not in result.path.read_text()


def test_trials_without_an_answer_count_as_wrong(finished: Callable[..., Path]) -> None:
    run = finished("frames/synthetic", "gold", context="64")
    with endpoint(honest) as (url, _), pytest.raises(UsageError, match="holds no answers to judge"):
        judge_run(run, Judge(url, "m"))


def test_the_judge_in_a_run_is_a_column_and_not_the_score(finished: Callable[..., Path]) -> None:
    with endpoint(honest) as (url, _):
        run = finished("frames/synthetic", "corrupt", judge=f"{url}|m")
        records = RunStore(run.parent).find(run.name).trials()
        assert {record.metrics["judge"] for record in records} == {1.0}
        assert {record.score for record in records} == {0.0}
    reader = RunStore(run.parent).find(run.name)
    assert reader.info.provenance["task"]["judge"]["model"] == "m"


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run directory"):
        judge_run(tmp_path, Judge("http://127.0.0.1:1/v1", "m"))
