"""What vLLM's and SGLang's wires hand to a server that is started again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.core.policy import VARIABLE, method_from
from agentbench_kv.engines.serving.engine import ServingEngine, refuse_method, start_server
from agentbench_kv.engines.serving.wire import EngineWire, ModelFacts, read_model
from agentbench_kv.engines.sglang.engine import SglangEngineWire
from agentbench_kv.engines.vllm.engine import VllmEngineWire
from agentbench_kv.errors import PrerequisiteError, UsageError
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


CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ""),
        ({"model_type": "qwen3_moe"}, ""),
        ({"model_type": "glm4", "partial_rotary_factor": 0.5}, "turns 50% of a head"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "turns 25% of a head"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' has frequencies"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' has frequencies"),
        ({"model_type": "cohere"}, "cohere has not been checked"),
    ],
)
def test_keys_are_turned_only_where_it_is_known_how(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Logical positions need no turning, so any model will do."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    facts = read_model(tmp_path)
    assert reason in facts.unturnable()
    refuse_method(make_method("streamingllm", 128), facts)
    paper = make_method("streamingllm@paper", 128)
    if not reason:
        refuse_method(paper, facts)
        return
    with pytest.raises(UsageError, match="positions=logical"):
        refuse_method(paper, facts)


def test_a_config_whose_rope_is_nonsense_is_one_line(tmp_path: Path) -> None:
    for nonsense in (["yarn"], {"partial_rotary_factor": "half"}):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": nonsense}))
        with pytest.raises(PrerequisiteError, match="is not a decoder's"):
            read_model(tmp_path)


@pytest.mark.parametrize("wire_class", [VllmEngineWire, SglangEngineWire])
def test_a_config_changed_on_the_command_line_is_not_the_one_keys_are_turned_by(
    wire_class: type[EngineWire], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = EngineOptions(
        str(tmp_path),
        make_method("streamingllm@paper", 128),
        engine_args={"hf-overrides": "{}"},
    )
    with pytest.raises(UsageError, match="--engine-arg hf-overrides"):
        start_server(ServingEngine, wire_class, "x", options, "no environment", gpu=False)


LARGE = replace(FACTS, layers=28, kv_heads=8, head_dim=128, context_limit=40_960)


def value_of(words: Sequence[str], option: str) -> int:
    return int(words[list(words).index(f"--{option}") + 1])


@pytest.mark.parametrize("wire_class", [VllmEngineWire, SglangEngineWire])
def test_a_cpu_gets_a_cache_for_one_whole_context(
    wire_class: Callable[..., EngineWire], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 GiB would not do for a model of 0.6 billion parameters, and vLLM would not start."""
    monkeypatch.setattr("agentbench_kv.engines.serving.wire.free_tokens", lambda _: 10**9)
    size = LARGE.bytes_per_token("float32")
    for facts in (FACTS, LARGE):
        wire = wire_class(OPTIONS, facts, Path("python"), tmp_path, tmp_path, False, False)
        words = wire.launch().command
        wire.close()
        if wire_class is VllmEngineWire:
            room = value_of(words, "kv-cache-memory-bytes")
            wanted = 2**30 if facts is FACTS else size * 40_960
        else:
            room = value_of(words, "max-total-tokens")
            wanted = 2**30 // FACTS.bytes_per_token("float32") if facts is FACTS else 40_960
        assert wanted <= room <= wanted * 1.01


def test_vllm_without_memory_for_a_context_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentbench_kv.engines.serving.wire.free_tokens", lambda _: 10_000)
    chosen = {"engine_args": {"max-model-len": "8192"}}
    small = replace(OPTIONS, **chosen)
    for options, fits in ((OPTIONS, False), (small, True)):
        wire = VllmEngineWire(options, LARGE, Path("python"), tmp_path, tmp_path, False, False)
        if fits:
            wire.launch()
        else:
            with pytest.raises(PrerequisiteError, match=r"8\.8 GiB.*max-model-len=9936"):
                wire.launch()
        wire.close()
