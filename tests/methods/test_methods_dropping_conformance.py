"""Methods that drop messages, in sessions of the micro model; and that the checks can fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentbench_kv.accounting import KVStats
from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.drop_checks import check_drops
from agentbench_kv.conformance.methods import method_suite
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.gateway.dropping import SessionDrops
from agentbench_kv.gateway.messages import Message
from agentbench_kv.gateway.planning import Planner
from agentbench_kv.methods.dropping.clear_tools import ClearTools
from agentbench_kv.methods.dropping.oracle_tools import OracleTools
from agentbench_kv.methods.dropping.policy import Drop, History, What
from agentbench_kv.methods.spans import SpanRange
from agentbench_kv.registry import make_method


def failures(results: Sequence[CheckResult]) -> list[str]:
    return [check.name for check in results if not check.ok]


@pytest.mark.parametrize("execution", ["text", "span", "span+move"])
@pytest.mark.parametrize("name", ["clear-tools", "turn-window"])
def test_policies_and_executions(name: str, execution: str) -> None:
    (results,) = method_suite(make_method(name, 500, {"exec": execution})).values()
    assert not failures(results)
    assert len(results) == 5


@pytest.mark.parametrize("name", ["random-tools", "summarise", "oracle-tools"])
def test_other_policies(name: str) -> None:
    assert not failures(check_drops(make_method(name, 500)))


@pytest.mark.parametrize("execution", ["text", "span"])
def test_what_the_model_names(execution: str) -> None:
    settings = {"exec": execution, "fork_every": "2"}
    assert not failures(check_drops(make_method("sidequest-prompted", None, settings)))


def test_thoughts_and_arguments_leave_as_spans() -> None:
    method = make_method("clear-tools", 500, {"exec": "span", "clear_inputs": "on"})
    assert not failures(check_drops(method))


def test_spans_of_other_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = SessionDrops.spans

    def shifted(drops: SessionDrops, *given: Any) -> list[SpanRange]:
        return [(begin + 2, end + 2) for begin, end in spans(drops, *given)]

    monkeypatch.setattr(SessionDrops, "spans", shifted)
    method = make_method("clear-tools", 500, {"exec": "span"})
    assert failures(check_drops(method)) == ["the right tokens leave"]


def test_tokens_that_are_not_accounted_for_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    account = SessionDrops.account

    def one_more(drops: SessionDrops, stats: KVStats) -> KVStats:
        return replace(account(drops, stats), evicted=stats.evicted + 1)

    monkeypatch.setattr(SessionDrops, "account", one_more)
    method = make_method("clear-tools", 500, {"exec": "span"})
    assert failures(check_drops(method)) == ["accounting"]


def test_a_log_of_other_messages_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite = Planner.rewrite

    def other(
        planner: Planner, session: Any, plan: Any, messages: Sequence[Message], tools: Any
    ) -> Any:
        shown = [*messages[:-1], {**messages[-1], "content": "something else"}]
        return rewrite(planner, session, plan, shown, tools)

    monkeypatch.setattr(Planner, "rewrite", other)
    assert "as a fresh session" in failures(check_drops(make_method("clear-tools", 500)))


def test_a_prefix_that_is_not_the_log_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rewind = EmbeddedEngine.rewind

    def too_far(engine: EmbeddedEngine, session: str, length: int) -> None:
        rewind(engine, session, length - 3)

    monkeypatch.setattr(EmbeddedEngine, "rewind", too_far)
    found = failures(check_drops(make_method("clear-tools", 500)))
    assert {"masked-cache equality", "accounting"} <= set(found)


def test_what_is_still_needed_and_goes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OracleTools, "decide", ClearTools(budget=500).decide)
    method = make_method("oracle-tools", 500, {"exec": "span"})
    assert failures(check_drops(method)) == ["decisions"]


class Greedy(ClearTools):
    """Names the system message and what is not due."""

    def decide(self, history: History) -> frozenset[Drop]:
        return frozenset({Drop(0, What.MESSAGE), *super().decide(history)})


def test_a_system_message_that_goes_is_found() -> None:
    assert "decisions" in failures(check_drops(Greedy(budget=500)))
