"""A gpt-oss of random weights, taught to speak, holds a session with tools while rows leave it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.methods.base import Phase
from agentbench_kv.registry import load_engine, make_method

sys.path.insert(0, str(Path(__file__).parent))
from harmony_model import (
    CALL,
    REPORT,
    HeldSession,
    harmony_tokenizer,
    hold_session,
    page_text,
    write_model,
)

TURNS = 5


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harmony") / "model"
    assert write_model(folder) < 0.01
    return folder


def held(engine: str, model: Path) -> HeldSession:
    method = make_method("agentkv", 96, {"interval": 16, "trigger": "prefill+every"})
    created = load_engine(engine).create(
        EngineOptions(str(model), method, device="cpu", concurrency=2)
    )
    try:
        return hold_session(created, TURNS)
    finally:
        created.shutdown()


def check_session(found: HeldSession) -> None:
    """Right calls, right phases by the text alone, nothing computed twice, rows evicted."""
    for number, reply in enumerate(found.replies):
        if number % 2:
            assert (reply.content, reply.tool_calls) == ("Done.", [])
            continue
        (call,) = reply.tool_calls
        assert call["function"]["name"] == "look_up"
        assert json.loads(call["function"]["arguments"]) == {"page": 7}
        assert reply.reasoning == "I need page 7"
    report = found.report
    assert (report.resets, report.stats.recomputed) == (0, 0)
    assert len(report.stats.events) >= 3
    assert report.stats.evicted > report.stats.live
    assert 0 < report.stats.window_bytes_read < report.stats.bytes_read
    tokenizer = harmony_tokenizer()
    pairs = groupby(zip(found.phases, found.tokens, strict=False), key=lambda pair: pair[0])
    runs = [(Phase(phase), tokenizer.decode([token for _, token in run])) for phase, run in pairs]
    for phase, inside in (
        (Phase.THINK, ["I need page 7"] * TURNS),
        (Phase.ACT, ['{"page": 7}'] * TURNS),
        (Phase.TOOL, [page_text(turn) for turn in range(TURNS)]),
    ):
        texts = [text for label, text in runs if label is phase]
        assert len(texts) == TURNS
        assert all(part in text for part, text in zip(inside, texts, strict=True))
    whole = tokenizer.decode(found.tokens)
    assert (whole.count(CALL), whole.count(REPORT.removesuffix("<|return|>"))) == (TURNS, TURNS)


@pytest.mark.slow
def test_gpt_oss_holds_a_session_in_the_embedded_engine(speaking: Path) -> None:
    check_session(held("embedded", speaking))


@pytest.mark.slow
@pytest.mark.engine
def test_gpt_oss_holds_the_same_session_in_vllm(
    speaking: Path, environment_python: Callable[[str], Path]
) -> None:
    environment_python("vllm")
    found = held("vllm", speaking)
    check_session(found)
    assert found.tokens == held("embedded", speaking).tokens
