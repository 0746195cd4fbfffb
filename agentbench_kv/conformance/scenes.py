"""Random caches as an engine really holds them after evictions, to let methods choose from.

Heads hold different tokens, rows are not in the order of positions, rings are not all full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentbench_kv.analysis.replay import MethodInput, held_queries
from agentbench_kv.methods.base import LayerView, Method, Queries, QueryKind
from agentbench_kv.methods.calibration import Calibration


@dataclass(frozen=True)
class CacheShape:
    """Sizes of the model whose cache is made up."""

    layers: int = 2
    kv_heads: int = 2
    group: int = 2  # query heads per KV head
    head_dim: int = 8

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    def of_cache(self, method: Method) -> CacheShape:
        """Return the shape of the cache: with a KV head per query head if the method wants that."""
        if not method.per_query_head:
            return self
        return replace(self, kv_heads=self.q_heads, group=1)


def make_scene(
    method: Method,
    tokens: int,
    *,
    seed: int = 0,
    shape: CacheShape | None = None,
    prompt: int | None = None,
    phases: Sequence[int] = (0, 1, 2, 3),
) -> MethodInput:
    """Build a random cache of `tokens` rows per head and the queries `method` asks for.

    Heads hold the same tokens only as far as the method's kept set is shared; what the method
    always keeps is there. `prompt` is the length of the first prefill, a third of the budget if not
    given; `phases` are those that occur.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (CacheShape() if shape is None else shape).of_cache(method)
    now = tokens + tokens // 2
    prompt = min(method.budget_at(now) // 3 if prompt is None else prompt, now)
    cached = _held_positions(method, tokens, now, prompt, shape, generator)
    layers = [_make_layer(method, places, shape, generator) for places in cached]
    labels = torch.tensor(phases)[torch.randint(len(phases), (now,), generator=generator)]
    held = held_queries(method.query_plan(), labels)
    size = (shape.layers, shape.q_heads, len(held), shape.head_dim)
    vectors = torch.randn(size, generator=generator) * 2
    queries = [Queries(layer, held, labels[held]) for layer in vectors]
    return MethodInput(layers, queries, now, prompt, labels, prompt // 2)


def _make_layer(
    method: Method, places: Tensor, shape: CacheShape, generator: torch.Generator
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
    shape: CacheShape,
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
    if method.kept_set == "per_layer":
        return [draw().expand(shape.kv_heads, -1) for _ in range(shape.layers)]
    if method.kept_set == "per_kv_head":
        return [torch.stack([draw() for _ in heads])] * shape.layers
    return [torch.stack([draw() for _ in heads]) for _ in range(shape.layers)]


def always_kept(method: Method, now: int, prompt: int) -> Tensor:
    """Return which of the positions 0..now-1 the method never evicts, [now] of bool.

    Half of the prompt is the system message.
    """
    positions = torch.arange(now)
    recent = method.recent_kept(method.budget_at(now))
    protected = method.protected(prompt, prompt // 2)
    declared = (positions < method.sinks) | (positions >= now - recent)
    own = method._always(positions[None, None], now, protected)[0, 0]
    return declared | own


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
    size = 2 * len(frequencies)
    factors = torch.randn(layers, q_heads, size, size, generator=generator) / size**0.5
    covariance = factors @ factors.transpose(-1, -2)
    return Calibration(pairs, pairs.abs() + spread, frequencies, scale, covariance=covariance)
