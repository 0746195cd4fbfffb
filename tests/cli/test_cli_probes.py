"""`kvbench run --task probe/file`: sessions with given answers, questions in forks, floors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.conformance.tasks import task_suite
from agentbench_kv.engines.base import Capability
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.store import RunStore

Kvbench = Callable[..., Any]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_order",
        "description": "Look an order up.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}},
    },
}


def trajectory(number: int) -> dict[str, Any]:
    """A session of three calls, the second of which is made twice."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You help in a shop. The shop closes at 17:30 on Fridays."},
        {"role": "user", "content": f"My name is Ada and my zip code is 1912{number}."},
    ]
    for call, order in enumerate(("A11", "B22", "B22")):
        arguments = json.dumps({"order": f"#{order}{number}", "page": 40 + call // 2})
        function = {"name": "get_order", "arguments": arguments}
        made = {"id": f"c{call}", "type": "function", "function": function}
        result = {"price": 100.5 + 7 * call + number, "to": [f"{call}{number} Lima harbour"]}
        messages += [
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": f"I should note that step {call} is #T{call}{number}9.",
                "tool_calls": [made],
            },
            {"role": "tool", "tool_call_id": f"c{call}", "content": json.dumps(result)},
        ]
    messages.append({"role": "assistant", "content": "It is done."})
    return {"id": f"s{number}", "messages": messages, "tools": [TOOL]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(trajectory(number)) + "\n" for number in range(3)))
    return path


def probe(kvbench: Kvbench, file: Path, out: Path, *more: str) -> RunReader:
    asked = ("run", "--task", "probe/file", "--set", f"file={file}", "--out", str(out), "--json")
    done = kvbench(*asked, *more)
    assert done.returncode == 0, done.stderr
    (summary,) = json.loads(done.stdout)
    return RunStore(out).find(summary["run_id"])


def documents(run: RunReader) -> list[dict[str, Any]]:
    return [
        each
        for trial in sorted(run.trials(), key=lambda trial: trial.sample_id)
        for each in json.loads((run.path / str(trial.transcript)).read_text())["transcript"][
            "probes"
        ]
    ]


def test_the_suite_of_every_task_holds(file: Path) -> None:
    """Agents of known score, complete records, an interrupted run that goes on."""
    parts = task_suite("probe/file", limit=3, settings={"file": str(file)})
    failed = {name: [r for r in results if not r.ok] for name, results in parts.items()}
    assert not any(failed.values()), failed


MICRO = ("--model", "micro", "--device", "cpu", "--concurrency", "2")


def test_a_run_says_what_was_asked_and_how(kvbench: Kvbench, file: Path, tmp_path: Path) -> None:
    run = probe(kvbench, file, tmp_path / "runs", *MICRO, "--method", "full")
    assert len(run.trials()) == 3
    for trial in run.trials():
        metrics = trial.metrics
        assert metrics["asked_in"] == "forks"
        assert metrics["contains_asked"] == metrics["exact_asked"] == 8
        assert sum(int(str(metrics[f"{p}_asked"])) for p in ("tool", "act", "others", "think")) == 8
        assert trial.session_resets == 0
        assert len(str(metrics["session_sha"])) == 16
        assert trial.sample_id.startswith("s")
    for each in documents(run):
        assert 0 < each["place"]["distance"] < trial.kv.logical
        assert each["rank"] in range(8)
    # The answers of the session were given: no question is in the account of its cache.
    assert len({trial.kv.decode_tokens for trial in run.trials()}) == 1


def test_forks_answer_as_replays_do(
    kvbench: Kvbench, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With events while the session is read, and in the middle of answers."""
    method = ("--method", "agentkv", "--budget", "96", "--set", "interval=24")
    forked = probe(kvbench, file, tmp_path / "forked", *MICRO, *method)
    able = EmbeddedEngine.capabilities - {Capability.FORK}
    monkeypatch.setattr(EmbeddedEngine, "capabilities", able)
    replayed = probe(kvbench, file, tmp_path / "replayed", *MICRO, *method)
    assert {t.metrics["asked_in"] for t in forked.trials()} == {"forks"}
    assert {t.metrics["asked_in"] for t in replayed.trials()} == {"replays"}
    assert all(trial.kv.events for trial in forked.trials())
    assert documents(forked) == documents(replayed)


def test_methods_are_asked_the_same(kvbench: Kvbench, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    full = probe(kvbench, file, out, *MICRO, "--method", "full")
    evicting = ("--method", "streamingllm", "--budget", "64", "--set", "interval=16")
    streaming = probe(kvbench, file, out, *MICRO, *evicting)
    assert {t.sample_id for t in full.trials()} == {t.sample_id for t in streaming.trials()}
    pairs = zip(documents(full), documents(streaming), strict=True)
    assert all(one["probe"] == other["probe"] for one, other in pairs)


def test_floors_ask_the_same_without_the_evidence(
    kvbench: Kvbench, file: Path, tmp_path: Path
) -> None:
    out, asked = tmp_path / "runs", (*MICRO, "--method", "full", "--limit", "1")
    whole = probe(kvbench, file, out, *asked)
    none = probe(kvbench, file, out, *asked, "--set", "floor=none")
    removed = probe(kvbench, file, out, *asked, "--set", "floor=removed")
    runs = [[each["probe"] for each in documents(run)] for run in (whole, none, removed)]
    assert runs[0] == runs[1] == runs[2]
    assert all(each["place"] is None for each in (*documents(none), *documents(removed)))
    told = [run.trials()[0].metrics["asked_in"] for run in (whole, none, removed)]
    assert told == ["forks", "empty sessions", "forks"]
    (alone,), (cut,), (read,) = (run.trials() for run in (none, removed, whole))
    assert alone.kv.logical < cut.kv.logical < read.kv.logical
    said = kvbench("report", str(out)).stdout
    assert said.count("score, %") == 1  # the floors stand in the table of what they are floors of
    assert "full, without the session" in said
    assert "full, without the evidence" in said
    # The micro model knows its own tasks only.
    assert "full is below 3 times its floor: the task says nothing about this model" in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--engine", "api"], "needs force, which engine 'api' has not"),
        ([], "--set file=PATH.jsonl"),
        (["--set", "file=/nowhere/x.jsonl"], "there is no file /nowhere/x.jsonl"),
        (["--set", "floor=low"], "one of off, none, removed"),
        (["--set", "file={bad}"], "line 2: message 0 has no role"),
        (["--set", "file={twice}"], "the id 's0' comes twice"),
        (["--set", "file={nothing}"], "no session of probe/file yields a question"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    kvbench: Kvbench, tmp_path: Path, more: list[str], said: str
) -> None:
    line = json.dumps(trajectory(0)) + "\n"
    (tmp_path / "bad").write_text(line + '{"messages": [{"content": "a"}]}')
    (tmp_path / "twice").write_text(line * 2)
    (tmp_path / "nothing").write_text('{"messages": [{"role": "user", "content": "Hello."}]}')
    paths = {name: tmp_path / name for name in ("bad", "twice", "nothing")}
    more = [part.format(**paths) for part in more]
    start = ("run", "--task", "probe/file", "--model", "micro", "--method", "full")
    done = kvbench(*start, "--device", "cpu", "--out", str(tmp_path / "runs"), *more)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_capture_is_of_one_session(kvbench: Kvbench, file: Path, tmp_path: Path) -> None:
    asked = ("capture", "--task", "probe/file", "--set", f"file={file}", "--model", "micro")
    done = kvbench(*asked, "--device", "cpu", "--out", str(tmp_path / "capture.npz"))
    assert (done.returncode, "only one is watched" in done.stderr) == (2, True)


def test_a_span_method_is_asked_in_replays(kvbench: Kvbench, file: Path, tmp_path: Path) -> None:
    """What it knows of a session is in no fork; given answers reach its watermark as others do."""
    evoke = ("--method", "evoke", "--budget", "384", "--set", "block=32", "--set", "questions=2")
    run = probe(kvbench, file, tmp_path / "runs", *MICRO, *evoke, "--limit", "1")
    (trial,) = run.trials()
    assert trial.metrics["asked_in"] == "replays"
    assert trial.kv.evicted > 0
    assert trial.kv.peak_live <= 384


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "asked_in"), [("llamacpp", "forks"), ("vllm", "replays"), ("sglang", "replays")]
)
def test_another_engine_answers_as_the_embedded_one(
    kvbench: Kvbench, file: Path, tmp_path: Path, engine: str, asked_in: str
) -> None:
    """Questions behind sessions whose answers are given, with events while they are read."""
    try:
        python_of(engine)
    except PrerequisiteError as error:
        pytest.skip(str(error))
    method = ("--method", "agentkv", "--budget", "96", "--set", "interval=24")
    ours = probe(kvbench, file, tmp_path / engine, "--engine", engine, "--model", "micro", *method)
    theirs = probe(kvbench, file, tmp_path / "embedded", *MICRO, *method)
    assert {trial.metrics["asked_in"] for trial in ours.trials()} == {asked_in}
    assert all(trial.kv.events for trial in ours.trials())
    assert documents(ours) == documents(theirs)
    if asked_in == "forks":
        assert accounts(ours) == accounts(theirs)


def accounts(run: RunReader) -> list[tuple[str, int, int, int]]:
    return sorted(
        (trial.sample_id, trial.kv.logical, trial.kv.peak_live, trial.kv.evicted)
        for trial in run.trials()
    )
