"""The vLLM engine: vLLM 0.32.0 in a process of its own, evicting through a plug-in."""

from __future__ import annotations

from typing import ClassVar, Self

from agentbench_kv.engines.embedded.model import check_dtype, model_path
from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.engines.serving.engine import ServingEngine
from agentbench_kv.engines.serving.setup import start_server
from agentbench_kv.engines.vllm.wire import VllmWire, on_gpu
from agentbench_kv.environments import python_of


class VllmEngine(ServingEngine):
    """Sessions inside vLLM, whose blocks go back to its allocator when a method evicts.

    `full` is vLLM as shipped: prefix caching and async scheduling on, no plug-in. Every other
    method, `full-constrained` among them, runs with the plug-in and both off.
    """

    takes_arguments: ClassVar[bool] = True

    @classmethod
    def create(cls, options: EngineOptions) -> Self:
        """Start a server.

        Raises
        ------
        PrerequisiteError
            If the environment is missing or the server does not start; with its last lines.
        UsageError
            For a method vLLM's cache cannot hold.
        """
        environment, gpu = _environment_for(options.device), on_gpu(options.device)
        return start_server(cls, VllmWire, "vllm", options, environment, gpu=gpu)

    @classmethod
    def check_model(cls, model: str) -> None:
        """Refuse a model that is no folder."""
        model_path(model)

    @classmethod
    def check_compute(cls, dtype: str, device: str) -> None:
        """Refuse an unknown dtype, and a missing environment."""
        check_dtype(dtype)
        python_of(_environment_for(device))


def _environment_for(device: str) -> str:
    return "vllm-cuda" if on_gpu(device) else "vllm"
