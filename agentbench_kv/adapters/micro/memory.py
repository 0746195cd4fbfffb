"""The task `micro/memory`: what a depot agent learned in past sessions, needed in a new one.

All requests of an episode but the one to ship an item, with the golden agent's answers, are past
sessions, each behind the system message. The request to ship is a session of its own, which needs
handles that only past sessions have said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from agentbench_kv.adapters.base import (
    AgentClient,
    Message,
    Outcome,
    PastSession,
    Recalled,
    RememberingClient,
    Reply,
    Sample,
    ScriptedAgent,
    Task,
    TrialContext,
)
from agentbench_kv.adapters.layers import best_layer
from agentbench_kv.adapters.micro.episode import Environment, Episode, ExpectedCall, UserTurn
from agentbench_kv.adapters.micro.task import (
    EVIDENCE,
    MAX_MESSAGE_TOKENS,
    RecallTask,
    play,
    score,
    scripted,
)
from agentbench_kv.errors import UsageError
from agentbench_kv.params import param
from agentbench_kv.results.records import Metric, TrialStatus

Numbered = tuple[int, Message]  # the message's number in the whole history, from 1


@dataclass(kw_only=True)
class MicroMemory(RecallTask):
    """A sample is an episode; it scores 1 if every call and the reply were exactly right."""

    name = "micro/memory"
    summary = "generated past sessions, and a request that needs them"
    profile = "memory"
    remembers: ClassVar[bool] = True
    # The new session has no tool result that a later one needs.
    last_uses = Task.last_uses  # type: ignore[assignment]

    context: str = param(
        "full",
        "which past sessions there are: all, the last ones, none",
        choices=("full", "sessions", "none"),
        rare=True,
    )
    last: int = param(0, "how many last sessions there are", low=0, rare=True)

    def __post_init__(self) -> None:
        """Refuse settings that do not go together."""
        if (self.context == "sessions") != bool(self.last):
            raise UsageError("context=sessions and last=N, how many, go together")

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        episode, client = self._episode(sample), context.client
        messages: list[Message] = [{"role": "system", "content": episode.system}]
        sessions = self._kept(past_sessions(episode))
        if isinstance(client, RememberingClient) and client.remembers:
            for session in sessions:
                client.remember(_told(messages[0], session))
        else:
            messages += [message for session in sessions for _, message in session]
        question, told = asked(episode), sum(map(len, sessions))
        environment, line = Environment(question), Listening(client)
        limit = min(MAX_MESSAGE_TOKENS, context.max_tokens)
        if not play(line, environment, messages, limit):
            return Outcome(TrialStatus.CONTEXT_LIMIT, transcript=messages)
        result = score(environment)
        metrics = {**result.metrics, **_recall(episode, question.calls, line, told)}
        success, facts = float(result.success), result.facts
        return Outcome(TrialStatus.SCORED, success, metrics, messages, facts=facts)

    def nothing_right(self, sample: Sample) -> Mapping[str, Metric]:
        environment = Environment(asked(self._episode(sample)))
        environment.abandon()
        return score(environment).metrics

    def nothing_recalled(self, sample: Sample) -> Mapping[str, Metric]:
        if self.context == "none":
            return {}
        episode = self._episode(sample)
        needed = sum(len(evidence_of(episode, call)) for call in asked(episode).calls)
        return {"evidence_recall_right": 0, "evidence_recall_asked": needed}

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        return scripted(asked(self._episode(sample)), agent)

    def _kept(self, sessions: Sequence[list[Numbered]]) -> Sequence[list[Numbered]]:
        if self.context == "none":
            return []
        return sessions[-self.last :] if self.last else sessions


class Listening:
    """A line that keeps what a memory put before the model for each answer, and for each call."""

    def __init__(self, client: AgentClient) -> None:
        self._client = client
        self.recalled: list[Recalled | None] = []
        self.for_calls: list[Recalled | None] = []  # an answer without any is in a call's place

    def chat(self, messages: Sequence[Message], *rest: Any, **more: Any) -> Reply:
        """Pass the request on."""
        reply = self._client.chat(messages, *rest, **more)
        self.recalled.append(reply.recalled)
        self.for_calls += [reply.recalled] * max(1, len(reply.tool_calls))
        return reply


def asked(episode: Episode) -> Episode:
    """Return the session of the request to ship."""
    (turn,) = (turn for turn in episode.turns if _ships(turn))
    return replace(episode, turns=(turn,))


def past_sessions(episode: Episode) -> list[list[Numbered]]:
    """Return the other requests, with what the golden agent and its tools said to them."""
    number, cursor = 1, 0
    sessions: list[list[Numbered]] = []
    for turn in episode.turns:
        if _ships(turn):
            continue
        said = _golden(turn, cursor)
        sessions.append(list(enumerate(said, number)))
        number, cursor = number + len(said), cursor + len(turn.calls)
    return sessions


def _ships(turn: UserTurn) -> bool:
    return turn.calls[0].name == "open"


def _golden(turn: UserTurn, cursor: int) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": turn.text}]
    for at, call in enumerate(turn.calls, cursor):
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        wanted = {"id": f"past_{at}", "type": "function", "function": function}
        said = {"role": "assistant", "content": "", "reasoning_content": call.think}
        messages.append({**said, "tool_calls": [wanted]})
        result = call.result_json(at)
        messages.append({"role": "tool", "tool_call_id": f"past_{at}", "content": result})
    reply: Message = {"role": "assistant", "content": turn.reply.text}
    if turn.reply.think is not None:
        reply["reasoning_content"] = turn.reply.think
    return [*messages, reply]


def _told(system: Message, session: Sequence[Numbered]) -> PastSession:
    numbers: list[int | None] = [None, *(number for number, _ in session)]
    return PastSession([system, *(message for _, message in session)], numbers)


def evidence_of(episode: Episode, call: ExpectedCall) -> list[int]:
    """Return which past messages first said what a call needs; rules stand in every prompt."""
    wanted = (slot.handle for slot in call.slots if slot.kind in EVIDENCE)
    handles = [handle for handle in dict.fromkeys(wanted) if handle not in episode.system]
    said = [(n, json.dumps(each)) for session in past_sessions(episode) for n, each in session]
    return [next(number for number, text in said if handle in text) for handle in handles]


def _recall(
    episode: Episode,
    calls: Sequence[ExpectedCall],
    line: Listening,
    told: int,
) -> dict[str, Metric]:
    """Return how much of each call's evidence was before the model when it was to be made."""
    recalled = line.recalled
    known = [each.messages for each in recalled if each is not None and each.messages is not None]
    if not known:
        return {}
    none = Recalled((), {}, {})
    before = [each or none for each in line.for_calls] + [none] * len(calls)
    needed = [
        (there, number)
        for there, call in zip(before, calls, strict=False)
        for number in evidence_of(episode, call)
    ]
    found: dict[str, Metric] = {
        "evidence_recall_right": sum(
            (there.messages or {}).get(number, 0.0) for there, number in needed
        ),
        "evidence_recall_asked": len(needed),
        "recalled_total": sum(sum(each.values()) for each in known),
        "recalled_count": len(known),
        "recalled_texts": sum(len(each.texts) for each in recalled if each is not None),
    }
    layers = [each.layers for each in recalled if each is not None and each.layers is not None]
    if len(layers) < len(known):
        return found
    by_layer = [(there.layers or {}, number) for there, number in needed]
    return found | best_layer(by_layer, layers, told)
