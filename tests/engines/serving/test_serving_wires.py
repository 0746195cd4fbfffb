"""What vLLM's and SGLang's wires hand to a server that is started again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.core.policy import VARIABLE, method_from
from agentbench_kv.engines.serving.wire import EngineWire, ModelFacts
from agentbench_kv.engines.sglang.engine import SglangEngineWire
from agentbench_kv.engines.vllm.engine import VllmEngineWire
from agentbench_kv.registry import make_method

FACTS = ModelFacts("qwen3", 2, 4, 2, 32, 4096, (1,))
OPTIONS = EngineOptions("micro", make_method("full-constrained", None))


@pytest.mark.parametrize("wire_class", [VllmEngineWire, SglangEngineWire])
def test_a_server_starts_with_the_method_in_use(
    wire_class: Callable[..., EngineWire], tmp_path: Path
) -> None:
    wire = wire_class(OPTIONS, FACTS, Path("python"), tmp_path, tmp_path, False, False)
    method = make_method("agentkv", 96, {"interval": 32})
    for expected in (OPTIONS.method, method):
        wire.use(expected)
        policy = Path(wire.launch().environment[VARIABLE])
        assert method_from(json.loads(policy.read_text())["method"]) == expected
    wire.close()
