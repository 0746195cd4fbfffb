"""vLLM's runner of ours on a device that is no CPU, above stand-ins for vLLM's classes.

What vLLM calls, and in which order, is that of 0.32.0: profile, try out CUDA graphs with a cache of
a few blocks, size the cache, allocate it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from agentbench_kv.engines.core.policy import VARIABLE, BackendPolicy
from agentbench_kv.engines.vllm.plugin import launch
from agentbench_kv.registry import make_method

MICRO = Path(launch.__file__).parents[3] / "models" / "micro"
PLUGIN = "agentbench_kv.engines.vllm.plugin"
HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 64, 3


class FullAttentionSpec:
    """As vLLM's, as far as we look."""

    page_size_bytes, block_size, dtype = 4096, 16, torch.bfloat16


class Impl:
    """Stands for an attention backend's implementation."""

    scale = DIM**-0.5

    def forward(self, layer: Any, query: Any, *words: Any) -> tuple[Any, ...]:
        return "attended", layer.layer_name, len(query), *words


class Builder:
    """Stands for what makes an attention backend's metadata."""

    kv_cache_spec = SimpleNamespace(sliding_window=None)

    def build(self, prefix: int, common: Any, fast: bool = False) -> tuple[Any, ...]:
        return prefix, common, fast


class Runner:
    """Stands for vLLM's model runner: notes what there was when it was asked to profile."""

    device = torch.device("meta")
    dtype = torch.bfloat16
    max_num_reqs = 5
    seq_lens = torch.zeros(8, dtype=torch.int32)

    def __init__(self, layers: list[Any], capture: Any) -> None:
        found = {layer.layer_name: layer for layer in layers}
        self.capture = capture
        self.compilation_config = SimpleNamespace(
            static_forward_context=found, cudagraph_capture_sizes=[1, 8]
        )
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1,
                decode_context_parallel_size=1,
            ),
            speculative_config=None, kv_transfer_config=None,
            cache_config=SimpleNamespace(enable_prefix_caching=False),
            scheduler_config=SimpleNamespace(async_scheduling=False),
        )  # fmt: skip
        self.profiled: list[tuple[int, int]] = []
        self.allocated: list[bool] = []

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {
            name: FullAttentionSpec() for name in self.compilation_config.static_forward_context
        }

    def profile_run(self, *_: Any, **__: Any) -> None:
        rows: Any = getattr(self, "_kvbench_rows")  # noqa: B009
        self.profiled.append((self.capture.buffered, rows.rings.places))

    def initialize_kv_cache(
        self, kv_cache_config: Any, *_: Any, is_profiling: bool = False, **__: Any
    ) -> None:
        self.kv_cache_config = kv_cache_config
        self.allocated.append(is_profiling)


def stand_ins() -> dict[str, ModuleType]:
    """Modules with the names that the plug-in imports from vLLM, on a machine with a GPU."""
    backends = {
        f"{name.lower()}_attn": {
            f"{name}AttentionBackend": type("Backend", (), {}),
            f"{name}AttentionImpl": type(f"{name}Impl", (Impl,), {}),
            f"{name}AttentionMetadataBuilder": type("Builder", (Builder,), {}),
        }
        for name in ("Flash", "Triton")
    }
    found = {
        "vllm": {},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
        "vllm.v1.attention.backends": {k: SimpleNamespace(**v) for k, v in backends.items()},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": Runner},
        "vllm.v1.worker.gpu_worker": {"Worker": type("Worker", (), {})},
        "vllm.v1.kv_cache_interface": {
            "FullAttentionSpec": FullAttentionSpec,
            "SlidingWindowSpec": type("SlidingWindowSpec", (), {}),
        },
    }  # fmt: skip
    modules = {}
    for name, content in found.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(content)
    return modules


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The runner's module, imported above the stand-ins and forgotten again."""
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    ours = [f"{PLUGIN}.{name}" for name in ("attention", "runner")]
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(ours[1])
    for name in ours:
        sys.modules.pop(name, None)


def flash(_plugin: Any) -> type:
    attention = sys.modules[f"{PLUGIN}.attention"]
    impl: type = attention.CapturingFlash.get_impl_cls()  # type: ignore[attr-defined]
    return impl


def made(plugin: Any, impl: type, method: str, folder: Path) -> Any:
    policy = BackendPolicy(make_method(method, 64), MICRO, folder / "socket")
    layers = [
        SimpleNamespace(
            layer_name=f"layers.{i}", impl=impl(), num_heads=HEADS, num_kv_heads=KV_HEADS,
            head_size=DIM, kv_cache=torch.zeros(4, KV_HEADS, 16, 2 * DIM, device="meta"),
        )
        for i in range(LAYERS)
    ]  # fmt: skip
    return plugin.EvictingRunner(layers, plugin.CAPTURE), policy.save(folder)


def cache_of(names: list[str]) -> Any:
    group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=names)
    return SimpleNamespace(kv_cache_groups=[group])


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
    assert len(runner._kvbench_pages[0].layers) == LAYERS


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


@pytest.mark.parametrize("kind", ["data", "pipeline"])
def test_parallel_workers_are_refused(
    kind: str, plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, path = made(plugin, flash(plugin), "agentkv", tmp_path)
    monkeypatch.setenv(VARIABLE, str(path))
    setattr(runner.vllm_config.parallel_config, f"{kind}_parallel_size", 2)
    with pytest.raises(ValueError, match=f"does not support {kind} parallelism"):
        runner.initialize_kv_cache(cache_of(["layers.0"]))


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
