"""Does Mem0 work here with no network? What `kvbench env create|check mem0` runs inside it.

A server on this machine plays language model and encoder. A memory is added and found again, and
connections to anywhere else are refused, so neither a hosted service nor telemetry can take part.
"""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FACTS = ("Caroline went to a support group on 7 May 2023", "Melanie painted a sunrise in 2022")
QUESTION = "When did Caroline go to the support group?"
SIZE = 256
_HERE = (None, "127.0.0.1", "::1", "localhost")


def embed(text: str) -> list[float]:
    """Return a hash embedding of length `SIZE`: how often each word's place is hit."""
    vector = [0.0] * SIZE
    for word in re.findall(r"\w+", text.lower()):
        vector[zlib.crc32(word.encode()) % SIZE] += 1.0
    return vector


def complete(body: dict[str, Any]) -> dict[str, Any]:
    """Return a chat completion that extracts the facts from any conversation."""
    memory = [{"id": str(i), "text": fact, "event": "ADD"} for i, fact in enumerate(FACTS)]
    message = {"role": "assistant", "content": json.dumps({"memory": memory})}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"],
            "choices": [choice]}  # fmt: skip


def encode(body: dict[str, Any]) -> dict[str, Any]:
    texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
    rows = [{"object": "embedding", "index": i, "embedding": embed(t)} for i, t in enumerate(texts)]
    return {"object": "list", "model": body["model"], "data": rows,
            "usage": {"prompt_tokens": 0, "total_tokens": 0}}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """The two routes that Mem0 asks."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = (encode if self.path.endswith("/embeddings") else complete)(body)
        raw = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def stay_here() -> list[str]:
    """Refuse to look up or reach other machines; return the list that their names will be in."""
    tried: list[str] = []
    look_up, connect = socket.getaddrinfo, socket.socket.connect

    def check(host: object) -> None:
        if host not in _HERE:
            tried.append(str(host))
            raise OSError(f"{host} is not this machine")

    def guarded_look_up(host: Any, *more: Any, **options: Any) -> Any:
        check(host)
        return look_up(host, *more, **options)

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple):
            check(address[0])
        connect(self, address)

    socket.getaddrinfo = guarded_look_up
    socket.socket.connect = guarded_connect  # type: ignore[assignment, method-assign]
    return tried


def settings(url: str, folder: str) -> dict[str, Any]:
    """Return a configuration of Mem0 in which everything is local."""
    server = {"openai_base_url": url, "api_key": "none"}
    encoder = {"model": "hash", "embedding_dims": SIZE}
    store = {"path": f"{folder}/store", "embedding_model_dims": SIZE}
    return {
        "llm": {"provider": "openai", "config": {"model": "scripted", **server}},
        "embedder": {"provider": "openai", "config": {**encoder, **server}},
        "vector_store": {"provider": "qdrant", "config": store},
        "history_db_path": f"{folder}/history.db",
    }


def probe(url: str, folder: str) -> None:
    """Add a conversation and look one of its facts up."""
    # Read when it is imported.
    os.environ.update(MEM0_TELEMETRY="False", MEM0_DIR=folder)
    from mem0 import Memory

    memory = Memory.from_config(settings(url, folder))
    said = [{"role": "user", "content": "Caroline: I went to a support group yesterday."}]
    added = memory.add(said, user_id="caroline")["results"]
    if len(added) != len(FACTS):
        raise SystemExit(f"Mem0 kept {len(added)} of {len(FACTS)} facts")
    found = memory.search(QUESTION, filters={"user_id": "caroline"}, top_k=1)["results"]
    if [each["memory"] for each in found] != [FACTS[0]]:
        raise SystemExit(f"Mem0 found {found} for {QUESTION!r}")


def main() -> None:
    tried = stay_here()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        probe(f"http://127.0.0.1:{server.server_address[1]}/v1", folder)
    server.shutdown()
    if tried:
        raise SystemExit(f"Mem0 asked for {', '.join(sorted(set(tried)))}, but must work offline")


if __name__ == "__main__":
    main()
