"""Transcripts for the terminal: phases, evictions in their place, and hostile text."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agentbench_kv.results.records import TurnRecord
from agentbench_kv.results.transcripts import PHASE_STYLES, Segment, segments, transcript_lines

CALL = {"id": "1", "type": "function", "function": {"name": "scan", "arguments": '{"a": 1}'}}
MESSAGES = [
    {"role": "system", "content": "be good"},
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "", "reasoning_content": "hmm\nhm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "found"},
    {"role": "assistant", "content": "done"},
]
EVENTS = [
    {"decoded": 128, "logical": 300, "live_before": 300, "live_after": 200, "rows_moved": 1},
    {"decoded": 256, "logical": 500, "live_before": 400, "live_after": 200, "rows_moved": 1},
]


def turns(*events: int) -> list[TurnRecord]:
    return [
        TurnRecord(sample_id="s", trial=0, turn=i, live_before=10 * i, live_after=9, events=n)
        for i, n in enumerate(events)
    ]


def lines(document, of=()) -> list[str]:
    return [text.plain for text in transcript_lines(document, of)]


def test_messages_are_split_into_phases():
    assert [segments(message) for message in MESSAGES] == [
        [Segment("others", "be good")],
        [Segment("others", "go")],
        [Segment("think", "hmm\nhm"), Segment("act", 'scan({"a": 1})')],
        [Segment("tool", "found")],
        [Segment("others", "done")],
    ]


def test_calls_that_are_no_list_are_shown_too():
    one = {"function": {"name": "scan", "arguments": None}}
    assert segments({"tool_calls": one}) == [Segment("act", "scan()")]
    assert segments({"tool_calls": "scan"}) == [Segment("act", "scan")]
    assert segments({"tool_calls": ""}) == []


def test_every_phase_has_its_colour_and_its_name():
    found = list(transcript_lines({"transcript": MESSAGES}, ()))
    for phase, style in PHASE_STYLES.items():
        own = [text for text in found if text.plain.startswith(f"  {phase} ")]
        assert own
        assert all(str(text.style) == style for text in own)
    assert len({*PHASE_STYLES.values()}) == 4


def test_events_stand_after_the_message_they_happened_in():
    found = lines({"transcript": MESSAGES, "events": EVENTS}, turns(2, 0))
    assert found == [
        "system",
        "  others | be good",
        "user",
        "  others | go",
        "assistant  turn 0, 0 > 9 live",
        "  think  | hmm\n  think  | hm",
        '  act    | scan({"a": 1})',
        "  event: 300 > 200 live (100 evicted, 128 decoded, 300 logical so far)",
        "  event: 400 > 200 live (200 evicted, 256 decoded, 500 logical so far)",
        "tool",
        "  tool   | found",
        "assistant  turn 1, 10 > 9 live",
        "  others | done",
    ]
    later = lines({"transcript": MESSAGES, "events": EVENTS}, turns(1, 1))
    assert [i for i, line in enumerate(later) if "event" in line] == [7, 12]


@pytest.mark.parametrize("of", [(), turns(2), turns(2, 0, 0), turns(1, 0)])
def test_events_that_cannot_be_placed_are_listed_at_the_end(of):
    found = lines({"transcript": MESSAGES, "events": EVENTS}, of)
    assert ["event" in line for line in found[-2:]] == [True, True]
    assert not any("turn" in line for line in found)


def test_model_text_is_shown_and_never_obeyed():
    hostile = "[red]x[/red]\x1b[2J\r\x07\u202e\x9b\x00"
    document = {
        "transcript": [
            {"role": f"user{hostile}", "content": hostile},
            {"role": "assistant", "reasoning_content": hostile, "tool_calls": [
                {"function": {"name": hostile, "arguments": hostile}}]},
        ],
        "events": [{"live_before": hostile, "decoded": hostile}, hostile],
    }  # fmt: skip
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    for line in transcript_lines(document, ()):
        console.print(line, soft_wrap=True)
    out = console.file.getvalue()
    assert out.count("[red]x[/red]\\x1b[2J\\r\\x07\\u202e\\x9b\\x00") == 8
    assert not set(out) & set(hostile) & set("\x1b\r\x07\u202e\x9b\x00")


def test_a_huge_line_is_cut_and_says_so():
    (_, paragraph) = lines([{"role": "tool", "content": "x" * 1_000_000}])
    assert len(paragraph) < 9_000
    assert "(992000 more characters; --json shows all)" in paragraph


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "function", "transcript", "events"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(document=anything)
def test_any_json_at_all_is_shown(document):
    for line in lines(json.loads(json.dumps(document)), turns(1)):
        assert all(c.isprintable() or c == "\n" for c in line)


def test_parts_of_other_shapes_are_shown_as_json():
    assert segments({"role": "user", "content": [{"type": "text", "text": "hi"}]}) == [
        Segment("others", '[{"type": "text", "text": "hi"}]')
    ]
    assert lines("just text") == ["entry", "  others | just text"]
    assert lines({"transcript": None}) == []
