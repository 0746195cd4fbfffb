"""Requests that SGLang puts back in its queue: computed again, counted, and still right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentbench_kv.conformance.driver import Driver, TurnPlan
from agentbench_kv.conformance.engines.comparison import wrong_tokens
from agentbench_kv.conformance.engines.fixture import load_network, prompt, write_model
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.sglang.engine import SglangEngine
from agentbench_kv.phases import TokenCodec, load_tokenizer
from agentbench_kv.registry import make_method

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def driver(sglang_python: Path, folder: Path) -> Iterator[Driver]:  # noqa: ARG001
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_RETRACT", "1")
        patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "23")
        patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        method = make_method("full-constrained", None)
        options = EngineOptions(
            str(folder), method, device="cpu", engine_args={"page-size": "16"}, concurrency=3
        )
        made = Driver(SglangEngine, options, TokenCodec(load_tokenizer(folder)))
        yield made
        made.close()


@pytest.mark.parametrize(
    ("name", "budget"), [("full-constrained", None), ("streamingllm", 96), ("agentkv", 96)]
)
def test_what_is_put_back_is_computed_again(
    driver: Driver, folder: Path, name: str, budget: int | None
) -> None:
    settings = {} if budget is None else {"interval": 32}
    assert driver.reconfigure(make_method(name, budget, settings))
    sessions = {
        f"s{i}": [TurnPlan(prompt(150 + 40 * i, i), 60), TurnPlan(prompt(50, 10 + i), 60)]
        for i in range(3)
    }
    traces = driver.play(sessions)
    network = load_network(folder)
    for trace in traces.values():
        assert trace.error is None
        assert not trace.kept_missing
        assert wrong_tokens(network, trace) == []
    assert sum(trace.stats.recomputed for trace in traces.values()) > 0
    assert all(len(t.stats.restarts) > 0 for t in traces.values() if t.stats.recomputed)
    decoded = [trace.stats.decode_tokens for trace in traces.values()]
    assert decoded == [120, 120, 120]
