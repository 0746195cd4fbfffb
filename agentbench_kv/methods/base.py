"""The common base of token-level methods.

Every such method is: which queries stand for the future, a score per cached token, what is always
kept, which set granularity, and when. A method declares the first and implements the second; the
rest is here (shared specification: methods.md, notation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from agentbench_kv.errors import UsageError, unknown_name
from agentbench_kv.kernels import select_top
from agentbench_kv.methods.params import ParamSpec, param, param_specs, parse_settings

GQA_MODES = ("mean_prob", "max_prob", "max_logit")
KEPT_SETS = ("per_head", "per_kv_head", "shared")
TRIGGERS = ("every", "slack", "turn", "prefill+every")


class QueryKind(StrEnum):
    """Which past queries an engine keeps for a method."""

    NONE = "none"
    RECENT = "recent"
    PER_PHASE = "per_phase"


@dataclass(frozen=True)
class QueryPlan:
    """The queries a method wants kept: `size` of them (per phase for `PER_PHASE`)."""

    kind: QueryKind = QueryKind.NONE
    size: int = 0


@dataclass(frozen=True)
class Queries:
    """Kept queries of one layer, post-RoPE.

    Attributes
    ----------
    vectors : Tensor [q_heads, n, head_dim]
    positions, phases : Tensor [n], int64
    """

    vectors: Tensor
    positions: Tensor
    phases: Tensor


@dataclass(frozen=True)
class LayerView:
    """The live rows of one layer of one session's cache, in cache order.

    Attributes
    ----------
    keys, values : Tensor [kv_heads, tokens, head_dim]
        Keys are post-RoPE at their original positions.
    positions : Tensor [kv_heads, tokens], int64
        Original position of every row; may differ between heads.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor


@dataclass(frozen=True)
class ScoreContext:
    """What `score` may know besides queries and keys.

    Attributes
    ----------
    positions : Tensor [kv_heads, tokens], int64
        Original positions; ascending unless the method sets `ordered = False`.
    values : Tensor [kv_heads, tokens, head_dim]
        In the order of the keys.
    now : int
        Logical length: tokens ever seen.
    budget : int
    layer : int
    """

    positions: Tensor
    values: Tensor
    now: int
    budget: int
    layer: int


@dataclass(frozen=True)
class Selection:
    """The outcome of one event.

    Attributes
    ----------
    kept : Tensor [layers, kv_heads, budget], int64
        Cache rows to keep, ascending.
    scores : Tensor [layers, kv_heads, tokens], float32
        Scores by ascending position, after `kept_set` merging; NaN where always kept.
    """

    kept: Tensor
    scores: Tensor


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of every method. Subclasses are frozen keyword-only dataclasses.

    Parameters
    ----------
    budget : int or None
        Tokens kept per (layer, KV head); None for methods without one.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    default_preset: ClassVar[str] = ""
    compresses: ClassVar[bool] = True
    ordered: ClassVar[bool] = True
    """Whether `score` needs rows by ascending position; False saves sorting the keys."""

    budget: int | None = None
    preset: str = ""
    interval: int = param(128, "decoded tokens between two events of a session", low=1)
    trigger: str = param("every", "when an event fires", choices=TRIGGERS)
    kept_set: str = param("per_head", "who shares a kept set", choices=KEPT_SETS)
    sinks: int = param(0, "first tokens always kept, counted in the budget", low=0)
    keep_recent: int = param(0, "last tokens always kept, counted in the budget", low=0)
    positions: str = param("logical", "positions of kept keys", choices=("logical",))

    @classmethod
    def create(
        cls, preset: str, budget: int | None, settings: Mapping[str, Any] | None = None
    ) -> Self:
        """Build a method from a preset name, a budget and `--set` overrides.

        Raises
        ------
        UsageError
            For an unknown preset or parameter, or values that cannot go together.
        """
        chosen = preset or cls.default_preset
        if chosen and chosen not in cls.presets:
            raise unknown_name(f"{cls.name} preset", chosen, cls.presets)
        values = {**cls.presets.get(chosen, {}), **dict(settings or {})}
        parsed = parse_settings(cls.name, cls, values)
        method = cls(budget=budget, preset=chosen, **parsed)
        method.validate()
        return method

    @classmethod
    def parameters(cls) -> dict[str, ParamSpec]:
        """Return the parameters that `--set` takes, by name."""
        return param_specs(cls)

    @property
    def label(self) -> str:
        """`name` or `name@preset` when the preset is not the default one."""
        plain = self.preset in ("", self.default_preset)
        return self.name if plain else f"{self.name}@{self.preset}"

    def settings(self) -> dict[str, Any]:
        """Return every parameter with its value, for the run record."""
        names = {f.name for f in fields(self)} - {"budget", "preset"}
        return {key: value for key, value in asdict(self).items() if key in names}

    def validate(self) -> None:
        """Check that budget and parameters fit together.

        Raises
        ------
        UsageError
            With the figures that clash.
        """
        if not self.compresses:
            return
        if self.budget is None:
            raise UsageError(f"{self.name} needs a budget: add --budget TOKENS")
        if self.budget < 1:
            raise UsageError(f"budget {self.budget}: expected a number of tokens >= 1")
        always = self.sinks + self.recent_kept()
        if always >= self.budget:
            raise UsageError(
                f"budget {self.budget} is not above the {always} tokens {self.label} always keeps "
                f"(sinks {self.sinks} + recent {self.recent_kept()}); raise --budget"
            )

    def recent_kept(self) -> int:
        """Return how many of the last tokens are always kept."""
        return self.keep_recent

    def query_plan(self) -> QueryPlan:
        """Return which queries the engine must keep."""
        return QueryPlan()

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:
        """Score the cached tokens of one layer; higher is kept.

        Parameters
        ----------
        queries : Queries
            The kept queries, `query_plan` of them at the most.
        keys : Tensor [kv_heads, tokens, head_dim]
            Post-RoPE keys by ascending position (in cache order if `ordered` is False).
        context : ScoreContext

        Returns
        -------
        Tensor [kv_heads, tokens], float32
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement score")

    def select(
        self, layers: Sequence[LayerView], queries: Sequence[Queries], now: int
    ) -> Selection:
        """Choose the rows to keep in every layer and KV head.

        Parameters
        ----------
        layers, queries : sequences, one entry per layer
        now : int
            Logical length of the session.
        """
        budget = self.budget or 0
        if layers[0].positions.shape[-1] <= budget:
            return _everything(layers)
        positions, orders = torch.stack([view.positions for view in layers]).sort(-1)
        scores = torch.stack(
            [
                self._score_layer(index, layers[index], queries[index], orders[index], now)
                for index in range(len(layers))
            ]
        )
        merged = self._merge(scores)
        always = self._always(positions, now)
        ranked = select_top(merged, budget, always)
        kept = orders.gather(-1, ranked).sort(-1).values
        return Selection(kept, merged.masked_fill(always, float("nan")))

    def _score_layer(
        self, index: int, view: LayerView, queries: Queries, order: Tensor, now: int
    ) -> Tensor:
        """Return scores [kv_heads, tokens] by ascending position."""
        rows = _sorted_view(view, order) if self.ordered else view
        context = ScoreContext(
            positions=rows.positions,
            values=rows.values,
            now=now,
            budget=self.budget or 0,
            layer=index,
        )
        scores = self.score(queries, rows.keys, context).float()
        return scores if self.ordered else scores.gather(-1, order)

    def _merge(self, scores: Tensor) -> Tensor:
        """Make scores [layers, kv_heads, tokens] agree where the kept set is shared."""
        if self.kept_set == "per_kv_head":
            return scores.mean(0, keepdim=True).expand_as(scores)
        if self.kept_set == "shared":
            return scores.mean(1, keepdim=True).sum(0, keepdim=True).expand_as(scores)
        return scores

    def _always(self, positions: Tensor, now: int) -> Tensor:
        return (positions < self.sinks) | (positions >= now - self.recent_kept())


def _everything(layers: Sequence[LayerView]) -> Selection:
    positions = torch.stack([view.positions for view in layers])
    kept = torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)
    return Selection(kept.contiguous(), torch.full_like(positions, torch.nan, dtype=torch.float32))


def _sorted_view(view: LayerView, order: Tensor) -> LayerView:
    if bool((order[:, 1:] > order[:, :-1]).all()):
        return view
    rows = order[..., None].expand(-1, -1, view.keys.shape[-1])
    return LayerView(
        view.keys.gather(1, rows), view.values.gather(1, rows), view.positions.gather(-1, order)
    )
