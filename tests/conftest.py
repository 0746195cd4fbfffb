"""What all tests share."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("kvbench", deadline=None)
settings.load_profile("kvbench")

# Tiny tensors on a shared machine: threads only cost time, here and in the processes tests start.
# Before anything imports torch, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background jobs ignore Ctrl-C, what `nohup` starts a hang-up, and so would the processes
# that tests start and interrupt.
for _number, _handler in {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: lambda *_: os._exit(129),
}.items():
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failure when it happens: a run that is cut off has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        sys.stdout.write(f"\nFAILED {report.nodeid}\n")
        sys.stdout.flush()


@pytest.fixture(autouse=True)
def _process_of_its_own() -> Iterator[None]:
    """Give back what `cli.main` sets up for its process, which here plays many tests."""
    before, log = signal.getsignal(signal.SIGINT), logging.getLogger("agentbench_kv")
    handlers, level = log.handlers.copy(), log.level
    yield
    if signal.getsignal(signal.SIGINT) is not before:
        signal.signal(signal.SIGINT, before)
    log.handlers[:] = handlers
    log.setLevel(level)


_ODD: list[Any] = [
    None, True, -1, 0, 1.5, 2**63, 10**400, -(10**30), float("nan"), float("inf"), 1e308, 5e-324,
    "", "x", "\ud800", "\x1b[2J", "../../..", "x" * 5000, [], {}, [[]], [None], {"": None},
    {"a": {"b": 1}},
]  # fmt: skip


@pytest.fixture(scope="session")
def damaged() -> Callable[[Random, bytes], bytes]:
    """Return a function that damages a file's content in one of the ways that files are damaged."""
    return _damaged


def _damaged(random: Random, whole: bytes) -> bytes:
    place = random.randrange(len(whole) + 1)
    match random.randrange(9):
        case 0:
            return whole[:place]
        case 1:
            return whole[:place] + random.randbytes(random.choice([1, 2, 8, 500])) + whole[place:]
        case 2:
            return whole[:place] + whole[place + random.choice([1, 2, 8, 500]) :]
        case 3:
            flipped = bytearray(whole)
            for _ in range(random.choice([1, 3, 50])):
                if flipped:
                    flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
            return bytes(flipped)
        case 4:
            deep = random.choice([b"[", b'{"a":', b"("]) * random.choice([100, 100_000])
            return whole[:place] + deep + whole[place:]
    return _other_values(random, whole)


def _other_values(random: Random, whole: bytes) -> bytes:
    """Give some values of a JSON document, or of one of its lines, another type or size."""
    with suppress(ValueError):
        return json.dumps(_changed(random, json.loads(whole))).encode()
    lines = whole.split(b"\n")
    chosen = random.randrange(len(lines))
    with suppress(ValueError):
        lines[chosen] = json.dumps(_changed(random, json.loads(lines[chosen]))).encode()
    return b"\n".join(lines)


def _changed(random: Random, document: Any) -> Any:
    for _ in range(random.choice([1, 1, 3])):
        places = [(None, None), *_places(document)]
        parent, name = places[random.randrange(len(places))]
        value = random.choice(_ODD)
        if parent is None:
            document = value if random.random() < 0.1 else document
        elif random.random() < 0.2 and isinstance(parent, dict):
            del parent[name]
        else:
            parent[name] = json.loads(json.dumps(value))
    return document


def _places(document: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    if isinstance(document, dict | list):
        names = list(document) if isinstance(document, dict) else list(range(len(document)))
        for name in names:
            found += [(document, name), *_places(document[name])]
    return found
