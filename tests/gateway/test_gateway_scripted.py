"""The scripted engine by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.engines.base import FinishReason, Sampling
from agentbench_kv.engines.scripted import EXHAUSTED, ScriptedEngine
from agentbench_kv.errors import ContextLimitError, PrerequisiteError, UsageError
from agentbench_kv.gateway import Gateway
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases.machine import PhaseMachine

EngineOf = Callable[..., ScriptedEngine]


def opened(engine: ScriptedEngine, tokenizer: Any) -> ScriptedEngine:
    engine.open("s", PhaseMachine(Gateway(engine, tokenizer=tokenizer).table))
    return engine


def test_it_replays_text_by_text(engine_of: EngineOf, tokenizer: Any) -> None:
    engine = opened(engine_of("one", "two 🌦️"), tokenizer)
    eos = engine.info.eos_token_ids[0]
    said = []
    for _ in range(3):
        engine.extend("s", [7, 8], [Phase.OTHERS] * 2)
        generation = engine.generate("s", Sampling(100, stop_token_ids=frozenset({eos})))
        ids = list(generation)
        assert ids[-1] == eos
        assert generation.finish_reason is FinishReason.STOP
        said.append(tokenizer.decode(ids[:-1]))
    assert said == ["one", "two 🌦️", EXHAUSTED]
    stats = engine.stats("s")
    assert stats.live == stats.logical == stats.peak_live == len(engine.token_log("s"))
    assert (stats.prefill_tokens, stats.longest_prefill, stats.evicted) == (6, 2, 0)
    assert engine.close("s") == stats
    with pytest.raises(KeyError):
        engine.close("s")


def test_a_session_opened_again_goes_on_with_its_script(
    engine_of: EngineOf, tokenizer: Any
) -> None:
    engine = opened(engine_of("one", "two"), tokenizer)
    first = list(engine.generate("s", Sampling(100)))
    engine.close("s")
    second = list(opened(engine, tokenizer).generate("s", Sampling(100)))
    assert tokenizer.decode([*first[:-1], *second[:-1]]) == "onetwo"


def test_limits_stop_and_cancel(engine_of: EngineOf, tokenizer: Any) -> None:
    engine = opened(engine_of(*["a b c d e f g h"] * 4, context_limit=12), tokenizer)
    short = engine.generate("s", Sampling(2))
    assert (len(list(short)), short.finish_reason) == (2, FinishReason.LENGTH)
    asked = engine.generate("s", Sampling(9, stop=lambda _: True))
    assert (len(list(asked)), asked.finish_reason) == (1, FinishReason.STOP)
    cancelled = engine.generate("s", Sampling(9))
    cancelled.cancel()
    assert (list(cancelled), cancelled.finish_reason) == ([], FinishReason.CANCELLED)
    full = engine.generate("s", Sampling(99))
    assert (len(list(full)), full.finish_reason) == (9, FinishReason.CONTEXT_LIMIT)
    with pytest.raises(ContextLimitError, match="limit is 12"):
        engine.extend("s", [1], [Phase.OTHERS])


def test_what_it_is_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        scripts = None
        model = "gold"

    with pytest.raises(PrerequisiteError, match="selftest task"):
        ScriptedEngine.create(Options())
    monkeypatch.setattr("agentbench_kv.engines.scripted.model_path", lambda _: tmp_path)
    Options.scripts = lambda _: []
    with pytest.raises(PrerequisiteError, match="no tokenizer"):
        ScriptedEngine.create(Options())
    ScriptedEngine.check_model("null")
    with pytest.raises(UsageError, match="did you mean 'corrupt'"):
        ScriptedEngine.check_model("corupt")
