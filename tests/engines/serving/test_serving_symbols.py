"""What an engine's insides are compared with, by symbols of our own."""

from __future__ import annotations

from agentbench_kv.engines.core.host import symbol_problems

PROCESS = "agentbench_kv.engines.serving.process:"


def test_what_is_missing_or_different_is_named() -> None:
    there = {
        f"{PROCESS}Launch": ("command", "ready"),
        f"{PROCESS}BackendProcess.ended": ("what",),
        f"{PROCESS}BackendProcess.alive": (),
    }
    assert symbol_problems(there, exact=False) == []
    gone = {
        f"{PROCESS}BackendProcess.sleep": (),
        "agentbench_kv.engines.serving.nowhere:x": (),
        f"{PROCESS}Launch": ("moon_phase",),
    }
    first, second, third = symbol_problems(gone, exact=False)
    assert first.endswith("sleep is gone (AttributeError)")
    assert second.endswith("nowhere:x is gone (ModuleNotFoundError)")
    assert third.endswith("Launch has no moon_phase")


def test_a_parameter_more_matters_where_all_are_replaced() -> None:
    taken = {f"{PROCESS}BackendProcess.ended": ("self",)}
    assert symbol_problems(taken, exact=False) == []
    (problem,) = symbol_problems(taken, exact=True)
    assert problem.endswith("takes self, what; expected self")
