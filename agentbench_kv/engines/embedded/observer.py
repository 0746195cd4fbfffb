"""Looking inside a running engine: what captures, audits and conformance checks are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentbench_kv.methods.base import Selection


@dataclass(frozen=True)
class FedRows:
    """Tokens of one session that the next forward is fed."""

    session: str
    position: int  # logical, of the first
    tokens: list[int]
    phases: list[int]
    generated: list[bool]  # by the model; a turn's last one is fed with the next prompt


class Observer:
    """Sees every forward and every event; subclasses override what they need.

    It is called on the engine's thread. Tensors are views that the next step overwrites: copy what
    is kept.
    """

    def on_rows(self, rows: FedRows) -> None:
        """See what a session feeds into the next forward."""

    def on_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """See one layer's new rows, all sessions' one after the other, post-RoPE.

        `query` [q_heads, rows, head_dim], `key` and `value` [kv_heads, rows, head_dim].
        """

    def on_logits(self, session: str, logical: int, logits: Tensor) -> None:
        """See the logits [vocab] that predict logical position `logical`."""

    def on_selection(
        self, session: str, logical: int, positions: Tensor, selection: Selection
    ) -> None:
        """See an event before rows move; `logical` tokens were ever seen.

        `positions` [layers, kv_heads, live] are in cache order, which `selection.kept` indexes.
        """

    def on_event(self, session: str, logical: int, kept_positions: Tensor) -> None:
        """See what an event or a restored block left, as original positions [layers, kv_heads, n].

        Earlier rows that are not in it are invisible to later queries until a call has them again.
        """


class SessionLog(Observer):
    """Keeps the tokens of one session, in the order they are fed."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.phases: list[int] = []
        self.decoded: list[bool] = []

    def on_rows(self, rows: FedRows) -> None:
        """Add a chunk; a session that starts over starts the log over."""
        if rows.position == 0:
            self.clear()
        self.tokens += rows.tokens
        self.phases += rows.phases
        self.decoded += rows.generated

    def clear(self) -> None:
        for part in (self.tokens, self.phases, self.decoded):
            part.clear()

    @property
    def prompt(self) -> int:
        """Tokens of the first prefill."""
        return self.decoded.index(True) if True in self.decoded else len(self.decoded)


class QkvRecorder(SessionLog):
    """Keeps queries, keys and values of one session on the CPU: some layers, some KV heads."""

    def __init__(self, layers: Sequence[int], heads: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.heads = tuple(heads)
        self.dtype = dtype
        self._parts: dict[int, list[list[Tensor]]] = {}
        self.clear()

    def clear(self) -> None:
        super().clear()
        self._parts = {layer: [] for layer in self.layers}

    def on_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        if layer not in self._parts:
            return
        group = query.shape[0] // key.shape[0]
        queries = [head * group + i for head in self.heads for i in range(group)]
        parts = (query[queries], key[list(self.heads)], value[list(self.heads)])
        self._parts[layer].append([part.detach().to("cpu", self.dtype) for part in parts])

    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        """Q [layers, q_heads, tokens, head_dim], K and V [layers, kv_heads, ...]."""
        stacked = [
            torch.stack([torch.cat([part[i] for part in self._parts[n]], 1) for n in self.layers])
            for i in range(3)
        ]
        return stacked[0], stacked[1], stacked[2]


class EventLog(SessionLog):
    """Hands every event to `keep`: logical length, positions in cache order, selection."""

    def __init__(self, keep: Callable[[int, Tensor, Selection], None]) -> None:
        super().__init__()
        self._keep = keep

    def on_selection(
        self, session: str, logical: int, positions: Tensor, selection: Selection
    ) -> None:
        del session
        self._keep(logical, positions, selection)
