"""`full@offload`: command lines that would be started, and where it is refused.

No GPU is here, so that none of them was; `test_serving_option_facts.py` looks whether every version
has the options.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentbench_kv.budget import Budget
from agentbench_kv.cli import kvbench
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.serving.engine import ServingEngine
from agentbench_kv.engines.serving.model_facts import ModelFacts
from agentbench_kv.engines.serving.wire import EngineWire
from agentbench_kv.engines.sglang.engine import SglangEngine, SglangEngineWire
from agentbench_kv.engines.vllm.engine import VllmEngine, VllmEngineWire
from agentbench_kv.errors import UsageError
from agentbench_kv.registry import load_engine, make_method
from agentbench_kv.run.engines import check_pair
from agentbench_kv.serving_bench.arms import engine_arms

FACTS = ModelFacts("qwen3", 2, 4, 2, 32, 4096, (1,))
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "max_position_embeddings": 4096,
}
OFFLOAD = make_method("full@offload", None)


def words(wire_class: Callable[..., EngineWire], folder: Path, **options: Any) -> Sequence[str]:
    """Return the command line of a stock server on a GPU."""
    chosen = replace(EngineOptions("micro", OFFLOAD, device="cuda"), **options)
    wire = wire_class(chosen, FACTS, Path("python"), folder, folder, True, True)
    found = wire.launch().command
    wire.close()
    return found


def test_vllms_native_offload_is_asked_for_by_its_size(tmp_path: Path) -> None:
    found = words(VllmEngineWire, tmp_path)
    assert found[found.index("--kv-offloading-backend") + 1] == "native"
    # 16 GB are 14.9012 GiB, which is what it counts in.
    assert found[found.index("--kv-offloading-size") + 1] == "14.9012"
    larger = make_method("full@offload", None, {"offload": "64"})
    found = words(VllmEngineWire, tmp_path, method=larger)
    assert found[found.index("--kv-offloading-size") + 1] == "59.6046"
    # Prefix caching, which finds what was offloaded, stays as shipped.
    assert not [word for word in found if "prefix-caching" in word]
    plain = words(VllmEngineWire, tmp_path, method=make_method("full", None))
    assert not [word for word in plain if "offloading" in word]


def test_sglangs_hierarchical_cache_is_asked_for_by_its_size(tmp_path: Path) -> None:
    found = words(SglangEngineWire, tmp_path)
    assert "--enable-hierarchical-cache" in found
    assert found[found.index("--hicache-size") + 1] == "16"
    assert "--disable-radix-cache" not in found  # SGLang refuses the two together
    plain = words(SglangEngineWire, tmp_path, method=make_method("full", None))
    assert not [word for word in plain if "hi" in word and "cache" in word]


@pytest.mark.parametrize(
    ("engine", "argument"),
    [(VllmEngine, "kv-offloading-size"), (SglangEngine, "hicache-size")],
)
def test_without_a_gpu_it_is_one_line(
    engine: type[ServingEngine], argument: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = EngineOptions(str(tmp_path), OFFLOAD, device="cpu")
    with pytest.raises(UsageError, match="moves cached rows between a GPU") as caught:
        engine.check_options(options)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=f"--engine-arg {argument}: .* says the same"):
        engine.check_options(replace(options, engine_args={argument: "4"}))
    engine.check_options(replace(options, method=make_method("full", None)))


@pytest.mark.parametrize("name", ["embedded", "llamacpp", "scripted", "api"])
def test_engines_that_offload_nothing_refuse_it(name: str) -> None:
    with pytest.raises(UsageError, match="has no offload"):
        check_pair(name, load_engine(name), OFFLOAD)
    check_pair(name, load_engine(name), make_method("full", None))


def test_it_is_a_full_of_its_own_name_and_full_is_as_before() -> None:
    assert (OFFLOAD.name, OFFLOAD.label) == ("full", "full@offload")
    assert OFFLOAD.settings() == {"offload": 16}
    plain = make_method("full", None)
    assert plain.settings() == {}
    assert plain.needs == frozenset()
    for method, settings in (
        ("full-constrained@offload", {}),
        ("full-constrained", {"offload": 1}),
    ):
        with pytest.raises(UsageError, match="offload"):
            make_method(method, None, settings)


def test_a_size_is_the_offloads_alone() -> None:
    """As `bench serving` gives settings to all of its arms."""
    where = {"dtype": "float32", "device": "cpu"}
    arms = [("full", None), ("agentkv", Budget.parse("64"))]
    with pytest.raises(UsageError, match="only --method full@offload has it"):
        engine_arms("embedded", "micro", arms, {"offload": "8"}, **where)
    with pytest.raises(UsageError, match="has no offload"):
        engine_arms("embedded", "micro", [*arms, ("full@offload", None)], {}, **where)


def test_the_commands_say_so_in_a_line() -> None:
    for command in (
        ["run", "--task", "micro/recall-1k", "--method", "full@offload"],
        ["bench", "serving", "--method", "full@offload"],
    ):
        done = CliRunner().invoke(kvbench, command)
        assert isinstance(done.exception, UsageError)
        assert "engine 'embedded' cannot run method 'full@offload'" in str(done.exception)
