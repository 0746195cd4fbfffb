"""Dropping messages in the gateway: where they stand, what is sent, forks, losses, endpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.engines.base import Capability, EngineOptions, KVStats
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.text import TextEngine, TextReply, TextRequest, TextSampling
from agentbench_kv.errors import ContextLimitError, EndpointError, KVBenchError, UsageError
from agentbench_kv.gateway import Gateway, Options, open_gateway
from agentbench_kv.gateway.dropping import as_text, expired_results, joined
from agentbench_kv.gateway.executing import phase_runs
from agentbench_kv.gateway.grammar import ToolChoice
from agentbench_kv.gateway.placing import content_spans, token_spans
from agentbench_kv.methods.base import Method, Phase
from agentbench_kv.phases.tokens import TokenCodec
from agentbench_kv.registry import make_method

Messages = list[dict[str, Any]]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]


def call(number: int) -> dict[str, Any]:
    function = {"name": "look", "arguments": json.dumps({"at": number})}
    calls = [{"id": f"c{number}", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(number: int, words: int = 60) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": f"c{number}",
        "content": f"result {number}: " + " ".join(f"w{number}x{n}" for n in range(words)),
    }


def opened(method: Method) -> Gateway:
    engine = EmbeddedEngine.create(
        EngineOptions("micro", method.below(), device="cpu", max_live_tokens=60_000)
    )
    gateway = open_gateway(engine, method)
    assert isinstance(gateway, Gateway)
    return gateway


def played(gateway: Gateway, uses: int, session: str = "run|0|1|a") -> Messages:
    """Play so many tool uses; return the history with which the next request would be made."""
    messages: Messages = [{"role": "user", "content": "Look."}]
    for number in range(uses):
        gateway.force(session, messages, call(number), TOOLS)
        messages += [call(number), result(number)]
    return messages


@pytest.fixture
def text() -> Any:
    gateway = opened(make_method("clear-tools", 600, {"keep": "1"}))
    yield gateway
    gateway.engine.shutdown()


def test_the_client_sends_its_whole_history_and_no_session_is_reset(text: Gateway) -> None:
    messages = played(text, 6)
    said = text.chat("run|0|1|a", messages, TOOLS, Options(max_tokens=4))
    assert (said.report.resets, said.turn.reset) == (0, False)
    assert said.report.stats.rewrites > 0
    tokens, phases = text.token_log("run|0|1|a")
    assert len(tokens) == len(phases)
    shown = text.codec.decode(tokens)
    assert shown.count("[cleared]") == len(text.drops("run|0|1|a").dropped) > 0
    assert "result 5" in shown


def test_what_is_read_again_is_no_longer_prefill(text: Gateway) -> None:
    """Else a policy that rewrites everything would set the bound of its own peak."""
    messages = played(text, 6)
    report = text.chat("run|0|1|a", messages, TOOLS, Options(max_tokens=4)).report
    read = [turn.prefill_tokens for turn in report.turns]
    new = [turn.prefill_tokens for turn in report.turns if not turn.events]
    assert max(read) > max(new)
    # The first prompt, or a result; each of those is as long as the longest that was not rewritten.
    assert report.stats.longest_prefill == max(new)


def test_what_stays_of_the_log_is_not_read_again(text: Gateway) -> None:
    messages = played(text, 6)
    report = text.chat("run|0|1|a", messages, TOOLS, Options(max_tokens=4)).report
    fed = len(text.token_log("run|0|1|a")[0]) - 1
    stats = report.stats
    assert stats.prefill_tokens + stats.decode_tokens < fed + stats.evicted + stats.recomputed + 10
    rewritten = [turn for turn in report.turns if turn.events]
    assert rewritten
    for turn in rewritten:
        # Of a prompt that was written anew, what stands before the first change stays.
        assert 0 < turn.cached_tokens < turn.prompt_tokens
        assert turn.evicted > 0


def test_another_story_starts_over_with_nothing_dropped(text: Gateway) -> None:
    messages = played(text, 6)
    assert text.drops("run|0|1|a").dropped
    messages[0]["content"] = "Look elsewhere."
    said = text.chat("run|0|1|a", messages[:3], TOOLS, Options(max_tokens=4))
    assert (said.report.resets, said.turn.reset) == (1, True)
    assert not text.drops("run|0|1|a").dropped
    assert "[cleared]" not in text.codec.decode(text.token_log("run|0|1|a")[0])


@pytest.mark.parametrize("execution", ["text", "span"])
def test_a_fork_goes_on_with_what_was_dropped(execution: str) -> None:
    gateway = opened(make_method("clear-tools", 600, {"keep": "1", "exec": execution}))
    try:
        messages = played(gateway, 5)
        gateway.fork("run|0|1|a", "side")
        sides = []
        for session in ("run|0|1|a", "side"):
            answer = gateway.chat(session, messages, TOOLS, Options(max_tokens=6))
            sides.append((answer.token_ids, gateway.token_log(session), answer.turn.live_after))
        assert sides[0] == sides[1]
        more = [*messages, answer.message, {"role": "user", "content": "Look on."}]
        gateway.force("side", more, call(9), TOOLS)
        more += [call(9), result(9)]
        assert gateway.chat("side", more, TOOLS, Options(max_tokens=4)).report.resets == 0
        dropped = [gateway.drops(session).dropped for session in ("run|0|1|a", "side")]
        assert dropped[0] < dropped[1]
    finally:
        gateway.engine.shutdown()


def test_rows_that_a_lost_backend_brings_back_leave_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend dies at rest: its command finds nobody, the turn computes every row again."""
    gateway = opened(make_method("clear-tools", 600, {"keep": "1", "exec": "span"}))
    engine, session = gateway.engine, "run|0|1|a"
    evict, stats = engine.evict_spans, engine.stats
    asked: list[list[tuple[int, int]]] = []
    restarts: list[tuple[int, int]] = []

    def gone(name: str, spans: list[tuple[int, int]]) -> int:
        asked.append(spans)
        if len(asked) == 2:
            restarts.append((1, 0))
            raise ConnectionError("the backend that had its rows is gone")
        return evict(name, spans)

    monkeypatch.setattr(engine, "evict_spans", gone)
    monkeypatch.setattr(engine, "stats", lambda name: replace(stats(name), restarts=[*restarts]))
    try:
        messages = played(gateway, 8)
        gateway.chat(session, messages, TOOLS, Options(max_tokens=4))
        places = [{n for span in spans for n in range(*span)} for spans in asked]
        assert len(places) >= 3
        assert places[0] | places[1] <= places[2]
        assert not places[0] & places[1]
    finally:
        gateway.engine.shutdown()


def test_a_rewrite_that_fails_is_not_gone_on_from(
    text: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = played(text, 6)
    extend, engine = text.engine.extend, text.engine
    messages += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "w " * 500}]
    messages[-2] = text.chat("run|0|1|a", messages[:-2], TOOLS, Options(max_tokens=4)).message
    before = text.stats("run|0|1|a").rewrites

    def full(*_: Any) -> None:
        raise ContextLimitError("no room")

    text.force("run|0|1|a", messages, call(9), TOOLS)
    messages += [call(9), result(9)]
    monkeypatch.setattr(engine, "extend", full)
    ended = text.chat("run|0|1|a", messages, TOOLS, Options(max_tokens=4))
    assert ended.finish_reason == "context_limit"
    assert ended.report.stats.rewrites > before
    monkeypatch.setattr(engine, "extend", extend)
    said = text.chat("run|0|1|a", messages, TOOLS, Options(max_tokens=4))
    assert said.report.resets == 1
    shown = text.codec.decode(text.token_log("run|0|1|a")[0])
    assert [f"result {n}:" in shown for n in (0, 5, 9)] == [True, True, True]


def test_a_request_that_is_refused_drops_nothing(text: Gateway) -> None:
    messages = played(text, 6)
    before = set(text.drops("run|0|1|a").dropped)
    wrong = Options(max_tokens=4, logprobs=1, tool_choice=ToolChoice("required"))
    with pytest.raises(KVBenchError):
        text.chat("run|0|1|a", messages, [{"type": "function", "function": {}}], wrong)
    assert text.drops("run|0|1|a").dropped == before


def test_raw_completions_are_refused(text: Gateway) -> None:
    with pytest.raises(UsageError, match=r"needs to be sent messages.*route=chat"):
        text.complete("raw", "Look at this.")


def test_a_summary_stands_for_what_it_is_about_and_is_paid_for() -> None:
    method = make_method("summarise", 600, {"keep_messages": "2", "summary_tokens": "8"})
    gateway = opened(method)
    try:
        messages = played(gateway, 6)
        report = gateway.chat("run|0|1|a", messages, TOOLS, Options(max_tokens=4)).report
        shown = gateway.codec.decode(gateway.token_log("run|0|1|a")[0])
        assert shown.count("Summary of the conversation so far:") == 1
        assert "result 0" not in shown
        assert "result 5" in shown
        stats = report.stats
        # The micro model was not trained to say any: some questions it answers with nothing.
        unmade = stats.figures.get("summaries_not_made", 0)
        assert 0 < stats.rewrites == stats.auxiliary_calls - unmade
        assert stats.auxiliary_tokens > 8 * stats.auxiliary_calls
        assert stats.auxiliary_s > 0
        assert stats.auxiliary_bytes_read > 0
        # They are apart from the session's own.
        assert stats.decode_tokens < 40 * len(report.turns)
        # A fork reads the question and writes the summary on top of what the session holds.
        on_top = stats.peak_live - stats.peak_alone
        assert 8 < on_top < stats.auxiliary_tokens / stats.auxiliary_calls + 8
        assert gateway.sessions() == ["run|0|1|a"]
    finally:
        gateway.engine.shutdown()


def test_an_engine_that_cannot_forget_reads_everything_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = make_method("clear-tools", 600, {"keep": "1"})
    logs, read = [], []
    for able in (True, False):
        gateway = opened(method)
        if not able:
            info = gateway.engine.info
            monkeypatch.setattr(
                gateway.engine,
                "info",
                replace(info, capabilities=info.capabilities - {Capability.REWIND}),
            )
        try:
            messages = played(gateway, 6)
            answer = gateway.chat("run|0|1|a", messages, TOOLS, Options(max_tokens=6))
            logs.append((gateway.token_log("run|0|1|a"), answer.token_ids))
            read.append(answer.report.stats.prefill_tokens)
            assert answer.report.resets == 0
        finally:
            gateway.engine.shutdown()
    assert logs[0] == logs[1]
    assert read[0] < read[1]


# ---- over an endpoint ----


def size_of(messages: Sequence[Any], tools: Any) -> int:
    return (sum(len(as_text(each)) for each in messages) + len(json.dumps(tools or ""))) // 4


class Endpoint(TextEngine):
    """Answers at once and counts a token for every four characters."""

    def __init__(self) -> None:
        class Info:
            name, context_limit = "fake", 100_000
            capabilities = frozenset({Capability.TEXT})

        self.info = Info()  # type: ignore[assignment]
        self.asked: list[Sequence[Any]] = []
        self.settings: list[TextSampling] = []
        self.answer: Callable[[Any], TextReply] | None = None

    def ask(self, messages: Any, tools: Any, sampling: TextSampling) -> TextRequest:
        self.asked.append(messages)
        self.settings.append(sampling)
        size = size_of(messages, tools)
        reply = TextReply(content="Seen.", prompt_tokens=size, output_tokens=2)
        if self.answer is not None:
            reply = self.answer(messages)

        class Done(TextRequest):
            def result(self) -> TextReply:
                return reply

            def cancel(self) -> None:
                return None

        return Done()


def test_an_endpoint_is_sent_what_is_left() -> None:
    engine = Endpoint()
    gateway = open_gateway(engine, make_method("clear-tools", 300, {"keep": "1"}))
    messages: Messages = [{"role": "user", "content": "Look."}]
    for number in range(6):
        report = gateway.chat("run|0|1|a", messages, TOOLS).report
        messages += [{"role": "assistant", "content": "Seen."}, call(number), result(number)]
    sent = engine.asked[-1]
    assert len(sent) == len(messages) - 3
    cleared = [message.get("content") == "[cleared]" for message in sent]
    assert any(cleared)
    assert not cleared[-1]
    assert report.resets == 0
    stats = report.stats
    assert stats.rewrites == len(stats.events) > 0
    assert stats.evicted > 0
    assert stats.budget == 300
    assert stats.peak_live < stats.logical
    # Whatever an endpoint says of its cache, the history is not new.
    assert report.turns[0].prompt_tokens <= stats.longest_prefill
    assert stats.longest_prefill < max(turn.prefill_tokens for turn in report.turns)
    assert sum(turn.evicted for turn in report.turns) == stats.evicted


@pytest.mark.parametrize("tools", [1, 40])
def test_tools_do_not_leave_an_endpoint(tools: int) -> None:
    """What leaves is what was said, however much the endpoint counts for tools and template."""
    engine = Endpoint()
    offered = TOOLS * tools
    method = make_method("clear-tools", 300 + size_of([], offered), {"keep": "1"})
    gateway = open_gateway(engine, method)
    messages: Messages = [{"role": "user", "content": "Look."}]
    for number in range(6):
        stats = gateway.chat("run|0|1|a", messages, offered).report.stats
        messages += [{"role": "assistant", "content": "Seen."}, call(number), result(number)]
    assert stats.events
    whole = size_of(messages[:-3], offered)
    assert 0.8 * whole < stats.logical < 1.2 * whole
    gone = (whole - stats.live) / len(stats.events)
    for event in stats.events:
        assert 0.5 * gone < event.live_before - event.live_after < 2 * gone
        assert event.logical >= event.live_before


# ---- where messages stand ----


@given(
    st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=5),
    st.booleans(),
)
def test_contents_are_found_where_they_stand(contents: list[str], strips: bool) -> None:
    messages = [{"role": "user", "content": content} for content in contents]

    def render(given: Sequence[Any]) -> str:
        shown = [m["content"].strip() if strips else m["content"] for m in given]
        return "<s>" + "</m><m>".join(shown) + "</s>"

    rendered = render(messages)
    spans = content_spans(render, messages)
    expected = [content.strip() if strips else content for content in contents]
    found = [rendered[span[0] : span[1]] if span else None for span in spans]
    # A content that looks like the template may hide those behind it, and is never misplaced.
    assert all(have in (None, want) for have, want in zip(found, expected, strict=True))
    if not any(set("<>") & set(content) for content in contents):
        assert [have for have in found if have is not None] == expected or "" in expected


def test_empty_contents_have_places_where_the_template_shows_them() -> None:
    messages = [{"role": "user", "content": content} for content in ("a", "", "b")]

    def plain(given: Sequence[Any]) -> str:
        return "".join(f"<{each['content']}>" for each in given)

    def leaving_out(given: Sequence[Any]) -> str:
        return "".join(f"<{each['content']}>" for each in given if each["content"])

    assert content_spans(plain, messages) == [(1, 2), (4, 4), (6, 7)]
    assert content_spans(leaving_out, messages) == [(1, 2), None, (4, 5)]


def test_a_template_that_rewrites_contents_shows_no_places() -> None:
    messages = [{"role": "tool", "content": '{"a": 1}'}, {"role": "user", "content": "b"}]
    spans = content_spans(lambda given: "|".join(json.dumps(m["content"]) for m in given), messages)
    assert spans[0] is None


@given(st.text(max_size=60), st.data())
def test_tokens_within_a_span_are_all_that_fit(text: str, data: st.DataObject) -> None:
    class Bytes:
        """A token for every byte."""

        special = frozenset[int]()

        def decode(self, ids: Sequence[int]) -> str:
            return bytes(ids).decode("utf-8", "replace")

    ids = list(text.encode("utf-8", "surrogatepass"))
    if "\ufffd" in bytes(ids).decode("utf-8", "replace"):
        return
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, len(text)))
    codec: TokenCodec = Bytes()  # type: ignore[assignment]
    (found,) = token_spans(codec, ids, text, [(begin, end)])
    assert found is not None
    assert bytes(ids[found[0] : found[1]]).decode("utf-8", "replace") == text[begin:end]


def test_runs_of_phases_and_joined_spans() -> None:
    think, act, others = Phase.THINK, Phase.ACT, Phase.OTHERS
    phases = [others, think, think, others, act, act, act, others]
    assert phase_runs(phases, (0, 8), think) == [(1, 3)]
    assert phase_runs(phases, (2, 6), act) == [(4, 6)]
    assert joined([(5, 7), (1, 3), (3, 5), (9, 9), (8, 10)]) == [(1, 7), (8, 10)]


# ---- foresight ----


def test_results_expire_behind_their_last_use() -> None:
    """Two turns: calls of one tool and of two; the first result is needed in the second turn."""
    uses = [[(1, 1), (0, 2), (0, 1)], [(1, 0)]]
    said = {"role": "assistant", "content": "So."}
    asked = {"role": "user", "content": "Look."}
    messages: Messages = [asked, call(0), result(0), call(1), result(1), result(2)]
    assert expired_results(messages, uses) == {5}  # named by the call before it, or by none
    messages.append(said)
    assert expired_results(messages, uses) == {4, 5}
    messages += [asked, call(3), result(3)]
    assert expired_results(messages, uses) == {4, 5, 9}
    assert expired_results([*messages, said], uses) == {2, 4, 5, 9}
    # An agent that calls more often, or in turns nobody knows: nothing is said of those results.
    more = [*messages, said, call(4), result(4), asked, call(5), result(5), said]
    assert expired_results(more, uses) == {2, 4, 5, 9}
    assert expired_results(messages, []) == set()


def test_one_turn_less_is_no_turn_more() -> None:
    """Where the agent gave a turn up early, later turns are still told apart."""
    uses = [[(0, 1), (0, 2)], [(2, 0)], [(2, 1)]]
    asked = {"role": "user", "content": "Look."}
    messages: Messages = [asked, call(0), result(0), asked, call(1), result(1), asked]
    assert expired_results(messages, uses) == {2}
    assert expired_results([*messages, call(2), result(2)], uses) == {2, 5}


def test_a_session_that_nobody_foresees_is_refused() -> None:
    gateway = opened(make_method("oracle-tools", 300))
    try:
        with pytest.raises(UsageError, match="of this session nobody does"):
            gateway.chat("run|0|1|a", [{"role": "user", "content": "Look."}], TOOLS)
        gateway.foresee("run|0|1|b", [[(0, 0)] * 9])
        messages = played(gateway, 5, "run|0|1|b")
        gateway.chat("run|0|1|b", messages, TOOLS, Options(max_tokens=4))
        assert {drop.message for drop in gateway.drops("run|0|1|b").dropped} >= {2, 4}
        gateway.foresee("run|0|1|c", [[(9, 0)] * 9])
        messages = played(gateway, 5, "run|0|1|c")
        gateway.chat("run|0|1|c", messages, TOOLS, Options(max_tokens=4))
        assert not gateway.drops("run|0|1|c").dropped
    finally:
        gateway.engine.shutdown()


def test_another_story_asked_aside_is_read_from_its_beginning(text: Gateway) -> None:
    """The fork keeps what the two have in common; the rest of the story is all there."""
    system = {"role": "system", "content": "You look at things and say what you see."}
    text.force("run|0|1|a", [system, {"role": "user", "content": "Look."}], call(0), TOOLS)
    other: Messages = [system, {"role": "user", "content": "Look again."}]
    told = Options(max_tokens=4)
    fresh = text.chat("run|0|1|b", other, None, told)
    state = text._find("run|0|1|a")
    aside = text._aside(state, other, other, None, 4).result()
    assert aside.text == fresh.content.strip()
    assert aside.stats.logical == fresh.report.stats.logical


def test_a_result_no_longer_than_what_would_stand_for_it_stays() -> None:
    """Clearing a word makes the prompt longer, and is no event."""
    found = []
    for budget in (60, 100_000):
        gateway = opened(make_method("clear-tools", budget, {"keep": "0"}))
        try:
            messages: Messages = [{"role": "user", "content": "Look."}]
            for number in range(4):
                gateway.force("run|0|1|a", messages, call(number), TOOLS)
                messages += [call(number), {**result(number), "content": "1"}]
            found.append(replace(gateway.stats("run|0|1|a"), budget=None))
            assert not gateway.drops("run|0|1|a").dropped
        finally:
            gateway.engine.shutdown()
    assert found[0] == found[1]


# ---- shares and resets ----


@pytest.mark.parametrize("execution", ["text", "span"])
def test_a_share_is_one_of_all_that_was_said(execution: str) -> None:
    """Not of what is left: that would shrink with every drop, and much more would leave."""
    gateway = opened(make_method("clear-tools", "60%", {"keep": "0", "exec": execution}))
    try:
        messages = played(gateway, 10)
        stats = gateway.chat("run|0|1|a", messages, TOOLS, Options(max_tokens=4)).report.stats
        largest = 300  # a result, which leaves as a whole
        assert stats.events
        for event in stats.events:
            assert event.live_after > 0.6 * event.logical - 2 * largest
        assert 0.6 * stats.logical - largest < stats.live
    finally:
        gateway.engine.shutdown()


def told(execution: str, rewrites: bool, after: int = 3) -> tuple[KVStats, int]:
    """Play a client that writes the time into its system message; return account and resets."""
    gateway = opened(make_method("clear-tools", 400, {"keep": "0", "exec": execution}))
    try:
        said: Messages = []
        for number in range(9):
            hour = max(0, number - after) if rewrites else 0
            system = {"role": "system", "content": f"It is {hour} o'clock."}
            messages = [system, {"role": "user", "content": "Look."}, *said]
            gateway.force("run|0|1|a", messages, call(number), TOOLS)
            said += [call(number), result(number)]
        report = gateway.close_report("run|0|1|a")
        return report.stats, report.resets
    finally:
        gateway.engine.shutdown()


@pytest.mark.parametrize("execution", ["text", "span"])
def test_a_client_that_tells_its_history_anew_sets_no_bound(execution: str) -> None:
    (kept, none), (changed, resets) = told(execution, False), told(execution, True)
    assert (none, resets) == (0, 5)
    assert kept.peak_live <= 400 + 128 + kept.longest_prefill
    assert changed.peak_live > 400 + 128 + changed.longest_prefill
    assert changed.longest_prefill < 2 * kept.longest_prefill
    assert changed.logical < 1.2 * kept.logical


def test_short_stories_between_long_ones_set_no_bound(text: Gateway) -> None:
    messages = played(text, 6)
    longest = text.stats("run|0|1|a").longest_prefill
    for number in range(3):
        text.chat("run|0|1|a", [{"role": "user", "content": "Hi."}], TOOLS, Options(max_tokens=4))
        messages[0]["content"] = f"Look {number}."
        report = text.chat("run|0|1|a", messages, TOOLS, Options(max_tokens=4)).report
    assert report.resets == 6
    assert report.stats.longest_prefill <= longest + 4 * 300


# ---- summaries that are not made, and messages that say nothing ----


def summarising(said: TextReply | str) -> tuple[Endpoint, Messages]:
    """Talk to an endpoint whose summaries are those; return it, and what it was sent last."""
    engine = Endpoint()
    gateway = open_gateway(engine, make_method("summarise", 100, {"keep_messages": "1"}))

    def answer(messages: Any) -> TextReply:
        asked = "Summarise the conversation" in str(messages[-1]["content"])
        reply = said if asked and isinstance(said, TextReply) else TextReply(content="Seen.")
        return replace(reply, prompt_tokens=size_of(messages, TOOLS), output_tokens=2)

    engine.answer = answer
    messages: Messages = []
    for number in range(4):
        messages.append({"role": "user", "content": f"Look {number}. " + "pad " * 60})
        answered = gateway.chat("run|0|1|a", messages, TOOLS)
        messages.append(answered.message)
    return engine, list(engine.asked[-1])


@pytest.mark.parametrize(
    "said",
    [
        TextReply(content="", reasoning="hmm " * 99, finish_reason="length"),
        TextReply(content=" \n", finish_reason="stop"),
        TextReply(content="The code is", finish_reason="context_limit"),
        TextReply(content="The code is", finish_reason="cancelled"),
        TextReply(content="", tool_calls=call(1)["tool_calls"], finish_reason="tool_calls"),
    ],
)
def test_without_a_summary_nothing_leaves(said: TextReply) -> None:
    engine, sent = summarising(said)
    assert "Look 0." in sent[0]["content"]
    assert len(sent) == 7
    assert [s.tool_choice for s in engine.settings].count("none") == len(engine.asked) - 4


def test_a_summary_is_asked_for_without_calls_and_stands() -> None:
    _, sent = summarising(TextReply(content="The code is 7.", finish_reason="stop"))
    assert "The code is 7." in sent[0]["content"]
    assert len(sent) < 7


def failing_endpoint(fails: Callable[[str], bool]) -> tuple[Any, Messages]:
    """A gateway whose method summarises, and a history that it is due for; `fails` by a message."""
    engine = Endpoint()
    gateway = open_gateway(engine, make_method("summarise", 100, {"keep_messages": "1"}))

    def answer(messages: Any) -> TextReply:
        if fails(str(messages[-1]["content"])):
            raise EndpointError("no answer after 5 retries")
        size = size_of(messages, TOOLS)
        return TextReply(content="Seen.", prompt_tokens=size, output_tokens=2, cost=0.5)

    engine.answer = answer
    return gateway, [{"role": "user", "content": "Look. " + "pad " * 120}]


@pytest.mark.parametrize("where", ["Summarise the conversation", "Go on."])
def test_an_endpoint_that_fails_is_to_blame_whatever_it_was_asked(where: str) -> None:
    gateway, messages = failing_endpoint(lambda said: where in said)
    messages.append(gateway.chat("s", messages, TOOLS).message)
    messages.append({"role": "user", "content": "Go on."})
    with pytest.raises(EndpointError):
        gateway.chat("s", messages, TOOLS)
    assert gateway.report("s").endpoint_failed
    assert len(gateway.report("s").turns) == 2


def test_what_a_method_asks_by_itself_is_paid_for() -> None:
    gateway, messages = failing_endpoint(lambda _: False)
    for _ in range(2):
        messages.append(gateway.chat("s", messages, TOOLS).message)
        messages.append({"role": "user", "content": "Go on."})
    report = gateway.report("s")
    assert report.stats.auxiliary_calls == 1
    assert report.usage["requests"] == 2
    assert report.cost == 1.5


def test_a_summary_without_room_for_it_drops_nothing() -> None:
    method = make_method("summarise", None, {"trigger": "context", "keep_messages": "1"})
    options = EngineOptions("micro", method.below(), device="cpu", context_limit=700)
    gateway = open_gateway(EmbeddedEngine.create(options), method)
    try:
        messages: Messages = [{"role": "user", "content": "The code is tiger. " + "pad " * 40}]
        for _ in range(20):
            said = {"role": "assistant", "content": "ok " * 20}
            report = gateway.force("run|0|1|a", messages, said).report
            messages += [said, {"role": "user", "content": "next " + "pad " * 20}]
            drops = gateway.drops("run|0|1|a")
            if drops.figures or drops.summary:
                break
        assert drops.summary is None or drops.summary.text
        assert drops.figures == {"summaries_not_made": 1}
        assert not drops.dropped
        assert report.stats.auxiliary_calls == 1
    finally:
        gateway.engine.shutdown()


# ---- the same decisions under every execution ----


def left_of(method: str, budget: int, execution: str, histories: Sequence[Any]) -> list[int]:
    """Play a client's requests; return the messages that something was dropped of."""
    gateway = opened(make_method(method, budget, {"exec": execution} | SETTINGS.get(method, {})))
    try:
        for messages, said in histories:
            gateway.force("run|0|1|a", messages, said, TOOLS)
        tokens = gateway.token_log("run|0|1|a")[0]
        stats = gateway.stats("run|0|1|a")
        assert stats.live <= len(tokens)
        return sorted({drop.message for drop in gateway.drops("run|0|1|a").dropped})
    finally:
        gateway.engine.shutdown()


SETTINGS = {"clear-tools": {"keep": "0"}}
SAID = {"role": "assistant", "content": "ok"}


def asked_twice_with_an_empty_result() -> list[Any]:
    both = {**call(0), "tool_calls": [*call(0)["tool_calls"], *call(1)["tool_calls"]]}
    messages = [{"role": "user", "content": "Look."}, both]
    messages += [{**result(0), "content": ""}, result(1)]
    histories = [(messages[:1], both), (list(messages), call(2))]
    messages += [call(2), result(2)]
    return [*histories, (list(messages), SAID)]


def calls_of_the_client() -> list[Any]:
    messages = [{"role": "user", "content": "Look."}, call(0), result(0), SAID]
    messages += [{"role": "user", "content": "More."}]
    histories: list[Any] = []
    for number in (2, 3):
        histories.append((list(messages), call(number)))
        messages += [call(number), result(number)]
    return [*histories, (list(messages), SAID)]


def turns_with_empty_results() -> list[Any]:
    messages: Messages = [{"role": "user", "content": "First."}]
    histories: list[Any] = [(list(messages), SAID)]
    messages.append(SAID)
    for number in range(4):
        messages.append({"role": "user", "content": f"q{number} " + "pad " * 15})
        histories.append((list(messages), call(number)))
        messages += [call(number), {**result(number), "content": "" if number == 1 else "done"}]
        histories.append((list(messages), SAID))
        messages.append(SAID)
    messages.append({"role": "user", "content": "end"})
    return [*histories, (list(messages), SAID)]


def turns_that_the_client_tells() -> list[Any]:
    messages: Messages = [{"role": "user", "content": "First."}, SAID]
    for number in range(3):
        messages += [{"role": "user", "content": f"q{number} " + "pad " * 15}, call(number)]
        messages += [result(number, 20), SAID]
    messages.append({"role": "user", "content": "Go on."})
    histories = [(list(messages), SAID)]
    messages += [SAID, {"role": "user", "content": "end"}]
    return [*histories, (list(messages), SAID)]


@pytest.mark.parametrize(
    ("method", "budget", "story", "gone"),
    [
        ("clear-tools", 100, asked_twice_with_an_empty_result, [3]),
        ("clear-tools", 100, calls_of_the_client, [2, 6]),
        ("turn-window", 150, turns_with_empty_results, list(range(2, 14))),
        ("turn-window", 150, turns_that_the_client_tells, list(range(2, 14))),
    ],
)
def test_what_leaves_is_the_same_under_every_execution(
    method: str, budget: int, story: Callable[[], list[Any]], gone: list[int]
) -> None:
    found = [left_of(method, budget, execution, story()) for execution in ("text", "span")]
    assert found[0] == found[1]
    assert set(found[0]) >= set(gone)


def test_lots_are_drawn_by_the_runs_seed() -> None:
    cleared = []
    for seed in (0, 0, 1, 2, 3):
        gateway = open_gateway(Endpoint(), make_method("random-tools", 700, {"keep": "1"}))
        messages: Messages = [{"role": "user", "content": "Look."}]
        for number in range(9):
            gateway.chat("run|0|1|a", messages, TOOLS, Options(seed=seed))
            messages += [{"role": "assistant", "content": "Seen."}, call(number), result(number)]
        cleared.append(frozenset(gateway._find("run|0|1|a").drops.dropped))
    assert cleared[0] == cleared[1] != frozenset()
    assert len(set(cleared)) > 2
