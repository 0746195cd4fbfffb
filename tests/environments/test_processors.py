"""How many threads compute where nobody has said it."""

from __future__ import annotations

import os

import pytest

from agentbench_kv.environments.processors import free_threads, usable_cores


@pytest.mark.parametrize(
    ("chosen", "usable", "load", "threads"),
    [
        ("", 8, 0.0, 8),
        ("", 8, 2.6, 5),
        ("", 8, 99.0, 1),
        ("3", 8, 99.0, 3),
        ("0", 4, 0.0, 4),
        ("many", 4, 0.0, 4),
    ],
)
def test_threads_are_those_asked_for_or_the_processors_nobody_uses(
    monkeypatch: pytest.MonkeyPatch, chosen: str, usable: int, load: float, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert usable_cores() == usable
    assert free_threads() == threads


def test_without_affinity_all_processors_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1
