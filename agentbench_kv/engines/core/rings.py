"""What is kept of past queries for a method: the last ones, in rings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isclose, sqrt

import torch
from torch import Tensor

from agentbench_kv.engines.core.prefixes import PREFIXES
from agentbench_kv.engines.core.transfers import to_device
from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import ring_write
from agentbench_kv.kernels.torch_backend import rotated
from agentbench_kv.methods.base import Method, Phase, Queries, QueryKind, QueryPlan
from agentbench_kv.methods.spans import SpanRange, within

_RINGS = {QueryKind.RECENT: 1, QueryKind.PER_PHASE: len(Phase)}


def places_for(method: Method, sessions: int) -> int:
    """Return for how many sessions rings are reserved: so many, and shared prefixes.

    A prefix is left before the one that makes room for it is dropped.
    """
    return sessions + (PREFIXES + 1 if method.prefix == "shared" else 0)


def queries_reserved(method: Method, sessions: int) -> int:
    """Return how many queries of a layer that is."""
    plan = method.query_plan()
    return _RINGS.get(plan.kind, 0) * plan.size * places_for(method, sessions)


def refuse_more_queries(method: Method, needed: int, reserved: int) -> None:
    """Refuse a method for which a running engine would have to take more memory than it has.

    On a GPU its cache has taken what was left; ValueError.
    """
    if needed > reserved:
        raise ValueError(
            f"kvbench: {method.label} keeps up to {needed} queries of a layer, and the engine was "
            f"started with memory for {reserved}; start it anew"
        )


@dataclass(frozen=True)
class RowShape:
    """A model's cache rows on this worker: under tensor parallelism, its own heads only.

    `layers` are those whose rows a method chooses among: the ones with full attention.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    with_sums: bool = False  # whether the cache keeps the attention every row has got
    interleaved: bool = False  # RoPE's pairs of channels are neighbours

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token over all layers and heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class RingWrite:
    """Which rows of a packed forward go to which ring slots; equal for all layers."""

    rows: Tensor
    slots: Tensor


def _nothing() -> None:
    """Wait for nobody."""


class QueryBuffer:
    """Rings of all sessions [layers, sessions · slots, q_heads, head_dim], for one scatter each.

    Reserved memory is all they take: beyond it, the rings that were longest out of use wait in the
    host's memory. Without a reservation the buffer grows.
    """

    def __init__(self, plan: QueryPlan, shape: RowShape) -> None:
        self.plan = plan
        self.kv_heads = shape.kv_heads
        self.device = shape.device
        self.interleaved = shape.interleaved
        self.rings = _RINGS.get(plan.kind, 0)
        self.per_session = self.rings * plan.size
        # What has to be over before vectors move: forwards that write them on another stream.
        self.before_moving: Callable[[], None] = _nothing
        self._free: list[int] = []
        self._holders: OrderedDict[int, QueryStore] = OrderedDict()  # by place, last used last
        self._planned: set[int] = set()  # places that the forward being planned writes
        self._planning = self._reserved = False
        size = (shape.layers, 0, shape.q_heads, shape.head_dim)
        self._vectors = torch.zeros(size, dtype=shape.dtype, device=shape.device)

    @property
    def places(self) -> int:
        """Sessions there is room for."""
        return self._vectors.shape[1] // self.per_session if self.per_session else 0

    def reserve(self, places: int) -> None:
        """Make room for that many sessions, before others take the memory."""
        self._reserved = True
        if places > self.places:
            self._grow(places - self.places)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Plan one forward: places whose slots have been given out do not change hands within."""
        self._planning = True
        try:
            yield
        finally:
            self._planning = False
            self._planned.clear()

    def first_slot(self, place: int) -> int:
        """Return a place's first slot, where the forward being planned writes."""
        if self._planning:
            self._planned.add(place)
        return place * self.per_session

    def use(self, place: int) -> None:
        """Count a place as used now."""
        self._holders.move_to_end(place)

    def take(self, holder: QueryStore) -> int:
        """Take a place for a session's rings."""
        if not self._free:
            unplanned = (place for place in self._holders if place not in self._planned)
            oldest = next(unplanned, None) if self._reserved else None
            if oldest is None:
                self._grow(max(4, self.places // 8))
            else:
                self._holders[oldest].put_aside()
        place = self._free.pop()
        self._holders[place] = holder
        return place

    def _grow(self, more: int) -> None:
        self.before_moving()
        places = self.places
        layers, _, heads, head_dim = self._vectors.shape
        extra = self._vectors.new_zeros(layers, more * self.per_session, heads, head_dim)
        self._vectors = torch.cat([self._vectors, extra], 1)
        self._free = [*range(places + more - 1, places - 1, -1), *self._free]

    def give_back(self, place: int) -> None:
        del self._holders[place]
        self._free.append(place)

    def to_host(self, place: int) -> Tensor:
        """Copy a place's vectors to the host, which waits for them."""
        self.before_moving()
        first = place * self.per_session
        return self._vectors[:, first : first + self.per_session].to("cpu", copy=True)

    def from_host(self, place: int, vectors: Tensor) -> None:
        self.before_moving()
        first = place * self.per_session
        self._vectors[:, first : first + self.per_session] = vectors.to(self.device)

    def write(self, layer: int, queries: Tensor, write: RingWrite) -> None:
        """Store one layer's queries [heads, packed rows, head_dim]."""
        chosen = queries[:, write.rows].transpose(0, 1)
        ring_write(self._vectors[layer], chosen, write.slots)

    def write_all(self, queries: Tensor, slots: Tensor) -> None:
        """Store queries [layers, n, heads, head_dim] of all layers at once."""
        self._vectors.index_copy_(1, slots, queries)

    def copy(self, source: int, target: int) -> None:
        """Copy a session's vectors to another one's place."""
        old, new = (place * self.per_session for place in (source, target))
        rows = self._vectors[:, old : old + self.per_session]
        self._vectors[:, new : new + self.per_session] = rows

    def read(self, place: int, slots: Tensor) -> Tensor:
        """Return vectors [layers, heads, n, head_dim] of a session's slots."""
        first = place * self.per_session
        return self._vectors[:, first + slots].transpose(1, 2)

    def shift(self, place: int, by: int, frequencies: Tensor) -> None:
        first = place * self.per_session
        rows = slice(first, first + self.per_session)
        moves = torch.full((1, 1), by, device=self.device)
        vectors = self._vectors[:, rows]
        self._vectors[:, rows] = rotated(vectors, moves, frequencies, interleaved=self.interleaved)


class QueryStore:
    """One session's rings: which slot holds the query of which position and phase."""

    def __init__(self, buffer: QueryBuffer) -> None:
        self._buffer = buffer
        self._place = -1
        self._aside: Tensor | None = None  # the vectors, while others have the place
        self._seen = [0] * buffer.rings
        self._held: dict[int, tuple[int, Phase]] = {}

    def place(
        self, phases: Sequence[Phase], first_position: int, first_row: int
    ) -> tuple[list[int], list[int]]:
        """Plan a chunk: which packed rows to store, and in which slots of the buffer.

        Logical position and packed row are the first token's; each ring keeps its last `size`.
        """
        size, rings = self._buffer.plan.size, self._buffer.rings
        if not rings:
            return [], []
        chosen: dict[int, int] = {}
        for offset, phase in enumerate(phases):
            ring = int(phase) if rings > 1 else 0
            slot = ring * size + self._seen[ring] % size
            self._seen[ring] += 1
            chosen[slot] = offset
            self._held[slot] = (first_position + offset, phase)
        base = self._buffer.first_slot(self._here())
        return [first_row + offset for offset in chosen.values()], [base + slot for slot in chosen]

    def fork(self) -> QueryStore:
        """Return the rings of a session that goes on from here, as a copy."""
        twin = QueryStore(self._buffer)
        if self._held:
            source = self._here()
            twin._place = self._buffer.take(twin)
            self._buffer.copy(source, twin._place)
        twin._seen, twin._held = self._seen.copy(), self._held.copy()
        return twin

    def layer_queries(self, layers: int) -> list[Queries]:
        """Return what is kept, oldest first, for every layer."""
        device = self._buffer.device
        held = sorted((position, phase, slot) for slot, (position, phase) in self._held.items())
        columns = to_device(held, device).reshape(-1, 3)
        positions, phases, slots = columns.T.contiguous()
        vectors = self._buffer.read(self._here() if held else 0, slots)
        return [Queries(vectors[i], positions, phases) for i in range(layers)]

    def shift(self, by: int, frequencies: Tensor) -> None:
        if self._held:
            self._buffer.shift(self._here(), by, frequencies)

    def put_aside(self) -> None:
        """Give the place back and keep the vectors in the host's memory until they are used."""
        self._aside = self._buffer.to_host(self._place)
        self._buffer.give_back(self._place)
        self._place = -1

    def free(self) -> None:
        if self._place >= 0:
            self._buffer.give_back(self._place)
        self._place, self._aside = -1, None

    def _here(self) -> int:
        """Return the place of the vectors, where they are brought if they have none."""
        if self._place >= 0:
            self._buffer.use(self._place)
            return self._place
        self._place = self._buffer.take(self)
        if self._aside is not None:
            self._buffer.from_host(self._place, self._aside)
            self._aside = None
        return self._place


def span_attention(
    queries: Sequence[Queries],
    keys: Sequence[Tensor],  # of every layer [kv_heads, tokens, head_dim]
    labels: Tensor,  # logical position of every token
    spans: Sequence[SpanRange],
    layers: Sequence[int],
    decay: float,
) -> list[float]:
    """Return the attention spans get from kept queries; see `Engine.span_attention`."""
    for layer in layers:
        if not -len(keys) <= layer < len(keys):
            raise UsageError(f"layer {layer}: the model has {len(keys)}")
    if not queries or not len(queries[0].positions) or not len(labels):
        return [0.0] * len(spans)
    seen = queries[0].positions
    hidden = labels[None] > seen[:, None]
    ages = torch.arange(len(seen) - 1, -1, -1, device=seen.device)
    weights = torch.pow(torch.tensor(decay, device=seen.device), ages)
    chosen = layers or range(len(keys))
    mass = torch.stack([_mass(queries[n].vectors, keys[n], hidden) for n in chosen]).mean(0)
    each = weights @ mass / weights.sum()
    return [float(each[within(labels, [span])].sum()) for span in spans]


def _mass(queries: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    """Return probabilities [n, tokens], mean over the query heads of vectors [heads, n, d]."""
    repeated = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0).float()
    logits = queries.float() @ repeated.transpose(1, 2) * queries.shape[-1] ** -0.5
    # A query whose every key has left sees nothing, not NaN.
    mass: Tensor = logits.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0).mean(0)
    return mass


def as_methods_see(queries: Tensor, scaling: float) -> Tensor:
    """Return queries [..., head_dim] whose logits are q·k/√d, where the model scales otherwise."""
    factor = scaling * sqrt(queries.shape[-1])
    return queries if isclose(factor, 1.0, rel_tol=1e-6) else queries * factor
