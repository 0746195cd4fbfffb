"""The ReAct loop: the agent calls browser tools until it answers or runs into a limit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from agentbench_kv.adapters.base import AgentClient, Message
from agentbench_kv.adapters.browser.browser import TOOLS, Browser, call_tool, estimate_tokens
from agentbench_kv.errors import ContextLimitError
from agentbench_kv.results.records import TrialStatus

_End = tuple[TrialStatus, str | None]


@dataclass
class Episode:
    """What was said and how it ended."""

    messages: list[Message]
    status: TrialStatus = TrialStatus.TURN_LIMIT  # `scored` if there is an answer to check
    reason: str | None = None  # why there is none
    answer: str = ""  # the agent's last message
    turns: int = 0
    calls: Counter[str] = field(default_factory=Counter)  # by tool; `errors`: calls not answered


def play(
    client: AgentClient, browser: Browser, messages: list[Message], *, turns: int, context: int = 0
) -> Episode:
    """Let the agent browse until it answers, cannot be read, or reaches a limit.

    An assistant message without a call is the answer. A call that the browser cannot answer gets
    an error as its result, and the episode goes on. `context` limits the conversation's estimated
    tokens; 0 leaves the model's own limit.
    """
    episode = Episode(messages, reason=f"no answer in {turns} turns")
    end: _End | None
    while episode.turns < turns:
        if context and sum(map(_tokens, messages)) > context:
            end = TrialStatus.CONTEXT_LIMIT, f"more than {context} estimated tokens"
        else:
            end = _step(client, browser, episode)
        if end:
            episode.status, episode.reason = end
            break
    return episode


def _step(client: AgentClient, browser: Browser, episode: Episode) -> _End | None:
    """Take one assistant message and run its calls; how the episode ended, if it did."""
    try:
        reply = client.chat(episode.messages, TOOLS)
    except ContextLimitError as error:
        return TrialStatus.CONTEXT_LIMIT, str(error)
    episode.turns += 1
    episode.messages.append(reply.message)
    if reply.finish_reason == "context_limit":
        return TrialStatus.CONTEXT_LIMIT, "the model's own limit"
    if reply.finish_reason == "length":
        return TrialStatus.UNPARSABLE, "the message was cut off at max_tokens"
    if reply.unparsable:
        return TrialStatus.UNPARSABLE, "a tool call that is not JSON"
    for call in reply.tool_calls:
        function = call["function"]
        seen = call_tool(browser, function["name"], function["arguments"])
        episode.calls[str(function["name"])] += 1
        episode.calls["errors"] += seen.failed
        answer = {"role": "tool", "tool_call_id": call["id"], "content": seen.text}
        episode.messages.append(answer)
    if reply.tool_calls:
        return None
    if not reply.content.strip():
        return TrialStatus.UNPARSABLE, "neither a call nor an answer"
    episode.answer = reply.content
    return TrialStatus.SCORED, None


def _tokens(message: Message) -> int:
    calls = message.get("tool_calls") or ()
    parts = [message.get("content"), message.get("reasoning_content")]
    parts += [f"{call['function']['name']} {call['function']['arguments']}" for call in calls]
    return estimate_tokens("\n".join(str(part) for part in parts if part))
