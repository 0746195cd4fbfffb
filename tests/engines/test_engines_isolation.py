"""What goes wrong in one session ends that session; its neighbours never know."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentbench_kv.engines.base import EngineOptions, FinishReason, Sampling
from agentbench_kv.engines.embedded import EmbeddedEngine
from agentbench_kv.engines.embedded import scheduler as scheduling
from agentbench_kv.engines.embedded.generation import EmbeddedGeneration
from agentbench_kv.engines.embedded.scheduler import EmbeddedScheduler
from agentbench_kv.errors import EngineGoneError, KVBenchError, SessionFailedError, UsageError
from agentbench_kv.methods.base import Phase
from agentbench_kv.registry import make_method

LONG = 60
TOKENS = 14
TURNS = 2
NAMES = [f"s{i}" for i in range(5)]
# The method compresses, and is scored with sums as well; half of the sessions draw their tokens.
METHODS = [("agentkv", {"interval": "4"}), ("h2o", {"interval": "4"})]
ERRORS = [ValueError("odd"), MemoryError(), SystemExit(3), KVBenchError("refused"), KeyError("x")]


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sampling(name: str) -> Sampling:
    number = NAMES.index(name)
    return Sampling(TOKENS, temperature=1.2 * (number % 2), seed=number)


class Fails:
    """Calls what it stands for, and raises at the n-th call."""

    def __init__(self, inner: Callable[..., Any], at: int, error: BaseException) -> None:
        self.inner, self.left, self.error = inner, at, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.inner(*args, **kwargs)


# Where a session calls code of its own, of a method or of a plug-in: object and name.
PLACES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "admission": lambda s: (s.ledger, "rows_needed"),
    "begin": lambda s: (s.ledger, "begin_turn"),
    "room": lambda s: (s.cache, "reserve"),
    "queries": lambda s: (s.queries, "place"),
    "account": lambda s: (s.ledger, "forward"),
    "labeller": lambda s: (s.labeller, "label"),
    "event": lambda s: (s.ledger, "sampled"),
    "select": lambda s: (s.method, "select"),
    "compact": lambda s: (s.cache, "keep"),
    "end of turn": lambda s: (s.ledger, "end_turn"),
}


class Labeller:
    def label(self, token: int) -> Phase:
        return Phase(token % 4)


def open_session(engine: EmbeddedEngine, name: str) -> None:
    engine.open(name, Labeller())
    ids = prompt(NAMES.index(name), 30 + 9 * NAMES.index(name))
    engine.extend(name, ids, [Phase(t % 4) for t in ids])


def sabotage(engine: EmbeddedEngine, name: str, place: str, at: int, error: BaseException) -> None:
    session = engine._scheduler.get(name)
    session.method = copy.copy(session.method)  # the session's own, to spoil
    owner, attribute = PLACES[place](session)
    object.__setattr__(owner, attribute, Fails(getattr(owner, attribute), at, error))


def play(engine: EmbeddedEngine, names: list[str], stops: dict[str, Any]) -> dict[str, Any]:
    """Play sessions side by side; return every session's tokens, the last item what ended it."""
    out: dict[str, list[Any]] = {name: [] for name in names}
    for turn in range(TURNS):
        running: dict[str, Any] = {}
        for name in names:
            if out[name] and isinstance(out[name][-1], BaseException):
                continue
            stop = stops.get(name)
            running[name] = engine.generate(name, replace(sampling(name), stop=stop))
        for name, generation in running.items():
            try:
                out[name].extend(generation)
                more = prompt(50 + turn, 5)
                engine.extend(name, more, [Phase(t % 4) for t in more])
            except BaseException as error:  # noqa: BLE001
                out[name].append(error)
    return out


@pytest.fixture(scope="module", params=METHODS, ids=[name for name, _ in METHODS])
def shared(
    request: pytest.FixtureRequest, tiny_model: Any
) -> Iterator[tuple[EmbeddedEngine, dict[str, Any]]]:
    """An engine for many plays, and what its sessions say when they are alone."""
    method, options = request.param
    chosen = EngineOptions("tiny", make_method(method, 24, options))
    engine = EmbeddedEngine.create(chosen, model=tiny_model("qwen3"))
    alone = {}
    for name in NAMES:
        open_session(engine, name)
        alone |= play(engine, [name], {})
        engine.close(name)
    assert all(len(set(said)) > 3 and len(said) == TURNS * TOKENS for said in alone.values())
    yield engine, alone
    engine.shutdown()


faults = st.dictionaries(
    st.sampled_from(NAMES),
    st.tuples(
        st.sampled_from([*PLACES, "stop"]), st.integers(1, 30), st.integers(0, len(ERRORS) - 1)
    ),
    min_size=1,
    max_size=len(NAMES) - 1,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(faults=faults)
def test_neighbours_say_what_they_say_alone(
    shared: tuple[EmbeddedEngine, dict[str, Any]], faults: dict[str, tuple[str, int, int]]
) -> None:
    engine, alone = shared
    stops: dict[str, Any] = {}
    for name in NAMES:
        open_session(engine, name)
        if name in faults:
            place, at, number = faults[name]
            if place == "stop":
                stops[name] = Fails(lambda _: False, at, ERRORS[number])
            else:
                sabotage(engine, name, place, at, ERRORS[number])
    said = play(engine, NAMES, stops)
    broken = [name for name in NAMES if isinstance(said[name][-1], BaseException)]
    for name in broken:
        with pytest.raises(KVBenchError, match="broke earlier"):
            engine.generate(name, sampling(name))
    for name in NAMES:
        engine.close(name)
    for name in NAMES:
        *tokens, last = said[name]
        if name not in broken:
            assert said[name] == alone[name]
            continue
        error = ERRORS[faults[name][2]]
        assert tokens == alone[name][: len(tokens)]
        assert last is error or (type(last) is SessionFailedError and last.__cause__ is error)
        assert isinstance(last, KVBenchError)
    assert engine._scheduler._running == []
    # The thread lives, and what the sessions held is free again, once it has been round.
    for _ in range(2):
        engine._scheduler._commands.call(lambda: None, timeout=LONG)
    assert all(not pool._users for pool in engine._scheduler.pools.full._pools.values())


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-308, 1e-30])
def test_the_smallest_temperatures_are_greedy(
    make_engine: Any, start_session: Any, temperature: float
) -> None:
    engine = make_engine()
    start_session(engine, "greedy", prompt(1, 20))
    start_session(engine, "cold", prompt(1, 20))
    running = [
        engine.generate("greedy", Sampling(12)),
        engine.generate("cold", Sampling(12, temperature=temperature)),
    ]
    greedy, cold = map(list, running)
    assert cold == greedy


def test_ids_the_model_has_not_are_refused_before_they_meet_others(
    make_engine: Any, start_session: Any
) -> None:
    engine = make_engine()
    start_session(engine, "a", prompt(1, 5))
    for bad in ([3, 97], [-1]):
        with pytest.raises(UsageError, match="the model has 97"):
            engine.extend("a", bad, [Phase.OTHERS] * len(bad))
    assert engine.stats("a").logical == 5
    assert len(list(engine.generate("a", Sampling(3)))) == 3


def test_a_session_of_no_numbers_spoils_nobody(make_engine: Any, start_session: Any) -> None:
    """Its logits end it, and its rows are gone before the next session gets its slot."""
    engine = make_engine()
    start_session(engine, "alone", prompt(2, 20))
    alone = list(engine.generate("alone", Sampling(10)))
    start_session(engine, "nan", prompt(1, 20))
    list(engine.generate("nan", Sampling(1)))
    cache = engine._scheduler.get("nan").cache
    with torch.inference_mode():
        cache.values.fill_(float("nan"))
    spoilt = engine.generate("nan", Sampling(10))
    with pytest.raises(SessionFailedError, match="no numbers"):
        list(spoilt)
    slot = cache.slot
    engine.close("nan")
    start_session(engine, "next", prompt(2, 20))
    assert list(engine.generate("next", Sampling(10))) == alone
    assert engine._scheduler.get("next").cache.slot == slot


def test_a_pool_without_memory_to_grow_costs_the_newcomer_only(
    make_engine: Any, start_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    start_session(engine, "a", prompt(1, 20))
    first = list(engine.generate("a", Sampling(6)))
    engine.extend("a", [1], [Phase.OTHERS])
    zeros = torch.zeros

    def none_left(*size: int, **options: Any) -> torch.Tensor:
        if len(size) == 4 and options.get("dtype") is torch.int64:  # after keys and values
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return zeros(*size, **options)

    start_session(engine, "b", prompt(2, 20))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", none_left)
        running = {name: engine.generate(name, Sampling(6)) for name in "ab"}
        second = list(running["a"])
        with pytest.raises(SessionFailedError, match="can't allocate memory"):
            list(running["b"])
    start_session(engine, "alone", prompt(1, 20))
    assert list(engine.generate("alone", Sampling(6))) == first
    engine.extend("alone", [1], [Phase.OTHERS])
    assert list(engine.generate("alone", Sampling(6))) == second


@pytest.mark.parametrize("method", ["full", "agentkv"])
def test_a_forward_that_fails_for_one_session_is_repeated_without_it(
    make_engine: Any, start_session: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Or where memory is too little for all of them at once."""
    budget = None if method == "full" else 24
    engine = make_engine(method=method, budget=budget, settings={"interval": "4"} if budget else {})
    alone = {}
    for name in NAMES:
        start_session(engine, name, prompt(NAMES.index(name), 30))
        alone[name] = list(engine.generate(name, Sampling(12)))
        engine.close(name)
    works, poison = scheduling.run_network, 0

    def fails(model: Any, packed: Any, last: list[int]) -> torch.Tensor:
        nonlocal poison
        names = [session.name for session in packed.sessions]
        if "s3" in names and packed.sessions[names.index("s3")].fed > 33:
            poison += 1
            works(model, packed, last)  # half of the work is done before it fails
            raise RuntimeError("not this one")
        return works(model, packed, last)

    monkeypatch.setattr(scheduling, "run_network", fails)
    for name in NAMES:
        start_session(engine, name, prompt(NAMES.index(name), 30))
    running = {name: engine.generate(name, Sampling(12)) for name in NAMES}
    for name, generation in running.items():
        if name == "s3":
            with pytest.raises(SessionFailedError, match="s3 failed: RuntimeError: not this one"):
                list(generation)
        else:
            assert list(generation) == alone[name]
    assert poison >= 1


def test_an_engine_whose_thread_ends_says_so_to_everybody(
    make_engine: Any, start_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    for name in "abc":
        start_session(engine, name, prompt(1, 5))
    scheduler = engine._scheduler

    def dies(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    monkeypatch.setattr(EmbeddedScheduler, "_plan", dies)
    running = [engine.generate(name, Sampling(5)) for name in "ab"]
    for generation in running:
        with pytest.raises(EngineGoneError, match="RuntimeError: CUDA error: an illegal memory"):
            list(generation)
    scheduler._thread.join(LONG)
    for late in (
        lambda: engine.generate("c", Sampling(5)),
        lambda: engine.open("d", Labeller()),
        lambda: scheduler.between_turns("c", lambda _: None),
    ):
        with pytest.raises(EngineGoneError, match=r"illegal memory access$"):
            late()
    assert engine.stats("c").logical == 5
    engine.close("c")


def test_a_device_that_fails_for_good_ends_the_engine(
    make_engine: Any, start_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the forward alone costs its sessions; one that stays costs the engine."""
    engine = make_engine()
    start_session(engine, "a", prompt(1, 5))
    start_session(engine, "b", prompt(1, 5))

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(scheduling, "run_network", broken)
    generation = engine.generate("a", Sampling(5))
    with pytest.raises(SessionFailedError, match="device-side assert"):
        list(generation)
    zeros = torch.zeros
    fails = Fails(zeros, 1, RuntimeError("device-side assert"))
    monkeypatch.setattr(
        torch, "zeros", lambda *size, **more: (fails if size == (1,) else zeros)(*size, **more)
    )
    generation = engine.generate("b", Sampling(5))
    with pytest.raises(KVBenchError, match="device-side assert"):
        list(generation)
    engine._scheduler._thread.join(LONG)
    monkeypatch.undo()
    with pytest.raises(EngineGoneError, match="the embedded engine ended"):
        engine.open("c", Labeller())


def test_a_generation_that_shutting_down_cuts_off_is_no_answer(
    make_engine: Any, start_session: Any
) -> None:
    engine = make_engine()
    start_session(engine, "a", prompt(1, 5))
    stream = iter(engine.generate("a", Sampling(4000)))
    next(stream)
    engine.shutdown()
    with pytest.raises(EngineGoneError, match="shut down"):
        list(stream)


def test_progress_moves_while_there_is_work_and_stands_when_the_thread_does(
    make_engine: Any, start_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    assert engine.progress() is None
    start_session(engine, "a", prompt(1, 5))
    reached, go_on = threading.Event(), threading.Event()

    def hang(token: int) -> bool:
        del token
        reached.set()
        assert go_on.wait(LONG)
        return True

    generation = engine.generate("a", Sampling(5, stop=hang))
    assert reached.wait(LONG)
    assert engine.progress() == engine.progress() is not None
    # Nobody waits for ever: not who asks on, not who ends the engine.
    monkeypatch.setattr("agentbench_kv.engines.embedded.scheduler._STOP_S", 0.01)
    engine.shutdown()
    with pytest.raises(EngineGoneError):
        list(generation)
    go_on.set()
    engine._scheduler._thread.join(LONG)
    assert not engine._scheduler._thread.is_alive()
    assert engine.progress() is None


def test_a_hanging_command_is_work_that_stands(make_engine: Any, start_session: Any) -> None:
    engine = make_engine()
    start_session(engine, "a", prompt(1, 5))
    go_on, reached = threading.Event(), threading.Event()

    def hang(_: Any) -> bool:
        reached.set()
        return go_on.wait(LONG)

    asking = threading.Thread(target=engine._scheduler.between_turns, args=("a", hang))
    asking.start()
    assert reached.wait(LONG)
    assert engine.progress() == engine.progress() is not None
    go_on.set()
    asking.join(LONG)
    assert engine.progress() is None


def test_what_a_generation_says_after_its_session_failed_is_not_heard(
    make_engine: Any, start_session: Any
) -> None:
    """A cancelled generation of a session that fails raises; it does not look cancelled."""
    engine = make_engine()
    start_session(engine, "a", prompt(1, 5))
    generation: EmbeddedGeneration = engine.generate(
        "a", Sampling(50, stop=Fails(lambda _: False, 3, ValueError("odd")))
    )
    with pytest.raises(SessionFailedError, match="ValueError: odd"):
        list(generation)
    assert generation.finish_reason is not FinishReason.CANCELLED
