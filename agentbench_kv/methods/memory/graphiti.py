"""Graphiti, the open core of Zep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agentbench_kv.methods.memory.plain import PlainMemory
from agentbench_kv.params import param


@dataclass(frozen=True, kw_only=True)
class Graphiti(PlainMemory):
    """The model builds a graph of entities and facts; search by words and embeddings, fused.

    This is the package with an embedded graph store, not the hosted Zep: no cross-encoder ranks
    what is found.
    """

    name: ClassVar[str] = "graphiti"
    summary: ClassVar[str] = "a graph of facts the model builds (graphiti, the open core of Zep)"
    source: ClassVar[str] = "Rasmussen et al. 2025; graphiti-core 0.31.1"
    environment: ClassVar[str] = "graphiti"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "llama": {"topk": 20},
        "qwen": {"topk": 25},
    }
    default_preset: ClassVar[str] = "llama"

    topk: int = param(20, "facts, and as many entities, that are put before a message", low=1)
    batch: int = param(1, "messages of an episode; 0 for a whole session", low=0)
