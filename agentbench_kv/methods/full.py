"""The uncompressed baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.params import param


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """Nothing is evicted; the engine as shipped."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "no eviction, engine as shipped"
    source: ClassVar[str] = "baseline"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "prefix": {"prefix": "shared"},
        "offload": {"offload": 16},
    }
    compresses: ClassVar[bool] = False

    offload: int = param(
        0, "GB of this machine's memory for cached rows that leave the GPU; 0: none", low=0
    )

    def settings(self) -> dict[str, Any]:
        # No other parameter of the base has an effect without eviction.
        own = {key: value for key, value in super().settings().items() if key == "prefix"}
        return own | ({"offload": self.offload} if self.offload else {})

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | ({"offload"} if self.offload else set())


@dataclass(frozen=True, kw_only=True)
class FullConstrained(Full):
    """Nothing is evicted, under the compressed arm's flags, which the embedded engine lacks."""

    name: ClassVar[str] = "full-constrained"
    summary: ClassVar[str] = "no eviction, same engine flags as a compressed run"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def validate(self) -> None:
        if self.offload:
            raise UsageError("offload: the plug-in moves rows itself; use --method full@offload")
