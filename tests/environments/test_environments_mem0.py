"""The probe of the Mem0 environment: it passes where Mem0 works offline, and fails else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentbench_kv import environments
from agentbench_kv.environments.profiles import MEM0_PROBE

# What the probe uses of Mem0, over the same server, without Mem0.
STAND_IN = """
import json, sys, types, urllib.request

class Memory:
    @classmethod
    def from_config(cls, config):
        made = cls()
        made.url = config["llm"]["config"]["openai_base_url"]
        made.facts = []
        return made

    def ask(self, route, body):
        sent = urllib.request.Request(self.url + route, json.dumps(body).encode())
        return json.load(urllib.request.urlopen(sent))

    def embed(self, text):
        return self.ask("/embeddings", {"model": "m", "input": text})["data"][0]["embedding"]

    def add(self, messages, user_id):
        said = self.ask("/chat/completions", {"model": "m", "messages": messages})
        found = json.loads(said["choices"][0]["message"]["content"])["memory"]
        self.facts = [(each["text"], self.embed(each["text"])) for each in found]
        return {"results": found}

    def search(self, text, filters, top_k):
        asked = self.embed(text)
        near = sorted(self.facts, key=lambda f: -sum(a * b for a, b in zip(f[1], asked)))
        return {"results": [{"memory": fact} for fact, _ in near[:top_k]]}

FAULT
sys.modules["mem0"] = types.ModuleType("mem0")
sys.modules["mem0"].Memory = Memory
"""


def probe(fault: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{STAND_IN.replace('FAULT', fault)}\nexec({MEM0_PROBE!r})"
    return subprocess.run((sys.executable, "-I", "-c", code), capture_output=True, text=True)


def test_a_memory_that_works_passes() -> None:
    found = probe()
    assert found.returncode == 0, found.stderr


KEEPS_NOTHING = "Memory.add = lambda *_, **__: {'results': []}"
FINDS_ANOTHER = "Memory.search = lambda *_, **__: {'results': [{'memory': 'no'}]}"
REACHES_OUT = """
import socket
kept = Memory.add
def reaching(self, *given, **named):
    try:
        socket.create_connection(("telemetry.invalid", 443))
    except OSError:
        pass
    return kept(self, *given, **named)
Memory.add = reaching
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (KEEPS_NOTHING, "kept 0 of 2 facts"),
        (FINDS_ANOTHER, "found [{'memory': 'no'}]"),
        (REACHES_OUT, "it asked for telemetry.invalid, but must work offline"),
    ],
    ids=["keeps nothing", "finds another", "reaches out"],
)
def test_faults_are_found(fault: str, said: str) -> None:
    found = probe(fault)
    assert found.returncode == 1
    assert said in found.stderr


@pytest.mark.engine
def test_the_real_one_works_here() -> None:
    status = environments.check("mem0")
    if status.state in ("missing", "outdated", "unfinished"):
        pytest.skip(f"mem0 {status.state}; {status.mend}")
    assert status.state == "ready", status.detail
