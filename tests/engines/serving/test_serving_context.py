"""`context_limit` beyond what `config.json` says, in the serving engines themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agentbench_kv.conformance.driver import Driver, TurnPlan
from agentbench_kv.conformance.engines.comparison import error_problem, wrong_tokens
from agentbench_kv.conformance.engines.fixture import load_network, prompt
from agentbench_kv.conformance.families import write_family
from agentbench_kv.engines.base import EngineOptions, FinishReason
from agentbench_kv.engines.core import context
from agentbench_kv.engines.core.context import stretched_folder
from agentbench_kv.phases import TokenCodec, load_tokenizer
from agentbench_kv.registry import load_engine, make_method

TRAINED, ASKED = 512, 1024  # the models below: positions in config.json, and on request


@pytest.fixture
def short_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(context, "home", lambda: tmp_path)
    folder = write_family(tmp_path / "qwen3", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": TRAINED}))
    return folder


@pytest.mark.engine
@pytest.mark.parametrize("method", ["full", "agentkv"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_serving_engines_go_on_behind_the_trained_context(
    engine: str, method: str, environment_python: Callable[[str], Path], short_model: Path
) -> None:
    environment_python(engine)
    built = make_method(method, None if method == "full" else 96)
    options = EngineOptions(str(short_model), built, device="cpu", context_limit=ASKED)
    driver = Driver(load_engine(engine), options, TokenCodec(load_tokenizer(short_model)))
    try:
        assert driver.engine.info.context_limit == ASKED
        turns = [TurnPlan(prompt(450, 0), 150), TurnPlan(prompt(300, 1), 200)]
        trace = driver.play({"s": turns})["s"]
    finally:
        driver.close()
    assert not error_problem(trace)
    assert trace.reasons == [FinishReason.LENGTH, FinishReason.CONTEXT_LIMIT]
    assert len(trace.tokens) == ASKED
    stretched = load_network(stretched_folder(short_model, ASKED))
    assert [each for each in wrong_tokens(stretched, trace) if each.gap > 1e-3] == []
    # Another RoPE says something else, so it is YaRN that was in effect.
    assert len(wrong_tokens(load_network(short_model), trace)) > 50
