"""vLLM's worker with a model runner that evicts."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from agentbench_kv.engines.vllm.backend import plugin
from agentbench_kv.engines.vllm.backend.runner import EvictingRunner

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as BaseRunner
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as BaseRunner
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker


class Runner(EvictingRunner, BaseRunner):
    """The platform's runner, evicting."""


class Worker(BaseWorker):
    """The platform's worker; named on the command line as `--worker-cls`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        plugin.register()
        super().__init__(*args, **kwargs)

    def _make_model_runner(self) -> Runner:
        return Runner(self.vllm_config, self.device)

    def init_device(self) -> None:
        super().init_device()
        # The CPU worker makes its runner here and does not call `_make_model_runner`.
        self.model_runner.__class__ = Runner
