"""EVOKE: blocks leave the cache under pressure and come back without a forward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.blocks import Resident, SpanMethod
from agentbench_kv.methods.evoke_encoders import HASH, TOKENS, make_encoder
from agentbench_kv.methods.evoke_scorer import FLOOR_MODES, Scorer
from agentbench_kv.methods.evoke_session import EvokeSession
from agentbench_kv.methods.evoke_store import HostStore
from agentbench_kv.methods.params import param
from agentbench_kv.methods.spans import SpanCache

RECOVERIES = ("discard", "breadcrumb", "kv_restore")
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Evoke(SpanMethod):
    """Evict the least relevant blocks above a watermark, bring back what a new message needs.

    When live > `high`·budget the lowest-scored blocks go until live ≤ `low`·budget. Before a new
    message is read, the `topk` evicted blocks most like it come back (`kv_restore`), are mentioned
    in a line each (`breadcrumb`), or stay away (`discard`). `@code` scores by recency and coherence
    as the authors' code does, `@readme` gives attention the most weight and takes floors as a
    lower bound, as their description does.
    """

    name: ClassVar[str] = "evoke"
    summary: ClassVar[str] = "evicts whole blocks by relevance, restores them without recompute"
    source: ClassVar[str] = "EVOKE, OS-like memory management for the LLM KV cache (Anyesh/EVOKE)"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "code": {},
        "readme": {"w_attention": 1.0, "floor": "clamp"},
    }
    default_preset: ClassVar[str] = "code"

    sinks: int = param(4, "first tokens whose block is always kept", low=0)
    positions: str = param(
        "sparse",
        "sparse: positions keep their holes; compact: they close, blocks come back at the end",
        choices=("sparse", "compact"),
    )
    block: int = param(128, "most tokens of a block; no block crosses a message", low=1)
    high: float = param(0.95, "share of the budget above which blocks leave", low=0.01, high=1.0)
    low: float = param(0.75, "share of the budget down to which they leave", low=0.01, high=1.0)
    w_recency: float = param(0.4, "weight of recency in a score", low=0.0)
    w_coherence: float = param(0.6, "weight of likeness to the task in a score", low=0.0)
    w_attention: float = param(0.0, "weight of measured attention in a score; 0: none", low=0.0)
    decay: float = param(0.01, "recency falls by this power of e per token of age", low=0.0)
    window: int = param(64, "last tokens whose attention counts", low=1)
    ewma: float = param(0.95, "weight of a token's attention per next newer one", low=0.0, high=1.0)
    layers: str = param("all", "whose attention counts: all, or numbers such as 2,-1")
    floor: str = param("rescale", "how floors lift a score", choices=FLOOR_MODES)
    floor_user: float = param(0.6, "floor of the user's blocks", low=0.0, high=1.0)
    floor_assistant: float = param(0.5, "floor of the assistant's blocks", low=0.0, high=1.0)
    focus_keep: float = param(0.7, "weight of the old task focus in the new", low=0.0, high=1.0)
    focus_snap: float = param(0.3, "cosine below which a message is a new task", low=-1.0, high=1.0)
    recovery: str = param("kv_restore", "what becomes of evicted blocks", choices=RECOVERIES)
    topk: int = param(4, "most blocks recovered for a message", low=0)
    margin: float = param(
        0.1, "by how much a block's cosine must be above that of those that leave for it", low=0.0
    )
    stub: int = param(16, "tokens of a block that a breadcrumb tells", low=1)
    encoder: str = param(TOKENS, f"{TOKENS}, {HASH}, or a sentence-transformers model's folder")
    store_mb: int = param(1024, "MiB of host memory for evicted blocks of all sessions", low=0)
    spill_mb: int = param(0, "MiB of files for blocks that leave host memory", low=0)

    @property
    def least(self) -> int:
        """Smallest budget whose lower watermark holds the first block and the newest."""
        return math.ceil(2 * self.block / self.low)

    @property
    def needs(self) -> frozenset[str]:
        restores = {"save_block", "restore_block"} if self.recovery == "kv_restore" else set()
        attends = {"span_attention"} if self.w_attention else set()
        embeds = {"embed_tokens"} if self.encoder == TOKENS else set()
        return frozenset({"evict_spans"} | restores | attends | embeds)

    @property
    def scorer(self) -> Scorer:
        weights = (self.w_recency, self.w_coherence, self.w_attention, self.decay)
        return Scorer(*weights, self.floor, self.floor_user, self.floor_assistant)

    @property
    def chosen_layers(self) -> tuple[int, ...]:
        """Layers whose attention counts; none named: all."""
        return () if self.layers == "all" else tuple(map(int, self.layers.split(",")))

    def validate(self) -> None:
        super().validate()
        if self.low > self.high:
            raise UsageError(f"low={self.low} is above high={self.high}")
        if self.w_recency + self.w_coherence <= 0:
            raise UsageError("w_recency and w_coherence are both 0; give one of them a weight")
        if self.sinks > self.block:
            raise UsageError(f"sinks={self.sinks} do not fit into a block of {self.block}")
        if self.budget is not None and self.budget < self.least:
            raise UsageError(
                f"budget {self.budget} is too small for blocks of {self.block} tokens; raise "
                f"--budget to {self.least} or lower --set block"
            )
        try:
            _ = self.chosen_layers
        except ValueError:
            raise UsageError(f"layers={self.layers}: expected all, or numbers: 2,-1") from None

    def budget_at(self, now: int) -> int:
        return max(super().budget_at(now), self.least)

    def below(self) -> Method:
        """Return what keeps all rows, and the queries whose attention is asked for."""
        return Resident(
            positions="cache" if self.positions == "compact" else "logical",
            recent_queries=self.window if self.w_attention else 0,
        )

    def sessions(self) -> EvokeSessions:
        return EvokeSessions(self)


class EvokeSessions:
    """The sessions of one engine under EVOKE, and the host store and the encoder they share."""

    def __init__(self, method: Evoke) -> None:
        self.store = HostStore(method.store_mb * MIB, method.spill_mb * MIB)
        self._method = method
        self._encoder = make_encoder(method.encoder)

    def open(self, cache: SpanCache) -> EvokeSession:
        return EvokeSession(self._method, cache, self.store, self._encoder)

    def close(self) -> None:
        self.store.close()
