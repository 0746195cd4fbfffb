"""An engine that is kept between two runs: when, and that nobody can tell it from a new one."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from agentbench_kv.budget import Budget
from agentbench_kv.engines.base import Capability, Engine, EngineOptions
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.environments import python_of
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.registry import make_method
from agentbench_kv.results.store import RunStore
from agentbench_kv.run import engines
from agentbench_kv.run.engines import EngineShelf
from agentbench_kv.run.runner import run_all
from agentbench_kv.run.spec import RunSpec, grid, unresolved


class Lasting(ScriptedEngine):
    """An engine that can go on with another method, and keeps a diary."""

    capabilities = frozenset({Capability.COMPRESS})
    outlives_runs = True
    diary: list[str]

    @classmethod
    def create(cls, options: EngineOptions) -> Self:
        engine = cls.__new__(cls)
        engine.alive, engine.refuses = True, False
        cls.diary.append(f"start {options.method.label}")
        return engine

    @classmethod
    def check_model(cls, model: str) -> None: ...

    def reconfigure(self, method: Method) -> None:
        if not self.alive:
            raise ConnectionRefusedError("nobody there")
        if self.refuses:
            raise UsageError("1 sessions are open")
        self.diary.append(f"turn to {method.label}")

    def shutdown(self) -> None:
        self.diary.append("stop")


class Plain(Lasting):
    outlives_runs = False


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Lasting.diary = []
    kinds = {"lasting": Lasting, "plain": Plain}
    monkeypatch.setattr(engines, "load_engine", kinds.__getitem__)
    monkeypatch.setattr(engines, "check_arguments", lambda *_: None)
    monkeypatch.setattr(engines, "check_trained", lambda *_: None)
    return Lasting.diary


def options(method: str = "agentkv", budget: int | None = 64, **changes: Any) -> EngineOptions:
    return replace(EngineOptions("micro", make_method(method, budget)), **changes)


def test_a_run_with_another_method_goes_on_with_the_engine(diary: list[str]) -> None:
    with EngineShelf() as shelf:
        with shelf.lend("lasting", options()) as first:
            pass
        with shelf.lend("lasting", options("snapkv", 48)) as second:
            pass
    assert first is second
    assert diary == ["start agentkv", "turn to snapkv", "stop"]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "another"}, {"dtype": "bfloat16"}, {"device": "cpu"}, {"concurrency": 2},
        {"max_live_tokens": 99}, {"context_limit": 99}, {"engine_args": {"a": "b"}},
        {"allow_untested": True}, {"load_format": "dummy"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_whatever_else_differs_needs_a_new_engine_and_the_old_one_ends_first(
    diary: list[str], change: dict[str, Any]
) -> None:
    with EngineShelf() as shelf:
        with shelf.lend("lasting", options()):
            pass
        with shelf.lend("lasting", options(**change)):
            pass
    assert diary == ["start agentkv", "stop", "start agentkv", "stop"]


def test_another_engine_ends_the_one_that_was_kept(diary: list[str]) -> None:
    with EngineShelf() as shelf:
        for name in ("lasting", "plain", "plain"):
            with shelf.lend(name, options()):
                pass
    assert diary == ["start agentkv", "stop"] * 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, KVBenchError])
def test_the_engine_of_a_run_that_failed_is_not_kept(
    diary: list[str], error: type[BaseException]
) -> None:
    with EngineShelf() as shelf:
        with pytest.raises(error), shelf.lend("lasting", options()):
            raise error
        assert diary == ["start agentkv", "stop"]
        with shelf.lend("lasting", options()):
            pass
    assert diary == ["start agentkv", "stop"] * 2


@pytest.mark.parametrize("what", ["alive", "refuses"])
def test_an_engine_that_died_or_holds_a_session_is_replaced(diary: list[str], what: str) -> None:
    with EngineShelf() as shelf:
        with shelf.lend("lasting", options()) as engine:
            pass
        setattr(engine, what, not getattr(engine, what))
        with shelf.lend("lasting", options("h2o")) as second:
            pass
    assert second is not engine
    assert diary == ["start agentkv", "stop", "start h2o", "stop"]


def test_a_method_that_cannot_run_is_refused_as_by_a_new_engine(diary: list[str]) -> None:
    with EngineShelf() as shelf:
        with shelf.lend("lasting", options()):
            pass
        with (
            pytest.raises(UsageError, match="has no"),
            shelf.lend("lasting", options("evoke", 512)),
        ):
            pass
    assert diary == ["start agentkv", "stop"]


def test_an_engine_that_says_nothing_of_it_is_never_reconfigured() -> None:
    assert not Engine.outlives_runs
    with pytest.raises(UsageError, match="needs a new start"):
        Engine.reconfigure(_named("mine"), make_method("full", None))


def _named(name: str) -> Any:
    return type("Named", (), {"info": type("Info", (), {"name": name})})()


POINTS = [("agentkv", "128"), ("snapkv", "96"), ("streamingllm@paper", "128"), ("full", None)]


@pytest.mark.engine
@pytest.mark.parametrize("engine", ["llamacpp", "vllm", "sglang"])
def test_runs_on_one_server_are_those_of_a_server_each(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens and accounts, and as few starts as there can be; one server dies between."""
    try:
        python_of(engine)
    except PrerequisiteError as error:
        pytest.skip(str(error))
    specs = [spec for point in POINTS for spec in specs_of(engine, *point)]
    alone = [run_all([spec], tmp_path / "alone", quiet) and spec.id for spec in specs]
    started = count_starts(monkeypatch)
    run_all(specs, tmp_path / "together", quiet)
    assert len(started) == (1 if engine == "llamacpp" else 2)  # `full` is a server as shipped
    killed = kill_between(monkeypatch)
    run_all(specs[:3], tmp_path / "killed", quiet)
    assert len(killed) == 2
    for run in alone:
        expected = accounts(tmp_path / "alone", run)
        assert accounts(tmp_path / "together", run) == expected
        assert run == alone[-1] or accounts(tmp_path / "killed", run) == expected


def specs_of(engine: str, method: str, budget: str | None) -> list[RunSpec]:
    base = unresolved(engine=engine, limit=2, concurrency=1, max_live_tokens=4096)
    return grid(base, [method], [budget and Budget.parse(budget)], ["micro/recall-1k"], [0], {})


def count_starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    started, start = [], engines.start_engine

    def counted(name: str, options: EngineOptions, observer: Any = None) -> Engine:
        started.append(options.method.label)
        return start(name, options, observer)

    monkeypatch.setattr(engines, "start_engine", counted)
    return started


def kill_between(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    killed, taken = [], EngineShelf._taken

    def dying(shelf: EngineShelf, name: str, options: EngineOptions) -> Engine | None:
        if shelf._kept is not None:
            pid = shelf._kept.engine.backend_pid
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        return taken(shelf, name, options)

    monkeypatch.setattr(EngineShelf, "_taken", dying)
    return killed


def quiet(*_: object) -> None: ...


def accounts(out: Path, run: str) -> dict[str, Any]:
    """What must not depend on how long the server has run: all but times."""
    records = {record.sample_id: record for record in RunStore(out).find(run).trials()}
    return {
        name: (record.status, record.score, record.kv, record.usage, record.transcript)
        for name, record in records.items()
    }
