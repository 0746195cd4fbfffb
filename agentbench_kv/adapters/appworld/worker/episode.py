"""One trial: the agent calls functions of apps until it says that the task is done."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...agent_client import AgentConnection, ChatHistory, ContextFullError, is_shallow
from . import world

if TYPE_CHECKING:
    from agentbench_kv.adapters.worker_child import WorkerRequest

_RULES = """\
You do what {name} asks for by calling functions of the apps on their behalf. Nobody will answer \
questions: decide everything yourself. {name}'s email address is {email}, the phone number \
{phone}. It is {date}. Passwords, addresses and payment cards are in the supervisor app; most \
apps want the access token that their login function returns. Results that come in pages have to \
be read to the last one. Change nothing that was not asked for. When you are done call \
supervisor__complete_task, with the answer as short as it can be if there was a question."""
_HOW_TO_CALL = """ Look up with the api_docs functions which apps and functions there are and what \
they take, and call those of the other apps with call_api."""
_CALL_ANY: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": world.CALL_ANY,
        "description": "Call a function of an app, as api_docs describes it.",
        "parameters": {
            "type": "object",
            "properties": {
                "app_name": {"type": "string"},
                "api_name": {"type": "string"},
                "arguments": {"type": "object", "description": "Its arguments by name."},
            },
            "required": ["app_name", "api_name"],
        },
    },
}


def _basic(_: str) -> list[dict[str, Any]]:
    return [*_described(world.basic()), _CALL_ANY]


def _needed(name: str) -> list[dict[str, Any]]:
    return _described(world.needed(name))


def _all(_: str) -> list[dict[str, Any]]:
    return list(world.functions().values())


def _described(names: Sequence[str]) -> list[dict[str, Any]]:
    return [world.functions()[each] for each in names]


OFFERED: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "docs": _basic, "needed": _needed, "all": _all,
}  # fmt: skip


class AppEpisode:
    """The history of a trial, and the world it changes."""

    def __init__(self, played: world.World, tools: list[dict[str, Any]]) -> None:
        self.world, self.tools = played, tools
        self.offered = {each["function"]["name"] for each in tools}
        who, when = played.task.supervisor, played.task.datetime
        rules = _RULES + (_HOW_TO_CALL if world.CALL_ANY in self.offered else "")
        about = {"name": f"{who.first_name} {who.last_name}", "email": who.email}
        about |= {"phone": who.phone_number, "date": f"{when:%A, %d %B %Y, %H:%M}"}
        self.history = ChatHistory([
            {"role": "system", "content": rules.format(**about)},
            {"role": "user", "content": played.task.instruction},
        ])  # fmt: skip

    def go_on(self, line: AgentConnection, most: int) -> str:
        """Play until the agent stops; return the status, `scored` or why it is not to be scored."""
        while len(self.history.steps) < most:
            said = self.history.add(line.chat(self.history.messages, self.tools))
            calls = said.get("tool_calls", ())
            if not calls:
                return "scored"
            for call in calls:
                answer = json.dumps(self._answer(call["function"]), ensure_ascii=False, default=str)
                result = {"role": "tool", "tool_call_id": call.get("id") or "", "content": answer}
                self.history.messages.append(result)
            if any(world.DONE in json.dumps(call) for call in calls) and self.world.completed():
                return "scored"
        return "turn_limit"

    def _answer(self, function: dict[str, Any]) -> Any:
        name, arguments = function["name"], _arguments(function.get("arguments"))
        if name not in self.offered:
            return {"message": f"There is no function {name}."}
        if name == world.CALL_ANY and arguments is not None:
            name = f"{arguments.get('app_name')}__{arguments.get('api_name')}"
            arguments = _arguments(arguments.get("arguments"))
        if arguments is None:
            return {"message": "The arguments are not a JSON object."}
        return self.world.call(name, arguments)


def _arguments(given: Any) -> dict[str, Any] | None:
    """Return a call's arguments, as an object or as its text; None if they are no such thing."""
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except (ValueError, RecursionError):
            return None
    given = {} if given is None else given
    return given if isinstance(given, dict) and is_shallow([given]) else None


def play(request: WorkerRequest) -> dict[str, Any]:
    """Play a task to its end and check the state it left.

    The arguments are those of a worker's trial, with `apis` and `max_steps`.
    """
    args = request.args
    line = AgentConnection.of_trial(request)
    tools = OFFERED[args["apis"]](args["sample"])
    episode = AppEpisode(world.World(args["sample"]), tools)
    error = None
    try:
        status = episode.go_on(line, args["max_steps"])
    except ContextFullError as full:
        status, error = "context_limit", str(full)
    verdict = episode.world.verdict() if status == "scored" else {}
    score = float(verdict["success"]) if verdict else None
    history = episode.history
    heard = {"agent": history.messages, "steps": history.steps, "api_calls": episode.world.calls}
    return {"status": status, "score": score, "error": error, "verdict": verdict, **heard}
