"""What vLLM's and SGLang's wires hand to a server that is started again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.engines.serving.backend.policy import VARIABLE, method_from
from agentbench_kv.engines.serving.model import ModelFacts
from agentbench_kv.engines.serving.wire import Wire
from agentbench_kv.engines.sglang.wire import SglangPaths, SglangWire
from agentbench_kv.engines.vllm.wire import VllmPaths, VllmWire
from agentbench_kv.registry import make_method

FACTS = ModelFacts("qwen3", 2, 4, 2, 32, 4096, (1,))
OPTIONS = EngineOptions("micro", make_method("full-constrained", None))


def vllm(folder: Path) -> Wire:
    return VllmWire(OPTIONS, FACTS, VllmPaths(Path("python"), folder, folder), stock=False)


def sglang(folder: Path) -> Wire:
    paths = SglangPaths(Path("python"), folder, folder)
    return SglangWire(OPTIONS, FACTS, paths, gpu=False, stock=False)


@pytest.mark.parametrize("make", [vllm, sglang])
def test_a_server_starts_with_the_method_in_use(
    make: Callable[[Path], Wire], tmp_path: Path
) -> None:
    wire = make(tmp_path)
    method = make_method("agentkv", 96, {"interval": 32})
    for expected in (OPTIONS.method, method):
        wire.use(expected)
        policy = Path(wire.launch().environment[VARIABLE])
        assert method_from(json.loads(policy.read_text())["method"]) == expected
    wire.close()
