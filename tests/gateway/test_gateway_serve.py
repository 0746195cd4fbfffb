"""`kvbench serve`: what reaches the engine and the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from agentbench_kv.cli.serve import serve
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.errors import UsageError
from agentbench_kv.registry import make_method


@pytest.fixture
def asked(
    monkeypatch: pytest.MonkeyPatch, engine_of: Callable[..., ScriptedEngine]
) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def start(name: str, options: EngineOptions) -> ScriptedEngine:
        seen.update(name=name, options=options)
        return engine_of("x")

    def run(gateway: Any, host: str, port: int, settings: Any) -> None:
        seen.update(gateway=gateway, host=host, port=port, settings=settings)

    monkeypatch.setattr("agentbench_kv.run.engines.start_engine", start)
    monkeypatch.setattr("agentbench_kv.gateway.http.run_server", run)
    return seen


def test_options_and_their_variables(asked: dict[str, Any]) -> None:
    arguments = ["--method", "agentkv", "--budget", "64", "--set", "interval=8", "--port", "9"]
    variables = {"KVBENCH_API_KEY": "k", "KVBENCH_HOST": "0.0.0.0", "KVBENCH_MAX_SESSIONS": "3"}
    result = CliRunner().invoke(serve, arguments, env=variables, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    options = asked["options"]
    assert (asked["name"], options.model, options.concurrency) == ("embedded", "micro", 16)
    assert options.method == make_method("agentkv", 64, {"interval": 8})
    assert (asked["host"], asked["port"], asked["settings"].api_key) == ("0.0.0.0", 9, "k")
    assert asked["gateway"].max_sessions == 3


def test_sessions_names_and_times(asked: dict[str, Any]) -> None:
    arguments = ["--sessions", "auto", "--concurrency", "3", "--session-idle", "9", "--drain", "2"]
    arguments += ["--allow-host", "gpu7", "--allow-host", "gpu8"]
    CliRunner().invoke(serve, arguments, catch_exceptions=False)
    assert (asked["gateway"].idle_s, asked["settings"].patience.drain_s) == (9.0, 2.0)
    assert asked["settings"].allow_hosts == ("gpu7", "gpu8")
    history = [{"role": "user", "content": "hi"}]
    said = asked["gateway"].chat(None, history).message
    assert asked["gateway"].chat(None, [*history, said, *history]).turn.cached_tokens > 0
    CliRunner().invoke(serve, ["--session-idle", "0"], catch_exceptions=False)
    assert asked["gateway"].idle_s is None
    asked["gateway"].chat(None, history)
    assert asked["gateway"].sessions() == []


def test_an_open_door_is_refused_before_anything_starts(asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="KVBENCH_API_KEY"):
        CliRunner().invoke(serve, ["--host", "0.0.0.0"], catch_exceptions=False)
    assert not asked
