"""Random caches as an engine really holds them after evictions, to let methods choose from.

Heads hold different tokens, rows are not in the order of positions, rings are not all full.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentbench_kv.methods.base import (
    LayerView,
    Method,
    Phase,
    Queries,
    QueryKind,
    QueryPlan,
    Selection,
)
from agentbench_kv.methods.calibration import Calibration


@dataclass(frozen=True)
class Shape:
    """Sizes of the model whose cache a scene shows."""

    layers: int = 2
    kv_heads: int = 2
    group: int = 2  # query heads per KV head
    head_dim: int = 8

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    def of_cache(self, method: Method) -> Shape:
        """Return the shape of the cache: with a KV head per query head if the method wants that."""
        if not method.per_query_head:
            return self
        return replace(self, kv_heads=self.q_heads, group=1)


@dataclass(frozen=True)
class Scene:
    """What a method is given at one event."""

    layers: list[LayerView]
    queries: list[Queries]
    now: int  # tokens ever seen
    prompt: int
    phases: Tensor  # of every token ever seen

    def select(self, method: Method) -> Selection:
        return method.select(self.layers, self.queries, self.now, self.prompt, self.phases)

    @property
    def places(self) -> Tensor:
        """Positions held [layers, kv_heads, tokens], ascending."""
        return torch.stack([view.positions for view in self.layers]).sort(-1).values

    def positions(self, selection: Selection) -> Tensor:
        """Return the kept positions [layers, kv_heads, budget], ascending."""
        places = torch.stack([view.positions for view in self.layers])
        return places.gather(-1, selection.kept).sort(-1).values

    def with_keys(self, change: Callable[[Tensor], Tensor]) -> Scene:
        return replace(self, layers=[replace(v, keys=change(v.keys)) for v in self.layers])

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor a method sees."""
        parts: list[LayerView | Queries] = [*self.layers, *self.queries]
        for part in parts:
            found = (getattr(part, f.name) for f in dataclasses.fields(part))
            yield from (tensor for tensor in found if tensor is not None)
        yield self.phases


def make_scene(
    method: Method,
    tokens: int,
    *,
    seed: int = 0,
    shape: Shape | None = None,
    prompt: int | None = None,
    phases: Sequence[int] = (0, 1, 2, 3),
) -> Scene:
    """Build a random cache of `tokens` rows per head and the queries `method` asks for.

    Heads hold the same tokens only as far as the method's kept set is shared; what the method
    always keeps is there. `prompt` is the length of the first prefill, a third of the budget if not
    given; `phases` are those that occur.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (Shape() if shape is None else shape).of_cache(method)
    now = tokens + tokens // 2
    prompt = min(method.budget_at(now) // 3 if prompt is None else prompt, now)
    held = _held_positions(method, tokens, now, prompt, shape, generator)
    layers = [_make_layer(method, places, shape, generator) for places in held]
    labels = torch.tensor(phases)[torch.randint(len(phases), (now,), generator=generator)]
    queries = _make_queries(method, labels, shape, generator)
    return Scene(layers, queries, now, prompt, labels)


def _make_layer(
    method: Method, places: Tensor, shape: Shape, generator: torch.Generator
) -> LayerView:
    heads, tokens = places.shape
    order = torch.stack([torch.randperm(tokens, generator=generator) for _ in places])
    keys, values = torch.randn(2, heads, tokens, shape.head_dim, generator=generator) * 2
    with_sums = method.query_plan().kind in (QueryKind.SUMS, QueryKind.FUTURE)
    sums = torch.rand(heads, tokens, generator=generator) if with_sums else None
    return LayerView(keys, values, places.gather(-1, order), sums)


def _held_positions(
    method: Method,
    tokens: int,
    now: int,
    prompt: int,
    shape: Shape,
    generator: torch.Generator,
) -> list[Tensor]:
    fixed = always_kept(method, now, prompt).nonzero()[:, 0][-tokens:]
    free = torch.ones(now, dtype=torch.bool).scatter(0, fixed, False).nonzero()[:, 0]

    def draw() -> Tensor:
        order = torch.randperm(len(free), generator=generator)
        return torch.cat([fixed, free[order[: tokens - len(fixed)]]]).sort().values

    heads = range(shape.kv_heads)
    if method.kept_set == "shared":
        return [draw().expand(shape.kv_heads, -1)] * shape.layers
    if method.kept_set == "per_kv_head":
        return [torch.stack([draw() for _ in heads])] * shape.layers
    return [torch.stack([draw() for _ in heads]) for _ in range(shape.layers)]


def always_kept(method: Method, now: int, prompt: int) -> Tensor:
    """Return which of the positions 0..now-1 the method never evicts, [now] of bool."""
    positions = torch.arange(now)
    recent = method.recent_kept(method.budget_at(now))
    declared = (positions < method.sinks) | (positions >= now - recent)
    own = method._always(positions[None, None], now, prompt)[0, 0]
    return declared | own


def _make_queries(
    method: Method, labels: Tensor, shape: Shape, generator: torch.Generator
) -> list[Queries]:
    held = held_queries(method.query_plan(), labels.tolist(), len(labels))
    places = torch.tensor(held, dtype=torch.int64)
    size = (shape.layers, shape.q_heads, len(held), shape.head_dim)
    vectors = torch.randn(size, generator=generator)
    return [Queries(layer * 2, places, labels[places]) for layer in vectors]


def held_queries(plan: QueryPlan, phases: Sequence[int], logical: int) -> list[int]:
    """Return the positions whose queries an engine holds after `logical` tokens, ascending."""
    if plan.kind is QueryKind.RECENT:
        return list(range(max(0, logical - plan.size), logical))
    if plan.kind is QueryKind.PER_PHASE:
        rings = [[p for p in range(logical) if phases[p] == phase] for phase in Phase]
        return sorted(p for ring in rings for p in ring[-plan.size :])
    return []


def made_up_calibration(
    layers: int, q_heads: int, frequencies: Tensor, scale: float = 1.0, seed: int = 0
) -> Calibration:
    """Return random statistics of the queries of a model.

    `frequencies` [head_dim / 2] are its inverse frequencies, `scale` is its attention factor.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, q_heads, len(frequencies))
    pairs = torch.view_as_complex(torch.randn(*shape, 2, generator=generator))
    spread = torch.rand(shape, generator=generator)
    return Calibration(pairs, pairs.abs() + spread, frequencies, scale)
