"""What the gateway tells span-level methods, and the reminders it writes for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.errors import UsageError
from agentbench_kv.gateway import Gateway, Options, TextGateway
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.gateway.session import notes_for
from agentbench_kv.methods.spans import Hints, Source, SpanRange, TurnNotes
from agentbench_kv.phases.machine import PhaseMachine

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "the weather in the town"}


class Noting(ScriptedEngine):
    """A scripted engine that keeps what it is told and asks for reminders."""

    wants_notes = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.notes: list[tuple[list[int], TurnNotes]] = []
        self.recalled: list[SpanRange] = []

    def note(self, session: str, tokens: Sequence[int], notes: TurnNotes) -> None:
        del session
        self.notes.append((list(tokens), notes))

    def recalls(self, session: str, tokens: Sequence[int], notes: TurnNotes) -> list[SpanRange]:
        del session, tokens, notes
        return self.recalled


@pytest.fixture
def noting(tokenizer_path: Any) -> Callable[..., tuple[Gateway, Noting]]:
    def build(*texts: str) -> tuple[Gateway, Noting]:
        engine = Noting(lambda _: texts, tokenizer_path=tokenizer_path)
        return Gateway(engine), engine

    return build


def told(engine: Noting) -> list[tuple[str, str]]:
    """The parts of the last note as (source, text)."""
    tokens, notes = engine.notes[-1]
    parts, at = [], 0
    for size, source in notes.parts:
        parts.append((source.value, engine_text(engine, tokens[at : at + size])))
        at += size
    assert at == len(tokens)
    return parts


def engine_text(engine: Noting, tokens: list[int]) -> str:
    return str(engine.decode(tokens))


def test_every_message_has_its_writer(noting: Any) -> None:
    gateway, engine = noting(CALL, "Fine.", "Bye.")
    engine.decode = gateway.codec.decode
    history: list[dict[str, Any]] = [SYSTEM, USER]
    first = gateway.chat("s", history, TOOLS)
    sources = [source for source, _ in told(engine)]
    assert sources == ["document", "user", "assistant"]
    assert told(engine)[1][1] == "<|im_start|>user\nthe weather in the town<|im_end|>\n"
    history += [first.message, {"role": "tool", "tool_call_id": "x", "content": "sun"}]
    second = gateway.chat("s", history, TOOLS)
    # Tool results come as a user message here, and what closes the answer before goes with them.
    assert [source for source, _ in told(engine)] == ["document", "assistant"]
    assert "<tool_response>\nsun" in told(engine)[0][1]
    gateway.chat("s", [*history, second.message, USER], TOOLS)
    assert [source for source, _ in told(engine)] == ["user", "assistant"]


def test_text_without_markers_is_a_document(noting: Any) -> None:
    gateway, engine = noting("x")
    gateway.complete("s", "the weather")
    _, notes = engine.notes[-1]
    assert [source for _, source in notes.parts] == [Source.DOCUMENT]


def test_the_machine_is_left_where_it_is(noting: Any) -> None:
    gateway, _ = noting("x")
    machine = PhaseMachine(gateway.table)
    before = machine.state
    notes_for(machine, gateway.codec.encode("<|im_start|>user\nhi"), Hints(pinned=True))
    assert machine.state is before


def test_hints_reach_the_engine_with_their_turn(noting: Any) -> None:
    gateway, engine = noting("one", "two")
    hints = Hints(priority=2.0, pinned=True, task_boundary=True)
    first = gateway.chat("s", [USER], options=Options(hints=hints))
    gateway.chat("s", [USER, first.message, USER])
    assert [notes.hints for _, notes in engine.notes] == [hints, Hints()]


def test_hints_for_another_engine_are_refused(gateway_of: Any) -> None:
    gateway = gateway_of("x")
    with pytest.raises(UsageError, match="runs no method that takes hints"):
        gateway.chat("s", [USER], options=Options(hints=Hints(pinned=True)))
    with pytest.raises(UsageError, match="priority must be above 0"):
        Options(hints=Hints(priority=0.0))


def test_an_engine_at_text_level_takes_no_hints_either() -> None:
    engine: Any = SimpleNamespace(info=SimpleNamespace(name="api"))
    with pytest.raises(UsageError, match="'api' runs no method that takes hints"):
        list(TextGateway(engine).stream("s", [USER], options=Options(hints=Hints(pinned=True))))


def test_a_server_refuses_hints_it_cannot_honour(gateway_of: Any) -> None:
    gateway = gateway_of("x", "y")
    with BackgroundServer(gateway) as server:
        url = server.url
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            ask = client.chat.completions.create
            with pytest.raises(openai.BadRequestError, match="takes hints"):
                ask(model="gold", messages=[USER], extra_body={"evoke_pinned": True})
            with pytest.raises(openai.BadRequestError, match="evoke_priority"):
                ask(model="gold", messages=[USER], extra_body={"evoke_priority": -1})
            harmless = {"evoke_pinned": False, "evoke_priority": 1, "evoke_task_boundary": None}
            assert ask(model="gold", messages=[USER], extra_body=harmless).choices


def test_a_reminder_stands_before_the_users_words_and_in_the_log(noting: Any) -> None:
    gateway, engine = noting("one", "two", "three")
    first = gateway.chat("s", [SYSTEM, USER])
    log, _ = gateway.token_log("s")
    start = len(gateway.codec.encode("<|im_start|>system\n"))
    engine.recalled = [(0, start + 4)]
    history = [SYSTEM, USER, first.message, USER]
    second = gateway.chat("s", history)
    said = gateway.codec.decode([t for t in log[: start + 4] if t not in gateway.codec.special])
    tokens, _ = engine.notes[-1]
    text = gateway.codec.decode(tokens)
    assert f"user\n[earlier: {' '.join(said.split())}]\nthe weather in the town" in text
    # The client does not send it back, and the session goes on all the same.
    engine.recalled = []
    third = gateway.chat("s", [*history, second.message, USER])
    assert third.report.resets == 0
    assert gateway.token_log("s")[0] == engine.token_log("s")


def test_no_reminder_in_a_first_prompt_or_without_a_user(noting: Any) -> None:
    gateway, engine = noting(CALL, "two")
    engine.recalled = [(0, 4)]
    first = gateway.chat("s", [USER], TOOLS)
    tool = {"role": "tool", "tool_call_id": "x", "content": "sun"}
    gateway.chat("s", [USER, first.message, tool], TOOLS)
    assert all("earlier" not in gateway.codec.decode(tokens) for tokens, _ in engine.notes)


def test_the_first_note_says_how_long_the_system_message_is(noting: Any) -> None:
    gateway, engine = noting("Hello", "Again")
    tools = [SYSTEM, USER]
    first = gateway.chat("s", tools, tools=TOOLS)
    tokens, notes = engine.notes[-1]
    engine.decode = gateway.codec.decode
    head = engine_text(engine, tokens[: notes.system])
    assert head.startswith("<|im_start|>system")
    assert "get_weather" in head
    assert engine_text(engine, tokens[notes.system :]).startswith("<|im_start|>user")
    gateway.chat("s", [*tools, first.message, SYSTEM, USER], tools=TOOLS)
    assert engine.notes[-1][1].system == 0
