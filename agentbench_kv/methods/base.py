"""The common base of token-level methods.

Every such method is: which queries represent the future, a score per cached token, what is always
kept, which set granularity, and when. A method declares the first and implements the second; the
rest is here (shared specification: methods.md, notation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError, unknown_name
from agentbench_kv.kernels import ascending_rows, by_position, select_top
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.methods.params import ParamSpec, param, param_specs, parse_settings
from agentbench_kv.methods.views import (
    LayerView,
    Queries,
    QueryKind,
    QueryPlan,
    ScoreContext,
    Selection,
    in_order,
)

__all__ = [
    "GQA_MODES",
    "KEPT_SETS",
    "TRIGGERS",
    "LayerView",
    "Method",
    "Queries",
    "QueryKind",
    "QueryPlan",
    "ScoreContext",
    "Selection",
]

GQA_MODES = ("mean_prob", "max_prob", "max_logit")
KEPT_SETS = ("per_head", "per_kv_head", "shared")
POSITIONS = ("logical", "cache")
TRIGGERS = ("every", "slack", "turn", "prefill+every")
ENDLESS = 1 << 40  # a budget larger than any session


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of every method. Subclasses are frozen keyword-only dataclasses."""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    default_preset: ClassVar[str] = ""
    compresses: ClassVar[bool] = True
    ordered: ClassVar[bool] = True  # `score` needs rows by ascending position; False saves a sort
    treats_heads_alike: ClassVar[bool] = True  # a KV head's rows decide, not its number
    by_position: ClassVar[bool] = False  # rows rank by position alone: heads, windows do nothing
    needs_calibration: ClassVar[bool] = False  # before it can score
    offline: ClassVar[bool] = False  # it needs what only a capture has: no engine can run it
    spans: ClassVar[bool] = False  # it manages whole spans (`methods.blocks`) and ranks no rows

    budget: int | None = None  # tokens kept per (layer, KV head); None for methods without one
    share: float | None = None  # of the tokens ever seen, instead of `budget`
    preset: str = ""
    interval: int = param(128, "decoded tokens between two events of a session", low=1)
    trigger: str = param("every", "when an event fires", choices=TRIGGERS)
    kept_set: str = param("per_head", "who shares a kept set", choices=KEPT_SETS)
    sinks: int = param(0, "first tokens always kept, counted in the budget", low=0)
    keep_recent: int = param(0, "last tokens always kept, counted in the budget", low=0)
    positions: str = param(
        "logical", "RoPE positions: as ever seen, or in the cache", choices=POSITIONS
    )

    @classmethod
    def create(
        cls, preset: str, budget: int | str | None, settings: Mapping[str, Any] | None = None
    ) -> Self:
        """Build a method from a preset name, a budget and `--set` overrides.

        Parameters
        ----------
        preset : str
            One of `presets`; the default one if empty.
        budget : int, str or None
            As `Budget.parse` takes it.
        settings : mapping, optional
            Parameters by name, typed or as text.

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
        size = Budget() if budget is None else Budget.parse(budget)
        method = cls(budget=size.tokens, share=size.share, preset=chosen, **parsed)
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
        return {key: getattr(self, key) for key in self.parameters()}

    def validate(self) -> None:
        """Check that budget and parameters fit together; UsageError with what clashes."""
        if not self.compresses:
            return
        if self.budget is None and self.share is None:
            raise UsageError(f"{self.name} needs a budget: add --budget TOKENS")
        if self.budget is None:
            if self.sinks + self.recent_kept(ENDLESS) >= ENDLESS:
                raise UsageError(f"{self.label} would keep recent tokens only; lower recent_share")
            return
        if self.budget < 1:
            raise UsageError(f"budget {self.budget}: expected a number of tokens >= 1")
        recent = self.recent_kept(self.budget)
        if self.sinks + recent >= self.budget:
            raise UsageError(
                f"budget {self.budget} is not above the {self.sinks + recent} tokens {self.label} "
                f"always keeps (sinks {self.sinks} + recent {recent}); raise --budget"
            )

    def budget_at(self, now: int) -> int:
        """Return the tokens to keep when `now` were seen: a share is never less than the floor."""
        if self.share is None:
            return self.budget or 0
        size = Budget(share=self.share).at(now)
        while size <= self.sinks + self.recent_kept(size):
            size += 1
        return size

    def recent_kept(self, budget: int) -> int:  # noqa: ARG002
        """Return how many of the last tokens are always kept at a budget."""
        return self.keep_recent

    def with_calibration(self, calibration: Calibration) -> Self:  # noqa: ARG002
        """Return the method with a model's statistics; itself if it needs none."""
        return self

    @property
    def per_query_head(self) -> bool:
        """Whether every query head has a kept set, so a cache, of its own."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """Return the capabilities an engine must have, by name."""
        return frozenset({"compress"} if self.compresses else ())

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
        self,
        layers: Sequence[LayerView],
        queries: Sequence[Queries],
        now: int,
        prompt: int = 0,
        phases: Tensor | None = None,
    ) -> Selection:
        """Choose the rows to keep in every layer and KV head.

        Parameters
        ----------
        layers, queries : sequences, one entry per layer
        now, prompt : int
            Logical length of the session, and tokens of its first prefill.
        phases : Tensor [now], int64, optional
            Of every token ever seen.
        """
        budget = self.budget_at(now)
        rows = torch.stack([view.positions for view in layers])
        live = rows.shape[-1]
        if live <= budget:
            everything = torch.arange(live, device=rows.device).expand_as(rows).contiguous()
            return Selection(everything, torch.full_like(rows, torch.nan, dtype=torch.float32))
        moment = ScoreContext(
            positions=rows,
            cached=layers[0],
            now=now,
            budget=budget,
            layer=0,
            prompt=prompt,
            next_position=now if self.positions == "logical" else live,
            seen_phases=phases,
        )
        if not self.ordered and self.kept_set == "per_head":
            return self._select_rows(layers, queries, moment)
        return self._select_ranks(layers, queries, moment)

    def _select_rows(
        self, layers: Sequence[LayerView], queries: Sequence[Queries], moment: ScoreContext
    ) -> Selection:
        """Choose among rows in cache order."""
        scores = torch.stack(
            [self._score_layer(view, queries[i], None, moment, i) for i, view in enumerate(layers)]
        )
        always = self._always(moment.positions, moment.now, moment.prompt)
        kept = select_top(scores, moment.budget, always, moment.positions)
        return Selection(kept, scores.masked_fill_(always, torch.nan), moment.positions)

    def _select_ranks(
        self, layers: Sequence[LayerView], queries: Sequence[Queries], moment: ScoreContext
    ) -> Selection:
        """Choose among rows by ascending position, as merging layers or heads needs it."""
        positions, orders = by_position(moment.positions)
        scores = []
        for i, (view, order) in enumerate(zip(layers, orders, strict=True)):
            wanted = order if self.ordered and not _ascending(order) else None
            found = self._score_layer(view, queries[i], wanted, moment, i)
            scores.append(found if self.ordered else found.gather(-1, order))
        merged = self._merge(torch.stack(scores))
        always = self._always(positions, moment.now, moment.prompt)
        ranked = select_top(merged, moment.budget, always)
        kept = ascending_rows(orders.gather(-1, ranked), positions.shape[-1])
        return Selection(kept, merged.masked_fill(always, torch.nan))

    def _score_layer(
        self,
        view: LayerView,
        queries: Queries,
        order: Tensor | None,
        moment: ScoreContext,
        layer: int,
    ) -> Tensor:
        """Return scores [kv_heads, tokens] in an order; None: in cache order."""
        context = replace(
            moment,
            layer=layer,
            cached=view,
            order=order,
            positions=view.positions if order is None else view.positions.gather(-1, order),
            sums=view.sums if view.sums is None or order is None else view.sums.gather(-1, order),
        )
        return self.score(queries, in_order(view.keys, order), context).float()

    def _merge(self, scores: Tensor) -> Tensor:
        """Make scores [layers, kv_heads, tokens] agree where the kept set is shared."""
        if self.kept_set == "per_kv_head":
            return scores.mean(0, keepdim=True).expand_as(scores)
        if self.kept_set == "shared":
            return scores.mean(1, keepdim=True).sum(0, keepdim=True).expand_as(scores)
        return scores

    def _always(self, positions: Tensor, now: int, prompt: int) -> Tensor:  # noqa: ARG002
        """Mark the positions [layers, kv_heads, tokens] that no event may evict."""
        recent = positions >= now - self.recent_kept(self.budget_at(now))
        return recent | (positions < self.sinks) if self.sinks else recent


def _ascending(order: Tensor) -> bool:
    return bool((order[:, 1:] > order[:, :-1]).all())
