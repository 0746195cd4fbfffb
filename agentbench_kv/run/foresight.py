"""What a session still needs, for policies that must know it beforehand: from its golden agent."""

from __future__ import annotations

from collections.abc import Sequence

from agentbench_kv.adapters.base import LastUses, Message, Sample, Task
from agentbench_kv.adapters.probe.gold import GoldSessions
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.registry import load_task, names
from agentbench_kv.run.spec import RunSpec
from agentbench_kv.training.sidequest.hindsight import cursor_uses


def check_foresight(spec: RunSpec) -> None:
    """Refuse a policy that must know what is needed later, where nobody does: UsageError."""
    task = load_task(spec.task)
    if not spec.built_method.foresees or foretold(task) or _plays_gold(spec, task):
        return
    known = ", ".join(name for name in names("task") if foretold(load_task(name)))
    raise UsageError(
        f"method {spec.method!r} must know which results are needed later, and task {spec.task!r} "
        f"does not say; use {known}, or --engine scripted --model gold"
    )


def refuse_foresight(method: Method) -> None:
    """Refuse a policy that must know what is needed later, where anybody may ask: UsageError."""
    if method.foresees:
        raise UsageError(
            f"method {method.label!r} must know which results are needed later, and of a client's "
            "sessions nobody does; use it in kvbench run"
        )


def foretold(task: type[Task]) -> bool:
    """Whether a task says what its golden agent needs, which any agent on it then does."""
    return task.last_uses is not Task.last_uses


def last_uses(spec: RunSpec, task: Task, sample: Sample) -> LastUses | None:
    """Return the last uses of a sample's results: the task's word, or in hindsight its gold's."""
    if foretold(type(task)):
        return task.last_uses(sample)
    session = GoldSessions(task).of(sample) if _plays_gold(spec, type(task)) else None
    if session is None:
        return None
    last = {use.message: session.answers[use.last - 1] for use in cursor_uses(session)}
    places = _places(session.messages)
    found: list[list[tuple[int, int]]] = []
    for at, message in enumerate(session.messages):
        if message["role"] == "user":
            found.append([])
        elif message["role"] == "tool" and found:
            found[-1].append(places[last[at]])
    return found


def _plays_gold(spec: RunSpec, task: type[Task]) -> bool:
    return (spec.engine, spec.model) == ("scripted", "gold") and task.needs_endpoint


def _places(messages: Sequence[Message]) -> dict[int, tuple[int, int]]:
    """Return for each answer, by its message, the user's turn and its number there."""
    turn, number, found = -1, 0, {}
    for at, message in enumerate(messages):
        if message["role"] == "user":
            turn, number = turn + 1, 0
        elif message["role"] == "assistant":
            found[at] = (turn, number)
            number += 1
    return found
