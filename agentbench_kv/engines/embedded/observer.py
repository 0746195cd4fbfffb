"""Looking inside a running engine: what captures and audits are made of."""

from __future__ import annotations

from torch import Tensor

from agentbench_kv.methods.views import Selection


class Observer:
    """Sees every forward and every event; subclasses override what they need.

    It is called on the engine's thread. Tensors are views that the next step overwrites: copy what
    is kept.
    """

    def on_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """See one layer's new rows, all sessions' one after the other, post-RoPE.

        `query` [q_heads, rows, head_dim], `key` and `value` [kv_heads, rows, head_dim].
        """

    def on_rows(
        self,
        session: str,
        tokens: list[int],
        phases: list[int],
        generated: list[bool],
        position: int,
    ) -> None:
        """See which tokens a session feeds into the next forward, from logical `position` on.

        `generated` says which the model wrote; a turn's last one is fed with the next prompt.
        """

    def on_selection(
        self, session: str, logical: int, positions: Tensor, selection: Selection
    ) -> None:
        """See an event before rows move; `logical` tokens were ever seen.

        `positions` [layers, kv_heads, live] are in cache order, which `selection.kept` indexes.
        """
