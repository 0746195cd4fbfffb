"""Running into the model's last position is a status of its own, whoever noticed it."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from agentbench_kv.adapters.base import Outcome, TrialContext
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.results.records import TrialRecord, TrialStatus

Play = Callable[..., dict[str, TrialRecord]]
UseEngine = Callable[..., list[ScriptedEngine]]
Ask = Callable[..., httpx.Response]
ONE = ("x-0",)
LIMIT = 200
SHORT, TOO_LONG = "hello", "hello " * LIMIT


def raised(error: str) -> Outcome:
    raise OSError(error)


@pytest.mark.parametrize(
    "fail",
    [
        raised,
        lambda error: Outcome(TrialStatus.ENGINE_ERROR, error=error),
        lambda error: Outcome(TrialStatus.INFRA_ERROR, error=error),
    ],
)
def test_a_worker_that_is_refused_at_the_limit_reached_it(
    play: Play, use_engine: UseEngine, ask: Ask, fail: Callable[[str], Outcome]
) -> None:
    use_engine(ScriptedEngine, context_limit=LIMIT)

    def behave(_: str, __: int, context: TrialContext) -> Outcome:
        answer = ask(context, TOO_LONG)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        return fail(answer.text)

    record = play(behave, ids=ONE, endpoint=True)["x-0"]
    assert (record.status, record.score) == (TrialStatus.CONTEXT_LIMIT, None)
    assert "more than the context holds" in (record.error or "")
    # It would be refused as often as it is tried.
    assert record.attempts == 1


def test_a_worker_whose_answer_was_cut_at_the_limit_reached_it(
    play: Play, use_engine: UseEngine, ask: Ask
) -> None:
    use_engine(ScriptedEngine, context_limit=LIMIT)

    def behave(_: str, __: int, context: TrialContext) -> Outcome:
        answer = ask(context, SHORT).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        raise ValueError("half an answer makes no sense")

    record = play(behave, ids=ONE, texts=(TOO_LONG,), endpoint=True)["x-0"]
    assert record.status is TrialStatus.CONTEXT_LIMIT


def test_a_failure_after_an_answer_is_not_the_limit(
    play: Play, use_engine: UseEngine, ask: Ask
) -> None:
    use_engine(ScriptedEngine, context_limit=LIMIT)

    def behave(_: str, __: int, context: TrialContext) -> Outcome:
        assert ask(context, TOO_LONG).status_code == 400
        assert ask(context, SHORT).status_code == 200
        return Outcome(TrialStatus.ENGINE_ERROR, error="something else")

    record = play(behave, ids=ONE, endpoint=True)["x-0"]
    assert (record.status, record.error) == (TrialStatus.ENGINE_ERROR, "something else")


def test_a_task_that_coped_with_the_limit_keeps_its_verdict(
    play: Play, use_engine: UseEngine, ask: Ask
) -> None:
    use_engine(ScriptedEngine, context_limit=LIMIT)

    def behave(_: str, __: int, context: TrialContext) -> Outcome:
        assert ask(context, TOO_LONG).status_code == 400
        return Outcome(TrialStatus.SCORED, score=0.5)

    assert play(behave, ids=ONE, endpoint=True)["x-0"].score == 0.5
