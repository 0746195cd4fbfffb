"""MemArt on llama.cpp: the embedded engine's answers, in a small cache too, and what goes wrong."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.base import PastSession
from agentbench_kv.engines.base import Engine, EngineOptions, KVStats, Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.llamacpp.engine import LlamaCppEngine
from agentbench_kv.errors import ContextLimitError, KVBenchError, MemoryLostError, UsageError
from agentbench_kv.gateway.client import InProcessClient
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.run.engines import EngineShelf
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SETTINGS = {"topk": "6", "block": "8"}
Build = Callable[..., Any]


@pytest.fixture
def build(llamacpp_python: Path) -> Iterator[Build]:  # noqa: ARG001
    made: list[Engine] = []

    def start(kind: type[Any], sets: str, **options: Any) -> Engine:
        method = make_method("memart", None, {**SETTINGS, "sets": sets})
        made.append(kind.create(EngineOptions(model="micro", method=method, **options)))
        return made[-1]

    yield start
    for engine in made:
        engine.shutdown()


def words(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 600) for _ in range(count)]


def turn(engine: Engine, name: str, prompt: list[int], tokens: int) -> list[int]:
    labels = TokenPhases()
    engine.extend(name, prompt, [labels.label(token) for token in prompt])
    return list(engine.generate(name, Sampling(max_tokens=tokens)))


def remember(engine: Engine, bank: str, seed: int = 0) -> None:
    for number, length in enumerate((75, 130)):
        name = f"{bank} {number}"
        engine.open(name, TokenPhases())
        turn(engine, name, words(length, seed + number), 1)
        engine.memorise(name, bank, length)
        engine.close(name)


def begin(engine: Engine, name: str, bank: str) -> None:
    engine.open(name, TokenPhases())
    engine.attach(name, bank)


@pytest.mark.parametrize("sets", ["shared", "layer"])
def test_sessions_that_are_parked_between_their_turns(sets: str, build: Build) -> None:
    """Six sessions of some 350 rows, in turns, in a cache of 1,024: each as in a large one."""
    found: list[list[tuple[list[list[int]], Any, KVStats]]] = []
    for kind, options in (
        (LlamaCppEngine, {"engine_args": {"cells": "1024"}}),
        (EmbeddedEngine, {}),
    ):
        engine = build(kind, sets, concurrency=2, **options)
        remember(engine, "bank")
        names = [f"s{number}" for number in range(6)]
        said: dict[str, list[list[int]]] = {name: [] for name in names}
        for name in names:
            begin(engine, name, "bank")
        for step, length in enumerate((200, 40)):
            for number, name in enumerate(names):
                said[name].append(turn(engine, name, words(length, 10 * number + step), 20))
        if kind is LlamaCppEngine:
            assert engine.pool()["parkings"] > 0
        rows = [engine.recalled(name).tolist() for name in names]
        found.append([(said[n], r, engine.close(n)) for n, r in zip(names, rows, strict=True)])
        if kind is LlamaCppEngine:
            pool = engine.pool()
            assert pool["free_blocks"] == pool["total_blocks"]
    for ours, theirs in zip(*found, strict=True):
        assert ours[:2] == theirs[:2]
        for name in ("restored", "prefill_tokens", "recomputed", "live", "peak_live", "bytes_read"):
            assert getattr(ours[2], name) == getattr(theirs[2], name), name


@pytest.mark.parametrize("sets", ["shared", "layer"])
def test_a_prompt_that_is_cancelled_while_it_is_read(sets: str, build: Build) -> None:
    engine, alone = build(LlamaCppEngine, sets), build(EmbeddedEngine, sets)
    for each in (engine, alone):
        remember(each, "bank")
        begin(each, "s", "bank")
        turn(each, "s", words(30, 5), 4)
    prompt = words(900, 6)
    engine.extend("s", prompt, [TokenPhases().label(token) for token in prompt])
    generation = engine.generate("s", Sampling(max_tokens=5))
    generation.cancel()
    assert list(generation) == []
    more = words(10, 7)
    assert turn(engine, "s", more, 12) == turn(alone, "s", [*prompt, *more], 12)
    assert engine.recalled("s").tolist() == alone.recalled("s").tolist()


def test_a_rewound_session_goes_on_behind_its_memory(build: Build) -> None:
    answers = []
    for kind in (LlamaCppEngine, EmbeddedEngine):
        engine = build(kind, "shared")
        remember(engine, "bank")
        begin(engine, "s", "bank")
        first = turn(engine, "s", words(40, 5), 9)
        turn(engine, "s", words(20, 6), 9)
        engine.rewind("s", 45)
        answers.append((first, turn(engine, "s", words(15, 8), 12), engine.stats("s").live))
        engine.rewind("s", 0)
        answers[-1] += (turn(engine, "s", words(11, 9), 12),)
    assert answers[0] == answers[1]


def test_a_fork_that_nothing_was_read_in(build: Build) -> None:
    engine = build(LlamaCppEngine, "layer")
    remember(engine, "bank")
    begin(engine, "s", "bank")
    engine.fork("s", "twin", TokenPhases())
    assert turn(engine, "s", words(20, 3), 8) == turn(engine, "twin", words(20, 3), 8)
    assert engine.stats("twin").restored == 48


def test_what_users_get_wrong_is_said(build: Build) -> None:
    engine = build(LlamaCppEngine, "shared")
    engine.open("s", TokenPhases())
    with pytest.raises(KeyError):
        engine.attach("s", "nothing")
    remember(engine, "bank")
    turn(engine, "s", words(20, 1), 1)
    with pytest.raises(UsageError, match="has begun"):
        engine.attach("s", "bank")
    with pytest.raises(UsageError, match="has seen 20 tokens, not 21"):
        engine.memorise("s", "bank", 21)
    begin(engine, "long", "bank")
    room = engine.info.context_limit - 48
    with pytest.raises(ContextLimitError):
        engine.extend("long", words(room, 2), [TokenPhases().label(9)] * room)
    engine.forget("bank")
    with pytest.raises(KeyError):
        engine.attach("s", "bank")
    engine.forget("bank")
    assert len(turn(engine, "long", words(10, 2), 3)) == 3  # it keeps what it is attached to


def test_a_method_without_a_memory_is_refused(llamacpp_python: Path) -> None:  # noqa: ARG001
    engine = LlamaCppEngine.create(EngineOptions("micro", make_method("full", None)))
    engine.open("s", TokenPhases())
    with pytest.raises(UsageError, match="has no memory"):
        engine.memorise("s", "bank")
    engine.shutdown()


def test_a_memory_that_went_with_the_backend(build: Build) -> None:
    """Nobody can tell the past again but the trial, which is played again."""
    engine = build(LlamaCppEngine, "shared")
    remember(engine, "bank")
    begin(engine, "s", "bank")
    turn(engine, "s", words(20, 1), 3)
    os.kill(engine.backend_pid, signal.SIGKILL)
    with pytest.raises((KVBenchError, ConnectionError), match="is gone"):
        turn(engine, "s", words(5, 2), 3)
    engine.close("s")
    with pytest.raises(MemoryLostError, match="memory bank bank is gone"):
        begin(engine, "t", "bank")
    engine.forget("bank")
    remember(engine, "bank")
    begin(engine, "u", "bank")
    assert len(turn(engine, "u", words(20, 1), 3)) == 3
    os.kill(engine.backend_pid, signal.SIGKILL)
    engine.forget("bank")  # before anybody has noticed


def test_a_past_from_files_goes_on_in_no_new_backend(build: Build, tmp_path: Path) -> None:
    """What was told before a backend died is in its memory only, however much is in files."""
    engine = build(LlamaCppEngine, "shared", banks=tmp_path)
    pasts = [words(length, length) for length in (75, 130, 60)]
    for number, past in enumerate(pasts):
        engine.open(f"past {number}", TokenPhases())
        turn(engine, f"past {number}", past, 1)
        engine.memorise(f"past {number}", "first", len(past))
        engine.preserve("first", past, 1.0)
    engine.open("s", TokenPhases())
    assert engine.recollect("s", "second", pasts[0]) is not None
    os.kill(engine.backend_pid, signal.SIGKILL)
    for past in pasts[1:]:
        with pytest.raises(MemoryLostError, match="memory bank second is gone"):
            engine.recollect("s", "second", past)
    with pytest.raises(MemoryLostError):
        engine.preserve("second", pasts[0], 1.0)
    assert engine.restarts == 1
    assert all(engine.recollect("s", "third", past) is not None for past in pasts)
    begin(engine, "t", "third")
    assert len(turn(engine, "t", words(20, 1), 3)) == 3


def test_a_trial_whose_backend_died_is_played_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    llamacpp_python: Path,  # noqa: ARG001
) -> None:
    settings, banks = {"topk": "24"}, tmp_path / "banks"
    first = played("llamacpp", settings, tmp_path / "first", banks, limit=1)
    told, remember = [], InProcessClient.remember

    def killed(client: InProcessClient, past: PastSession) -> None:
        remember(client, past)
        told.append(past)
        if len(told) == 4:
            os.kill(client._gateway.engine.backend_pid, signal.SIGKILL)

    monkeypatch.setattr(InProcessClient, "remember", killed)
    assert played("llamacpp", settings, tmp_path / "again", banks, limit=1) == first
    (run,) = (tmp_path / "again").iterdir()
    assert [each.attempts for each in RunReader(run).trials()] == [2]


def played(
    engine: str, settings: dict[str, str], out: Path, banks: Path | None = None, limit: int = 2
) -> list[Any]:
    """Return answers, metrics without times, and accounts of four samples of `micro/memory`."""
    spec = RunSpec(engine, "micro", "memart", None, "micro/memory", limit=limit)
    spec = resolve(replace(spec, dtype="float32", device="cpu"), settings)
    with EngineShelf(banks) as shelf:
        run_one(spec, out, lambda *_: None, shelf)
    found = []
    for record in sorted(RunReader(out / spec.id).trials(), key=lambda each: each.key):
        said = json.loads((out / spec.id / str(record.transcript)).read_text())["generated"]
        metrics = {
            name: value
            for name, value in record.metrics.items()
            if not name.endswith(("_s", "ttft_ms_total")) and "files" not in name
        }
        account = {name: getattr(record.kv, name) for name in ("restored", "prefill_tokens",
                   "recomputed", "peak_live", "logical", "bytes_read")}  # fmt: skip
        found.append((record.key, record.score, said, metrics, account))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"topk": "64", "sets": "shared"},
        {"topk": "40", "sets": "layer", "block": "8"},
        {"topk": "32", "pick": "random"},
    ],
    ids=["shared", "layer", "random"],
)
def test_micro_memory_is_the_embedded_engine_s(
    settings: dict[str, str],
    tmp_path: Path,
    llamacpp_python: Path,  # noqa: ARG001
) -> None:
    theirs = played("embedded", settings, tmp_path / "embedded")
    assert played("llamacpp", settings, tmp_path / "llamacpp") == theirs
    assert all(account["restored"] for *_, account in theirs)


def test_a_past_from_files(tmp_path: Path, llamacpp_python: Path) -> None:  # noqa: ARG001
    settings, banks = {"topk": "24"}, tmp_path / "banks"
    first = played("llamacpp", settings, tmp_path / "first", banks)
    files = sorted(banks.glob("*.safetensors"))
    assert len(files) > 20
    written = [path.stat().st_mtime_ns for path in files]
    assert played("llamacpp", settings, tmp_path / "again", banks) == first
    assert [path.stat().st_mtime_ns for path in files] == written
    assert sorted(banks.glob("*.safetensors")) == files
