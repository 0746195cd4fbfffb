"""Session ids carry any sample id, in the process and through an HTTP header."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

import httpx
import pytest

from agentbench_kv.adapters.base import Outcome, TrialContext
from agentbench_kv.gateway.http import _SESSION_ID
from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.run.trial import sample_key, session_id

LONGEST_RUN_ID = "r" * 171
ODD = [
    "frage 3/ü|x",
    "frage 3/ü x",
    "frage 3%2F%C3%BC%7Cx",
    "a b",
    "line\nbreak\t",
    "|",
    "../..",
    "x" * 64,
    "x" * 65,
    "x" * 5000,
    "ü" * 100,
    "質問",
]


def test_ids_fit_the_header_and_stay_apart() -> None:
    ids = [session_id(LONGEST_RUN_ID, name, 999_999, 3) for name in [*ODD, "", "lone \ud800"]]
    assert [name for name in ids if not _SESSION_ID.fullmatch(name)] == []
    assert [name for name in ids if name.count("|") != 3] == []
    assert len(set(ids)) == len(ids)


def test_a_plain_id_is_left_readable() -> None:
    wanted = "run-1|2|1|multi_turn_base_7"
    assert session_id("run-1", "multi_turn_base_7", trial=2, attempt=1) == wanted
    assert sample_key("frage 3/ü|x") == "frage%203%2F%C3%BC%7Cx"


@pytest.mark.parametrize("endpoint", [False, True])
def test_trials_of_odd_samples_keep_their_sessions(
    play: Callable[..., dict[str, TrialRecord]],
    ask: Callable[..., httpx.Response],
    endpoint: bool,
) -> None:
    def behave(_: str, __: int, context: TrialContext) -> Outcome:
        if endpoint:
            answer = ask(context).json()
            assert answer["usage"]["kvbench"]["session"] == context.session
            content = answer["choices"][0]["message"]["content"]
        else:
            content = context.client.chat([{"role": "user", "content": "hello"}]).content
        return Outcome(TrialStatus.SCORED, score=1.0, metrics={"said": content})

    records = play(behave, ids=ODD, texts=("sample {number}",), endpoint=endpoint)
    assert set(records) == set(ODD)
    for name, record in records.items():
        assert record.metrics == {"said": f"sample {ODD.index(name)}"}, record.error
        assert record.usage.requests == 1


def test_a_worker_can_close_an_odd_session(
    play: Callable[..., dict[str, TrialRecord]],
) -> None:
    def behave(_: str, __: int, context: TrialContext) -> Outcome:
        context.client.chat([{"role": "user", "content": "hello"}])
        path = quote(context.session, safe="")
        closed = httpx.delete(f"{context.endpoint}/sessions/{path}").json()
        assert closed["id"] == context.session
        return Outcome(TrialStatus.SCORED, score=1.0)

    record = play(behave, ids=ODD[:1], endpoint=True)[ODD[0]]
    assert record.score == 1.0, record.error
    assert record.usage.requests == 1
