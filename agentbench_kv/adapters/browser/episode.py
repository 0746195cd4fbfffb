"""The ReAct loop: the agent calls browser tools until it answers or runs into a limit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from agentbench_kv.adapters.base import AgentClient, Message, Reply
from agentbench_kv.adapters.browser.browser import Browser
from agentbench_kv.adapters.browser.estimate import estimate_tokens
from agentbench_kv.adapters.browser.tools import TOOLS, call_tool
from agentbench_kv.errors import ContextLimitError
from agentbench_kv.results.records import TrialStatus


@dataclass(frozen=True)
class Limits:
    """When an episode ends without an answer."""

    turns: int  # assistant messages
    context: int = 0  # estimated tokens of the conversation; 0: only the model's own limit


@dataclass
class Episode:
    """What was said and how it ended."""

    messages: list[Message]
    status: TrialStatus = TrialStatus.TURN_LIMIT  # `scored` if there is an answer to check
    reason: str | None = None  # why there is none
    answer: str = ""  # the agent's last message
    turns: int = 0
    calls: Counter[str] = field(default_factory=Counter)  # by tool; `errors`: calls not answered

    def end(self, status: TrialStatus, reason: str | None = None) -> bool:
        """Set how it ended; return True."""
        self.status, self.reason = status, reason
        return True


def play(client: AgentClient, browser: Browser, messages: list[Message], limits: Limits) -> Episode:
    """Let the agent browse until it answers, cannot be read, or reaches a limit.

    An assistant message without a call is the answer. A call that the browser cannot answer gets
    an error as its result, and the episode goes on.
    """
    episode = Episode(messages)
    while episode.turns < limits.turns:
        if limits.context and sum(map(_tokens, messages)) > limits.context:
            reason = f"more than {limits.context} estimated tokens"
            episode.end(TrialStatus.CONTEXT_LIMIT, reason)
            return episode
        if _step(client, browser, episode):
            return episode
    episode.end(TrialStatus.TURN_LIMIT, f"no answer in {limits.turns} turns")
    return episode


def _step(client: AgentClient, browser: Browser, episode: Episode) -> bool:
    """Take one assistant message and run its calls; True if the episode is over."""
    try:
        reply = client.chat(episode.messages, TOOLS)
    except ContextLimitError as error:
        return episode.end(TrialStatus.CONTEXT_LIMIT, str(error))
    episode.turns += 1
    episode.messages.append(reply.message)
    if _ended(reply, episode):
        return True
    for call in reply.tool_calls:
        function = call["function"]
        seen = call_tool(browser, function["name"], function["arguments"])
        episode.calls[str(function["name"])] += 1
        episode.calls["errors"] += seen.failed
        answer = {"role": "tool", "tool_call_id": call["id"], "content": seen.text}
        episode.messages.append(answer)
    return False


def _ended(reply: Reply, episode: Episode) -> bool:
    if reply.finish_reason == "context_limit":
        return episode.end(TrialStatus.CONTEXT_LIMIT, "the model's own limit")
    if reply.finish_reason == "length":
        return episode.end(TrialStatus.UNPARSABLE, "the message was cut off at max_tokens")
    if reply.unparsable:
        return episode.end(TrialStatus.UNPARSABLE, "a tool call that is not JSON")
    if reply.tool_calls:
        return False
    if not reply.content.strip():
        return episode.end(TrialStatus.UNPARSABLE, "neither a call nor an answer")
    episode.answer = reply.content
    return episode.end(TrialStatus.SCORED)


def _tokens(message: Message) -> int:
    calls = message.get("tool_calls") or ()
    parts = [message.get("content"), message.get("reasoning_content")]
    parts += [f"{call['function']['name']} {call['function']['arguments']}" for call in calls]
    return estimate_tokens("\n".join(str(part) for part in parts if part))
