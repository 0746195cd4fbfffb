"""The uncompressed baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agentbench_kv.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """Nothing is evicted; the engine as shipped."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "no eviction, engine as shipped"
    source: ClassVar[str] = "baseline"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"prefix": {"prefix": "shared"}}
    compresses: ClassVar[bool] = False

    def settings(self) -> dict[str, Any]:
        # No other parameter of the base has an effect without eviction.
        return {key: value for key, value in super().settings().items() if key == "prefix"}


@dataclass(frozen=True, kw_only=True)
class FullConstrained(Full):
    """Nothing is evicted, under the compressed arm's flags, which the embedded engine lacks."""

    name: ClassVar[str] = "full-constrained"
    summary: ClassVar[str] = "no eviction, same engine flags as a compressed run"
