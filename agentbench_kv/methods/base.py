"""The common base of token-level methods, and what they are given and return.

Every such method is: which queries represent the future, a score per cached token, what is always
kept, which set granularity, and when. A method declares the first and implements the second; the
rest is here (docs/add-a-method.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError, unknown_name
from agentbench_kv.kernels import ascending_rows, by_position, select_top
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.params import ParamSpec, param, param_specs, parse_settings

GQA_MODES = ("mean_prob", "max_prob", "max_logit")
KEPT_SETS = ("per_head", "per_layer", "per_kv_head", "shared")
POSITIONS = ("logical", "cache")
CLOSINGS = ("own", "next")  # the phase of a token that closes a span: the span's, or what follows
TRIGGERS = ("every", "slack", "turn", "prefill+every")
PROTECTS = ("none", "system", "prompt")
PREFIXES = ("own", "shared")  # who holds the rows of a session's system message with its tools
BY_RULE = ("prompt", "system")  # presets of every method: its default one with this `protect`
ENDLESS = 1 << 40  # a budget larger than any session


class Phase(IntEnum):
    """What a token of an agent's stream is part of (AgentKV, section 3.2)."""

    THINK = 0
    ACT = 1
    TOOL = 2
    OTHERS = 3


PHASE_NAMES = tuple(phase.name.lower() for phase in Phase)


class QueryKind(StrEnum):
    """What an engine keeps of past queries for a method."""

    NONE = "none"
    RECENT = "recent"  # the last queries
    PER_PHASE = "per_phase"  # the last queries of each phase
    SUMS = "sums"  # no queries, but the attention every cached row has got so far
    FUTURE = "future"  # the attention it will get after the event, which only a capture knows


@dataclass(frozen=True)
class QueryPlan:
    """The queries a method wants kept: `size` of them (per phase for `PER_PHASE`)."""

    kind: QueryKind = QueryKind.NONE
    size: int = 0


@dataclass(frozen=True)
class Queries:
    """Kept queries of one layer, post-RoPE."""

    vectors: Tensor  # [q_heads, n, head_dim]
    positions: Tensor  # [n], int64
    phases: Tensor  # [n], int64


@dataclass(frozen=True)
class LayerView:
    """The live rows of one layer of one session's cache, in cache order."""

    keys: Tensor  # [kv_heads, tokens, head_dim], post-RoPE at their original positions
    values: Tensor  # [kv_heads, tokens, head_dim]
    positions: Tensor  # [kv_heads, tokens], int64: original ones; may differ between heads
    # [kv_heads, tokens], float32: attention probability every row has got since it was written,
    # summed over all queries that saw it, mean over the group's query heads; given for plans of
    # kind `SUMS`. For plans of kind `FUTURE`, the same over all later queries.
    sums: Tensor | None = None


BLOCK_DOUBLES = 1 << 21  # of each kind, in float64, that a method computes with at the same time


def at_once(each: int) -> int:
    """Return how many heads or rows to take at a time, each with so many numbers in float64.

    An engine has no memory put by for events, and keys in float64 are four times the cache's.
    """
    return max(1, BLOCK_DOUBLES // max(1, each))


def in_order(vectors: Tensor, order: Tensor | None) -> Tensor:
    """Return vectors [kv_heads, tokens, head_dim] in an order [kv_heads, tokens]; None: as is."""
    if order is None:
        return vectors
    return vectors.gather(1, order[..., None].expand(-1, -1, vectors.shape[-1]))


@dataclass(frozen=True)
class ScoreContext:
    """What `score` may know besides queries and keys."""

    positions: Tensor  # [kv_heads, tokens], int64: original ones; ascending if `ordered`
    cached: LayerView  # the layer's rows in cache order
    now: int  # logical length: tokens ever seen
    budget: int  # tokens to keep at this event
    layer: int
    order: Tensor | None = None  # [kv_heads, tokens], int64: cache row of every key; None: as is
    sums: Tensor | None = None  # [kv_heads, tokens], float32, see `LayerView`
    prompt: int = 0  # tokens of the session's first prefill
    protected: int = 0  # the session's first tokens that no event evicts
    # RoPE position of the next token: `now`, or the rows held where positions are the cache's.
    next_position: int = 0
    seen_phases: Tensor | None = None  # [now], int64: phase of every token ever seen

    @cached_property
    def phases(self) -> Tensor | None:
        """Phase of every key's token [kv_heads, tokens], int64; None if phases are not known."""
        return None if self.seen_phases is None else self.seen_phases[self.positions]

    @cached_property
    def values(self) -> Tensor:
        """Values [kv_heads, tokens, head_dim] in the order of the keys; sorted when asked for."""
        return in_order(self.cached.values, self.order)


@dataclass(frozen=True)
class Selection:
    """The outcome of one event."""

    kept: Tensor  # [layers, kv_heads, budget], int64: cache rows to keep, ascending
    # [layers, kv_heads, tokens], float32: scores after `kept_set` merging; NaN where always kept.
    values: Tensor
    # Of `values`, [layers, kv_heads, tokens], int64, if they come in cache order; else None, and
    # they come by ascending position.
    positions: Tensor | None = None

    @cached_property
    def scores(self) -> Tensor:
        """`values` by ascending position."""
        if self.positions is None:
            return self.values
        return self.values.gather(-1, self.positions.argsort(-1))


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
    needs_covariance: ClassVar[bool] = False  # one that holds the queries' covariance, too
    offline: ClassVar[bool] = False  # it needs what only a capture has: no engine can run it
    messages: ClassVar[bool] = (
        False  # it drops whole messages, so it needs a client that sends them
    )
    foresees: ClassVar[bool] = False  # it must be told which tool results are needed later
    remembers: ClassVar[bool] = False  # it brings earlier sessions back to later ones
    spans: ClassVar[bool] = False  # whole spans or messages come and go: it ranks no rows

    budget: int | None = None  # tokens kept per (layer, KV head); None for methods without one
    share: float | None = None  # of the tokens ever seen, instead of `budget`
    preset: str = ""
    interval: int = param(128, "decoded tokens between two events of a session", low=1)
    trigger: str = param("every", "when an event fires", choices=TRIGGERS)
    kept_set: str = param("per_head", "who shares a kept set", choices=KEPT_SETS)
    sinks: int = param(0, "first tokens always kept, counted in the budget", low=0)
    keep_recent: int = param(0, "last tokens always kept, counted in the budget", low=0)
    protect: str = param(
        "none",
        "first tokens always kept, counted in the budget: the system message with its tools, all "
        "before the first generated token, or so many",
        choices=PROTECTS,
        counts=True,
        rare=True,
    )
    prefix: str = param(
        "own",
        "rows of the system message with its tools: each session's own, or cached once for all",
        choices=PREFIXES,
        rare=True,
    )
    chunk: int = param(
        1, "neighbouring tokens that share a score, their mean (ChunkKV)", low=1, rare=True
    )
    positions: str = param(
        "logical", "RoPE positions: as ever seen, or in the cache", choices=POSITIONS
    )

    @classmethod
    def create(
        cls,
        preset: str,
        budget: Budget | int | str | None,
        settings: Mapping[str, Any] | None = None,
    ) -> Self:
        """Build a method from a preset name, a budget and `--set` overrides.

        Parameters
        ----------
        preset : str
            One of `presets`; the default one if empty.
        budget : Budget, int, str or None
            As `Budget.parse` takes it.
        settings : mapping, optional
            Parameters by name, typed or as text.

        Raises
        ------
        UsageError
            For an unknown preset or parameter, or values that cannot go together.
        """
        chosen, known = preset or cls.default_preset, cls.known_presets()
        if chosen and chosen not in known:
            raise unknown_name(f"{cls.name} preset", chosen, known)
        values = {**known.get(chosen, {}), **dict(settings or {})}
        parsed = parse_settings(cls.name, cls, values)
        size = Budget() if budget is None else Budget.parse(budget)
        method = cls(budget=size.tokens, share=size.share, preset=chosen, **parsed)
        method.validate()
        return method

    @classmethod
    def known_presets(cls) -> dict[str, Mapping[str, Any]]:
        """Return `presets` and, for methods that rank rows, those made by rule (`BY_RULE`)."""
        plain = cls.presets.get(cls.default_preset, {})
        ruled = BY_RULE if cls.compresses and not cls.spans else ()
        return {**{name: {**plain, "protect": name} for name in ruled}, **cls.presets}

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
        """Return the parameters with their values, for the run record.

        A rare one at its default is left out, unless the preset has another value.
        """
        values = {key: getattr(self, key) for key in self.parameters()}
        preset = self.known_presets().get(self.preset, {})
        rare = {k: p.default for k, p in self.parameters().items() if p.rare and k not in preset}
        return {k: value for k, value in values.items() if k not in rare or value != rare[k]}

    def changed_settings(self) -> dict[str, Any]:
        """Return the parameters that are not those of the preset."""
        usual = type(self)(**self.known_presets().get(self.preset, {})).settings()
        return {key: value for key, value in self.settings().items() if value != usual.get(key)}

    def validate(self) -> None:
        """Check that budget and parameters fit together; UsageError with what clashes."""
        if not self.compresses:
            return
        if self.protect != "none" and type(self).select is not Method.select:
            raise UsageError(f"{self.name} has a selection of its own, which takes no protect")
        if self.budget is None and self.share is None:
            raise UsageError(f"{self.name} needs a budget: add --budget TOKENS")
        if self.budget is None:
            if self.first_kept(0) + self.recent_kept(ENDLESS) >= ENDLESS:
                raise UsageError(
                    f"{self.label} would keep recent tokens only; choose a larger budget"
                )
            return
        if self.budget < 1:
            raise UsageError(f"budget {self.budget}: expected a number of tokens >= 1")
        protected, recent = self.protected(), self.recent_kept(self.budget)
        if not self.has_room(self.budget, protected):
            first = self.first_kept(protected)
            kind = "protected" if first == protected else "sinks"
            raise UsageError(
                f"budget {self.budget} is not above the {first + recent} tokens {self.label} "
                f"always keeps ({kind} {first} + recent {recent}); raise --budget"
            )

    def protected(self, prompt: int = 0, system: int = 0) -> int:
        """Return how many of a session's first tokens no event may evict, sinks apart.

        `prompt` are the tokens of its first prefill, `system` those of its system message.
        """
        known = {"none": 0, "prompt": prompt, "system": system}
        return known[self.protect] if self.protect in known else int(self.protect)

    def has_room(self, budget: int, protected: int) -> bool:
        """Return whether a budget is above what is always kept, so that an event may fire."""
        return self.first_kept(protected) + self.recent_kept(budget) < budget

    def first_kept(self, protected: int) -> int:
        """Return how many of a session's first tokens are always kept, of which so many protected.

        What else is kept at the beginning `score` may rank first itself.
        """
        return max(protected, self.sinks)

    def budget_at(self, now: int) -> int:
        """Return the tokens to keep when `now` were seen: a share is never less than the floor."""
        if self.share is None:
            return self.budget or 0
        size = Budget(share=self.share).at(now)
        while size <= self.first_kept(0) + self.recent_kept(size):
            size += 1
        return size

    def recent_kept(self, budget: int) -> int:  # noqa: ARG002
        """Return how many of the last tokens are always kept at a budget."""
        return self.keep_recent

    def with_calibration(self, calibration: Calibration) -> Self:  # noqa: ARG002
        """Return the method with a model's statistics in a field `calibration`.

        Itself if it needs none.
        """
        return self

    @property
    def per_query_head(self) -> bool:
        """Whether every query head has a kept set, so a cache, of its own."""
        return False

    @property
    def takes_budget(self) -> bool:
        """Whether a run of the method has a budget."""
        return self.compresses

    def below(self) -> Method:
        """Return the method that the engine itself runs: this one, if it works on its rows."""
        return self

    @property
    def closing_markers(self) -> str:
        """Return which phase a closing marker has for the method, one of `CLOSINGS`."""
        return CLOSINGS[0]

    @property
    def across_heads(self) -> str:
        """Say what the method has of all KV heads together; empty if each could be on its own."""
        if self.kept_set in ("per_layer", "shared"):
            return f"one kept set for all heads (kept_set={self.kept_set})"
        if self.needs_calibration:
            return "a calibration, whose statistics are of all heads"
        return "" if self.treats_heads_alike else "a choice that goes by the number of a head"

    @property
    def needs(self) -> frozenset[str]:
        """Return the capabilities an engine must have, by name."""
        shared = frozenset({"share_prefix"} if self.prefix == "shared" else ())
        if not self.compresses:
            return shared
        return shared | {"compress", *({"protect_system"} if self.protect == "system" else ())}

    @property
    def asks_for_system(self) -> bool:
        """Whether an engine must be told where a session's system message ends."""
        return self.protect == "system" or self.prefix == "shared"

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
        system: int = 0,
    ) -> Selection:
        """Choose the rows to keep in every layer and KV head.

        Parameters
        ----------
        layers, queries : sequences, one entry per layer
        now, prompt : int
            Logical length of the session, and tokens of its first prefill.
        phases : Tensor [now], int64, optional
            Of every token ever seen.
        system : int
            Tokens of the session's system message with its tools.

        Raises
        ------
        UsageError
            If the budget is not above what is always kept. An engine's ledger fires no such event.
        """
        budget = self.budget_at(now)
        rows = torch.stack([view.positions for view in layers])
        live = rows.shape[-1]
        if live <= budget:
            everything = torch.arange(live, device=rows.device).expand_as(rows).contiguous()
            return Selection(everything, torch.full_like(rows, torch.nan, dtype=torch.float32))
        protected = self.protected(prompt, system)
        if not self.has_room(budget, protected):
            raise UsageError(
                f"{self.label} has no room: protected {self.first_kept(protected)} + recent "
                f"{self.recent_kept(budget)} >= budget {budget}"
            )
        moment = ScoreContext(
            positions=rows,
            cached=layers[0],
            now=now,
            budget=budget,
            layer=0,
            prompt=prompt,
            protected=protected,
            next_position=now if self.positions == "logical" else live,
            seen_phases=phases,
        )
        if not self.ordered and self.kept_set == "per_head":
            return self._select_rows(layers, queries, moment)
        return self._select_ranks(layers, queries, moment)

    def _select_rows(
        self, layers: Sequence[LayerView], queries: Sequence[Queries], moment: ScoreContext
    ) -> Selection:
        scores = torch.stack(
            [self._score_layer(view, queries[i], None, moment, i) for i, view in enumerate(layers)]
        )
        always = self._always(moment.positions, moment.now, moment.protected)
        scores = self._by_chunk(scores, moment.positions, always)
        kept = select_top(scores, moment.budget, always, moment.positions)
        return Selection(kept, scores.masked_fill_(always, torch.nan), moment.positions)

    def _select_ranks(
        self, layers: Sequence[LayerView], queries: Sequence[Queries], moment: ScoreContext
    ) -> Selection:
        """Choose among rows by ascending position, as merging layers or heads needs it."""
        positions, orders = by_position(moment.positions)
        scores = []
        for i, (view, order) in enumerate(zip(layers, orders, strict=True)):
            # On a GPU the host would wait for the answer: there, rows in order are sorted, too.
            looks = self.ordered and order.device.type == "cpu"
            sorts = self.ordered and not (looks and bool((order[:, 1:] > order[:, :-1]).all()))
            found = self._score_layer(view, queries[i], order if sorts else None, moment, i)
            scores.append(found if self.ordered else found.gather(-1, order))
        always = self._always(positions, moment.now, moment.protected)
        merged = self._by_chunk(self._merge(torch.stack(scores)), positions, always)
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

    def _by_chunk(self, scores: Tensor, positions: Tensor, always: Tensor) -> Tensor:
        """Give every cached token the mean score of its chunk's; all [layers, kv_heads, tokens].

        Tokens that are kept `always` have no say: a method may give them any score. Chunks are of
        logical positions, so that they stay what they are from event to event. Of the last one
        that fits, the first tokens stay: the budget is met exactly.
        """
        if self.chunk == 1:
            return scores
        chunks = positions // self.chunk
        size = (*scores.shape[:-1], int(chunks.max()) + 1)
        # In float64, so that the order of the rows does not matter.
        asked = scores.double().masked_fill(always, 0.0)
        sums = scores.new_zeros(size, dtype=torch.float64).scatter_add_(-1, chunks, asked)
        counts = torch.zeros_like(sums).scatter_add_(-1, chunks, (~always).double())
        return (sums / counts.clamp(min=1)).gather(-1, chunks).float()

    def _merge(self, scores: Tensor) -> Tensor:
        """Make scores [layers, kv_heads, tokens] agree where the kept set is shared."""
        if self.kept_set == "per_layer":
            return scores.mean(1, keepdim=True).expand_as(scores)
        if self.kept_set == "per_kv_head":
            return scores.mean(0, keepdim=True).expand_as(scores)
        if self.kept_set == "shared":
            return scores.mean(1, keepdim=True).sum(0, keepdim=True).expand_as(scores)
        return scores

    def _always(self, positions: Tensor, now: int, protected: int) -> Tensor:
        """Mark the positions [layers, kv_heads, tokens] that no event may evict."""
        recent = positions >= now - self.recent_kept(self.budget_at(now))
        first = max(self.sinks, protected)
        return recent | (positions < first) if first else recent


class Schedule:
    """Counts decoded tokens of one session and says when an event fires.

    None fires while the budget is not above what is always kept; `refused` counts those that were
    due then, at most one an interval.
    """

    def __init__(self, method: Method, protected: int = 0) -> None:
        self.protected = protected  # the session's first tokens that no event may evict
        self.refused = 0
        self.refused_budget: int | None = None  # of the last one refused
        self._method = method
        self._since_due = 0
        self._refused_until = 0  # tokens ever seen up to which another refusal is the same

    def restart(self) -> None:
        """Go on with a session whose rows were lost; what was refused stays counted."""
        self._since_due = 0

    def after_decode(self, live: int, logical: int) -> bool:
        """Count one decoded token, with `live` tokens cached of `logical` ever seen."""
        self._since_due += 1
        trigger = self._method.trigger
        if trigger == "slack":
            return self._over(live, logical, self._method.interval)
        if trigger == "turn" or self._since_due < self._method.interval:
            return False
        self._since_due = 0
        return self._over(live, logical)

    def take_back(self) -> None:
        """Uncount the last decoded token, with which no event fired."""
        self._since_due = (self._since_due - 1) % self._method.interval

    def after_prefill(self, live: int, logical: int) -> bool:
        return self._method.trigger == "prefill+every" and self._over(live, logical)

    def after_turn(self, live: int, logical: int) -> bool:
        return self._method.trigger == "turn" and self._over(live, logical)

    def _over(self, live: int, logical: int, slack: int = 0) -> bool:
        if not self._method.compresses:
            return False
        budget = self._method.budget_at(logical)
        over = live >= budget + slack if slack else live > budget
        if not over or self._method.has_room(budget, self.protected):
            return over
        if logical >= self._refused_until:
            self.refused += 1
            self._refused_until = logical + self._method.interval
        self.refused_budget = budget
        return False
