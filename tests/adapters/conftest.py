"""Agents whose calls are hostile, through the command line, and a server that says what it must."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.agent_client import call_text, think_block
from agentbench_kv.adapters.worker import Limits
from agentbench_kv.adapters.worker_task import WorkerTask
from agentbench_kv.cli import kvbench
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.store import RunStore

CALL_CPU_S = 2


@dataclass(frozen=True)
class Played:
    """What `kvbench run` left."""

    attempts: dict[str, list[TrialRecord]]  # by sample
    shown: str
    summary: dict[str, Any]


@pytest.fixture
def bombed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Played]:
    """Return a function that runs `kvbench run` on a task with gold agents.

    `bombs[sample]` is said before what gold says: texts, or calls as (name, arguments).
    """
    limits = Limits(call_cpu_s=CALL_CPU_S, address_space=2 << 30)
    monkeypatch.setattr(WorkerTask, "_limits", lambda _: limits)

    def run(task: type[WorkerTask], bombs: dict[str, list[Any]], *options: str) -> Played:
        def script(self: WorkerTask, sample: Any, agent: Any, gold: Any = task.script) -> list[str]:
            said = [
                each if isinstance(each, str) else think_block("Boom.") + call_text(*each)
                for each in bombs.get(sample.id, [])
            ]
            return [*said, *gold(self, sample, agent)]

        out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        fixed = ["--engine", "scripted", "--model", "gold", "--method", "full", "--out", str(out)]
        with monkeypatch.context() as patch:
            patch.setattr(task, "script", script)
            command = ["run", "--task", task.name, *fixed, "--concurrency", "16", *options]
            assert not kvbench.main(command, standalone_mode=False)
        shown = capsys.readouterr().out
        (folder,) = (each for each in out.iterdir() if each.is_dir())
        records: dict[str, list[TrialRecord]] = {}
        for record in RunStore(out).find(folder.name).trial_lines().records:
            records.setdefault(record.sample_id, []).append(record)
        summary = json.loads((folder / "summary.json").read_text())
        return Played(records, shown, summary)

    return run


class ChatServer:
    """Answers every chat request with what `answer(body)` returns: (status, JSON or bytes).

    `say(content, calls)` makes the JSON of a chat completion.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answer: Callable[[dict[str, Any]], tuple[int, Any]] = lambda _: (200, say("Hello."))
        self.say = say
        self.retry_after = "0.05"
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(chats) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "made-model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                chats.bodies.append(body)
                chats.headers.append(dict(self.headers))
                self._send(*chats.answer(body))

            def _send(self, status: int, content: Any) -> None:
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.send_header("Retry-After", chats.retry_after)
                self.end_headers()
                self.wfile.write(raw)

        return Handler


def say(content: str | None, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the body of a chat completion."""
    message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "made-model",
            "choices": [choice], "usage": usage}  # fmt: skip


@pytest.fixture
def chats() -> Iterator[ChatServer]:
    """Run a chat server for the test."""
    server = ChatServer()
    yield server
    server.close()
