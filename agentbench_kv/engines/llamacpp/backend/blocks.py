"""Saving, evicting and restoring whole tokens of a session; called on the scheduler's thread.

Positions are logical, as in `engines.base.Engine`. No forward pass runs, and llama.cpp is never
asked to shift positions: that would rotate keys of all cells of the cache, whoever's they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentbench_kv.engines.base import KVEvent, SpanRange
from agentbench_kv.engines.llamacpp.backend.blob import Blob
from agentbench_kv.engines.llamacpp.backend.scheduler import Scheduler
from agentbench_kv.engines.llamacpp.backend.session import BackendSession
from agentbench_kv.errors import UsageError


class Blocks:
    """The primitives over a scheduler's sessions."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def save(self, name: str, start: int, end: int) -> tuple[int, bytearray]:
        """Return the RoPE position of the first token of [start, end), and the rows' bytes.

        UsageError if a token is not in the cache, or they are no neighbours.
        """
        session = self._session(name)
        rows = session.rows
        chosen = _inside(rows.logical, [(start, end)])
        found = rows.logical[chosen].tolist()
        if start >= end or found != list(range(start, end)):
            raise UsageError(
                f"cannot save positions {start} to {end} of session {name}: "
                f"{len(found)} of {end - start} are in the cache"
            )
        rope = rows.rope[chosen]
        if int(rope[-1] - rope[0]) != len(rope) - 1:
            raise UsageError(f"positions {start} to {end} are no neighbours any more")
        blob = rows.save(chosen)
        blob.set_positions(rope)
        return int(rope[0]), blob.data

    def evict(self, name: str, spans: Sequence[SpanRange]) -> int:
        """Remove spans from all layers and heads; return the tokens removed."""
        session = self._session(name)
        rows, before = session.rows, session.rows.live
        gone = _inside(rows.logical, spans)
        if not bool(gone.any()):
            return 0
        rows.drop(gone)
        if self._packed:  # close the gap that the rows left
            rows.pack()
            self._scheduler.worker.shift_queries(session.name, rows.live - before)
        ledger = session.ledger
        ledger.live = rows.live
        ledger.stats.evicted += before - rows.live
        ledger.stats.events.append(
            KVEvent(ledger.stats.decode_tokens, ledger.fed, before, rows.live, 0)
        )
        self._scheduler.admission.settle(session)
        return before - rows.live

    def restore(self, name: str, start: int, data: bytearray, at: int | None) -> None:
        """Put saved rows back, as logical positions from `start`, without a forward pass.

        UsageError if the positions are in the cache, were never seen, or are taken.
        """
        blob = Blob(self._scheduler.cells.form, data)
        session = self._session(name, more=blob.tokens)
        rows, before = session.rows, session.rows.live
        logical = torch.arange(start, start + blob.tokens)
        inside = _inside(rows.logical, [(start, start + blob.tokens)])
        if start + blob.tokens > session.ledger.fed or bool(inside.any()):
            raise UsageError(
                f"cannot restore positions {start} to {start + blob.tokens} of session {name}: "
                f"they are in the cache, or past its {session.ledger.fed} tokens"
            )
        where = self._spot(session, blob, at)
        own = int(blob.positions[0])
        if where != own:
            blob.rotate(where - own)
        rows.restore(blob, logical)
        if self._packed:
            self._scheduler.worker.shift_queries(session.name, rows.live - before)
        ledger = session.ledger
        ledger.live = rows.live
        ledger.stats.restored += blob.tokens
        ledger.stats.peak_live = max(ledger.stats.peak_live, rows.live)
        self._scheduler.admission.settle(session)

    def attention(
        self, name: str, spans: Sequence[SpanRange], layers: Sequence[int], decay: float
    ) -> list[float]:
        """Return the attention spans get from the kept queries; see `Engine.span_attention`."""
        session = self._session(name)
        rows, shape = session.rows, self._scheduler.context.shape
        queries = self._scheduler.worker.queries(name)
        if not queries or not len(queries[0].positions) or not rows.live:
            return [0.0] * len(spans)
        seen = queries[0].positions
        hidden = rows.logical[None] > seen[:, None]
        weights = torch.pow(torch.tensor(decay), torch.arange(len(seen) - 1, -1, -1))
        keys, _ = self._scheduler.cells.read(rows.cells)
        chosen = layers or range(shape.layers)
        mass = torch.stack([_mass(queries[n].vectors, keys[n], hidden) for n in chosen]).mean(0)
        each = weights @ mass / weights.sum()
        return [float(each[_inside(rows.logical, [span])].sum()) for span in spans]

    @property
    def _packed(self) -> bool:
        """Whether positions are the cache's, without gaps."""
        return self._scheduler.policy.method.positions == "cache"

    def _session(self, name: str, more: int = 0) -> BackendSession:
        method = self._scheduler.policy.method
        if method.compresses:
            raise UsageError(
                f"method {method.label!r} keeps other tokens in every head; spans can be evicted "
                "or saved under methods that keep whole tokens only"
            )
        return self._scheduler.idle_session(name, more)

    def _spot(self, session: BackendSession, blob: Blob, at: int | None) -> int:
        rows = session.rows
        if self._packed:
            if at not in (None, rows.live):
                raise UsageError("where positions are the cache's, blocks come back at its end")
            return rows.live
        first = int(blob.positions[0]) if at is None else at
        taken = (rows.rope >= first) & (rows.rope < first + blob.tokens)
        if first < 0 or bool(taken.any()):
            raise UsageError(f"RoPE positions {first} to {first + blob.tokens} are taken")
        return first


def _mass(queries: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    """Return probabilities [n, tokens], mean over the query heads of vectors [heads, n, d]."""
    repeated = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0).float()
    logits = queries.float() @ repeated.transpose(1, 2) * queries.shape[-1] ** -0.5
    # A query whose every key has left sees nothing, not NaN.
    mass: Tensor = logits.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0).mean(0)
    return mass


def _inside(logical: Tensor, spans: Sequence[SpanRange]) -> Tensor:
    """Return which logical positions [rows] lie in any of the spans, bool."""
    inside = torch.zeros_like(logical, dtype=torch.bool)
    for start, end in spans:
        inside |= (logical >= start) & (logical < end)
    return inside
