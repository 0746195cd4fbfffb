"""The vLLM engine: vLLM 0.32.0 in a process of its own, evicting through a plug-in."""

from __future__ import annotations

from typing import ClassVar, Self

from agentbench_kv.engines.embedded.model import check_dtype, model_path
from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.engines.serving.engine import ServingEngine, scratch_folder
from agentbench_kv.engines.serving.model import read_model
from agentbench_kv.engines.serving.setup import engine_info, log_file, refuse_method
from agentbench_kv.engines.vllm.wire import VllmPaths, VllmWire, on_gpu
from agentbench_kv.environments import python_of


class VllmEngine(ServingEngine):
    """Sessions inside vLLM, whose blocks go back to its allocator when a method evicts.

    `full` is vLLM as shipped: prefix caching and async scheduling on, no plug-in. Every other
    method, `full-constrained` among them, runs with the plug-in and both off.
    """

    takes_arguments: ClassVar[bool] = True

    @classmethod
    def create(cls, options: EngineOptions) -> Self:
        """Start a server."""
        refuse_method(options.method)
        path = model_path(options.model)
        facts = read_model(path)
        python = python_of(environment_for(options.device))
        folder = scratch_folder()
        wire = VllmWire(
            options, facts, VllmPaths(python, path, folder), stock=options.method.name == "full"
        )
        info = engine_info(
            "vllm",
            options,
            path,
            facts,
            gpu=on_gpu(options.device),
            context_limit=wire.context_limit,
            capabilities=cls.capabilities,
        )
        size = facts.bytes_per_token(options.dtype)
        return cls(info, wire, folder, log_file("vllm", folder), size)

    @classmethod
    def check_model(cls, model: str) -> None:
        """Refuse a model that is no folder."""
        model_path(model)

    @classmethod
    def check_compute(cls, dtype: str, device: str) -> None:
        """Refuse an unknown dtype, and a missing environment."""
        check_dtype(dtype)
        python_of(environment_for(device))


def environment_for(device: str) -> str:
    """Return the name of the managed environment for a device."""
    return "vllm-cuda" if on_gpu(device) else "vllm"
