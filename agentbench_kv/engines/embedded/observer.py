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
        """See one layer's new rows, post-RoPE.

        Parameters
        ----------
        query : Tensor [q_heads, rows, head_dim]
        key, value : Tensor [kv_heads, rows, head_dim]
            Rows of all sessions of the forward, one session after the other.
        """

    def on_rows(
        self,
        session: str,
        tokens: list[int],
        phases: list[int],
        generated: list[bool],
        position: int,
    ) -> None:
        """See which tokens a session feeds into the forward that follows.

        Parameters
        ----------
        tokens, phases : list of int
        generated : list of bool
            Which of them the model generated; a turn's last one is fed with the next prompt.
        position : int
            Logical position of the first of them.
        """

    def on_selection(
        self, session: str, logical: int, positions: Tensor, selection: Selection
    ) -> None:
        """See an event before rows move.

        Parameters
        ----------
        logical : int
            Tokens ever seen.
        positions : Tensor [layers, kv_heads, live]
            Original positions in cache order, which `selection.kept` indexes.
        """
