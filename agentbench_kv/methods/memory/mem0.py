"""Mem0, the open-source package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agentbench_kv.methods.memory.plain import PlainMemory


@dataclass(frozen=True, kw_only=True)
class Mem0(PlainMemory):
    """The model extracts facts of what is told; those closest to a message come back.

    This is the package's `Memory`, not its maker's hosted platform.
    """

    name: ClassVar[str] = "mem0"
    summary: ClassVar[str] = "facts the model extracts, found by embeddings (Mem0, open source)"
    source: ClassVar[str] = "Chhikara et al. 2025; mem0ai 2.2.1"
    environment: ClassVar[str] = "mem0"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "llama": {"topk": 100},
        "qwen": {"topk": 150},
    }
    default_preset: ClassVar[str] = "llama"
