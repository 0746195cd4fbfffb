"""EVOKE through the server: the openai SDK, twenty turns with tools, a bounded cache."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from agentbench_kv.adapters.micro.episode import Environment
from agentbench_kv.adapters.micro.generate import EpisodeProfile, generate
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.registry import make_method
from agentbench_kv.run.engines import start_engine

BUDGET = 512
LONG = EpisodeProfile("long", (2, 2), (2, 2), (15, 15), (2, 4), (2, 3), (1, 4), (0, 2), (8, 12))


@contextmanager
def served(engine: str = "embedded", **settings: Any) -> Iterator[openai.OpenAI]:
    settings = {"block": 32, "encoder": "hash", **settings}
    built = start_engine(engine, EngineOptions("micro", make_method("evoke", BUDGET, settings)))
    try:
        with (
            BackgroundServer(Gateway(built)) as server,
            openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
        ):
            yield client
    finally:
        built.shutdown()


@contextmanager
def served_from_the_command_line(*options: str) -> Iterator[openai.OpenAI]:
    """A server as a user starts it."""
    command = [sys.executable, "-c", "from agentbench_kv.cli import main; main()", "serve"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(
        [*command, *options, "--port", str(port)],
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


def ask(client: openai.OpenAI, session: str, **request: Any) -> tuple[Any, dict[str, Any]]:
    """Return the message and the account of one request."""
    answer = client.chat.completions.create(
        model="micro", max_tokens=128, extra_headers={"X-KVBench-Session": session}, **request
    )
    return answer.choices[0].message, answer.usage.model_extra["kvbench"]


def hold(client: openai.OpenAI, seed: int, session: str = "s") -> list[dict[str, Any]]:
    """Hold one session of twenty user turns; return the account of every request."""
    environment = Environment(generate(seed, LONG))
    messages: list[dict[str, Any]] = [{"role": "system", "content": environment.episode.system}]
    accounts, users = [], 0
    while not environment.done:
        users += 1
        messages.append({"role": "user", "content": environment.request})
        over = False
        while not over:
            message, account = ask(
                client, session, messages=messages, tools=environment.episode.tools
            )
            accounts.append(account)
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


@pytest.mark.parametrize("recovery", ["kv_restore", "discard", "breadcrumb"])
def test_twenty_turns_with_tools_stay_within_the_budget(recovery: str) -> None:
    with served(recovery=recovery) as client:
        check(hold(client, 3), recovery)


@pytest.fixture
def llamacpp() -> str:
    try:
        python_of("llamacpp")
    except PrerequisiteError as error:
        pytest.skip(str(error))
    return "llamacpp"


@pytest.mark.engine
def test_the_same_on_llamacpp(llamacpp: str) -> None:
    with served(llamacpp) as client:
        check(hold(client, 3), "kv_restore")


@pytest.mark.engine
@pytest.mark.slow
def test_the_same_from_the_command_line(llamacpp: str) -> None:
    options = f"--engine {llamacpp} --method evoke --budget {2 * BUDGET} --set encoder=hash"
    with served_from_the_command_line(*options.split()) as client:
        accounts = hold(client, 3)
    check(accounts, "kv_restore", 2 * BUDGET)
    assert accounts[-1]["recomputed"] == 0


def check(accounts: list[dict[str, Any]], recovery: str, budget: int = BUDGET) -> None:
    last = accounts[-1]
    assert all(account["resident"] == account["live"] <= budget for account in accounts)
    assert all(account["session_resets"] == 0 for account in accounts)
    assert last["logical"] > 3 * BUDGET
    assert last["peak_live"] <= budget
    assert last["evicted"] == sum(account["turn_evicted"] for account in accounts) > 0
    assert last["recovered"] == sum(account["turn_recovered"] for account in accounts)
    assert (last["recovered"] > 0) == (recovery == "kv_restore")
    assert (last["spans"]["breadcrumbs"] > 0) == (recovery == "breadcrumb")
    # The newest token is known but not fed.
    assert last["live"] == last["logical"] - 1 - last["evicted"] + last["recovered"]


def test_pinned_blocks_stay_and_too_many_are_refused() -> None:
    with served(topk=0) as client:
        history: list[Any] = [{"role": "user", "content": 'Please read "peg".'}]
        message, account = ask(client, "s", messages=history, extra_body={"evoke_pinned": True})
        pinned = account["logical"]
        assert account["evicted"] == 0
        history += [message, {"role": "user", "content": 'Please read "bib".' * 120}]
        with pytest.raises(openai.BadRequestError, match="pin less"):
            ask(client, "s", messages=history, extra_body={"evoke_pinned": True})
        for _ in range(3):
            message, account = ask(client, "s", messages=history)
            history += [message, {"role": "user", "content": 'Please read "bib".' * 20}]
        assert account["evicted"] > 0
        assert account["session_resets"] == 0
        assert account["live"] >= pinned


def test_sessions_at_once_do_not_mix() -> None:
    with served() as client:
        alone = [hold(client, seed, f"alone-{seed}")[-1] for seed in (5, 6)]
        found: dict[int, dict[str, Any]] = {}
        threads = [
            threading.Thread(
                target=lambda seed=seed: found.update(
                    {seed: hold(client, seed, f"both-{seed}")[-1]}
                )
            )
            for seed in (5, 6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    keys = ("logical", "live", "evicted", "recovered", "peak_live", "turn", "prompt_sha")
    for before, after in zip(alone, (found[5], found[6]), strict=True):
        assert {key: before[key] for key in keys} == {key: after[key] for key in keys}
