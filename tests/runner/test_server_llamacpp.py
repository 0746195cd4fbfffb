"""EVOKE on llama.cpp behind `kvbench serve`: the openai SDK, twenty turns with tools."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from agentbench_kv.adapters.micro.environment import Environment
from agentbench_kv.adapters.micro.generate import generate
from agentbench_kv.adapters.micro.profiles import Profile
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BUDGET = 1024
LONG = Profile("long", (2, 2), (2, 2), (15, 15), (2, 4), (2, 3), (1, 4), (0, 2), (8, 12))


@contextmanager
def served() -> Iterator[openai.OpenAI]:
    """A server started from the command line, as a user would."""
    command = [sys.executable, "-c", "from agentbench_kv.cli import main; main()", "serve"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--engine", "llamacpp", "--method", "evoke", "--budget", str(BUDGET)]
    with subprocess.Popen(
        [*command, *options, "--set", "encoder=hash", "--port", str(port)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert any(f":{port}" in line for line in process.stdout or ())
            url = f"http://127.0.0.1:{port}/v1"
            # The address is printed a moment before somebody listens on it.
            with openai.OpenAI(base_url=url, api_key="none", max_retries=5) as client:
                yield client
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


def hold(client: openai.OpenAI, seed: int) -> list[dict[str, Any]]:
    """Hold one session; return the account of every request."""
    environment = Environment(generate(seed, LONG))
    messages: list[Any] = [{"role": "system", "content": environment.episode.system}]
    accounts: list[dict[str, Any]] = []
    users = 0
    while not environment.done:
        users += 1
        messages.append({"role": "user", "content": environment.request})
        over = False
        while not over:
            answer = client.chat.completions.create(
                model="micro",
                messages=messages,
                tools=environment.episode.tools,
                max_tokens=128,
                extra_headers={"X-KVBench-Session": "s"},
            )
            message = answer.choices[0].message
            accounts.append(answer.usage.model_extra["kvbench"])
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                over = environment.reply(message.content or "").turn_over
                continue
            call = message.tool_calls[0]
            seen = environment.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": seen.text})
            over = seen.turn_over
    assert users == 20
    return accounts


def test_twenty_turns_with_tools_stay_within_the_budget() -> None:
    try:
        python_of("llamacpp")
    except PrerequisiteError as error:
        pytest.skip(str(error))
    with served() as client:
        accounts = hold(client, 3)
    last = accounts[-1]
    assert all(account["resident"] == account["live"] <= BUDGET for account in accounts)
    assert all(account["session_resets"] == 0 for account in accounts)
    assert last["logical"] > BUDGET
    assert last["evicted"] == sum(account["turn_evicted"] for account in accounts) > 0
    assert last["recovered"] == sum(account["turn_recovered"] for account in accounts)
    assert last["recomputed"] == 0
