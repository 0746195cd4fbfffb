"""Agent frameworks in their default set-up: URL, key and model's name, nothing else.

Their programs stand in docs/bring-your-agent.md. The server's answers are scripted; what is tested
is that the framework's own requests are understood, and its loop comes to an end.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.engines.base import Generation, Sampling
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.gateway.reports import SessionReport

DOC = Path(__file__).parents[2] / "docs" / "bring-your-agent.md"
BLOCK = re.compile(r"^```python (\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = dict(BLOCK.findall(DOC.read_text()))
FRAMEWORKS = ["agents", "pydantic_ai", "langchain", "smolagents", "inspect_ai"]
# It writes its history anew each time, and forces its calls, which needs a grammar.
REWRITES = "smolagents"


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def thought(text: str) -> str:
    return f"<think>\nI must look.\n</think>\n\n{text}"


TEXTS = {
    REWRITES: [
        thought(call("look_up", item="lamp")),
        call("final_answer", answer="A lamp costs 12."),
        call("look_up", item="chair"),
        call("final_answer", answer="A chair costs 12."),
    ]
}
TALK = [
    thought(call("look_up", item="lamp")),
    "A lamp costs 12.",
    thought(call("look_up", item="chair")),
    "A chair costs 12.",
]


class ByTurn(ScriptedEngine):
    """Says the text that is due after as many answers as the prompt holds, whatever the session."""

    def generate(self, session: str, sampling: Sampling) -> Generation:
        text = self._tokenizer.decode(self.token_log(session))
        self._turns[session] = text.count("<|im_start|>assistant") - 1
        return super().generate(session, sampling)


def play(name: str, folder: Path, **limits: Any) -> list[SessionReport]:
    """Run a framework's program against a server; return what its sessions came to."""
    reports: list[SessionReport] = []
    path = Path(str(files("agentbench_kv.models"))) / "micro"
    engine = ByTurn(lambda _: TEXTS.get(name, TALK), tokenizer_path=path)
    gateway = Gateway(engine, on_close=reports.append, **limits)
    program = folder / "agent.py"
    program.write_text(f"{BLOCKS['tool']}\n{BLOCKS[name]}\nprint('answer:', answer)\n")
    with BackgroundServer(gateway) as server:
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": server.url,
            "OPENAI_API_KEY": "unused",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "MODEL": "gold",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(program)], cwd=folder,
            env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "answer: A chair costs 12."
        for session in gateway.sessions():
            gateway.close_report(session)
    return reports


def needs(name: str) -> None:
    for package in (name, "llguidance") if name == REWRITES else (name,):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_chat_with_tools_in_one_session(name: str, tmp_path: Path) -> None:
    needs(name)
    reports = play(name, tmp_path, conversations=16)
    turns = [turn for report in reports for turn in report.turns]
    assert [turn.finish_reason for turn in turns].count("tool_calls") >= 2
    if name != REWRITES:
        (report,) = reports
        assert len(report.turns) == 4
        assert report.resets == 0
        assert all(turn.cached_tokens > 0 for turn in report.turns[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_same_chat_where_sessions_go_by_their_header(name: str, tmp_path: Path) -> None:
    needs(name)
    assert sum(len(report.turns) for report in play(name, tmp_path)) == 4


def test_the_page_shows_each_framework() -> None:
    assert set(FRAMEWORKS) <= set(BLOCKS)
    settings: Callable[[str], list[str]] = re.compile(
        r"header|session|tool_choice|use_resp"
    ).findall
    assert not any(settings(BLOCKS[name]) for name in FRAMEWORKS)
