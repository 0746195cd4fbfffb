"""The vLLM engine: vLLM 0.32.0 in a process of its own, evicting through a plug-in."""

from __future__ import annotations

from typing import Any, Self

from agentbench_kv.engines.base import EngineInfo
from agentbench_kv.engines.embedded.model import check_dtype, folder_sha, model_path
from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.engines.serving.backend.policy import method_document
from agentbench_kv.engines.serving.engine import ServingEngine, scratch_folder
from agentbench_kv.engines.serving.model import read_model
from agentbench_kv.engines.vllm.wire import VllmPaths, VllmWire, on_gpu
from agentbench_kv.environments import home, python_of
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method

__all__ = ["VllmEngine"]


class VllmEngine(ServingEngine):
    """Sessions inside vLLM, whose blocks go back to its allocator when a method evicts.

    `full` is vLLM as shipped: prefix caching and async scheduling on, no plug-in. Every other
    method, `full-constrained` among them, runs with the plug-in and both off.
    """

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
        refuse_method(options.method)
        path = model_path(options.model)
        facts = read_model(path)
        python = python_of(environment_for(options.device))
        folder = scratch_folder()
        wire = VllmWire(
            options, facts, VllmPaths(python, path, folder), stock=options.method.name == "full"
        )
        info = EngineInfo(
            name="vllm",
            model=options.model,
            model_path=path,
            model_sha=folder_sha(path),
            device="cuda" if on_gpu(options.device) else "cpu",
            dtype=options.dtype,
            context_limit=wire.context_limit,
            eos_token_ids=facts.eos_token_ids,
            capabilities=cls.capabilities,
        )
        log = home() / "logs"
        log.mkdir(parents=True, exist_ok=True)
        size = facts.bytes_per_token(options.dtype)
        return cls(info, wire, folder, log / f"vllm-{folder.name}.log", size)

    @classmethod
    def check_model(cls, model: str) -> None:
        """Refuse a model that is no folder."""
        model_path(model)

    @classmethod
    def check_compute(cls, dtype: str, device: str) -> None:
        """Refuse an unknown dtype, and a missing environment."""
        check_dtype(dtype)
        python_of(environment_for(device))

    def reconfigure(self, method: Method) -> None:
        """Go on with another method; only while no session is open, and not from or to `full`."""
        refuse_method(method)
        document: dict[str, Any] = method_document(method, self._folder)
        self._control.call("configure", method=document)


def environment_for(device: str) -> str:
    """Return the name of the managed environment for a device."""
    return "vllm-cuda" if on_gpu(device) else "vllm"


def refuse_method(method: Method) -> None:
    """Refuse a method whose cache a serving engine cannot hold."""
    if method.per_query_head:
        raise UsageError(
            f"{method.label} keeps a set per query head, a serving engine's cache has rows per KV "
            "head; use another preset or --engine embedded"
        )
