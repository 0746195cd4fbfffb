"""Traces: what is written is read, what is sent is what they say, and what is none is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agentbench_kv.cli import kvbench
from agentbench_kv.errors import UsageError
from agentbench_kv.serving_bench.agent_trace import PUBLISHED, agent_sessions
from agentbench_kv.serving_bench.jobs import Load, TraceCall, TraceSession, Vocabulary, prefix_hits
from agentbench_kv.serving_bench.prompts import Speaker
from agentbench_kv.serving_bench.recorded import recorded_messages
from agentbench_kv.serving_bench.trace import RESIZED, read_trace, scaled, write_trace

SECONDS = st.floats(0, 1000, allow_nan=False)
PIECES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=4)


@st.composite
def traces(draw: Callable[..., Any], ids: bool = True) -> list[TraceSession]:
    """Some sessions, in the order in which they begin."""
    timed = draw(st.booleans())
    sessions = []
    for number in range(draw(st.integers(1, 6))):
        shared = [(f"{name}{size}", size) for name, size in draw(PIECES)]  # one size a name
        least = sum(size for _, size in shared) or 1
        calls, now = list[TraceCall](), 0.0
        for at in range(draw(st.integers(1, 4))):
            new = draw(st.integers(least if at == 0 else 1, least + 30))
            fresh = at > 0 and draw(st.booleans())
            known = ids and not fresh and not (at == 0 and shared) and draw(st.booleans())
            own = draw(st.lists(st.integers(2, 40), min_size=new, max_size=new)) if known else []
            clock = draw(st.none() | SECONDS)
            clock = None if clock is None else (now := now + clock)
            gap = draw(SECONDS)
            calls.append(TraceCall(new, draw(st.integers(1, 20)), gap, clock, fresh, own))
        start = draw(SECONDS) if timed else None
        sessions.append(TraceSession(f"s{number}", calls, start, shared))
    return sorted(sessions, key=lambda session: session.start_s or 0.0)


@given(traces())
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None
)
def test_a_trace_that_was_written_is_read_again(
    tmp_path: Path, sessions: list[TraceSession]
) -> None:
    write_trace(tmp_path / "t.jsonl", sessions)
    found = read_trace(tmp_path / "t.jsonl")
    assert list(found.sessions) == sessions
    assert found.form == "kvbench"


def endless_cache(prompts: list[list[list[int]]], sessions: list[TraceSession]) -> int:
    """Count the tokens that a cache of every sequence ever seen would have, by brute force."""
    cache: set[tuple[int, ...]] = set()
    hits = 0
    for said, session in zip(prompts, sessions, strict=True):
        log: list[int] = []
        for new, call in zip(said, session.calls, strict=True):
            log = [*([] if call.fresh else log), *new]
            prefixes = [tuple(log[:size]) for size in range(1, len(log) + 1)]
            hits += sum(prefix in cache for prefix in prefixes)
            # An answer is what nobody else says.
            log += [10**9 + len(cache) + at for at in range(call.output_tokens)]
            cache.update(tuple(log[:size]) for size in range(1, len(log) + 1))
    return hits


@given(traces(), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_prompts_have_the_lengths_of_the_trace_and_the_hits_are_those_of_an_endless_cache(
    sessions: list[TraceSession], seed: int
) -> None:
    # From many ids, two random tokens are seldom the same by chance.
    speaker = Speaker(Vocabulary(20_000), seed)
    prompts = [speaker.prompts(number, each) for number, each in enumerate(sessions)]
    for said, session in zip(prompts, sessions, strict=True):
        for new, call, whole in zip(said, session.calls, session.prompts, strict=True):
            assert len(new) == (whole if call.fresh else call.new_tokens)
            assert not call.ids or new == call.ids
    # Two pieces of one name and different lengths begin alike, which the bound does not count.
    names = {piece for session in sessions for piece in session.shared}
    found = endless_cache(prompts, sessions)
    if len(names) == len({name for name, _ in names}):
        assert prefix_hits(sessions) == pytest.approx(found, abs=2)
    assert prefix_hits(sessions) <= found


def test_the_hits_of_a_small_trace_by_hand() -> None:
    calls = [TraceCall(10, 5), TraceCall(4, 5), TraceCall(2, 1, fresh=True)]
    one = TraceSession("one", calls, shared=[("system", 6), ("task", 2)])
    two = TraceSession("two", [TraceCall(9, 1)], shared=[("system", 6), ("other", 3)])
    assert one.prompts == [10, 19, 26]
    assert prefix_hits([one]) == 0 + 15 + 8
    assert prefix_hits([one, two]) == 23 + 6
    assert prefix_hits([two, one]) == 0 + 6 + 15 + 8


def test_a_recorded_session_that_comes_twice_may_be_found_whole() -> None:
    calls = [TraceCall(4, 2, ids=[1, 2, 3, 4]), TraceCall(3, 2, ids=[5, 6, 7])]
    one, two = TraceSession("one", calls), TraceSession("two", calls)
    assert prefix_hits([one]) == 6
    assert prefix_hits([one, two]) == 6 + 4 + 6 + 3
    other = TraceSession("other", [calls[0], TraceCall(3, 2, ids=[5, 9, 7])])
    assert prefix_hits([one, other]) == 6 + 4 + 6 + 1
    # A longer first prompt is no prompt and an answer.
    joined = TraceSession("joined", [TraceCall(7, 2, ids=[1, 2, 3, 4, 5, 6, 7])])
    assert prefix_hits([one, joined]) == 6 + 4
    shortened = TraceSession("kept", [calls[0], TraceCall(3, 2, ids=[5, 6, 7], keep=2)])
    assert prefix_hits([one, shortened]) == 6 + 4 + 2


@given(traces(ids=False), st.floats(0.01, 3))
@settings(max_examples=30, deadline=None)
def test_scaled_sessions_keep_their_calls_and_are_sessions(
    sessions: list[TraceSession], factor: float
) -> None:
    for session in sessions:
        found = scaled(session, factor, times=0.5)
        assert len(found.calls) == len(session.calls)
        assert [call.gap_s for call in found.calls] == [call.gap_s / 2 for call in session.calls]
        for before, after in zip(session.calls[1:], found.calls[1:], strict=True):
            assert after.new_tokens == max(round(before.new_tokens * factor), 1)
            assert after.output_tokens == max(round(before.output_tokens * factor), 1)
            assert after.fresh == before.fresh


def test_generated_sessions_have_the_published_statistics() -> None:
    sessions = agent_sessions(600, seed=7)
    prompts = sum(sum(session.prompts) for session in sessions)
    calls = [call for session in sessions for call in session.calls]
    sizes = [len(session.calls) for session in sessions]
    gaps = [call.gap_s for session in sessions for call in session.calls[1:]]
    growth = [call.new_tokens + call.output_tokens for s in sessions for call in s.calls[1:]]
    found = {
        "calls, median": np.median(sizes),
        "calls, 90 %": np.percentile(sizes, 90),
        "first prompt, median": np.median([session.prompts[0] for session in sessions]),
        "last prompt, median": np.median([session.prompts[-1] for session in sessions]),
        "growth of the context a call, mean": np.mean(growth),
        "prompt : output": prompts / sum(call.output_tokens for call in calls),
        "prefix hits": prefix_hits(sessions) / prompts,
        "gap, median, s": np.median(gaps),
        "gap, 99 %, s": np.percentile(gaps, 99),
    }
    assert found == {name: pytest.approx(value, rel=0.08) for name, value in PUBLISHED.items()}
    assert found["prefix hits"] == pytest.approx(PUBLISHED["prefix hits"], abs=0.005)
    assert agent_sessions(3, seed=7) == sessions[:3]
    assert agent_sessions(3, seed=8) != sessions[:3]


def wrote(path: Path, *rows: object) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("\n".join(lines))
    return path


OWN = {"id": "a", "calls": [{"new_tokens": 3, "output_tokens": 2}]}
REQUEST = {"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}
HEADING = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty"),
        (["[1]"], "line 1: expected one session"),
        (["{"], "line 1: expected one session"),
        ([{"prompt": "hello"}], "line 1: expected one session"),
        ([OWN, '{"id": "b", "calls": [{"new_tok'], "line 2: Input data was truncated"),
        ([OWN, "", OWN], "line 3: there is a session 'a' before it"),
        ([OWN, REQUEST], "line 2: Object contains unknown field `timestamp`"),
        ([OWN, {**OWN, "id": "b", "turns": 3}], "line 2: Object contains unknown field `turns`"),
        ([{"id": "a", "calls": []}], r"line 1: Expected `array` of length >= 1 - at `\$.calls`"),
        ([{"id": "a", "calls": [{"new_tokens": 0, "output_tokens": 2}]}], "line 1: .* >= 1"),
        ([{"id": "a", "calls": [{"new_tokens": 2.5, "output_tokens": 2}]}], "line 1: .*`int`"),
        ([{**OWN, "start_s": -1}], "line 1: .*>= 0.0"),
        ([{**OWN, "start_s": 1e400}], "line 1: "),
        ([{**OWN, "shared": [["system", 4]]}], "line 1: shared pieces are longer"),
        ([OWN, {**OWN, "id": "b", "start_s": 1.0}], "some sessions have a start_s and others none"),
        (
            [{"id": "a", "calls": [{**OWN["calls"][0], "at_s": at} for at in (2.0, 1.0)]}],
            "line 1: at_s of a call is before that of one before it",
        ),
        (
            [
                {"id": name, "calls": OWN["calls"], "shared": [["s", n]]}
                for name, n in (("a", 2), ("b", 3))
            ],
            "shared 's' has 2 tokens and, in session 'b', 3",
        ),
        (
            [{**REQUEST, "session_id": "x", "timestamp": at} for at in (5, None, 3)],
            "session 'x' goes back in time",
        ),
        ([REQUEST, {**REQUEST, "input_length": -5}], "line 2: .*>= 1"),
        ([REQUEST, OWN], "line 2: Object missing required field"),
        ([{**REQUEST, "timestamp": None}], "neither timestamp nor session_id"),
        ([HEADING, "5,ChatGPT,472,18,490"], "line 2: 5 values for 6 columns"),
        ([HEADING, "5,ChatGPT,many,18,490,API log"], "line 2: .*int"),
        ([HEADING, "5,ChatGPT,472,0,472,API log"], "has no request that was answered"),
    ],
)
def test_what_is_no_trace_is_one_line_with_its_number(
    tmp_path: Path, rows: list[object], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_trace(wrote(tmp_path / "t", *rows))
    assert "\n" not in str(caught.value)


@example(b"\x01\r\x01")
@example(b"Timestamp,Request tokens,Response tokens\n1,2\r3,4\n")
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
def test_any_bytes_are_a_trace_or_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(UsageError):
        read_trace(tmp_path / "t")


def test_mooncakes_requests_are_joined_by_their_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1300, "output_length": 100, "hash_ids": [1, 2, 3]},
        # The same system prompt, another task: a session of its own.
        {"timestamp": 500, "input_length": 1100, "output_length": 10, "hash_ids": [1, 7, 8]},
        # Goes on with the first, whose last block was not whole.
        {"timestamp": 9000, "input_length": 1700, "output_length": 50, "hash_ids": [1, 2, 4, 5]},
        # Begins like it, but has no room for its answer: it was asked anew.
        {"timestamp": 9500, "input_length": 1701, "output_length": 5, "hash_ids": [1, 2, 4, 6]},
    ]
    trace = read_trace(wrote(tmp_path / "mooncake.jsonl", *rows))
    one, two, three = trace.sessions
    assert [(c.new_tokens, c.output_tokens, c.gap_s, c.at_s) for c in one.calls] == [
        (1300, 100, 0.0, 0.0),
        (300, 50, 9.0, 9.0),
    ]
    assert one.shared == [("1", 512), ("2", 512), ("3/276", 276)]
    assert (two.start_s, two.shared) == (0.5, [("1", 512), ("7", 512), ("8/76", 76)])
    assert (three.start_s, len(three.calls)) == (9.5, 1)
    assert trace.prompt_tokens == 1300 + 1100 + 1700 + 1701
    assert "3 sessions, joined from 4 requests" in trace.notes[0]
    # History of the first; the system prompt of the second; two blocks of the last.
    assert prefix_hits(trace.sessions) == 1400 + 512 + 1024


def test_requests_with_a_session_id_are_sessions_as_aiperf_has_them(tmp_path: Path) -> None:
    rows = [
        {"session_id": "x", "timestamp": 2000, "input_length": 600, "output_length": 4},
        {"session_id": "y", "timestamp": 1000, "input_length": 5, "output_length": 4},
        {"session_id": "x", "delay": 1500, "input_length": 7, "output_length": 8},
    ]
    y, x = read_trace(wrote(tmp_path / "m.jsonl", *rows)).sessions
    assert (y.id, y.start_s, len(y.calls)) == ("y", 1.0, 1)
    assert (x.id, x.start_s) == ("x", 2.0)
    assert x.calls[1] == TraceCall(7, 8, 1.5)


def test_requests_of_a_session_are_sorted_by_time(tmp_path: Path) -> None:
    times = (3000, 1000, 2000)
    rows = [
        {"session_id": "x", "timestamp": at, "input_length": at // 100, "output_length": 4}
        for at in times
    ]
    (found,) = read_trace(wrote(tmp_path / "m.jsonl", *rows)).sessions
    assert [(call.at_s, call.new_tokens) for call in found.calls] == [(1, 10), (2, 20), (3, 30)]
    assert found.start_s == 1.0


def test_a_block_that_is_cut_off_is_another_piece_than_the_whole_one(tmp_path: Path) -> None:
    rows = [
        {**REQUEST, "session_id": str(size), "input_length": size, "hash_ids": [1, 2]}
        for size in (700, 1024)
    ]
    sessions = read_trace(wrote(tmp_path / "m.jsonl", *rows)).sessions
    write_trace(tmp_path / "own.jsonl", sessions)
    again = read_trace(tmp_path / "own.jsonl").sessions
    assert again == sessions
    assert prefix_hits(again) == 512


def test_scaled_messages_are_no_longer_the_recorded_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "Seen."}]
    wrote(tmp_path / "m.jsonl", {"id": "a", "messages": said})
    for scale, note in (("1", "messages: the recorded prompts"), ("0.5", RESIZED)):
        words = ["bench", "trace", "o.jsonl", "--from", "m.jsonl", "--token-scale", scale]
        done = CliRunner().invoke(kvbench, words)
        assert done.exit_code == 0, done.output
        assert note in done.output
        assert done.output.count("messages:") == 1


def test_burstgpts_tables(tmp_path: Path) -> None:
    plain = wrote(
        tmp_path / "b.csv",
        HEADING,
        "5,ChatGPT,472,18,490,Conversation log",
        "45,GPT-4,7,0,7,API log",
        "118,GPT-4,417,276,693,API log",
    )
    found = read_trace(plain).sessions
    assert [(s.start_s, s.calls[0].new_tokens, s.calls[0].output_tokens) for s in found] == [
        (5.0, 472, 18),
        (118.0, 417, 276),
    ]
    newer = wrote(
        tmp_path / "b3.csv",
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens",
        "10,u,4,GPT-4,100,20",
        "12,v,1,GPT-4,9,9",
        "44,u,3,GPT-4,30,5",
    )
    u, v = read_trace(newer).sessions
    assert u.calls == [TraceCall(100, 20, 0.0, 10.0), TraceCall(30, 5, 30.0, 44.0)]
    assert v.id == "v"


def test_recorded_messages_are_played_in_the_models_own_tokens(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Two and two?"},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "And two?"},
        {"role": "assistant", "content": "Six."},
    ]
    other = [*messages[:1], {"role": "user", "content": "Who?"}, messages[2]]
    path = wrote(tmp_path / "m.jsonl", {"messages": messages}, {"messages": other})
    with pytest.raises(UsageError, match="name the model"):
        read_trace(path)
    trace = read_trace(path, recorded_messages("micro", gap_s=2.0))
    one, two = trace.sessions
    assert [call.gap_s for call in one.calls] == [0.0, 2.0]
    said = Speaker(Vocabulary(5), 0).prompts(0, one)
    assert said == [call.ids for call in one.calls]
    # The system message is common, and more than nothing of the user's frame.
    hits = prefix_hits(trace.sessions)
    history = one.prompts[1] - one.calls[1].new_tokens
    beginning = hits - history
    assert one.calls[0].ids[:beginning] == two.calls[0].ids[:beginning]
    assert one.calls[0].ids[: beginning + 1] != two.calls[0].ids[: beginning + 1]
    assert beginning > 5


def test_nothing_is_sent_before_its_time(play: Any, fake_server: Any, make_job: Any) -> None:
    sessions = [
        TraceSession("a", [TraceCall(5, 3), TraceCall(2, 3, gap_s=0.4)], start_s=10.0),
        TraceSession("b", [TraceCall(5, 3), TraceCall(2, 3, at_s=10.9)], start_s=10.2),
    ]
    job = make_job(sessions=sessions, load=Load(2, warmup=1), time_scale=0.5)
    one, two, three, four = play(fake_server("gateway"), job).turns
    assert one.start >= 0
    assert two.start >= one.end + 0.2
    assert three.start >= 0.1
    assert four.start >= 0.45
    # In a closed loop, only gaps count.
    closed = make_job(sessions=sessions, load=Load(2, concurrency=1, warmup=0), time_scale=0.5)
    one, two, three, four = play(fake_server("gateway"), closed).turns
    assert two.start >= one.end + 0.2
    assert four.start < three.end + 0.2


def test_a_call_that_the_answer_before_holds_up_is_late(
    play: Any, fake_server: Any, make_job: Any
) -> None:
    calls = [TraceCall(5, 3), TraceCall(2, 3, at_s=10.0)]
    sessions = [TraceSession("a", calls, start_s=10.0)]
    job = make_job(sessions=sessions, load=Load(1, warmup=0))
    one, two = play(fake_server("gateway"), job).turns
    assert one.late_s == 0
    assert two.late_s >= one.end > 0  # it was due as the session began
    closed = make_job(sessions=sessions, load=Load(1, concurrency=1, warmup=0))
    assert not any(turn.late_s for turn in play(fake_server("gateway"), closed).turns)


@pytest.mark.parametrize("kind", ["gateway", "vllm", "sglang"])
def test_a_fresh_call_is_another_session_of_the_server(
    play: Any, fake_server: Any, make_job: Any, kind: str
) -> None:
    calls = [TraceCall(5, 3), TraceCall(2, 4), TraceCall(3, 2, fresh=True), TraceCall(1, 2)]
    server = fake_server(kind)
    job = make_job(
        kind,
        sessions=[TraceSession("a", calls, shared=[("system", 4)])],
        load=Load(1, concurrency=1, warmup=0),
    )
    turns = play(server, job).turns
    assert [turn.error for turn in turns] == [None] * 4
    assert [turn.prompt_tokens for turn in turns] == [5, 10, 17, 20]
    assert [turn.new_tokens for turn in turns] == [5, 2, 17, 1]
    assert [turn.part for turn in turns] == [0, 0, 1, 1]
    assert [turn.output_tokens for turn in turns] == [3, 4, 2, 2]
    if kind == "sglang":
        names = [body["session_params"]["id"] for body in server.generations]
        first, again = (server.generations[at]["input_ids"] for at in (0, 2))
    else:
        names = [body["session_id"] for body in server.generations]
        first, again = (server.generations[at]["prompt"] for at in (0, 2))
    assert names == [names[0]] * 2 + [f"{names[0]}-1"] * 2
    assert (len(again), again[:4]) == (17, first[:4])
    assert again[:5] != first[:5]
