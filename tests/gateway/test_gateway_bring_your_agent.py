"""The agents of docs/bring-your-agent.md, run as they stand there against a real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import BackgroundServer

DOC = Path(__file__).parents[2] / "docs" / "bring-your-agent.md"
BLOCK = re.compile(r"^```python (\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = dict(BLOCK.findall(DOC.read_text()))
AGENTS = ["openai", "litellm", "langchain_openai"]  # the others: test_gateway_frameworks.py


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SAID = [f"<think>\nI must look.\n</think>\n\n{call('look_up', item='lamp')}", "It costs 12."]


@pytest.fixture
def gateway() -> Gateway:
    path = Path(str(files("agentbench_kv.models"))) / "micro"
    return Gateway(ScriptedEngine(lambda _: SAID, tokenizer_path=path))


@pytest.fixture
def server(gateway: Gateway) -> Iterator[BackgroundServer]:
    with BackgroundServer(gateway) as running:
        yield running


@pytest.mark.parametrize("name", AGENTS)
def test_the_agent_plays_an_episode_in_one_session(
    name: str, gateway: Gateway, server: BackgroundServer, tmp_path: Path
) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    program = tmp_path / "agent.py"
    program.write_text(f"{BLOCKS['tool']}\n{BLOCKS[name]}\nprint('answer:', answer)\n")
    done = ran(program, server.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "answer: It costs 12."
    report = only_report(gateway, name)
    assert len(report["turns"]) == 2
    assert report["turns"][1].cached_tokens > 0
    assert report["resets"] == 0


def ran(program: Path, url: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "unused",
        "MODEL": "gold",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(program)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def only_report(gateway: Gateway, name: str) -> dict[str, Any]:
    """Return the turns and resets of the one session there was, open or closed."""
    session = f"{name.replace('langchain_openai', 'langchain')}-episode-1"
    report = gateway.report(session)
    return {"turns": report.turns, "resets": report.resets}


def test_the_page_shows_what_it_promises() -> None:
    assert set(AGENTS) <= set(BLOCKS)
