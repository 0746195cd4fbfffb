"""The probe of the graphiti environment: it passes where graphiti works offline, and fails else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentbench_kv import environments
from agentbench_kv.environments.profiles import GRAPHITI_PROBE

# What the probe uses of graphiti, over the same server, without graphiti.
STAND_IN = """
import json, sys, types, urllib.request

class Given:
    def __init__(self, *given, **named):
        self.given, self.named = given, named

class KuzuDriver(Given):
    provider = "kuzu"
    indexed = False

    async def execute_query(self, query):
        self.indexed = query == "index kuzu"

class Server:
    def __init__(self, config):
        self.config = config

    def ask(self, route, body):
        url = self.config.named["base_url"] + route
        sent = urllib.request.Request(url, json.dumps(body).encode())
        return json.load(urllib.request.urlopen(sent))

class OpenAIGenericClient(Server):
    def form(self, name):
        wanted = {"type": "json_schema", "json_schema": {"name": name}}
        body = {"model": self.config.named["model"], "messages": [], "response_format": wanted}
        said = self.ask("/chat/completions", body)
        return json.loads(said["choices"][0]["message"]["content"])

class OpenAIEmbedder(Server):
    def embed(self, text):
        body = {"model": self.config.named["embedding_model"], "input": [text]}
        return self.ask("/embeddings", body)["data"][0]["embedding"]

class Graphiti:
    def __init__(self, graph_driver, llm_client, embedder, cross_encoder):
        self.driver, self.llm, self.embedder = graph_driver, llm_client, embedder
        self.edges = []

    async def add_episode(self, name, body, description, when):
        if not self.driver.indexed:
            raise RuntimeError("the graph has no index")
        names = [each["name"] for each in self.llm.form("ExtractedEntities")["extracted_entities"]]
        for edge in self.llm.form("ExtractedEdges")["edges"]:
            if {edge["source_entity_name"], edge["target_entity_name"]} <= set(names):
                self.edges.append((edge["fact"], self.embedder.embed(edge["fact"])))

    async def search(self, question, num_results):
        asked = self.embedder.embed(question)
        near = sorted(self.edges, key=lambda e: -sum(a * b for a, b in zip(e[1], asked)))
        return [types.SimpleNamespace(fact=fact) for fact, _ in near[:num_results]]

FAULT
for name, content in {
    "": {"Graphiti": Graphiti},
    "cross_encoder.client": {"CrossEncoderClient": object},
    "driver.kuzu_driver": {"KuzuDriver": KuzuDriver},
    "embedder.openai": {"OpenAIEmbedder": OpenAIEmbedder, "OpenAIEmbedderConfig": Given},
    "graph_queries": {"get_fulltext_indices": lambda provider: [f"index {provider}"]},
    "llm_client.config": {"LLMConfig": Given},
    "llm_client.openai_generic_client": {"OpenAIGenericClient": OpenAIGenericClient},
}.items():
    path = "graphiti_core"
    for part in ["", *name.split(".")]:
        path += f".{part}" if part else ""
        sys.modules.setdefault(path, types.ModuleType(path))
    vars(sys.modules[path]).update(content)
"""


def probe(fault: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{STAND_IN.replace('FAULT', fault)}\nexec({GRAPHITI_PROBE!r})"
    return subprocess.run((sys.executable, "-I", "-c", code), capture_output=True, text=True)


def test_a_graph_that_works_passes() -> None:
    found = probe()
    assert found.returncode == 0, found.stderr


KEEPS_NOTHING = """
async def forget(self, *_):
    pass
Graphiti.add_episode = forget
"""
FINDS_ANOTHER = """
async def another(self, *_, **__):
    return [types.SimpleNamespace(fact="no")]
Graphiti.search = another
"""
NEEDS_ANOTHER_INDEX = 'KuzuDriver.provider = property(lambda self: "neo4j")'
REACHES_OUT = """
import socket
kept = Graphiti.add_episode
async def reaching(self, *given):
    try:
        socket.create_connection(("telemetry.invalid", 443))
    except OSError:
        pass
    await kept(self, *given)
Graphiti.add_episode = reaching
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (KEEPS_NOTHING, "graphiti found [] for 'When did Caroline go to the support group?'"),
        (FINDS_ANOTHER, "graphiti found ['no'] for"),
        (NEEDS_ANOTHER_INDEX, "the graph has no index"),
        (REACHES_OUT, "it asked for telemetry.invalid, but must work offline"),
    ],
    ids=["keeps nothing", "finds another", "needs another index", "reaches out"],
)
def test_faults_are_found(fault: str, said: str) -> None:
    found = probe(fault)
    assert found.returncode == 1
    assert said in found.stderr


@pytest.mark.engine
def test_the_real_one_works_here() -> None:
    status = environments.check("graphiti")
    if status.state in ("missing", "outdated", "unfinished"):
        pytest.skip(f"graphiti {status.state}; {status.mend}")
    assert status.state == "ready", status.detail
