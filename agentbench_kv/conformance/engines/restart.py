"""A backend that dies is started again, and its sessions continue from their tokens."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

from agentbench_kv.conformance.engines.comparing import error_problem
from agentbench_kv.conformance.engines.driver import Driver
from agentbench_kv.conformance.engines.exactness import check_reference
from agentbench_kv.conformance.engines.plans import prompt
from agentbench_kv.conformance.engines.traces import Step
from agentbench_kv.conformance.result import CheckResult

_NAME = "a killed backend's sessions go on"


def check_restart(driver: Driver, network: Any) -> list[CheckResult]:
    """Kill the engine's process between two turns; the session must continue, and say so."""
    pid = getattr(driver.engine, "backend_pid", None)
    if pid is None:
        return [CheckResult(_NAME, True, "the engine runs in this process", skipped=True)]
    steps = [Step(prompt(150, 12), 45), Step(prompt(40, 13), 45)]
    traces = driver.play({"killed": steps}, between=lambda: os.kill(pid, signal.SIGKILL))
    recomputed = traces["killed"].stats.recomputed
    problem = error_problem(traces["killed"])
    problem = problem or ("" if recomputed else "nothing is counted as recomputed")
    result = CheckResult(_NAME, not problem, problem or f"{recomputed} tokens computed again")
    if problem:
        return [result]
    exact = check_reference(network, traces, driver.method.positions)
    return [result, replace(exact, name="goes on exactly after a restart")]
