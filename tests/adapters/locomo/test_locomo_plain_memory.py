"""Mem0 and graphiti, the real packages, end to end with a model that is scripted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv import environments
from agentbench_kv.adapters.locomo.scoring import find_spec
from agentbench_kv.environments import memory_probe
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.gateway.recall import _TITLE
from agentbench_kv.memories import store
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.store import CHECKPOINTS
from agentbench_kv.results.summary import summarize
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve

pytestmark = [
    pytest.mark.skipif(
        find_spec("nltk") is None, reason="nltk absent: pip install 'agentbench-kv[locomo]'"
    ),
    pytest.mark.usefixtures("folder"),
]
USAGE = {"prompt_tokens": 50, "completion_tokens": 5, "total_tokens": 55}


class ScriptedModel(BaseHTTPRequestHandler):
    """Fills in a package's forms; to a question it says the first memory it is shown."""

    asked: list[dict[str, Any]]
    down = False  # it has no time for a package's forms
    ends: Callable[[str], bool] | None = None  # whether what asks for a form has been ended

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.down and "response_format" in body:
            self.send_error(429)
            return
        self.asked.append(body)
        if self.ends is not None and "response_format" in body and self.ends(str(body)):
            self.close_connection = True
            return
        done = memory_probe.complete(body)
        if "response_format" not in body:
            shown = str(body["messages"][-1]["content"])
            said = shown.splitlines()[1].removeprefix("- ") if shown.startswith(_TITLE) else "no"
            done["choices"][0]["message"]["content"] = said
        self._send({**done, "usage": USAGE})

    def _send(self, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


DAYS = (1, 2, 10)  # of May 2023: the sessions of the made conversations
FACTS = ("Ada was in Lima in session 2", "Ben did read books, first of all towns")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    monkeypatch.setattr(memory_probe, "FACTS", FACTS)
    handler = type("Handler", (ScriptedModel,), {"asked": []})
    monkeypatch.setattr(ScriptedModel, "down", False)
    monkeypatch.setattr(ScriptedModel, "ends", None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1", handler.asked  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


def _texts(forms: list[dict[str, Any]], words: list[str]) -> list[list[str]]:
    """Return, for each of some words, the requests that hold it."""
    said = [json.dumps(each["messages"]) for each in forms]
    return [[text for text in said if word in text] for word in words]


def skip_without(method: str) -> None:
    state = next(each for each in environments.list_environments() if each.name == method)
    if state.state != "ready":
        pytest.skip(f"{method} {state.state}; {state.mend}")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("method", "schemas"),
    [
        ("mem0", {""}),
        ("graphiti", {"ExtractedEntities", "ExtractedEdges"}),
    ],
)
def test_a_conversation_is_told_and_asked_about(
    model: tuple[str, list[dict[str, Any]]], tmp_path: Path, method: str, schemas: set[str]
) -> None:
    skip_without(method)
    url, asked = model
    spec = RunSpec("api", f"{url}#scripted", method, None, "probe/locomo", limit=1)
    settings = {"check": "off", "encoder": "hash", "topk": "3", "batch": "0"}
    spec = resolve(spec, settings)
    run_one(spec, tmp_path, lambda *_: None)
    reader = RunReader(tmp_path / spec.id)
    (trial,) = reader.trials()
    assert trial.status.value == "scored", trial.error
    forms = [each for each in asked if "response_format" in each]
    named = {each["response_format"].get("json_schema", {}).get("name", "") for each in forms}
    assert schemas <= named
    # Each is told when it was said: mem0 takes all for today's otherwise.
    days = [f"{day:02d} May 2023" if method == "mem0" else f"2023-05-{day:02d}" for day in DAYS]
    assert all(_texts(forms, days)), "a session's day is told to nobody"
    # Three past sessions; the model's part in taking them in is counted, apart from the answers.
    assert trial.metrics["ingest_calls"] == len(forms) >= 3
    assert trial.metrics["ingest_tokens"] == 55 * len(forms)
    assert trial.metrics["recalled_texts"] > 0
    assert summarize(reader).validity.state.value != "budget_not_applied"
    answers = reader.transcript(trial)["transcript"]["answers"]
    assert {each["answer"] for each in answers} & {*FACTS}
    assert all("evidence_recalled" in each for each in answers[:4])
    # The questions saw memories and none of the past itself.
    questions = [each for each in asked if "response_format" not in each]
    assert len(questions) == trial.metrics["questions"]
    assert all(len(each["messages"]) == 2 for each in questions)


TELEMETRY = {
    "mem0": "from mem0.memory.telemetry import MEM0_TELEMETRY as on",
    "graphiti": "from graphiti_core.telemetry import telemetry as t; on = t.is_telemetry_enabled()",
}


@pytest.mark.engine
@pytest.mark.parametrize("method", sorted(TELEMETRY))
def test_no_package_tells_its_makers_anything(tmp_path: Path, method: str) -> None:
    skip_without(method)
    said = []
    ours = {name: text.format(scratch=tmp_path) for name, text in store._ENVIRONMENT.items()}
    for environment in ({}, ours):
        run = subprocess.run(
            [environments.python_of(method), "-c", f"{TELEMETRY[method]}; print(on)"],
            env={"HOME": str(tmp_path), "MEM0_DIR": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(run.stdout.split()[-1])
    assert said == ["True", "False"]


@pytest.mark.engine
@pytest.mark.parametrize("method", ["mem0", "graphiti"])
def test_a_server_that_has_no_time_is_not_the_memorys_failure(
    model: tuple[str, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """Else a run without any memory would be scored, its past lost as if the model were weak."""
    skip_without(method)
    monkeypatch.setattr(ScriptedModel, "down", True)
    monkeypatch.setenv("KVBENCH_API_RETRIES", "0")
    spec = RunSpec("api", f"{model[0]}#scripted", method, None, "probe/locomo", limit=1)
    spec = resolve(spec, {"check": "off", "encoder": "hash", "batch": "0"})
    with pytest.raises(PrerequisiteError, match="does not answer: HTTP 429"):
        run_one(spec, tmp_path, lambda *_: None)
    assert not any(trial.score for trial in RunReader(tmp_path / spec.id).trials())
    assert all("response_format" in each for each in model[1])  # no question was asked


def start(url: str, place: Path, method: str) -> subprocess.Popen[str]:
    command = ["run", "--engine", "api", "--model", f"{url}#scripted", "--method", method]
    command += ["--task", "probe/locomo", "--limit", "1", "--quiet", "--json", "--out", str(place)]
    for pair in ("check=off", "encoder=hash", "topk=3", "batch=1"):
        command += ["--set", pair]
    return subprocess.Popen(
        [sys.executable, "-c", "from agentbench_kv.cli import main; main()", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(place.parent)},
    )


def finished(child: subprocess.Popen[str]) -> str:
    _, said = child.communicate(timeout=600)
    assert child.returncode == 0, said
    return said


def result(place: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a run's figures and its answers."""
    (path,) = place.glob("*/run.json")
    assert not (path.parent / CHECKPOINTS).exists()
    reader = RunReader(path.parent)
    (trial,) = reader.trials()
    assert trial.status.value == "scored", trial.error
    return dict(trial.metrics), reader.transcript(trial)["transcript"]["answers"]


def timeless(figures: Any) -> Any:
    """Return figures without times, and without what was gone on from."""
    if isinstance(figures, list):
        return [timeless(each) for each in figures]
    clock = ("_s", "seconds", "ttft_ms_total", "ingest_files")
    return {name: value for name, value in figures.items() if not name.endswith(clock)}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("method", ["mem0", "graphiti"])
def test_a_run_that_was_ended_goes_on_behind_the_last_whole_session(
    model: tuple[str, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """Killed at the second message of the second session, then interrupted in the third."""
    skip_without(method)
    url, asked = model
    finished(start(url, tmp_path / "calm", method))
    wanted, answers = result(tmp_path / "calm")
    assert "ingest_files" not in wanted
    for number, words, code in (
        (signal.SIGKILL, "read 2 books", -9),
        (signal.SIGTERM, "read 10 books", 130),
    ):
        children: list[subprocess.Popen[str]] = []
        begun = threading.Event()

        def ends(form: str) -> bool:
            if words not in form:  # noqa: B023  of this turn of the loop
                return False
            begun.wait()  # noqa: B023
            children[0].send_signal(number)  # noqa: B023
            children[0].wait()  # noqa: B023
            return True

        monkeypatch.setattr(ScriptedModel, "ends", staticmethod(ends))
        children.append(start(url, tmp_path / "stormy", method))
        begun.set()
        _, said = children[0].communicate(timeout=600)
        assert children[0].returncode == code, said
        assert "Traceback" not in said
    monkeypatch.setattr(ScriptedModel, "ends", None)
    asked.clear()
    assert "took in 2 past sessions" in finished(start(url, tmp_path / "stormy", method))
    assert "I was in Oslo" in str(asked[0]), "which the third session begins with"
    found, said_then = result(tmp_path / "stormy")
    assert timeless(found) == timeless(wanted)
    assert timeless(said_then) == timeless(answers)
    assert found["ingest_files"] == 2
    assert found["ingest_s"] > 0
