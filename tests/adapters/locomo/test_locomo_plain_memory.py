"""Mem0 and graphiti, the real packages, end to end with a model that is scripted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv import environments
from agentbench_kv.adapters.locomo.scoring import find_spec
from agentbench_kv.environments import memory_probe
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.gateway.recall import _TITLE
from agentbench_kv.results.store import RunReader
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


FACTS = ("Ada was in Lima in session 2", "Ben did read books, first of all towns")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    monkeypatch.setattr(memory_probe, "FACTS", FACTS)
    handler = type("Handler", (ScriptedModel,), {"asked": []})
    monkeypatch.setattr(ScriptedModel, "down", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1", handler.asked  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


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
    state = next(each for each in environments.list_environments() if each.name == method)
    if state.state != "ready":
        pytest.skip(f"{method} {state.state}; {state.mend}")
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


@pytest.mark.engine
@pytest.mark.parametrize("method", ["mem0", "graphiti"])
def test_a_server_that_has_no_time_is_not_the_memorys_failure(
    model: tuple[str, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """Else a run without any memory would be scored, its past lost as if the model were weak."""
    state = next(each for each in environments.list_environments() if each.name == method)
    if state.state != "ready":
        pytest.skip(f"{method} {state.state}; {state.mend}")
    monkeypatch.setattr(ScriptedModel, "down", True)
    monkeypatch.setenv("KVBENCH_API_RETRIES", "0")
    spec = RunSpec("api", f"{model[0]}#scripted", method, None, "probe/locomo", limit=1)
    spec = resolve(spec, {"check": "off", "encoder": "hash", "batch": "0"})
    with pytest.raises(PrerequisiteError, match="does not answer: HTTP 429"):
        run_one(spec, tmp_path, lambda *_: None)
    assert not any(trial.score for trial in RunReader(tmp_path / spec.id).trials())
    assert all("response_format" in each for each in model[1])  # no question was asked
