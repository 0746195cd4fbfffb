"""SideQuest in the gateway: its fork disturbs nobody, answers are read with care and paid for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.accounting import KVStats
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.gateway import Gateway, Options
from agentbench_kv.gateway import gateway as gateway_module
from agentbench_kv.gateway.aside import Aside
from agentbench_kv.gateway.client import InProcessClient
from agentbench_kv.gateway.cursors import named_cursors, places_of_cursors, with_cursors
from agentbench_kv.gateway.session import Session
from agentbench_kv.gateway.sidequest import expired
from agentbench_kv.methods.dropping.policy import Drop, What
from agentbench_kv.methods.dropping.sidequest import SideQuestPrompted
from agentbench_kv.registry import make_method

NAME = "run|0|1|a"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]


class Told(Gateway):
    """Answers what is asked beside a session with what it is told; asks the model if nothing is."""

    answers: Sequence[str | Exception] = ()
    asked: int = 0

    def _aside(self, state: Session, *rest: Any) -> Aside:
        self.asked += 1
        if not self.answers:
            return super()._aside(state, *rest)
        answer = self.answers[min(self.asked, len(self.answers)) - 1]

        def say() -> str:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return Aside(say, lambda: KVStats(prefill_tokens=7, decode_tokens=3), reads=10)


def opened(**settings: str) -> Told:
    method = make_method("sidequest-prompted", None, settings)
    assert isinstance(method, SideQuestPrompted)
    engine = EmbeddedEngine.create(
        EngineOptions("micro", method.below(), device="cpu", max_live_tokens=60_000)
    )
    return Told(engine, policy=method)


@pytest.fixture
def told() -> Iterator[Told]:
    gateway = opened(fork_every="1")
    yield gateway
    gateway.engine.shutdown()


def call(*numbers: int) -> dict[str, Any]:
    calls = [
        {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "look", "arguments": json.dumps({"at": number})},
        }
        for number in numbers
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(number: int) -> dict[str, Any]:
    text = f"result {number}: " + " ".join(f"w{number}x{n}" for n in range(20))
    return {"role": "tool", "tool_call_id": f"c{number}", "content": text}


def played(gateway: Gateway, *uses: tuple[int, ...]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
    for numbers in uses:
        gateway.force(NAME, messages, call(*numbers), TOOLS)
        messages += [call(*numbers), *map(result, numbers)]
    return messages


def asides() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvbench-aside"]


@pytest.mark.parametrize("execution", ["text", "span", "span+move"])
def test_the_session_is_as_if_nobody_had_been_asked(execution: str) -> None:
    found = []
    for often in ("1", "1000000"):
        gateway = opened(exec=execution, fork_every=often, fork_tokens="12")
        try:
            messages = played(gateway, (0,), (1, 2), (3,))
            said = gateway.chat(NAME, messages, TOOLS, Options(max_tokens=20))
            stats = gateway.close_report(NAME).stats
            account = stats.as_dict()
            paid = {key: account.pop(key) for key in [*account] if key.startswith("auxiliary")}
            peak, held = account.pop("peak_live"), account.pop("peak_bytes")
            assert (peak > account["peak_alone"]) == (often == "1")
            assert held == peak * gateway.engine.bytes_per_token
            found.append((said.token_ids, account, gateway.sessions(), asides()))
            # The micro model was not trained for it: what it says cannot be read.
            questions = 0 if often != "1" else 3
            assert paid["auxiliary_calls"] == questions
            assert (paid["auxiliary_tokens"] > 12 * questions) == bool(questions)
            assert stats.figures.get("unreadable_answers", 0) == max(0, questions - 1)
        finally:
            gateway.engine.shutdown()
    assert found[0] == found[1]
    assert found[0][2:] == ([], [])


@pytest.mark.parametrize("execution", ["text", "span"])
def test_rows_of_forks_are_in_the_peak(execution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fork adds to the rows it shares, counted from the engine's own accounts."""
    gateway = opened(exec=execution, fork_every="1", fork_tokens="12")
    engine, own, read = gateway.engine, dict[str, int](), dict[str, int]()
    fork, close, extend = engine.fork, engine.close, engine.extend

    def forked(session: str, new: str, labeller: Any) -> None:
        fork(session, new, labeller)
        own[new], read[new] = -engine.stats(new).live, 0

    def extended(session: str, tokens: Sequence[int], phases: Sequence[Any]) -> None:
        extend(session, tokens, phases)
        if session in read:
            read[session] += len(tokens)

    def closed(session: str) -> KVStats:
        final = close(session)
        if session in own:
            own[session] += final.live
        return final

    monkeypatch.setattr(engine, "fork", forked)
    monkeypatch.setattr(engine, "close", closed)
    monkeypatch.setattr(engine, "extend", extended)
    try:
        messages = played(gateway, (0,), (1, 2), (3,))
        gateway.chat(NAME, messages, TOOLS, Options(max_tokens=20))
        report = gateway.close_report(NAME)
    finally:
        engine.shutdown()
    # The first request has no result to ask about; an answer is waited for at the next request.
    held = [*(turn.live_before for turn in report.turns[2:]), report.stats.live]
    # Nobody waits for the last one: how much it said is chance, and it counts for what it read.
    rows = [*own.values()][:-1] + [*read.values()][-1:]
    assert len(held) == len(rows) == 3
    assert all(a > b for a, b in zip(rows[:-1], read.values(), strict=False))
    peak = max(live + added for live, added in zip(held, rows, strict=True))
    assert (report.stats.peak_live, report.stats.peak_alone) == (peak, report.stats.live)
    assert report.stats.auxiliary_tokens == sum(rows)


def test_named_results_leave_with_calls_that_asked_for_nothing_else(told: Told) -> None:
    told.answers = ['{"del_cursors": []}', 'So: {"del_cursors": [0, 1]}']
    messages = played(told, (0,), (1, 2), (3,))
    report = told.chat(NAME, messages, TOOLS, Options(max_tokens=4)).report
    drops = told.drops(NAME)
    assert drops is not None
    # Result 1 leaves, its call stays: result 2 of the same message is still there.
    assert drops.dropped == {Drop(2, What.RESULT), Drop(1, What.INPUTS), Drop(4, What.RESULT)}
    assert report.stats.evicted > 20
    assert len(report.stats.events) == 1
    assert drops.figures == {"questions": 2, "unreadable_answers": 0, "unknown_cursors": 0}
    assert (report.stats.auxiliary_calls, report.stats.auxiliary_tokens) == (2, 20)


@pytest.mark.parametrize(
    ("answer", "unreadable", "unknown"),
    [
        ("I would rather go on.", 1, 0),
        ('{"del_cursors": [0', 1, 0),
        ('{"del_cursors": ["0"]}', 1, 0),
        ('{"del_cursors": [0.5, true]}', 1, 0),
        ('{"del_cursors": [7, -1, 99999999999999999999]}', 0, 3),
        ('{"del_cursors": [0, 99]}', 0, 1),
        ('{"del_cursors": []}', 0, 0),
    ],
)
def test_what_cannot_be_carried_out_drops_nothing_and_is_counted(
    told: Told, answer: str | Exception, unreadable: int, unknown: int
) -> None:
    told.answers = [answer, '{"del_cursors": []}']
    messages = played(told, (0,), (1,))
    said = told.chat(NAME, messages, TOOLS, Options(max_tokens=4))
    drops = told.drops(NAME)
    assert drops is not None
    assert not drops.dropped
    assert said.report.stats.evicted == 0
    expected = {"questions": 1, "unreadable_answers": unreadable, "unknown_cursors": unknown}
    assert drops.figures == expected
    assert said.usage["kvbench"]["spans"] == expected


def test_an_engine_that_has_no_room_is_no_answer_of_the_model(told: Told) -> None:
    told.answers = [KVBenchError("no room"), '{"del_cursors": []}']
    said = told.chat(NAME, played(told, (0,), (1,)), TOOLS, Options(max_tokens=4))
    assert said.usage["kvbench"]["spans"] == {"questions": 1, "unanswered_questions": 1}
    # What it had read until then is paid for.
    assert (said.report.stats.auxiliary_calls, said.report.stats.auxiliary_tokens) == (1, 10)


def test_an_account_that_is_lost_ends_no_session() -> None:
    def lost() -> KVStats:
        raise KVBenchError("the backend is gone")

    answer = Aside(lambda: "said", lost).result()
    assert (answer.text, answer.stats, answer.error) == ("said", KVStats(), "the backend is gone")


def test_a_question_that_cannot_be_rendered_leaves_no_fork(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template may refuse two messages of the user's in a row, at every question."""
    planner = told._planner
    genuine = planner.chat

    def refusing(session: Session, *rest: Any, **more: Any) -> Any:
        if " aside " in session.id:
            raise UsageError("roles must alternate")
        return genuine(session, *rest, **more)

    monkeypatch.setattr(planner, "chat", refusing)
    messages = played(told, (0,))
    for _ in range(2):
        with pytest.raises(UsageError, match="roles must alternate"):
            told.chat(NAME, messages, TOOLS, Options(max_tokens=4))
        assert [*told.engine._scheduler._sessions] == [NAME]


def test_a_turn_that_waits_for_an_answer_has_a_later_first_token(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user waits for is in the time to the first token, whatever the engine did then."""
    told.answers = ['{"del_cursors": []}']
    messages = played(told, (0,), (1,))
    clock = iter([100.0, 105.0])
    monkeypatch.setattr(gateway_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    said = told.chat(NAME, messages, TOOLS, Options(max_tokens=4))
    first = said.report.turns[-1].ttft_ms
    assert first is not None
    assert first > 5000


def test_what_is_asked_in_forks_of_a_trial_is_the_trials(told: Told) -> None:
    """Probes ask each question in a fork, in which a method may ask by itself, too."""
    told.answers = ['{"del_cursors": []}']
    client = InProcessClient(told, NAME, max_tokens=4)
    messages = played(told, (0,), (1,))
    for text in ("What was #0?", "And #1?"):
        with client.fork() as side:
            side.chat([*messages, {"role": "user", "content": text}], TOOLS)
    stats = client.close().stats
    assert told.asked > 1
    assert (stats.auxiliary_calls, stats.auxiliary_tokens) == (told.asked, 10 * told.asked)


def test_a_cursor_named_twice_leaves_once(told: Told) -> None:
    told.answers = ['{"del_cursors": [0, 0]}', '{"del_cursors": [0]}']
    messages = played(told, (0,), (1,), (2,))
    told.chat(NAME, messages, TOOLS, Options(max_tokens=4))
    drops = told.drops(NAME)
    assert drops is not None
    assert drops.figures["unknown_cursors"] == 0
    assert Drop(2, What.RESULT) in drops.dropped


def test_nobody_is_asked_about_results_that_hold_nothing(told: Told) -> None:
    told.answers = ['{"del_cursors": [0]}']
    messages = played(told, (0,))
    messages[-1]["content"] = ""
    for _ in range(2):
        messages.append({"role": "user", "content": "And?"})
        messages.append(told.chat(NAME, messages, TOOLS, Options(max_tokens=2)).message)
    assert told.asked == 0
    drops = told.drops(NAME)
    assert drops is not None
    history = [{"role": "user", "content": "a"}, call(0), {**result(0), "content": ""}]
    drops.seen = len(history)
    assert expired(drops.method, drops, history, '{"del_cursors": [0]}') == frozenset()
    assert drops.figures["unknown_cursors"] == 0


def test_a_session_that_closes_ends_what_is_asked_beside_it() -> None:
    gateway = opened(fork_every="1", fork_tokens="3000")
    try:
        messages = played(gateway, (0,))
        gateway.force(NAME, messages, call(1), TOOLS)
        assert asides()
        report = gateway.close_report(NAME)
        assert not asides()
        assert report.stats.auxiliary_calls == 1
        assert 0 < report.stats.auxiliary_tokens < 1000
    finally:
        gateway.engine.shutdown()


def test_cursors_are_what_the_model_is_shown_and_the_client_never_sees() -> None:
    messages = [{"role": "user", "content": "a"}, call(0, 1), result(0), result(1)]
    shown = with_cursors(messages)
    assert [m["content"][:11] for m in shown[2:]] == ["[cursor 0] ", "[cursor 1] "]
    assert messages[2] == result(0)
    assert places_of_cursors(messages) == {0: 2, 1: 3}


@given(st.text(max_size=80))
def test_any_answer_is_read_or_not(answer: str) -> None:
    assert named_cursors(answer) is None or "del_cursors" in answer


@given(st.lists(st.integers(-5, 10**20)), st.text(max_size=30), st.text(max_size=30))
def test_the_last_list_counts(cursors: list[int], before: str, behind: str) -> None:
    answer = f'{before}{{"del_cursors": [5]}} {{ "del_cursors" :{cursors}}}{behind}'
    assert named_cursors(answer) == list(dict.fromkeys(cursors))
