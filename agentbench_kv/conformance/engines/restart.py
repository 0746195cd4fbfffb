"""A backend that dies is started again, and its sessions go on from their tokens."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

from agentbench_kv.conformance.engines.comparing import error_problem
from agentbench_kv.conformance.engines.driver import Rig
from agentbench_kv.conformance.engines.exactness import check_reference
from agentbench_kv.conformance.engines.plans import prompt
from agentbench_kv.conformance.engines.traces import Step
from agentbench_kv.conformance.result import CheckResult

__all__ = ["check_restart"]

_NAME = "a killed backend's sessions go on"


def check_restart(rig: Rig, network: Any) -> list[CheckResult]:
    """Kill the engine's process between two turns; the session must go on, and say so."""
    pid = getattr(rig.engine, "backend_pid", None)
    if pid is None:
        return [CheckResult(_NAME, True, "the engine runs in this process", skipped=True)]
    first, second = Step(prompt(150, 12), 45), Step(prompt(40, 13), 45)
    trace = rig.play(
        {"killed": [first, second]},
        between=lambda: os.kill(pid, signal.SIGKILL),
    )["killed"]
    recomputed = trace.stats.recomputed
    problem = error_problem(trace) or ("" if recomputed else "nothing is counted as recomputed")
    result = CheckResult(_NAME, not problem, problem or f"{recomputed} tokens computed again")
    if problem:
        return [result]
    exact = check_reference(network, {"killed": trace}, rig.method.positions)
    return [result, replace(exact, name="goes on exactly after a restart")]
