"""Checks recorded simulations with tau2-bench alone; runs in its environment.

`python recheck.py FILE`, where FILE is a JSON list of {"task", "ended_by", "trajectory"}; prints
the rewards. Nothing of kvbench is imported, and nothing of tau2-bench is replaced.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from loguru import logger
from tau2.data_model.message import AssistantMessage, ToolMessage, UserMessage
from tau2.data_model.simulation import SimulationRun
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.registry import registry
from tau2.scripts.evaluate_trajectories import _build_eval_env_kwargs

DOMAIN = "banking_knowledge"
KINDS = {"assistant": AssistantMessage, "user": UserMessage, "tool": ToolMessage}


def reward(tasks: dict[str, Any], played: dict[str, Any]) -> float:
    task = tasks[played["task"]]
    run = SimulationRun(
        id="again", task_id=task.id, start_time="", end_time="", duration=0.0,
        termination_reason=played["ended_by"],
        messages=[KINDS[each["role"]](**each) for each in played["trajectory"]],
    )  # fmt: skip
    # How the agent searched is in no check; the default would ask a provider for embeddings.
    options = {"retrieval_variant": "no_knowledge", **_build_eval_env_kwargs(DOMAIN, task)}
    how = {"evaluation_type": EvaluationType.ALL, "solo_mode": False, "domain": DOMAIN}
    return float(evaluate_simulation(run, task, **how, env_kwargs=options).reward)


if __name__ == "__main__":
    logger.remove()
    by_name = {task.id: task for task in registry.get_tasks_loader(DOMAIN)()}
    recorded = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.stdout.write(json.dumps([reward(by_name, each) for each in recorded]) + "\n")
