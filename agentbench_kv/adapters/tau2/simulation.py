"""One simulation: the benchmark's orchestrator and checker around our agent and user."""

from __future__ import annotations

import threading
from typing import Any

from tau2.data_model.simulation import TerminationReason
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.orchestrator.orchestrator import Orchestrator
from tau2.registry import registry

from .agent import EndpointAgent, InvalidAnswerError
from .chat import ChatLine, ContextLimitError
from .users import ScriptedUser, SimulatedUser, UserFailedError

_MAX_ERRORS = 10
_USER_WAIT_S = 120.0
_UNSCORED: dict[type[Exception], str] = {
    ContextLimitError: "context_limit",
    InvalidAnswerError: "unparsable",
    UserFailedError: "user_error",
}


class Domain:
    """What the simulations of a domain share; tools are the agent's, in OpenAI form."""

    def __init__(self, name: str) -> None:
        self.name = name
        # In the official order.
        self.tasks = {task.id: task for task in registry.get_tasks_loader(name)()}
        environment = self.environment()
        self.policy: str = environment.get_policy()
        self.tools = [tool.openai_schema for tool in environment.get_tools()]
        self.user_tools = environment.get_user_tools() if environment.user_tools else None

    def environment(self) -> Any:
        return registry.get_env_constructor(self.name)()


def play(domain: Domain, args: dict[str, Any], cancelled: threading.Event) -> dict[str, Any]:
    """Play a simulation to its end and check it, until `cancelled` is set.

    `args` are `sample`, `endpoint`, `session`, `sampling`, `key`, `timeout_s`, `user` and
    `max_steps`. Returns status and score, the checker's verdict, the agent's history and steps,
    and the user's tokens.
    """
    task = domain.tasks[args["sample"]]
    where, session = args["endpoint"], args["session"]
    line = ChatLine(where, session, args["sampling"], args["key"], args["timeout_s"], cancelled)
    agent = EndpointAgent(domain.policy, domain.tools, line)
    user: ScriptedUser | SimulatedUser
    scenario = str(task.user_scenario)
    if args["user"]["kind"] == "scripted":
        user = ScriptedUser(scenario, task.evaluation_criteria.actions or [])
    else:
        wait_s = min(_USER_WAIT_S, args["timeout_s"])
        user = SimulatedUser(scenario, domain.user_tools, args["user"], wait_s)
    orchestrator = Orchestrator(
        domain=domain.name,
        agent=agent,
        user=user,
        environment=domain.environment(),
        task=task,
        max_steps=args["max_steps"],
        max_errors=_MAX_ERRORS,
        seed=args["sampling"]["seed"],
    )
    try:
        ended = _run(domain, task, orchestrator)
    finally:
        line.close()
    kept = {"role", "content", "tool_calls", "requestor", "error"}
    plain = {"mode": "json", "include": kept, "exclude_none": True}
    said = [message.model_dump(**plain) for message in orchestrator.trajectory]
    return {**ended, "steps": agent.steps, "agent": agent.messages, "user": user.usage,
            "trajectory": said}  # fmt: skip


def _run(domain: Domain, task: Any, orchestrator: Orchestrator) -> dict[str, Any]:
    try:
        simulation = orchestrator.run()
    except tuple(_UNSCORED) as error:
        return _unscored(_UNSCORED[type(error)], str(error))
    reason = TerminationReason(simulation.termination_reason)
    if reason is TerminationReason.MAX_STEPS:
        return _unscored("turn_limit", f"not done after {orchestrator.max_steps} steps")
    checked = evaluate_simulation(
        simulation=simulation,
        task=task,
        evaluation_type=EvaluationType.ALL,
        solo_mode=False,
        domain=domain.name,
    )
    verdict = {"ended_by": reason.value, **checked.model_dump(mode="json")}
    return {"status": "scored", "score": checked.reward, "verdict": verdict, "error": None}


def _unscored(status: str, error: str) -> dict[str, Any]:
    return {"status": status, "score": None, "verdict": {}, "error": error}
