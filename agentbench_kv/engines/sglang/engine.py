"""The SGLang engine: SGLang 0.5.12 in a process of its own, evicting through a plug-in."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar, Self

from agentbench_kv.engines.base import Capability, KVStats, SpanRange
from agentbench_kv.engines.embedded.model import check_dtype, model_path, pick_device
from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.engines.serving.engine import ServingEngine
from agentbench_kv.engines.serving.sessions import ServingSession
from agentbench_kv.engines.serving.setup import start_server
from agentbench_kv.engines.sglang.wire import SglangWire
from agentbench_kv.environments import python_of
from agentbench_kv.errors import KVBenchError, UsageError


class SglangEngine(ServingEngine):
    """Sessions inside SGLang, whose pages go back to its allocator when a method evicts.

    `full` is SGLang as shipped: the radix cache and the overlapping scheduler on, no plug-in. Every
    other method, `full-constrained` among them, runs with the plug-in in streaming sessions.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.COMPRESS, Capability.EVICT_SPANS, Capability.FORK}
    )
    takes_arguments: ClassVar[bool] = True

    _wire: SglangWire

    @classmethod
    def create(cls, options: EngineOptions) -> Self:
        """Start a server.

        Raises
        ------
        PrerequisiteError
            If the environment is missing or the server does not start; with its last lines.
        UsageError
            For a method SGLang's cache cannot hold.
        """
        gpu = pick_device(options.device).type == "cuda"
        return start_server(cls, SglangWire, "sglang", options, "sglang", gpu=gpu)

    @classmethod
    def check_model(cls, model: str) -> None:
        """Refuse a model that is no folder, and a missing environment."""
        model_path(model)
        python_of("sglang")

    @classmethod
    def check_compute(cls, dtype: str, device: str) -> None:
        """Refuse an unknown dtype or a device that is not there."""
        check_dtype(dtype)
        pick_device(device)

    def close(self, session: str) -> KVStats:
        """Free the session in the backend and return its accounting."""
        self._wire.forget(self._sessions[session].backend_name)
        return super().close(session)

    def fork(self, session: str, new: str) -> None:
        """Open a session that has seen what another one, between two generations, has.

        Whole pages of rows are shared, a partial last one is copied. While both are open no rows of
        either can be evicted.
        """
        source = self._sessions[session]
        if new in self._sessions:
            raise KVBenchError(f"session {new} is open already")
        fork = ServingSession(new, copy.deepcopy(source.labeller))
        fork.tokens = list(source.tokens)
        if self._lives(source):
            self._control.call("fork", session=source.backend_name, new=fork.backend_name)
            self._wire.forked(source.backend_name, fork.backend_name)
            fork.epoch, fork.known = source.epoch, source.known
        self._sessions[new] = fork

    def evict_spans(self, session: str, spans: Sequence[SpanRange]) -> int:
        """Remove logical spans from all layers and heads, between two generations."""
        state = self._sessions[session]
        if not self._lives(state):
            return 0
        removed: int = self._control.call(
            "evict_spans", session=state.backend_name, spans=[list(span) for span in spans]
        )
        return removed

    def _lives(self, state: ServingSession) -> bool:
        """Return whether the backend that runs now has a session's rows."""
        if self._wire.stock:
            raise UsageError(
                "SGLang as shipped shares and evicts rows as it likes; use full-constrained"
            )
        return state.known > 0 and state.epoch == self._epoch
