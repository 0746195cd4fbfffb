"""StreamingLLM: attention sinks and a recency window (Xiao et al., ICLR 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from agentbench_kv.methods.base import Method, Queries, ScoreContext
from agentbench_kv.params import param


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Method):
    """Keep the first `sinks` tokens and the most recent ones, one set for all heads and layers.

    `@logical` leaves keys where they were rotated; `@paper` gives every kept key the position of
    its row in the cache, as the authors do, so that positions never pass the budget by much.
    """

    name: ClassVar[str] = "streamingllm"
    summary: ClassVar[str] = "first tokens + most recent tokens"
    source: ClassVar[str] = "Xiao et al., Efficient Streaming Language Models with Attention Sinks"
    ordered: ClassVar[bool] = False
    by_position: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "logical": {"positions": "logical"},
        "paper": {"positions": "cache"},
    }
    default_preset: ClassVar[str] = "logical"

    sinks: int = param(4, "first tokens always kept, counted in the budget", low=0)

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:  # noqa: ARG002
        return context.positions.double()
