"""vLLM's runner of ours on a device that is no CPU, above stand-ins for vLLM's classes.

What vLLM calls, and in which order, is that of 0.32.0: profile, try out CUDA graphs with a cache of
a few blocks, size the cache, allocate it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_stand_ins import DIM, HEADS, LAYERS, PLUGIN, Impl, cache_of, flash, made

from agentbench_kv.engines.core.policy import VARIABLE
from agentbench_kv.engines.core.prefixes import PREFIXES


def test_queries_have_their_memory_before_the_cache_is_sized(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, path = made(plugin, flash(plugin), "agentkv", tmp_path)
    monkeypatch.setenv(VARIABLE, str(path))
    runner.profile_run()
    assert runner.profiled == [(8, 5)]  # rows of static buffers, sessions with rings
    rows, buffers = runner._kvbench_rows, [b.shape for b in plugin.CAPTURE._buffers]
    assert buffers == [(8, HEADS, DIM)] * LAYERS
    names = list(runner.compilation_config.static_forward_context)
    runner.initialize_kv_cache(cache_of(names), is_profiling=True)
    runner.initialize_kv_cache(cache_of(names))
    assert runner.allocated == [True, False]
    assert runner._kvbench_rows is rows
    assert [layer.layer_name for layer in runner._kvbench_layers] == names
    described = vars(runner)["_kvbench_pages"]  # and not only when the first step asks for it
    assert [len(rows.layers) for rows in described] == [LAYERS] * 2


def test_shared_prefixes_have_their_places_before_the_cache_is_sized(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"prefix": "shared", "protect": "system"}
    runner, path = made(plugin, flash(plugin), "agentkv", tmp_path, **shared)
    monkeypatch.setenv(VARIABLE, str(path))
    runner.profile_run()
    assert runner.profiled == [(8, 5 + PREFIXES + 1)]


def test_a_backend_that_bypasses_ours_is_refused_in_a_line(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = type("FlashInferImpl", (Impl,), {})
    for method in ("agentkv", "streamingllm"):
        runner, path = made(plugin, other, method, tmp_path)
        monkeypatch.setenv(VARIABLE, str(path))
        with pytest.raises(ValueError, match="FlashInferImpl shows no queries") as caught:
            runner.profile_run()
        assert "attention-backend=FLASH_ATTN" in str(caught.value)
        assert "\n" not in str(caught.value)
    # What evicts nothing may be attended to by anybody.
    runner, path = made(plugin, other, "full-constrained", tmp_path)
    monkeypatch.setenv(VARIABLE, str(path))
    runner.profile_run()


@pytest.mark.parametrize("backend", ["CapturingFlash", "CapturingTriton"])
def test_both_backends_of_a_gpu_go_through_ours(backend: str, plugin: Any) -> None:
    attention: Any = sys.modules[f"{PLUGIN}.attention"]
    ours = getattr(attention, backend)
    # vLLM finds a class by its module and its name.
    assert getattr(sys.modules[ours.__module__], ours.__qualname__) is ours
    seen: list[tuple[str, int]] = []
    plugin.CAPTURE.see = lambda name, query: seen.append((name, len(query)))
    layer = SimpleNamespace(layer_name="layers.2")
    found = ours.get_impl_cls()().forward(layer, torch.zeros(7, HEADS, DIM), "k", "v")
    assert found == ("attended", "layers.2", 7, "k", "v")
    assert seen == [("layers.2", 7)]
    assert issubclass(ours.get_impl_cls(), plugin.CapturingImpl)
    builder = ours.get_builder_cls()()
    assert builder.build(0, "batch", True) == (0, "batch", True)
    builder.kv_cache_spec = SimpleNamespace(sliding_window=128)
    attention.LOGICAL.put_into = lambda common: f"logical {common}"
    assert builder.build(0, "batch") == (0, "logical batch", False)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("data_parallel_size", 2, "data"),
        ("data_parallel_index", 1, "data"),  # all that vLLM leaves a dense model's second rank
        ("pipeline_parallel_size", 2, "pipeline"),
        ("decode_context_parallel_size", 2, "decode context"),
        ("prefill_context_parallel_size", 2, "prefill context"),
    ],
)
def test_parallel_workers_are_refused(
    name: str, value: int, kind: str, plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, path = made(plugin, flash(plugin), "agentkv", tmp_path)
    monkeypatch.setenv(VARIABLE, str(path))
    setattr(runner.vllm_config.parallel_config, name, value)
    with pytest.raises(ValueError, match=f"does not support {kind} parallelism"):
        runner.initialize_kv_cache(cache_of(["layers.0"]))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("tova", "kept_set=per_layer"),
        ("triattention", "a calibration"),
        ("expected-attention", "a calibration"),
        ("random", "the number of a head"),
    ],
)
def test_what_needs_all_heads_is_refused_under_tensor_parallelism(
    name: str, what: str, plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, path = made(plugin, flash(plugin), name, tmp_path)
    monkeypatch.setenv(VARIABLE, str(path))
    names = list(runner.compilation_config.static_forward_context)
    runner.initialize_kv_cache(cache_of(names))
    runner.vllm_config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(ValueError, match=f"does not support .*{what}.* under tensor parallelism"):
        runner.initialize_kv_cache(cache_of(names))


def test_a_cache_of_8_bits_and_attention_in_chunks_are_refused(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, path = made(plugin, flash(plugin), "agentkv", tmp_path)
    monkeypatch.setenv(VARIABLE, str(path))
    for name, value, said in (
        ("dtype", torch.float8_e4m3fn, "a quantised KV cache"),
        ("attention_chunk_size", 8192, "other than over all tokens or a window"),
    ):
        cache = cache_of(["layers.0"])
        setattr(cache.kv_cache_groups[0].kv_cache_spec, name, value)
        with pytest.raises(ValueError, match=said):
            runner.initialize_kv_cache(cache)
