"""One simulation: the benchmark's orchestrator and checker around our agent and user.

The agent's answers come from one session of a chat server. The user is the benchmark's LLM
simulator over any endpoint, or a fixed script for tests.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
from tau2.data_model.message import (
    AssistantMessage,
    MultiToolMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from tau2.data_model.simulation import TerminationReason
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.orchestrator.orchestrator import Orchestrator
from tau2.registry import registry
from tau2.user.user_simulator import UserSimulator

from ...agent_client import (
    AgentConnection,
    ChatHistory,
    ContextFullError,
    address_of,
    is_shallow,
)
from .patches import appoint

# What agents and users are derived from, by the names that each release has.
try:  # v1.x
    from tau2.agent.base_agent import HalfDuplexAgent as AgentBase
    from tau2.user.user_simulator_base import STOP, UserState
    from tau2.user.user_simulator_base import HalfDuplexUser as UserBase
except ImportError:  # v0.2.0
    from tau2.agent.base import BaseAgent as AgentBase
    from tau2.user.base import STOP, UserState
    from tau2.user.base import BaseUser as UserBase

if TYPE_CHECKING:
    from agentbench_kv.adapters.worker_child import WorkerRequest

_ENDINGS = re.compile("###[A-Z-]+###")
_RETRIES = 3
_USER_WAIT_S = 120.0
_MAX_ERRORS = 10


class InvalidAnswerError(Exception):
    """The agent's answer is neither text nor a call with an object of arguments."""


class EndpointAgent(AgentBase):  # type: ignore[misc]  # tau2 has no types
    """The benchmark's own agent prompt and loop, over a session that keeps what was generated.

    The history only grows, and an answer goes back as it came: the server's session goes on.
    """

    def __init__(self, policy: str, tools: Sequence[dict[str, Any]], line: AgentConnection) -> None:
        prompt = SYSTEM_PROMPT.format(domain_policy=policy, agent_instruction=AGENT_INSTRUCTION)
        self.history = ChatHistory([{"role": "system", "content": prompt}])
        self._tools = tools
        self._line = line

    def get_init_state(self, message_history: list[Any] | None = None) -> None:
        """Begin; a task that starts in the middle brings its messages along."""
        for message in message_history or []:
            self._hear(message)

    def set_seed(self, seed: int) -> None:
        """Do nothing: the seed is in every request."""

    def generate_next_message(self, message: Any, state: None) -> tuple[AssistantMessage, None]:
        self._hear(message)
        completion = self._line.chat(self.history.messages, self._tools)
        said = self.history.add(completion)
        return _parsed(said, completion.usage), state

    def _hear(self, message: Any) -> None:
        if isinstance(message, MultiToolMessage):
            for each in message.tool_messages:
                self._hear(each)
        elif isinstance(message, ToolMessage):
            content = message.content or ""
            result = {"role": "tool", "tool_call_id": message.id, "content": content}
            self.history.messages.append(result)
        else:
            role = "assistant" if isinstance(message, AssistantMessage) else "user"
            self.history.messages.append({"role": role, "content": message.content})


def _parsed(said: dict[str, Any], usage: dict[str, Any]) -> AssistantMessage:
    try:
        calls = [_call(call) for call in said.get("tool_calls", ())]
        answer = AssistantMessage(
            role="assistant",
            content=said["content"],
            tool_calls=calls or None,
            cost=0.0,
            usage={key: usage.get(key, 0) for key in ("completion_tokens", "prompt_tokens")},
        )
        answer.validate()
    # A pydantic error is a ValueError, too.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidAnswerError(f"{type(error).__name__}: {error}"[:500]) from error
    return answer


def _call(call: dict[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = json.loads(function.get("arguments") or "{}")
    if not is_shallow([arguments]):
        raise ValueError("arguments that nest too deep")
    return ToolCall(id=call.get("id") or "", name=function["name"], arguments=arguments)


class UserFailedError(Exception):
    """The user simulator gave no valid message; the agent is not to blame."""


class ScriptedUser(UserBase):  # type: ignore[misc]  # tau2 has no types
    """States the scenario, does what the golden actions ask of it, then stops.

    The next golden user action is done when the agent's message names it; any other message ends
    the simulation. So it fits agents that are scripted, too.
    """

    def __init__(self, scenario: str, actions: Sequence[Any]) -> None:
        super().__init__(instructions=scenario)
        self.usage: dict[str, int] = {}
        self._pending = [each for each in actions if each.requestor == "user"]
        self._greeted = False

    def get_init_state(self, message_history: list[Any] | None = None) -> UserState:
        return UserState(system_messages=[], messages=message_history or [])

    @classmethod
    def is_stop(cls, message: UserMessage) -> bool:
        return not message.is_tool_call() and STOP in (message.content or "")

    def set_seed(self, seed: int) -> None:
        """Do nothing: there is nothing random."""

    def generate_next_message(
        self, message: Any, state: UserState
    ) -> tuple[UserMessage, UserState]:
        if not self._greeted:
            self._greeted = True
            # Some scenarios tell the user what to end with, which would end it at once.
            stated = _ENDINGS.sub("the end", str(self.instructions))
            return _says(stated or "Hello."), state
        if isinstance(message, (ToolMessage, MultiToolMessage)):
            return _says("Done."), state
        if self._pending and self._pending[0].name in (message.content or ""):
            action = self._pending.pop(0)
            asked = {"name": action.name, "arguments": action.arguments, "requestor": "user"}
            call = ToolCall(id=f"user_{len(self._pending)}", **asked)
            return UserMessage(role="user", tool_calls=[call], cost=0.0), state
        return _says(STOP), state


class SimulatedUser(UserSimulator):  # type: ignore[misc]  # tau2 has no types
    """The benchmark's own simulator, with its failures marked and its tokens counted.

    `settings` are `url`, `model` and `key`; without a `url` litellm finds the model by its name.
    """

    def __init__(
        self, scenario: str, tools: Sequence[Any] | None, settings: dict[str, Any], wait_s: float
    ) -> None:
        model = settings["model"]
        options: dict[str, Any] = {"temperature": 0.0, "timeout": wait_s, "num_retries": _RETRIES}
        if settings["url"]:
            model = f"openai/{model}"
            options["api_base"] = settings["url"]
        # An OpenAI client wants some key even where the server wants none.
        if settings["key"] or settings["url"]:
            options["api_key"] = settings["key"] or "none"
        super().__init__(tools=tools, instructions=scenario, llm=model, llm_args=options)
        # Of the user alone.
        self.usage = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}

    def generate_next_message(
        self, message: Any, state: UserState
    ) -> tuple[UserMessage, UserState]:
        """Ask the model; whatever goes wrong is the user's failure."""
        try:
            said, state = super().generate_next_message(message, state)
            said.validate()
        except Exception as error:
            raise UserFailedError(f"{type(error).__name__}: {error}"[:500]) from error
        self.usage["requests"] += 1
        for key, count in (said.usage or {}).items():
            self.usage[key] = self.usage.get(key, 0) + (count or 0)
        return said, state


def _says(text: str) -> UserMessage:
    return UserMessage(role="user", content=text, cost=0.0)


_UNSCORED: dict[type[Exception], str] = {
    ContextFullError: "context_limit",
    InvalidAnswerError: "unparsable",
    UserFailedError: "user_error",
}


class Domain:
    """What the simulations of a domain share, and what the worker answers about it."""

    def __init__(self, name: str) -> None:
        self._name = name
        # In the official order.
        self._tasks = {task.id: task for task in registry.get_tasks_loader(name)()}
        # Made before the first fork, so that all share what it loads.
        environment = self._environment(self.options(None))
        self._about = {
            "tau2": importlib.metadata.version("tau2"),
            "domain": name,
            "policy_characters": len(environment.get_policy()),
            "tools": len(environment.get_tools()),
        }

    def about(self, _: WorkerRequest) -> dict[str, Any]:
        return self._about

    def options(self, task: Any) -> dict[str, Any]:  # noqa: ARG002
        """Return what the environment of a task is made with; of no task if None."""
        return {}

    def user_tools(self, made: Any, task: Any) -> list[Any] | None:  # noqa: ARG002
        """Return the tools of the one who plays the user."""
        return made.get_user_tools() if made.user_tools else None

    def samples(self, _: WorkerRequest) -> list[str]:
        return list(self._tasks)

    def criteria(self, sample: str) -> Any:
        return self._tasks[sample].evaluation_criteria

    def run(self, request: WorkerRequest) -> dict[str, Any]:
        """Play a simulation to its end and check it, until the request is cancelled.

        Its arguments are `sample`, `endpoint`, `session`, `sampling`, `key`, `timeout_s`, `user`,
        `max_steps` and `judge`. Returns status and score, the checker's verdict, the agent's
        history and steps, and the user's tokens.
        """
        user, judge = request.args["user"], request.args["judge"]
        for url in (user["url"], judge and judge["url"]):
            if url:
                request.guard.allow(*address_of(url))
        if judge:  # only v1.x has what it replaces
            appoint(judge)
        plain: dict[str, Any] = json.loads(json.dumps(self._play(request), default=str))
        return plain

    def _environment(self, options: dict[str, Any]) -> Any:
        return registry.get_env_constructor(self._name)(**options)

    def _play(self, request: WorkerRequest) -> dict[str, Any]:
        args = request.args
        task, timeout_s = self._tasks[args["sample"]], args["timeout_s"]
        line = AgentConnection.of_trial(request, session_id=args["session"])
        environment = self._environment(self.options(task))
        tools = [tool.openai_schema for tool in environment.get_tools()]
        agent = EndpointAgent(environment.get_policy(), tools, line)
        user: ScriptedUser | SimulatedUser
        scenario = str(task.user_scenario)
        if args["user"]["kind"] == "scripted":
            user = ScriptedUser(scenario, task.evaluation_criteria.actions or [])
        else:
            wait_s = min(_USER_WAIT_S, timeout_s)
            user = SimulatedUser(scenario, self.user_tools(environment, task), args["user"], wait_s)
        orchestrator = Orchestrator(
            domain=self._name,
            agent=agent,
            user=user,
            environment=environment,
            task=task,
            max_steps=args["max_steps"],
            max_errors=_MAX_ERRORS,
            seed=args["sampling"]["seed"],
        )
        ended = self._run(task, orchestrator)
        # All that the benchmark's checker reads, so that a verdict can be checked again.
        kept = {"role", "content", "tool_calls", "requestor", "error", "id"}
        plain = {"mode": "json", "include": kept, "exclude_none": True}
        said = [message.model_dump(**plain) for message in orchestrator.trajectory]
        history = agent.history
        heard = {"steps": history.steps, "agent": history.messages, "user": user.usage}
        return {**ended, **heard, "trajectory": said}

    def _run(self, task: Any, orchestrator: Orchestrator) -> dict[str, Any]:
        try:
            simulation = orchestrator.run()
        except tuple(_UNSCORED) as error:
            return _unscored(_UNSCORED[type(error)], str(error))
        reason = TerminationReason(simulation.termination_reason)
        if reason is TerminationReason.MAX_STEPS:
            return _unscored("turn_limit", f"not done after {orchestrator.max_steps} steps")
        how = {"evaluation_type": EvaluationType.ALL, "solo_mode": False, "domain": self._name}
        if options := self.options(task):  # only v1.x can be told
            how["env_kwargs"] = options
        checked = evaluate_simulation(simulation=simulation, task=task, **how)
        verdict = {"ended_by": reason.value, **checked.model_dump(mode="json")}
        return {"status": "scored", "score": checked.reward, "verdict": verdict, "error": None}


def _unscored(status: str, error: str) -> dict[str, Any]:
    return {"status": status, "score": None, "verdict": {}, "error": error}
