"""A backend that dies, as a whole or in part: noticed, started again with a bound, and counted."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agentbench_kv.engines.base import FinishReason, Sampling
from agentbench_kv.engines.core.ledger import SessionLedger
from agentbench_kv.engines.serving import backend
from agentbench_kv.engines.serving.backend import RESTARTS
from agentbench_kv.engines.serving.session import ServingSession
from agentbench_kv.engines.serving.transport import RequestError
from agentbench_kv.errors import EngineGoneError, KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.methods.full import Full
from agentbench_kv.phases import TokenPhases

sys.path.insert(0, str(Path(__file__).parent))

import fake_backend
import fake_engine
from fake_engine import PROMPT, Build, expected, extend, folder_of, kill, starts, turn


def test_tokens_of_a_dead_backend_are_counted_as_it_would_have() -> None:
    """Its last account may be of any moment, but for the rows that an event evicted since."""
    undisturbed = SessionLedger(Full(), 1)
    session = ServingSession("s", TokenPhases())
    session.epoch, fed = 1, 0
    for prompt, answer in ((40, 12), (3, 30), (25, 9)):
        session.account(undisturbed.snapshot())
        session.tokens += [1] * prompt
        undisturbed.begin_turn(prompt)
        for _ in range(answer):
            undisturbed.forward(len(session.tokens) - fed)
            fed = len(session.tokens)
            undisturbed.sampled()
            session.accept(1)
    session.lose()
    found = session.total()
    assert (found.decode_tokens, found.decode_kv_sum) == (51, undisturbed.stats.decode_kv_sum)


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("moment", ["within a generation", "between turns"])
@pytest.mark.parametrize("who", ["core", "front", "group"])
def test_whoever_is_killed_the_session_goes_on_and_is_computed_again(
    who: str, moment: str, stock: bool, build: Build
) -> None:
    engine = build(stock=stock)
    engine.open("s", TokenPhases())
    first = turn(engine, "s", PROMPT, 12)
    hold = folder_of(engine) / "hold"
    if moment == "between turns":
        kill(engine, who)
    else:
        hold.touch()
    extend(engine, "s", [7, 8, 9])
    said = []
    for token in engine.generate("s", Sampling(30)):
        said.append(token)
        if hold.exists() and len(said) == fake_backend.HELD:
            kill(engine, who)
            hold.unlink()
    assert first == expected(PROMPT, 12)
    assert said == expected([*PROMPT, *first, 7, 8, 9], 30)
    assert (engine.restarts, starts(engine)) == (1, 2)
    stats = engine.close("s")
    given = len(PROMPT) + 12 + 3 + (0 if moment == "between turns" else fake_backend.HELD)
    # The last token said was never fed; nor were the new ones, if the backend was dead before.
    assert stats.recomputed == given - (4 if moment == "between turns" else 1)
    assert stats.restarts == [(0, given)]
    assert stats.logical == len(PROMPT) + 12 + 3 + 30
    # Who lives counts for itself; the fake does not.
    alive = 30 - (0 if moment == "between turns" else fake_backend.HELD)
    assert stats.decode_tokens == (42 if stock else 42 - alive)


def test_many_sessions_share_one_restart(build: Build) -> None:
    engine = build()
    hold = folder_of(engine) / "hold"
    hold.touch()
    held = threading.Barrier(9)

    def play(number: int) -> list[int]:
        name, prompt = f"s{number}", [number + 1, 5]
        engine.open(name, TokenPhases())
        extend(engine, name, prompt)
        said = []
        for token in engine.generate(name, Sampling(20)):
            said.append(token)
            if len(said) == fake_backend.HELD:
                held.wait(60)
        assert engine.close(name).recomputed == 1 + fake_backend.HELD
        return said

    with ThreadPoolExecutor(8) as threads:
        played = [threads.submit(play, number) for number in range(8)]
        held.wait(60)
        kill(engine, "core")
        hold.unlink()
        said = [each.result() for each in played]
    assert said == [expected([number + 1, 5], 20) for number in range(8)]
    assert starts(engine) == 2


class Anything:
    """A constraint that allows everything."""

    grammar = "start: /.*/"

    def allowed(self) -> NDArray[np.bool_]:
        return np.ones(97, np.bool_)

    def accept(self, token: int) -> None:
        pass


def test_no_other_backend_goes_on_in_the_middle_of_a_grammar(build: Build) -> None:
    engine = build()
    engine.open("s", TokenPhases())
    hold = folder_of(engine) / "hold"
    hold.touch()
    extend(engine, "s", PROMPT)
    generation = iter(engine.generate("s", Sampling(30, constraint=Anything())))
    said = [next(generation) for _ in range(fake_backend.HELD)]
    kill(engine, "core")
    hold.unlink()
    with pytest.raises(KVBenchError, match="backend was lost in the middle of an answer"):
        next(generation)
    assert said == expected(PROMPT, fake_backend.HELD)
    # The next request is answered, by another backend.
    again = turn(engine, "s", [7], 6)
    assert again == expected([*PROMPT, *said, 7], 6)
    # Once: that answer's own request computed nothing again.
    assert engine.close("s").recomputed == len(PROMPT) + fake_backend.HELD - 1


def test_a_backend_lost_before_the_first_token_is_asked_again(build: Build) -> None:
    engine = build()
    engine.open("s", TokenPhases())
    kill(engine, "core")
    extend(engine, "s", PROMPT)
    assert list(engine.generate("s", Sampling(6, constraint=Anything()))) == expected(PROMPT, 6)
    assert starts(engine) == 2


def test_an_answer_may_take_several_restarts_each_of_which_counts(build: Build) -> None:
    dies = {"dies": "Segmentation fault"}
    engine = build(*[dies] * RESTARTS, {})
    engine.open("s", TokenPhases())
    assert turn(engine, "s", PROMPT, 40) == expected(PROMPT, 40)
    stats, step = engine.close("s"), fake_backend.HELD
    given = [len(PROMPT) + step * number for number in range(1, RESTARTS + 1)]
    assert stats.restarts == [(0, tokens) for tokens in given]
    assert stats.recomputed == sum(given) - RESTARTS
    assert engine.restarts == RESTARTS


def test_after_a_few_restarts_in_vain_the_engine_is_gone_for_all_with_the_cause(
    build: Build,
) -> None:
    head = "(EngineCore pid=7) ERROR 11-22 10:00:00 [core.py:1] "
    engine = build({"dies": f"{head}torch.OutOfMemoryError: CUDA out of memory"})
    engine.open("s", TokenPhases())
    with pytest.raises(EngineGoneError) as gone:
        turn(engine, "s", PROMPT, 50)
    said = str(gone.value)
    assert f"died {RESTARTS + 1} times in one request (ended by SIGKILL)" in said
    assert "torch.OutOfMemoryError: CUDA out of memory; memory ran out: lower" in said
    assert "kv-cache-memory-bytes" in said
    assert "\n" not in said
    assert starts(engine) == RESTARTS + 1
    engine.open("other", TokenPhases())
    with pytest.raises(EngineGoneError, match="CUDA out of memory"):
        turn(engine, "other", PROMPT, 5)
    assert starts(engine) == RESTARTS + 1


def test_a_restart_may_fail_once_but_not_for_ever(build: Build) -> None:
    fails = {"exit": 3, "lines": ["ValueError: Free memory on device is less than desired"]}
    engine = build({}, fails, {}, fails)
    engine.open("s", TokenPhases())
    turn(engine, "s", PROMPT, 5)
    kill(engine, "group")
    assert turn(engine, "s", [3], 5) == expected([*PROMPT, *expected(PROMPT, 5), 3], 5)
    assert starts(engine) == 3
    kill(engine, "group")
    with pytest.raises(EngineGoneError, match=r"exit code 3\): ValueError: Free memory on device"):
        turn(engine, "s", [3], 5)
    assert starts(engine) == 3 + RESTARTS


def test_a_first_start_that_fails_is_tried_once_and_shows_its_cause(build: Build) -> None:
    lines = [
        "(APIServer pid=1) WARNING 11-22 16:55:17 [system_utils.py:255] Found ulimit of 20000 and "
        "failed to increase it. This can cause errors like `OSError: [Errno 24] Too many files`.",
        "(EngineCore pid=2) ERROR 11-22 16:55:18 [core.py:9] Traceback (most recent call last):",
        "(EngineCore pid=2) ERROR 11-22 16:55:18 [core.py:9]     raise ValueError('kvbench: x')",
        "(EngineCore pid=2) ERROR 11-22 16:55:18 [core.py:9] ValueError: No such rope",
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    with pytest.raises(PrerequisiteError) as failed:
        build({"exit": 1, "lines": lines})
    said = str(failed.value)
    assert "the fake backend did not start (exit code 1): ValueError: No such rope (log: " in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("plan", "raised", "message"),
    [
        ({"fails": True}, RequestError, "EngineCore encountered an issue"),
        ({"status": 500}, RequestError, "answered 500"),
        ({"status": 400}, RequestError, "answered 400"),
        ({"cut": True}, ConnectionError, "broke off"),
    ],
)
def test_what_fails_while_the_backend_lives_is_no_death(
    plan: dict[str, Any],
    raised: type[Exception],
    message: str,
    build: Build,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend, "_PATIENCE_S", 0.3)
    engine = build(plan)
    engine.open("s", TokenPhases())
    with pytest.raises(raised, match=message):
        turn(engine, "s", PROMPT, 10)
    assert starts(engine) == 1


def test_a_cancelled_generation_waits_for_no_restart(build: Build) -> None:
    engine = build()
    (folder_of(engine) / "hold").touch()
    engine.open("s", TokenPhases())
    extend(engine, "s", PROMPT)
    generation = engine.generate("s", Sampling(30))
    said = []
    for token in generation:
        said.append(token)
        if len(said) == fake_backend.HELD:
            generation.cancel()
            kill(engine, "core")
    assert (said, generation.finish_reason) == (expected(PROMPT, 5), FinishReason.CANCELLED)
    assert starts(engine) == 1
    (folder_of(engine) / "hold").unlink()
    assert turn(engine, "s", [4], 6) == expected([*PROMPT, *said, 4], 6)


def test_a_loss_between_turns_shows_at_once_and_is_counted_when_it_is_mended(build: Build) -> None:
    engine = build()
    engine.open("s", TokenPhases())
    turn(engine, "s", PROMPT, 10)
    kill(engine, "core")
    stats = engine.stats("s")
    assert (len(stats.restarts), stats.live, stats.recomputed) == (1, 0, 0)
    assert engine.stats("s").restarts == stats.restarts
    turn(engine, "s", [5], 10)
    stats = engine.stats("s")
    assert (stats.restarts, stats.recomputed) == ([(0, 51)], 49)


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("died", [False, True])
@pytest.mark.parametrize("length", [52, 51, 45, 13, 0])
def test_a_rewound_session_goes_on_whoever_died(
    length: int, died: bool, stock: bool, build: Build
) -> None:
    engine = build(stock=stock)
    engine.open("s", TokenPhases())
    whole = [*PROMPT, *turn(engine, "s", PROMPT, 12)]
    if died:
        kill(engine, "core")
    with pytest.raises(UsageError, match="52 tokens and cannot be rewound to 53"):
        engine.rewind("s", 53)
    engine.rewind("s", length)
    assert engine.stats("s").logical == length
    extend(engine, "s", [4, 5])
    engine.rewind("s", length + 1)
    assert turn(engine, "s", [6], 8) == expected([*whole[:length], 4, 6], 8)
    stats = engine.close("s")
    assert stats.logical == length + 10
    if stock or died:  # the fake's prefix cache finds nothing; the fake keeps no accounts
        assert stats.recomputed == min(length, 51)
    if stock and not died:
        assert (stats.prefill_tokens, stats.decode_tokens) == (len(PROMPT) + 2, 20)
        assert stats.live == length + 9


def test_under_a_plug_in_windows_that_were_outgrown_do_not_go_back(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine, "FACTS", replace(fake_engine.FACTS, windows=(48, 0)))
    for stock in (False, True):
        engine = build(stock=stock)
        engine.open("s", TokenPhases())
        turn(engine, "s", PROMPT, 8)
        engine.rewind("s", 41)  # the model has seen 47 tokens
        extend(engine, "s", [1] * 9)
        assert len(list(engine.generate("s", Sampling(3)))) == 3
        if stock:
            engine.rewind("s", 41)
        else:
            with pytest.raises(UsageError, match="outgrown its model's windows of 48 tokens"):
                engine.rewind("s", 41)
            extend(engine, "s", [1, 2])
            engine.rewind("s", 54)  # nothing of that was fed
        assert engine.stats("s").logical == (41 if stock else 54)


def test_a_session_that_generates_is_not_rewound(build: Build) -> None:
    engine = build()
    hold = folder_of(engine) / "hold"
    hold.touch()
    engine.open("s", TokenPhases())
    extend(engine, "s", PROMPT)
    tokens = iter(engine.generate("s", Sampling(30)))
    next(tokens)
    with pytest.raises(KVBenchError, match="is generating"):
        engine.rewind("s", 3)
    hold.unlink()
    assert len(list(tokens)) == 29


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("plan", [{}, {"stubborn": True}])
def test_an_engine_that_was_shut_down_is_gone(
    plan: dict[str, Any], stock: bool, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose process takes its time to end."""
    monkeypatch.setattr("agentbench_kv.engines.serving.process._GRACE_S", 2.0)
    engine = build(plan, stock=stock)
    hold = folder_of(engine) / "hold"
    hold.touch()
    engine.open("s", TokenPhases())
    extend(engine, "s", PROMPT)
    tokens = iter(engine.generate("s", Sampling(30)))
    for _ in range(fake_backend.HELD):
        next(tokens)
    engine.shutdown()
    with pytest.raises(EngineGoneError, match="has been shut down"):
        list(tokens)
    with pytest.raises(EngineGoneError, match="has been shut down"):
        list(engine.generate("s", Sampling(1)))
