"""Faults as data: what happens to a run, to which of its processes, and when. All from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    `target` is the process it strikes: the run itself, its process group, a benchmark's worker, the
    backend's server, or the engine core behind that server. `ends` says that the attempt is over
    then; after any other fault it has to go on by itself.
    """

    name: str
    target: str = "run"
    ends: bool = True
    untidy: bool = False  # nobody had time to delete temporary folders outside the run's own


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("kill", untidy=True),
        Kind("kill group", "group", untidy=True),
        Kind("kill worker", "worker", ends=False),
        Kind("kill core", "core", ends=False),
        Kind("kill server", "server", ends=False),
        Kind("int"),
        Kind("int twice", untidy=True),
        Kind("term"),
        Kind("stop", ends=False),
        Kind("stop worker", "worker", ends=False),
        Kind("stop core", "core", ends=False),
        Kind("stop server", "server", ends=False),
        Kind("torn files", untidy=True),
        Kind("full disk"),
        Kind("takeover", untidy=True),
    )
}

# How often each kind is drawn where its target exists.
_ANYWHERE = {
    "kill": 6, "kill group": 3, "int": 4, "int twice": 4, "term": 3, "stop": 3, "torn files": 5,
    "full disk": 3,
}  # fmt: skip
_WORKERS = _ANYWHERE | {"kill worker": 5, "stop worker": 2}
_SERVERS = _ANYWHERE | {"kill server": 6, "stop server": 3}

_MICRO = ("--task", "micro/recall-1k", "--concurrency", "4")
_SCRIPTED = ("--engine", "scripted", "--method", "full", "--concurrency", "6")
_SMALL = ("--method", "agentkv", "--budget", "96", "--set", "interval=32")
_CONSTRAINED = ("--method", "full-constrained")


@dataclass(frozen=True)
class Setup:
    """An engine or benchmark under test: the runs it plays, and what can befall them."""

    variants: tuple[tuple[str, ...], ...]  # options of `kvbench run`
    weights: Mapping[str, int]  # by kind
    faults: tuple[int, int]  # in one case, least and most
    environment: str | None = None  # that must have been created


SETUPS: Mapping[str, Setup] = {
    # No model: for tests.
    "scripted": Setup(
        ((*_SCRIPTED, "--model", "corrupt", "--task", "micro/recall-1k", "--limit", "60"),),
        _ANYWHERE | {"takeover": 1},
        (6, 9),
    ),
    "embedded": Setup(
        (
            (*_MICRO, *_SMALL, "--limit", "10"),
            (*_MICRO, *_SMALL, "--limit", "5", "--trials", "2", "--seed", "3"),
            (*_MICRO, "--method", "streamingllm", "--budget", "128", "--limit", "10"),
            (*_MICRO, *_SMALL, "--limit", "12", "--temperature", "1", "--seed", "5"),
            (*_MICRO, "--method", "evoke", "--budget", "384", "--limit", "10"),
        ),
        _ANYWHERE | {"takeover": 1},
        (6, 9),
    ),
    "bfcl": Setup(
        (
            (*_SCRIPTED, "--model", "gold", "--task", "bfcl/multi_turn_base", "--limit", "24"),
            (*_SCRIPTED, "--model", "corrupt", "--task", "bfcl/multi_turn_base", "--limit", "24"),
            (*_SCRIPTED, "--model", "gold", "--task", "bfcl/multi_turn_miss_func", "--limit", "18",
             "--set", "route=chat", "--set", "workers=2"),
            (*_SCRIPTED, "--model", "gold", "--task", "bfcl/memory_kv", "--limit", "18"),
        ),
        _WORKERS,
        (6, 9),
        "bfcl",
    ),
    "tau2": Setup(
        (
            (*_SCRIPTED, "--model", "gold", "--task", "tau2/retail", "--limit", "18"),
            (*_SCRIPTED, "--model", "corrupt", "--task", "tau2/airline", "--limit", "18"),
            (*_SCRIPTED, "--model", "gold", "--task", "tau2/telecom", "--limit", "8",
             "--trials", "2"),
        ),
        _WORKERS,
        (6, 9),
        "tau2",
    ),
    "vllm": Setup(
        (
            ("--engine", "vllm", *_MICRO, *_CONSTRAINED, "--limit", "10"),
            ("--engine", "vllm", *_MICRO, "--method", "full", "--limit", "10"),
        ),
        _SERVERS | {"kill core": 8, "stop core": 3},
        (6, 9),
        "vllm",
    ),
    "llamacpp": Setup(
        (
            ("--engine", "llamacpp", *_MICRO, *_CONSTRAINED, "--limit", "10"),
            ("--engine", "llamacpp", *_MICRO, "--method", "full", "--limit", "10"),
        ),
        _SERVERS,
        (6, 9),
        "llamacpp",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One fault of a plan.

    Counted from the start of the attempt or from the fault before, it strikes `delay` seconds after
    a `share` of the missing trials is on record, or at that share of the time they should take.
    `how` (0 to 1) decides what is left open: how long a process is stopped, where a file is torn,
    how long after the first Ctrl-C the second one comes.
    """

    kind: str
    by_time: bool
    share: float
    delay: float
    how: float


@dataclass(frozen=True)
class Case:
    """One run with its faults. `setup` and `variant` name its options, see `SETUPS`."""

    setup: str
    number: int
    variant: int
    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        return f"{self.setup}-{self.number:04d}"

    @property
    def options(self) -> tuple[str, ...]:
        return SETUPS[self.setup].variants[self.variant]


def draw_case(setup: str, seed: int, number: int, kinds: tuple[str, ...] = ()) -> Case:
    """Return the case of this number; with `kinds`, of exactly those faults."""
    rng = random.Random(f"{seed}/{setup}/{number}")
    known = SETUPS[setup]
    count = rng.randint(*known.faults)
    drawn = rng.choices(list(known.weights), list(known.weights.values()), k=count)
    variant = rng.randrange(len(known.variants))
    return Case(setup, number, variant, tuple(_draw_fault(rng, kind) for kind in kinds or drawn))


def _draw_fault(rng: random.Random, kind: str) -> Fault:
    by_time = rng.random() < 0.35
    share = rng.random() * (0.8 if by_time else 0.35)
    delay = rng.choice((0.0, rng.random() * 0.02, rng.random() * 0.4))
    return Fault(kind, by_time, share, delay, rng.random())
