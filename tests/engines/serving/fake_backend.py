"""A server with vLLM's surface in two processes, which dies as it is told.

`fake_backend.py FOLDER CONTROL` runs the front end on FOLDER/http, and what computes as a child,
which answers on the socket CONTROL unless that is `-`. FOLDER/starts.json is a list with a plan for
every start: `lines` go to the log; with `exit` the start fails. Every generation stops after `HELD`
tokens as long as FOLDER/hold exists. It says to have `cached` so many tokens of each prompt, and
`keeps` its prefix cache so many times before it empties it.
"""

from __future__ import annotations

import json
import os
import signal
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

HELD = 5


def next_token(tokens: list[int]) -> int:
    """What the model says: it depends on all that was before."""
    return (31 * sum(tokens) + len(tokens)) % 97


class Front(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    core: Any
    plan: dict[str, Any]

    def log_message(self, *_: Any) -> None:
        return None

    def do_GET(self) -> None:
        body = b'{"version": "fake"}' if self.path == "/version" else b""
        self._answer(200 if self.core.poll() is None else 503, body)

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/reset_prefix_cache"):
            self._empty()
            return
        request = json.loads(sent)
        status = self.plan.get("status", 200)
        if status != 200 or self.core.poll() is not None:
            self._answer(500 if status == 200 else status, b"EngineCore encountered an issue")
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with (self.folder / "asked").open("a") as file:
            file.write(json.dumps([len(request["prompt"]), request["max_tokens"]]) + "\n")
        asked = request.get("vllm_xargs", {}).get("kvbench_given", "[]")
        self._generate(request["prompt"], request["max_tokens"], json.loads(asked))

    def _empty(self) -> None:
        with (self.folder / "emptied").open("a") as file:
            file.write(f"{self.path}\n")
        tries = len((self.folder / "emptied").read_text().splitlines())
        done = tries > self.plan.get("keeps", 0)
        self._answer(200, json.dumps({"success": done}, separators=(",", ":")).encode())

    def _generate(self, tokens: list[int], count: int, given: list[int]) -> None:
        for number in range(count):
            if number == HELD:
                while (self.folder / "hold").exists() and self.core.poll() is None:
                    time.sleep(0.005)
                self._die_as_planned()
            if self.core.poll() is not None or self.plan.get("fails"):
                self._event({"error": {"message": "EngineCore encountered an issue"}})
                break
            tokens.append(given[number] if given else next_token(tokens))
            self._event({"choices": [{"token_ids": tokens[-1:]}]})
        else:
            details = {"cached_tokens": self.plan.get("cached", 0)}
            self._event({"choices": [], "usage": {"prompt_tokens_details": details}})
            if not self.plan.get("cut"):
                self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _die_as_planned(self) -> None:
        if dies := self.plan.get("dies"):
            print(dies, flush=True)  # noqa: T201
            os.killpg(0, 9)

    def _event(self, document: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Control(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            command = json.loads(line)["command"]
            self.wfile.write(
                json.dumps({"ok": True if command == "ping" else None}).encode() + b"\n"
            )


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


def serve(path: str, handler: Any) -> None:
    Path(path).unlink(missing_ok=True)
    Server(path, handler).serve_forever()


def main() -> None:
    folder, control = Path(sys.argv[1]), sys.argv[2]
    plans = json.loads((folder / "starts.json").read_text())
    with (folder / "started").open("a") as file:
        file.write("x")
    number = len((folder / "started").read_text()) - 1
    plan = plans[min(number, len(plans) - 1)]
    print("\n".join(plan.get("lines", [])), flush=True)  # noqa: T201
    if plan.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "exit" in plan:
        raise SystemExit(plan["exit"])
    Front.folder, Front.plan = folder, plan
    Front.core = subprocess.Popen([sys.executable, __file__, "core", control])
    (folder / "core.pid").write_text(str(Front.core.pid))
    serve(str(folder / "http"), Front)


if __name__ == "__main__":
    if sys.argv[1] != "core":
        main()
    elif sys.argv[2] == "-":
        time.sleep(3600)
    else:
        serve(sys.argv[2], Control)
