"""Sessions against a fake server: what each turn sends, and what counts as failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentbench_kv.serving_bench import loadgen
from agentbench_kv.serving_bench.endpoints import TimedTurn, events
from agentbench_kv.serving_bench.jobs import (
    Load,
    LoadJob,
    SessionShape,
    TraceCall,
    TraceSession,
    Workload,
)
from agentbench_kv.serving_bench.loadgen import PlayedJob
from agentbench_kv.serving_bench.prompts import Speaker

Play = Callable[[Any, LoadJob], PlayedJob]
Fake = Callable[..., Any]
MakeJob = Callable[..., LoadJob]
KINDS = ("gateway", "vllm", "sglang")
ANSWER = [7, 8, 9, 10, 11]
"""What the fake server says, see conftest."""


def prompts_of(job: LoadJob, number: int) -> list[list[int]]:
    return Speaker(job.vocabulary, job.seed).prompts(number, job.sessions[number])


@pytest.mark.parametrize("kind", ["gateway", "vllm"])
def test_a_completions_turn_sends_the_whole_session_as_ids(
    play: Play, fake_server: Fake, make_job: MakeJob, kind: str
) -> None:
    server, job = fake_server(kind), make_job(kind)
    outcome = play(server, job)
    for session in (0, 1):
        first, second, third = prompts_of(job, session)
        sent = server.generations[3 * session : 3 * session + 3]
        so_far = [first, [*first, *ANSWER, *second]]
        so_far.append([*so_far[1], *ANSWER, *third])
        assert [body["prompt"] for body in sent] == so_far
        assert len({body["session_id"] for body in sent}) == 1
        for body in sent:
            assert body["model"] == "model"
            assert (body["max_tokens"], body["temperature"]) == (5, 0.0)
            assert body["ignore_eos"] is body["stream"] is body["return_token_ids"] is True
            assert body["stream_options"] == {"include_usage": True}
    names = {body["session_id"] for body in server.generations}
    assert len(names) == 2
    assert [turn.prompt_tokens for turn in outcome.turns] == [20, 29, 38] * 2
    assert [turn.new_tokens for turn in outcome.turns] == [20, 4, 4] * 2
    assert all(turn.error is None and turn.output_tokens == 5 for turn in outcome.turns)


def test_the_gateway_gets_a_header_and_is_told_when_a_session_ends(
    play: Play, fake_server: Fake, make_job: MakeJob
) -> None:
    server = fake_server("gateway")
    outcome = play(server, make_job())
    for _, path, body, headers in server.calls:
        if path == "/v1/completions":
            assert headers["x-kvbench-session"] == body["session_id"]
    ended = [path for method, path, _, _ in server.calls if method == "DELETE"]
    named = dict.fromkeys(body["session_id"] for body in server.generations)
    assert ended == [f"/v1/sessions/{name}" for name in named]
    assert [turn.kv and turn.kv["live"] for turn in outcome.turns] == [25, 34, 43] * 2


def test_sglang_gets_new_ids_only_in_a_streaming_session(
    play: Play, fake_server: Fake, make_job: MakeJob
) -> None:
    server, job = fake_server("sglang"), make_job("sglang")
    outcome = play(server, job)
    paths = [path for _, path, _, _ in server.calls]
    assert paths == ["/open_session", *["/generate"] * 3, "/close_session"] * 2
    opened = [body for _, path, body, _ in server.calls if path == "/open_session"]
    assert all(body["streaming"] is True for body in opened)
    closed = [body["session_id"] for _, path, body, _ in server.calls if path == "/close_session"]
    assert closed == [body["session_id"] for body in opened]
    prompts = [prompts_of(job, n) for n in (0, 1)]
    assert [body["input_ids"] for body in server.generations] == [*prompts[0], *prompts[1]]
    assert [body["session_params"]["id"] for body in server.generations[:3]] == [closed[0]] * 3
    sampling = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True}
    assert all(body["sampling_params"] == sampling for body in server.generations)
    # Tokens come two at a time: one gap of two, and one of one.
    assert [len(turn.itls_s) for turn in outcome.turns] == [3] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_turn_is_sent_without_a_session(
    play: Play, fake_server: Fake, make_job: MakeJob, kind: str
) -> None:
    server = fake_server(kind)
    outcome = play(server, make_job(kind, sessions=Workload(SessionShape(20, 5)).sessions(2)))
    assert len(server.calls) == len(server.generations) == 2
    for _, _, body, headers in server.calls:
        assert not {"session_id", "session_params", "return_token_ids"} & body.keys()
        assert "x-kvbench-session" not in headers
    assert [turn.output_tokens for turn in outcome.turns] == [5, 5]
    assert all(turn.error is None for turn in outcome.turns)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_may_be_cut_anywhere(
    play: Play, fake_server: Fake, make_job: MakeJob, kind: str
) -> None:
    def bytewise(data: bytes) -> list[bytes]:
        return [data[at : at + 3] for at in range(0, len(data), 3)]

    outcome = play(fake_server(kind, parts=bytewise), make_job(kind))
    assert [turn.error for turn in outcome.turns] == [None] * 6
    assert [turn.output_tokens for turn in outcome.turns] == [5] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_turn_is_a_failure_and_ends_its_session(
    play: Play, fake_server: Fake, make_job: MakeJob, kind: str
) -> None:
    server = fake_server(kind, refuse=lambda number: "no memory" if number == 1 else None)
    outcome = play(server, make_job(kind))
    assert [(turn.session, turn.turn, turn.error) for turn in outcome.turns] == [
        (0, 0, None),
        (0, 1, "HTTP 500: no memory"),
        (1, 0, None),
        (1, 1, None),
        (1, 2, None),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_of_another_length_is_a_failure(
    play: Play, fake_server: Fake, make_job: MakeJob, kind: str
) -> None:
    outcome = play(fake_server(kind, short=1), make_job(kind))
    assert [turn.error for turn in outcome.turns] == ["4 of 5 tokens were generated"] * 2


def test_an_error_inside_a_stream_is_a_failure(
    play: Play, fake_server: Fake, make_job: MakeJob
) -> None:
    def broken(_: bytes) -> list[bytes]:
        return [b'data: {"error": {"message": "the engine died"}}\n\n']

    outcome = play(fake_server("gateway", parts=broken), make_job())
    assert [turn.error for turn in outcome.turns] == ["the engine died"] * 2


def test_a_stream_of_something_else_is_a_failure(
    play: Play, fake_server: Fake, make_job: MakeJob
) -> None:
    outcome = play(fake_server("gateway", parts=lambda _: [b"data: <html>\n\n"]), make_job())
    assert all("something else than JSON" in (turn.error or "") for turn in outcome.turns)


def test_the_warm_up_is_played_first_and_not_counted(
    play: Play, fake_server: Fake, make_job: MakeJob
) -> None:
    server, job = fake_server("gateway"), make_job()
    warmed = make_job(load=Load(sessions=2, concurrency=1, warmup=1))
    outcome = play(server, warmed)
    assert len(server.generations) == 9
    assert [turn.session for turn in outcome.turns] == [0, 0, 0, 1, 1, 1]
    measured = prompts_of(job, 0)[0]
    assert server.generations[0]["prompt"] != measured
    assert server.generations[3]["prompt"] == measured


def test_the_warm_up_tells_no_cache_what_recorded_prompts_say(
    play: Play, fake_server: Fake, make_job: MakeJob
) -> None:
    calls = [TraceCall(6, 5, ids=[30, 31, 32, 33, 34, 35]), TraceCall(3, 5, ids=[40, 41, 42])]
    server, sessions = fake_server("gateway"), [TraceSession("s", calls)]
    play(server, make_job(sessions=sessions, load=Load(1, concurrency=1, warmup=1)))
    warm, measured = server.generations[:2], server.generations[2:]
    assert [len(body["prompt"]) for body in warm] == [len(body["prompt"]) for body in measured]
    assert measured[0]["prompt"] == calls[0].ids
    assert warm[0]["prompt"] != calls[0].ids
    assert measured[1]["prompt"][-3:] == calls[1].ids
    assert warm[1]["prompt"][-3:] != calls[1].ids


def test_failures_of_the_warm_up_are_told_apart(
    play: Play, fake_server: Fake, make_job: MakeJob
) -> None:
    server = fake_server("gateway", refuse=lambda number: "cold" if number == 0 else None)
    outcome = play(server, make_job(load=Load(sessions=1, concurrency=1, warmup=1)))
    assert outcome.warmup_errors == ["HTTP 500: cold"]
    assert [turn.error for turn in outcome.turns] == [None] * 3


def test_think_time_passes_between_turns_only(
    play: Play, fake_server: Fake, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    workload = Workload(SessionShape(20, 5), turns=3, tool_tokens=4, think_time_s=50.0)
    job = make_job(sessions=workload.sessions(2), load=Load(2, concurrency=1, warmup=1))
    play(fake_server("gateway"), job)
    # What is left of the gap when the sleep begins; none of it in the warm-up.
    assert [round(seconds) for seconds in slept if seconds > 1] == [50] * 4


def test_a_closed_loop_keeps_as_many_sessions_open_as_asked() -> None:
    running, most, played = [0], [0], []

    async def one(index: int) -> list[TimedTurn]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        for _ in range(index % 3 + 1):
            await asyncio.sleep(0)
        running[0] -= 1
        played.append(index)
        return [TimedTurn(index, 0, 0.0, 1, 1)]

    turns = asyncio.run(loadgen._closed(one, 10, 4))
    assert most == [4]
    assert sorted(played) == list(range(10))
    assert [turn.session for turn in turns] == list(range(10))


def test_an_open_loop_begins_sessions_by_their_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def one(index: int) -> list[TimedTurn]:
        return [TimedTurn(index, 0, 0.0, 1, 1)]

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(loadgen.time, "perf_counter", lambda: 101.0)
    turns = asyncio.run(loadgen._open(one, [0.0, 2.5, 4.0], began=100.0))
    # A second has passed: the first is late, the others wait for the rest of their time.
    assert slept == [0.0, 1.5, 3.0]
    assert [turn.session for turn in turns] == [0, 1, 2]


def test_events_skip_comments_and_the_end_mark() -> None:
    async def parts() -> Any:
        for part in (b': ping\n\ndata: {"a"', b":1}\r\n\r\ndata:", b' {"b":2}\n\ndata: [DONE]\n\n'):
            yield part

    async def collected() -> list[dict[str, Any]]:
        return [event async for event in events(parts())]

    assert asyncio.run(collected()) == [{"a": 1}, {"b": 2}]
