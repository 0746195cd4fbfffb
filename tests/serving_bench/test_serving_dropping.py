"""Arms that drop messages: what they send is what a gateway under the policy reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.budget import Budget
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.errors import UsageError
from agentbench_kv.gateway import Gateway, Options, open_gateway
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.dropping.policy import DropMethod
from agentbench_kv.registry import make_method
from agentbench_kv.run.engines import start_engine
from agentbench_kv.run.exact_calls import exact_calls
from agentbench_kv.run.recordings import Recording, record_file
from agentbench_kv.serving_bench.arms import engine_arms
from agentbench_kv.serving_bench.endpoints import TimedTurn
from agentbench_kv.serving_bench.jobs import (
    Load,
    LoadJob,
    Target,
    TraceCall,
    TraceSession,
    prefix_hits,
)
from agentbench_kv.serving_bench.loadgen import measure
from agentbench_kv.serving_bench.prompts import read_vocabulary
from agentbench_kv.serving_bench.recorded import sessions_of
from agentbench_kv.serving_bench.trace import read_trace

Messages = list[dict[str, Any]]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]
WHERE: dict[str, Any] = {"dtype": "float32", "device": "cpu"}


def call(number: int) -> dict[str, Any]:
    function = {"name": "look", "arguments": json.dumps({"at": number})}
    calls = [{"id": f"c{number}", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(number: int, content: str = "") -> dict[str, Any]:
    said = content or f"result {number}: " + " ".join(f"w{number}x{n}" for n in range(60))
    return {"role": "tool", "tool_call_id": f"c{number}", "content": said}


def session(uses: int) -> Messages:
    """Return a question, so many tool uses, and an answer."""
    said: Messages = [{"role": "user", "content": "Look."}]
    for number in range(uses):
        said += [call(number), result(number)]
    return [*said, {"role": "assistant", "content": "Seen."}]


def wrote(path: Path, *sessions: Messages) -> Path:
    lines = [
        json.dumps({"id": f"s{n}", "messages": m, "tools": TOOLS}) for n, m in enumerate(sessions)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def policy(budget: int | None, **settings: str) -> DropMethod:
    method = make_method("clear-tools", budget, settings)
    assert isinstance(method, DropMethod)
    return method


@pytest.fixture
def gateways() -> Iterator[Any]:
    """Return a function that opens a gateway over the micro model, as a run does."""
    engines = []

    def opened(method: Method) -> Gateway:
        options = EngineOptions("micro", method, device="cpu", max_live_tokens=60_000)
        engines.append(start_engine("embedded", options))
        gateway = open_gateway(engines[-1], method)
        assert isinstance(gateway, Gateway)
        return gateway

    yield opened
    for engine in engines:
        engine.shutdown()


def whole_prompts(recording: Recording) -> list[list[int]]:
    """Return every call's prompt, with what the session holds before it."""
    log: list[int] = []
    found = []
    for turn in recording.turns:
        log = log if turn.keep is None else log[: turn.keep]
        log = [*log, *(token for token, _ in turn.prompt)]
        found.append(log)
        log = [*log, *(token for token, _ in turn.answer)]
    return found


def test_the_third_request_is_the_history_with_the_first_result_cleared(
    tmp_path: Path, gateways: Any
) -> None:
    """By hand: above the budget, all but the last result leave, and `[cleared]` stands there."""
    said = session(2)
    (plain,) = record_file(wrote(tmp_path / "t.jsonl", said), "micro")
    first, second, third = whole_prompts(plain)
    budget = (len(second) + len(third)) // 2
    (found,) = record_file(tmp_path / "t.jsonl", "micro", method=policy(budget, keep="1"))
    assert [turn.keep is None for turn in found.turns] == [True, True, False]
    assert whole_prompts(found)[:2] == [first, second]

    by_hand = [*said[:2], result(0, "[cleared]"), *said[3:5]]
    codec = gateways(make_method("full", None)).codec
    text = codec.tokenizer.apply_chat_template(
        [*_plain(by_hand)], tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    assert whole_prompts(found)[2] == codec.encode(text)

    turn = found.turns[2]
    assert turn.keep is not None
    same = next(
        n for n, (a, b) in enumerate(zip(third, codec.encode(text), strict=False)) if a != b
    )
    assert turn.keep == same
    new = len(third) - len(second) - len(plain.turns[1].answer)
    assert (len(turn.prompt) - turn.again, turn.again) == (new, len(turn.prompt) - new)


def _plain(messages: Messages) -> Iterator[dict[str, Any]]:
    """Yield messages as templates take them, arguments as objects."""
    for message in messages:
        calls = [
            {
                **c,
                "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])},
            }
            for c in message.get("tool_calls", ())
        ]
        yield {**message, "tool_calls": calls} if calls else message


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("clear-tools", {"keep": "1"}),
        ("clear-tools", {"keep": "0", "clear_inputs": "on", "until": "all"}),
        ("random-tools", {"keep": "1"}),
        ("turn-window", {}),
    ],
)
def test_requests_are_those_of_a_gateway_under_the_policy(
    name: str, settings: dict[str, str], tmp_path: Path, gateways: Any
) -> None:
    said = session(5)[:-1]
    said += [{"role": "assistant", "content": "Seen."}, {"role": "user", "content": "More."}]
    said += [call(5), result(5), {"role": "assistant", "content": "Done."}]
    said += [{"role": "user", "content": "And."}, {"role": "assistant", "content": "No."}]
    method = make_method(name, 600, settings)
    assert isinstance(method, DropMethod)
    (found,) = record_file(wrote(tmp_path / "t.jsonl", said), "micro", method=method)
    assert any(turn.keep is not None for turn in found.turns)
    # The embedded engine, as `kvbench run` drives it, with the same answers given.
    gateway = gateways(method)
    at = [n for n, message in enumerate(said) if message["role"] == "assistant"]
    for number, planned in zip(at, whole_prompts(found), strict=True):
        gateway.force("0|s0", said[:number], said[number], TOOLS)
        info = gateway.report("0|s0").turns[-1]
        assert gateway.token_log("0|s0")[0][: info.prompt_tokens] == planned
    kept = [turn.keep for turn in found.turns if turn.keep is not None]
    turns = gateway.report("0|s0").turns
    assert [turn.cached_tokens for turn in turns if turn.events] == kept
    stats = gateway.stats("0|s0")
    assert stats.recomputed == sum(turn.again for turn in found.turns)


def served(method: Method, recordings: Sequence[Recording], gateways: Any) -> Any:
    """Play recordings over HTTP on the micro model; return the measurement."""
    gateway = gateways(method)
    with BackgroundServer(gateway, concurrency=2) as server:
        drops = isinstance(method, DropMethod)
        target = Target(server.url.removesuffix("/v1"), "gateway", "micro", drops)
        vocabulary = read_vocabulary(gateway.engine.info.model_path)
        sessions = sessions_of(recordings, 0.0)
        load = Load(len(sessions), concurrency=2, warmup=0)
        return measure(LoadJob(target, sessions, load, vocabulary))


def test_what_is_read_again_is_counted_as_that(tmp_path: Path, gateways: Any) -> None:
    path = wrote(tmp_path / "t.jsonl", session(6), session(5))
    method = policy(600, keep="1")
    plain, cleared = record_file(path, "micro"), record_file(path, "micro", method=method)
    full = served(make_method("full", None), plain, gateways)
    short = served(method, cleared, gateways)
    assert (full.errors, short.errors) == ({}, {})
    # New tokens are the same, counted once; answers, too.
    for name in ("completed", "total_input_tokens", "total_output_tokens"):
        assert short.figures[name] == full.figures[name]
    again = sum(turn.again for each in cleared for turn in each.turns)
    rewrites = sum(turn.keep is not None for each in cleared for turn in each.turns)
    assert full.kv is not None
    assert short.kv is not None
    assert short.kv["recomputed"] == again > 0
    assert short.kv["rewrites"] == short.kv["events"] == rewrites
    assert short.kv["session_resets"] == 0
    assert short.kv["prefill_tokens"] == full.kv["prefill_tokens"] + again
    assert short.kv["median_peak_bytes"] < full.kv["median_peak_bytes"]
    assert short.figures["total_prompt_tokens"] < full.figures["total_prompt_tokens"]
    assert short.figures["prefix_hit_rate"] == pytest.approx(
        short.figures["prefix_hit_bound"], abs=0.2
    )
    assert short.kv["budget"] == 600
    assert short.kv["max_over_budget"] <= 128


def test_a_prompt_that_rewrites_history_needs_a_method_that_drops(
    tmp_path: Path, gateways: Any
) -> None:
    dropping, full = gateways(policy(600)), gateways(make_method("full", None))
    ids = full.codec.encode("some words to begin with")
    limit = Options(max_tokens=1)
    with pytest.raises(UsageError, match="needs to be sent messages"):
        dropping.complete("a", ids, limit)
    with pytest.raises(UsageError, match="new_tokens is for methods that drop"):
        [*full.stream_complete("a", ids, limit, new_tokens=3)]
    with pytest.raises(UsageError, match="token ids"):
        [*dropping.stream_complete("a", "words", limit, new_tokens=3)]
    span = gateways(policy(600, exec="span"))
    with pytest.raises(UsageError, match="exec=text"):
        [*span.stream_complete("a", ids, limit, new_tokens=3)]
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"id": "a", "calls": [{"new_tokens": 1, "output_tokens": 1, "ids": [1], "keep": 0}]}'
    )
    with pytest.raises(UsageError, match="line 1: keep is a method's"):
        read_trace(path)


def test_exact_calls_are_asked_of_what_is_left(tmp_path: Path, gateways: Any) -> None:
    path, method = wrote(tmp_path / "t.jsonl", session(6)), policy(600, keep="1")
    cleared = record_file(path, "micro", method=method)
    engine = gateways(method).engine
    found = exact_calls(engine, cleared)
    assert (found.asked, found.events) == (6, sum(t.keep is not None for t in cleared[0].turns))
    # An engine that cannot forget reads the same from the start.
    info = engine.info
    engine.info = type(info)(**{**vars(info), "capabilities": info.capabilities - {"rewind"}})
    again = exact_calls(engine, cleared)
    assert (again.right, again.asked, again.events) == (found.right, found.asked, found.events)


def test_lengths_of_a_session_that_is_shortened() -> None:
    calls = [
        TraceCall(10, 5, ids=[*range(10)]),
        TraceCall(4, 5, ids=[*range(7)], keep=6, again=3),
        TraceCall(2, 1, ids=[1, 2]),
    ]
    one = TraceSession("a", calls)
    assert one.prompts == [10, 13, 20]
    assert one.length == 21
    assert prefix_hits([one]) == 6 + 18
    with pytest.raises(ValueError, match="needs ids"):
        TraceCall(4, 5, keep=6, again=3)
    with pytest.raises(ValueError, match="whole history stays"):
        TraceCall(1, 5, ids=[1, 2], again=1)


def test_a_shortened_call_sends_what_stays_and_what_is_read_again(
    play: Any, fake_server: Any, make_job: Any
) -> None:
    calls = [
        TraceCall(4, 3, ids=[1, 2, 3, 4]),
        TraceCall(2, 3, ids=[21, 22, 23], keep=3, again=1),
        TraceCall(1, 3, ids=[31]),
    ]
    load = Load(1, concurrency=1, warmup=0)
    server = fake_server("gateway")
    job = make_job(
        sessions=[TraceSession("a", calls)],
        load=load,
        target=Target("http://fake", "gateway", "model", drops=True),
    )
    turns: list[TimedTurn] = play(server, job).turns
    prompts = [[1, 2, 3, 4], [1, 2, 3, 21, 22, 23], [1, 2, 3, 21, 22, 23, 7, 8, 9, 31]]
    assert [body["prompt"] for body in server.generations] == prompts
    assert [body["kvbench"] for body in server.generations] == [
        {"new_tokens": new} for new in (4, 2, 1)
    ]
    assert [turn.new_tokens for turn in turns] == [4, 2, 1]
    assert [turn.prompt_tokens for turn in turns] == [4, 6, 10]


@pytest.mark.parametrize(
    ("name", "settings", "messages", "why"),
    [
        ("clear-tools", {}, False, "drops messages, and these sessions are token ids"),
        ("clear-tools", {"exec": "span"}, True, "which is exec=text"),
        ("summarise", {}, True, "asks the model what to drop"),
        ("sidequest-prompted", {"exec": "text"}, True, "asks the model what to drop"),
        ("oracle-tools", {}, True, "which results are needed later"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    name: str, settings: dict[str, str], messages: bool, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        engine_arms(
            "embedded", "micro", [(name, Budget(600))], settings, messages=messages, **WHERE
        )


def test_a_policy_with_a_trigger_of_its_own_has_no_budget() -> None:
    asked = [("clear-tools,trigger=700", Budget(64)), ("clear-tools", Budget(600))]
    arms = engine_arms("embedded", "micro", asked, {}, messages=True, **WHERE)
    assert [arm.name for arm in arms] == ["clear-tools trigger=700", "clear-tools 600"]
    assert [arm.budget for arm in arms] == [None, 600]
    assert all(arm.drops for arm in arms)
