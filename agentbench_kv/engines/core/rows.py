"""One worker's view of its sessions: queries, original positions, phases; selecting and moving."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, SupportsInt
from urllib.parse import quote

import torch
from safetensors.torch import save_file
from torch import Tensor

from agentbench_kv.engines.core.attention_sums import AttentionSums
from agentbench_kv.engines.core.ledger import EvictionOrder, PrefixEnd
from agentbench_kv.engines.core.policy import BackendPolicy
from agentbench_kv.engines.core.rings import (
    QueryBuffer,
    QueryStore,
    RingWrite,
    RowShape,
    places_for,
)
from agentbench_kv.engines.core.transfers import to_device
from agentbench_kv.kernels import paged
from agentbench_kv.kernels.layout import PagedRows, places_of
from agentbench_kv.methods.base import LayerView, Phase, Queries, QueryKind
from agentbench_kv.methods.spans import SpanRange, within
from agentbench_kv.phases.machine import Labeller, PromptPhases, labeller_source


class PagedStore:
    """Rows in blocks, found through a table [blocks], int32; kernels move them in place."""

    def __init__(self, keys: PagedRows, values: PagedRows, blocks: Tensor, live: int) -> None:
        self._keys = keys
        self._values = values
        self._table = blocks[None]
        self._live = live
        self._where: tuple[Tensor, Tensor] | None = None  # block and place of every live row

    def keys(self, layer: int) -> Tensor:
        return self._gathered(self._keys.layers[layer])

    def values(self, layer: int) -> Tensor:
        return self._gathered(self._values.layers[layer])

    def _gathered(self, rows: Tensor) -> Tensor:
        if self._where is None:
            self._where = places_of(self._table, rows.shape[2], 0, self._live)
        return rows[:, self._where[0], self._where[1]]

    def keep(
        self, kept: Tensor, positions: Tensor, extras: Sequence[Tensor], *, sort: bool
    ) -> SupportsInt:
        lengths = torch.full((1,), self._live, device=kept.device)
        # What goes along moves by the same plan, as one block per layer.
        along = [PagedRows.of(part[:, :, None].unbind(0), "hbr") for part in (positions, *extras)]
        one_block = torch.zeros(1, 1, dtype=torch.int32, device=kept.device)
        paged.compact(along, one_block, kept[None], lengths, sort=sort, check=False)
        moved = paged.compact(
            [self._keys, self._values], self._table, kept[None], lengths, sort=sort, check=False
        )
        self._live, self._where = kept.shape[-1], None
        return moved

    def rotate(self, shifts: Tensor, frequencies: Tensor) -> None:
        lengths = torch.full((1,), shifts.shape[-1], device=shifts.device)
        paged.rope_rotate(self._keys, self._table, lengths, shifts[None], frequencies)


class RowStore(Protocol):
    """The rows of one session in an engine's cache."""

    def keys(self, layer: int) -> Tensor:
        """Return one layer's keys [kv_heads, live, head_dim] in cache order; a copy."""
        ...

    def values(self, layer: int) -> Tensor:
        """Return one layer's values, likewise."""
        ...

    def keep(
        self, kept: Tensor, positions: Tensor, extras: Sequence[Tensor], *, sort: bool
    ) -> SupportsInt:
        """Move the rows `kept` [layers, kv_heads, budget], ascending, to the front; count moves.

        `positions` and `extras`, each [layers, kv_heads, live], are moved along in place. `sort`
        keeps the order of `kept` instead of filling holes. Reading the number may wait for a GPU.
        """
        ...

    def rotate(self, shifts: Tensor, frequencies: Tensor) -> None:
        """Turn the first rows' keys by some positions [layers, kv_heads, rows]."""
        ...


class StoredLayer(LayerView):
    """A layer whose rows are copied out of the cache whenever they are asked for, and not kept.

    An event takes memory outside the pool, so no more of it than one layer's rows at a time.
    """

    _keys: Callable[[], Tensor]
    _values: Callable[[], Tensor]

    def __init__(
        self,
        keys: Callable[[], Tensor],
        values: Callable[[], Tensor],
        positions: Tensor,
        sums: Tensor | None = None,
    ) -> None:
        parts = {"_keys": keys, "_values": values, "positions": positions, "sums": sums}
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    @property
    def keys(self) -> Tensor:
        return self._keys()

    @property
    def values(self) -> Tensor:
        return self._values()


@dataclass(frozen=True)
class Fed:
    """Tokens of one session in a forward."""

    session: str
    first_position: int
    tokens: Sequence[int]


@dataclass
class SessionRows:
    """What a worker knows of one session besides keys and values."""

    queries: QueryStore
    prompt: PromptPhases | None = None
    given: Sequence[Phase] = ()  # the prompt's phases; `labeller` goes on behind them
    labeller: Labeller | None = None
    phases: list[int] = field(default_factory=list)  # of the tokens fed so far
    # [layers, kv_heads, budget], int64: original positions of the rows the last event left. The
    # rows after them are in order.
    kept: Tensor | None = None
    since: int = 0  # logical length at that event


class WorkerRows:
    """All sessions of a worker; `frequencies` are RoPE's inverse ones [head_dim / 2]."""

    def __init__(self, policy: BackendPolicy, shape: RowShape, frequencies: Tensor) -> None:
        self.policy = policy
        self.shape = shape
        plan = policy.method.query_plan()
        self.sums = AttentionSums(shape.layers, shape.kv_heads, shape.device)
        self.wants_sums = plan.kind is QueryKind.SUMS
        self.rings = QueryBuffer(plan, shape)
        self._frequencies = frequencies if policy.method.positions == "cache" else None
        if self._frequencies is not None and 2 * len(frequencies) != shape.head_dim:
            raise ValueError(
                f"kvbench: RoPE turns {2 * len(frequencies)} of {shape.head_dim} channels, so keys "
                "cannot be turned to their places in the cache"
            )
        self._labellers: dict[str, Callable[[dict[str, Any]], Labeller]] = {}
        self._sessions: dict[str, SessionRows] = {}

    @property
    def cache_positions(self) -> bool:
        return self._frequencies is not None

    def reserve(self, sessions: int) -> None:
        """Take the memory of so many sessions' queries, and prefixes', before others do.

        Queries of further sessions take none of the device's.
        """
        self.rings.reserve(places_for(self.policy.method, sessions))

    def drop(self, session: str) -> None:
        rows = self._sessions.pop(session, None)
        if rows is not None:
            rows.queries.free()
        self.sums.drop(session)

    def queries(self, session: str) -> list[Queries]:
        """Return a session's kept queries, oldest first, for every layer; empty before any."""
        rows = self._sessions.get(session)
        return [] if rows is None else rows.queries.layer_queries(self.shape.layers)

    def shift_queries(self, session: str, by: int) -> None:
        """Turn a session's kept queries by some positions, as the end of its cache moved."""
        rows = self._sessions.get(session)
        if rows is not None and self._frequencies is not None:
            rows.queries.shift(by, self._frequencies)

    def feed(
        self,
        fed: Sequence[Fed],
        prompts: Mapping[str, PromptPhases],
        left: Mapping[str, PrefixEnd] | None = None,
    ) -> RingWrite | None:
        """Take in a forward's tokens, in the order of its rows, and plan which queries to store.

        `prompts` has the phases of sessions whose generation begins, or begins again; others may
        be in it too. `left` has the prefixes that end within the forward, by session.
        """
        rows: list[int] = []
        slots: list[int] = []
        start = 0
        with self.rings.planning():
            for part in fed:
                phases = self._label(part, prompts.get(part.session))
                places: list[tuple[QueryStore, Sequence[Phase]]]
                places = [(self._sessions[part.session].queries, phases)]
                if left and part.session in left:
                    places.insert(0, self._leave(part, phases, left[part.session]))
                for queries, read in places:
                    stored, where = queries.place(read, part.first_position, start)
                    rows += stored
                    slots += where
                start += len(part.tokens)
        if not rows:
            return None
        device = self.shape.device
        return RingWrite(to_device(rows, device), to_device(slots, device))

    def remove(self, order: EvictionOrder, store: RowStore) -> SupportsInt:
        """Carry out one event; return rows moved, summed over layers and heads.

        Nothing here waits for a GPU, unless the method does, or spans leave.
        """
        if order.spans:
            return self._remove_spans(order, store)
        session, eviction = self._sessions[order.session], order.eviction
        positions = self._positions(session, eviction.live, eviction.logical)
        extras = [self.sums.of(order.session, eviction.live)] if self.wants_sums else []
        selection = self.policy.method.select(
            self._views(store, positions, extras),
            session.queries.layer_queries(self.shape.layers),
            eviction.logical,
            eviction.prompt,
            to_device(session.phases, self.shape.device),
            **eviction.more,
        )
        moved = store.keep(selection.kept, positions, extras, sort=self.cache_positions)
        self._settle(order, store, selection.kept, positions)
        return moved

    def _remove_spans(self, order: EvictionOrder, store: RowStore) -> SupportsInt:
        eviction = order.eviction
        kept = self.outside(order.session, eviction.live, eviction.logical, order.spans)
        if len(kept) != eviction.keep:
            raise RuntimeError(f"{len(kept)} rows stay, the scheduler has {eviction.keep}")
        return self.keep_tokens(order, store, kept)

    def outside(self, session: str, live: int, logical: int, spans: Sequence[SpanRange]) -> Tensor:
        """Return the rows [n] of tokens outside some spans; ValueError if heads keep others."""
        if self.policy.method.compresses:
            raise ValueError(f"{self.policy.method.label} keeps other tokens in every head")
        rows = self._open(session)
        inside = within(self._positions(rows, live, logical)[0, 0], spans)
        return (~inside).nonzero()[:, 0]

    def keep_tokens(self, order: EvictionOrder, store: RowStore, kept: Tensor) -> SupportsInt:
        """Keep rows [n] in all layers and heads, in their order; return rows moved."""
        session, eviction = self._sessions[order.session], order.eviction
        positions = self._positions(session, eviction.live, eviction.logical)
        everywhere = kept.expand(self.shape.layers, self.shape.kv_heads, -1).contiguous()
        moved = store.keep(everywhere, positions, [], sort=True)
        self._settle(order, store, everywhere, positions)
        return moved

    def fork(self, session: str, new: str) -> None:
        """Let a session start with what is known of another one's rows, its kept queries too."""
        rows = self._sessions.get(session)
        if rows is not None:
            self._sessions[new] = replace(
                rows, queries=rows.queries.fork(), phases=rows.phases.copy()
            )
        self.sums.fork(session, new)

    def _leave(
        self, part: Fed, phases: Sequence[Phase], end: PrefixEnd
    ) -> tuple[QueryStore, Sequence[Phase]]:
        """Keep what is known of a session as it is at a prefix's end, within this forward.

        Return the queries kept of it so far, and the phases of the tokens up to the end.
        """
        session = self._sessions[part.session]
        twin = replace(session, queries=session.queries.fork(), phases=session.phases[: end.tokens])
        self._sessions[end.name] = twin
        self.sums.fork(part.session, end.name)
        return twin.queries, phases[: end.tokens - part.first_position]

    def rewind(self, session: str, length: int) -> None:
        """Forget what is known of a session's tokens from position `length` on: whole tokens."""
        rows = self._sessions.get(session)
        if rows is None:
            return
        del rows.phases[length:]
        if rows.kept is not None and length < rows.since:
            rows.kept = rows.kept[:, :, : int((rows.kept[0, 0] < length).sum())]
        rows.since = min(rows.since, length)

    def _settle(
        self, order: EvictionOrder, store: RowStore, kept: Tensor, positions: Tensor
    ) -> None:
        session, eviction = self._sessions[order.session], order.eviction
        session.kept, session.since = positions[:, :, : eviction.keep].clone(), eviction.logical
        self.sums.shrink(order.session, eviction.keep)
        if self._frequencies is not None:
            rows = torch.arange(kept.shape[-1], device=kept.device)
            store.rotate(rows - kept, self._frequencies)
            session.queries.shift(eviction.keep - eviction.live, self._frequencies)
        if self.policy.trace is not None:
            _write_trace(self.policy.trace, order, session.kept)

    def _views(
        self, store: RowStore, positions: Tensor, extras: Sequence[Tensor]
    ) -> list[LayerView]:
        return [
            StoredLayer(
                *(partial(store.keys, i), partial(store.values, i)),
                *(positions[i], extras[0][i] if extras else None),
            )
            for i in range(self.shape.layers)
        ]

    def _positions(self, session: SessionRows, live: int, logical: int) -> Tensor:
        """Return original positions [layers, kv_heads, live] in cache order; a copy."""
        shape = (self.shape.layers, self.shape.kv_heads)
        recent = torch.arange(session.since, logical, device=self.shape.device)
        newer = recent.expand(*shape, len(recent))
        positions = newer if session.kept is None else torch.cat([session.kept, newer], -1)
        if positions.shape[-1] != live:
            raise RuntimeError(f"{positions.shape[-1]} rows are known, the scheduler has {live}")
        return positions.contiguous()

    def _label(self, part: Fed, prompt: PromptPhases | None) -> list[Phase]:
        """Return the phases of a session's next tokens: as given, then by the labeller."""
        session, first = self._open(part.session), part.first_position
        if prompt is not None and prompt is not session.prompt:
            self._begin(session, prompt)
        if first != len(session.phases):
            raise RuntimeError(
                f"session {part.session} goes on at {first}, "
                f"{len(session.phases)} tokens are labelled"
            )
        phases = list(session.given[first : first + len(part.tokens)])
        sampled = part.tokens[len(phases) :]
        if session.labeller is None:
            raise RuntimeError(f"nobody said how session {part.session} is labelled")
        phases += [session.labeller.label(token) for token in sampled]
        session.phases += [int(phase) for phase in phases]
        return phases

    def _begin(self, session: SessionRows, prompt: PromptPhases) -> None:
        name = prompt.labeller_name
        if name not in self._labellers:
            self._labellers[name] = labeller_source(name, self.policy.model_path)
        session.prompt, session.given = prompt, prompt.expand()
        session.labeller = self._labellers[name](prompt.state)

    def _open(self, session: str) -> SessionRows:
        if session not in self._sessions:
            self._sessions[session] = SessionRows(QueryStore(self.rings))
        return self._sessions[session]


def _write_trace(folder: Path, order: EvictionOrder, kept: Tensor) -> None:
    path = folder / f"{quote(order.session, safe='')}.{order.number:06d}.safetensors"
    partial = path.with_suffix(".partial")
    save_file({"kept": kept.cpu().contiguous()}, partial)
    partial.replace(path)
