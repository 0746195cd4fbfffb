"""What the plug-in imports from vLLM on a machine with a GPU, as far as it looks."""

from __future__ import annotations

import sys
from abc import ABCMeta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from agentbench_kv.engines.core.policy import BackendPolicy
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


def config(sessions: int = 5, tokens: int = 64) -> Any:
    """Stand for vLLM's: one worker, so many requests at once, so many tokens in a step."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1,
            data_parallel_index=0, decode_context_parallel_size=1, prefill_context_parallel_size=1,
        ),
        speculative_config=None, kv_transfer_config=None,
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: 4, disable_cascade_attn=True
        ),
        scheduler_config=SimpleNamespace(
            async_scheduling=False, max_num_seqs=sessions, max_num_batched_tokens=tokens
        ),
    )  # fmt: skip


class Runner:
    """Stands for vLLM's model runner: notes what there was when it was asked to profile."""

    device = torch.device("meta")
    dtype = torch.bfloat16
    max_num_reqs = 5
    seq_lens = torch.zeros(8, dtype=torch.int32, device="meta")

    def __init__(self, layers: list[Any], capture: Any) -> None:
        found = {layer.layer_name: layer for layer in layers}
        self.capture = capture
        self.compilation_config = SimpleNamespace(
            static_forward_context=found, cudagraph_capture_sizes=[1, 8]
        )
        self.vllm_config = config()
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


def stand_ins(runner: type = Runner) -> dict[str, ModuleType]:
    """Modules with the names that the plug-in imports from vLLM, on a machine with a GPU."""
    backends = {
        f"{name.lower()}_attn": {
            # Abstract, as vLLM's is: a class made from it is ABCMeta's to name.
            f"{name}AttentionBackend": ABCMeta("Backend", (), {}),
            f"{name}AttentionImpl": type(f"{name}Impl", (Impl,), {}),
            f"{name}AttentionMetadataBuilder": type("Builder", (Builder,), {}),
        }
        for name in ("Flash", "Triton")
    }
    found = {
        "vllm": {},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
        "vllm.v1.attention.backends": {k: SimpleNamespace(**v) for k, v in backends.items()},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": runner},
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


def flash(_plugin: Any) -> type:
    attention = sys.modules[f"{PLUGIN}.attention"]
    impl: type = attention.CapturingFlash.get_impl_cls()  # type: ignore[attr-defined]
    return impl


def made(
    plugin: Any, impl: type, method: str, folder: Path, budget: int | None = 64, **settings: Any
) -> Any:
    """Return our runner and the file of its policy."""
    policy = BackendPolicy(make_method(method, budget, settings), MICRO, folder / "socket")
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
