"""Does a memory package work here with no network? What `kvbench env create|check NAME` runs.

It runs inside the environment, from its source. A server on this machine plays language model and
encoder. A memory is added and found again, and connections to anywhere else are refused, so neither
a hosted service nor telemetry can take part.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import tempfile
import threading
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
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


def answer(schema: str) -> dict[str, Any]:
    """Return what a model answers by the name of the form that graphiti asks it to fill in.

    Mem0's form has no name: it gets the facts of any conversation.
    """
    entities = [{"name": name, "entity_type_id": 0} for name in ("Caroline", "support group")]
    edge = {
        "source_entity_name": "Caroline",
        "target_entity_name": "support group",
        "relation_type": "WENT_TO",
        "fact": FACTS[0],
    }
    memory = [{"id": str(i), "text": fact, "event": "ADD"} for i, fact in enumerate(FACTS)]
    forms: dict[str, dict[str, Any]] = {
        "": {"memory": memory},
        "ExtractedEntities": {"extracted_entities": entities},
        "NodeResolutions": {"entity_resolutions": []},
        "ExtractedEdges": {"edges": [edge]},
        "EdgeDuplicate": {"duplicate_facts": [], "contradicted_facts": []},
        "SummarizedEntities": {"summaries": []},
    }
    return forms.get(schema, {})


def complete(body: dict[str, Any], form: str | None = None) -> dict[str, Any]:
    """Return a chat completion, which says `form` if that is given."""
    schema = body.get("response_format", {}).get("json_schema", {}).get("name", "")
    message = {"role": "assistant", "content": form or json.dumps(answer(schema))}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"],
            "choices": [choice]}  # fmt: skip


def encode(body: dict[str, Any]) -> dict[str, Any]:
    texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
    rows = [{"object": "embedding", "index": i, "embedding": embed(t)} for i, t in enumerate(texts)]
    return {"object": "list", "model": body["model"], "data": rows,
            "usage": {"prompt_tokens": 0, "total_tokens": 0}}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """The two routes that are asked; `form` is what every form is filled in with, if it is set."""

    form: str | None = None

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        embeds = self.path.endswith("/embeddings")
        found = encode(body) if embeds else complete(body, self.form)
        raw = json.dumps(found).encode()
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


def probe_mem0(url: str, folder: str) -> None:
    """Add a conversation and look one of its facts up."""
    from mem0 import Memory

    memory = Memory.from_config(settings(url, folder))
    said = [{"role": "user", "content": "Caroline: I went to a support group yesterday."}]
    added = memory.add(said, user_id="caroline")["results"]
    if len(added) != len(FACTS):
        raise SystemExit(f"Mem0 kept {len(added)} of {len(FACTS)} facts")
    found = memory.search(QUESTION, filters={"user_id": "caroline"}, top_k=1)["results"]
    if [each["memory"] for each in found] != [FACTS[0]]:
        raise SystemExit(f"Mem0 found {found} for {QUESTION!r}")


async def add_episode(url: str, folder: str) -> list[str]:
    """Add an episode to a new graph; return the facts that a question finds."""
    from graphiti_core import Graphiti
    from graphiti_core.cross_encoder.client import CrossEncoderClient
    from graphiti_core.driver.kuzu_driver import KuzuDriver
    from graphiti_core.embedder.openai import OpenAIEmbedder, OpenAIEmbedderConfig
    from graphiti_core.graph_queries import get_fulltext_indices
    from graphiti_core.llm_client.config import LLMConfig
    from graphiti_core.llm_client.openai_generic_client import OpenAIGenericClient

    class NoReranker(CrossEncoderClient):  # type: ignore[misc]
        async def rank(self, query: str, passages: list[str]) -> list[tuple[str, float]]:
            raise NotImplementedError

    driver = KuzuDriver(f"{folder}/graph")
    for query in get_fulltext_indices(driver.provider):
        await driver.execute_query(query)
    server = {"base_url": url, "api_key": "none"}
    graph = Graphiti(
        graph_driver=driver,
        llm_client=OpenAIGenericClient(LLMConfig(model="scripted", **server)),
        embedder=OpenAIEmbedder(OpenAIEmbedderConfig(embedding_model="hash", **server)),
        cross_encoder=NoReranker(),
    )
    when = datetime(2023, 5, 8, tzinfo=UTC)
    said = "Caroline: I went to a support group yesterday."
    await graph.add_episode("1", said, "conversation", when)
    found = await graph.search(QUESTION, num_results=1)
    return [edge.fact for edge in found]


def probe_graphiti(url: str, folder: str) -> None:
    found = asyncio.run(add_episode(url, folder))
    if found != [FACTS[0]]:
        raise SystemExit(f"graphiti found {found} for {QUESTION!r}")


def main(probe: Callable[[str, str], None]) -> None:
    tried = stay_here()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        # Read when the packages are imported.
        os.environ.update(MEM0_TELEMETRY="False", MEM0_DIR=folder, HOME=folder)
        os.environ["GRAPHITI_TELEMETRY_ENABLED"] = "false"
        probe(f"http://127.0.0.1:{server.server_address[1]}/v1", folder)
    server.shutdown()
    if tried:
        names = ", ".join(sorted(set(tried)))
        raise SystemExit(f"it asked for {names}, but must work offline")
