"""The ReAct loop: how each way of ending is recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agentbench_kv.adapters.base import Message, Reply
from agentbench_kv.adapters.browser.browser import Browser
from agentbench_kv.adapters.browser.corpus import Corpus
from agentbench_kv.adapters.browser.task import BrowsingEpisode, play
from agentbench_kv.errors import ContextLimitError
from agentbench_kv.results.records import TrialStatus

SEARCH = ("search", {"query": "heron"})


def says(
    text: str = "", *calls: tuple[str, Any], finish: str = "stop", broken: bool = False
) -> Reply:
    """Return an assistant message."""
    made = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": text, "tool_calls": made}
    return Reply(text, "", made, finish, broken, text, message)


class Agent:
    """Says what it was given, then the last thing again and again."""

    def __init__(self, *replies: Reply | Exception) -> None:
        self.replies = list(replies)
        self.histories: list[list[Message]] = []

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        assert tools
        assert max_tokens is None
        assert stop == ()
        self.histories.append(list(messages))
        said = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(said, Exception):
            raise said
        return said


def run(corpus: Corpus, agent: Agent, context: int = 0) -> BrowsingEpisode:
    messages: list[Message] = [{"role": "user", "content": "Which bird?"}]
    return play(agent, Browser(corpus), messages, turns=5, context=context)


def test_an_answer_ends_it(corpus: Corpus) -> None:
    agent = Agent(says("", SEARCH, ("open", {"id": 0})), says("Final answer: heron"))
    episode = run(corpus, agent)
    assert (episode.status, episode.reason, episode.turns) == (TrialStatus.SCORED, None, 2)
    assert episode.answer == "Final answer: heron"
    roles = [message["role"] for message in episode.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]
    assert [m["tool_call_id"] for m in episode.messages[2:4]] == ["call_0", "call_1"]
    assert "heron stands" in episode.messages[3]["content"]
    assert agent.histories[1] == episode.messages[:4]
    assert dict(episode.calls) == {"search": 1, "open": 1, "errors": 0}


def test_a_wrong_call_is_answered_and_the_episode_goes_on(corpus: Corpus) -> None:
    episode = run(corpus, Agent(says("", ("open", {"id": 3}), ("fly", {})), says("x")))
    assert episode.status is TrialStatus.SCORED
    assert episode.calls["errors"] == 2
    assert episode.messages[2]["content"].startswith("Error: no page is open yet")


@pytest.mark.parametrize(
    ("last", "status", "reason"),
    [
        (says("", SEARCH), TrialStatus.TURN_LIMIT, "no answer in 5 turns"),
        (says("<tool_call>", broken=True), TrialStatus.UNPARSABLE, "a tool call that is not JSON"),
        (says("and", finish="length"), TrialStatus.UNPARSABLE, "cut off at max_tokens"),
        (says("  "), TrialStatus.UNPARSABLE, "neither a call nor an answer"),
        (says("a", finish="context_limit"), TrialStatus.CONTEXT_LIMIT, "the model's own limit"),
        (ContextLimitError("9 of 8 tokens"), TrialStatus.CONTEXT_LIMIT, "9 of 8 tokens"),
    ],
    ids=["turns", "broken", "cut", "empty", "model limit", "refused"],
)
def test_the_ways_of_not_completing(
    corpus: Corpus, last: Reply | Exception, status: TrialStatus, reason: str
) -> None:
    episode = run(corpus, Agent(says("", SEARCH), last))
    assert episode.status is status
    assert reason in str(episode.reason)
    assert episode.answer == ""
    assert len(episode.messages) >= 3


def test_the_context_limit_in_estimated_tokens(corpus: Corpus) -> None:
    wide = run(corpus, Agent(says("", SEARCH)), 10_000)
    assert wide.status is TrialStatus.TURN_LIMIT
    tight = run(corpus, Agent(says("", SEARCH)), 150)
    assert tight.status is TrialStatus.CONTEXT_LIMIT
    assert tight.turns < 5
    assert "150 estimated tokens" in str(tight.reason)
