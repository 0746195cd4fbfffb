"""Events over a capture: what an engine would hand a method, and what the method keeps.

`select_capture` runs one event; `replay` runs a session's events one after the other, each on what
the last left, with the code the engines run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentbench_kv import __version__
from agentbench_kv.analysis.captures import Capture, write_archive
from agentbench_kv.analysis.traces import ScoredEvent, Trace
from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import attention_mass
from agentbench_kv.methods.base import (
    LayerView,
    Method,
    Phase,
    Queries,
    QueryKind,
    QueryPlan,
    Schedule,
    Selection,
)

BLOCK_BYTES = 32 << 20
"""Size of the attention probabilities that exist at a time."""


@dataclass(frozen=True)
class MethodInput:
    """Everything `Method.select` takes, for one event; lists have one entry per layer."""

    layers: list[LayerView]
    queries: list[Queries]
    now: int  # tokens ever seen
    prompt: int = 0  # tokens of the first prefill
    phases: Tensor | None = None  # by logical position, [now]
    system: int = 0  # tokens of the system message

    def select(self, method: Method) -> Selection:
        given = (self.layers, self.queries, self.now, self.prompt, self.phases)
        if method.protect == "system":
            return method.select(*given, self.system)
        return method.select(*given)

    @property
    def places(self) -> Tensor:
        """Positions held [layers, kv_heads, tokens], ascending."""
        return torch.stack([view.positions for view in self.layers]).sort(-1).values

    def positions(self, selection: Selection) -> Tensor:
        """Return the kept positions [layers, kv_heads, budget], ascending."""
        places = torch.stack([view.positions for view in self.layers])
        return places.gather(-1, selection.kept).sort(-1).values

    def with_keys(self, change: Callable[[Tensor], Tensor]) -> MethodInput:
        return replace(self, layers=[replace(v, keys=change(v.keys)) for v in self.layers])


def attention_sums(
    queries: Tensor, query_positions: Tensor, keys: Tensor, key_positions: Tensor
) -> Tensor:
    """Sum over queries of the attention that each key gets, mean over a group's query heads.

    A query of `queries` [q_heads, n, head_dim] sees the keys [kv_heads, tokens, head_dim] at its
    own position and before, and no others. `query_positions` is [n], `key_positions` [tokens] or
    [kv_heads, tokens]; the result [kv_heads, tokens], float32.
    """
    places = key_positions.expand(keys.shape[:2])
    total = torch.zeros(keys.shape[:2], device=keys.device)
    size = max(1, BLOCK_BYTES // (4 * queries.shape[0] * keys.shape[1]))
    for first in range(0, queries.shape[1], size):
        block, at = queries[:, first : first + size].float(), query_positions[first : first + size]
        mass = attention_mass(block, keys.float(), query_positions=at, key_positions=places)
        total += mass * block.shape[1]
    return total


def ready(method: Method, capture: Capture, now: int) -> Method:
    """Return the method with what the capture knows of the model; `now` is its last event.

    UsageError if the method does not evict, or needs something the capture has not.
    """
    if not method.compresses:
        raise UsageError(f"{method.name} keeps every token: there is nothing to select")
    plan = method.query_plan()
    if plan.kind is QueryKind.PER_PHASE:
        capture.labels(method.label)
    if plan.kind is QueryKind.FUTURE and capture.before(now) == capture.length:
        raise UsageError(
            f"{method.label} needs tokens after the event: the capture ends at its event, position "
            f"{now}; give an earlier one with --now"
        )
    if method.protect == "system" and capture.system is None:
        raise UsageError(
            f"{method.label} needs to know where the system message ends: the capture has no array "
            "'system' (its number of tokens); use --set protect=N"
        )
    if not method.needs_calibration:
        return method
    if capture.calibration is None:
        raise UsageError(
            f"{method.label} needs the model's statistics: the capture has no arrays q_mean_real, "
            "q_mean_imag, q_abs_mean and inv_freq; kvbench capture adds what kvbench calibrate made"
        )
    return method.with_calibration(capture.calibration)


def cache_heads(capture: Capture, method: Method) -> int:
    """Return the heads of the method's cache: query heads if it has one per query head."""
    return capture.q_heads if method.per_query_head else capture.kv_heads


def input_at(
    capture: Capture,
    method: Method,
    now: int,
    rows: Tensor | None = None,
    sums: Tensor | None = None,
) -> MethodInput:
    """Return what `method`, as `ready` returns it, is given at an event.

    Tokens of the capture at positions from `now` on are the future. `rows` [layers, heads, live]
    are those that are cached, ascending; all before the event if not given. `sums`, of the same
    shape, is the attention they got, if it is known already.
    """
    count, plan = capture.before(now), method.query_plan()
    heads = cache_heads(capture, method)
    if rows is None:
        rows = torch.arange(count).expand(capture.layers, heads, -1)
    layers = []
    for layer, held in enumerate(rows):
        known = None if sums is None else sums[layer]
        if known is None and plan.kind in (QueryKind.SUMS, QueryKind.FUTURE):
            known = _all_sums(capture, layer, count, heads, plan.kind).gather(-1, held)
        keys, values = (gathered(source[layer], held) for source in (capture.k, capture.v))
        layers.append(LayerView(keys, values, capture.positions[held], known))
    queries, phases = kept_queries(capture, plan, count), phases_by_position(capture, now)
    return MethodInput(layers, queries, now, capture.prompt, phases, capture.system or 0)


def gathered(source: Tensor, rows: Tensor) -> Tensor:
    """Return rows [heads, live] of one layer's keys or values, [heads, live, head_dim], float32.

    Heads are query heads for a method with a cache per query head.
    """
    heads = torch.arange(rows.shape[0])[:, None] // (rows.shape[0] // source.shape[0])
    return source[heads, rows].float()


def _all_sums(capture: Capture, layer: int, count: int, heads: int, kind: QueryKind) -> Tensor:
    """Return the attention [heads, count] that the first tokens get."""
    # It is that of their own queries, or for `FUTURE` of all later ones.
    future = kind is QueryKind.FUTURE
    asking = slice(count, None) if future else slice(count)
    seen = capture.length if future else count
    keys = capture.k[layer, :, :seen].float().repeat_interleave(heads // capture.kv_heads, 0)
    queries, places = capture.q[layer, :, asking], capture.positions
    return attention_sums(queries, places[asking], keys, places[:seen])[:, :count]


def held_queries(plan: QueryPlan, phases: Tensor) -> Tensor:
    """Return whose queries an engine holds for a plan, ascending, of tokens with these phases."""
    tokens = torch.arange(len(phases))
    if plan.kind is QueryKind.RECENT:
        return tokens[max(0, len(tokens) - plan.size) :]
    if plan.kind is QueryKind.PER_PHASE:
        rings = [tokens[phases == int(phase)][-plan.size :] for phase in Phase]
        return torch.cat(rings).sort().values
    return tokens[:0]


def kept_queries(capture: Capture, plan: QueryPlan, count: int) -> list[Queries]:
    """Return the queries that a plan has kept of the first `count` tokens, for every layer."""
    if plan.kind is QueryKind.PER_PHASE:
        capture.labels("this method")
    phases = capture.phases
    if phases is None:
        phases = torch.full((capture.length,), int(Phase.OTHERS))
    held = held_queries(plan, phases[:count])
    return [
        Queries(layer[:, held].float(), capture.positions[held], phases[held])
        for layer in capture.q
    ]


def phases_by_position(capture: Capture, now: int) -> Tensor | None:
    """Return the phases [now] by logical position; positions the capture lacks are `others`."""
    if capture.phases is None:
        return None
    labels = torch.full((now,), int(Phase.OTHERS))
    count = capture.before(now)
    labels[capture.positions[:count]] = capture.phases[:count]
    return labels


def event_points(capture: Capture, method: Method) -> list[int]:
    """Return the logical lengths at which an engine would have run the method's events.

    An engine counts generated tokens. Where a capture does not say which those are (`decoded`),
    every token after the prompt counts as one.
    """
    decoded = capture.decoded
    if decoded is None:
        decoded = capture.positions >= capture.prompt
    starts = decoded & ~torch.nn.functional.pad(decoded, (1, 0))[:-1]
    # Whether the last token ends a turn cannot be known: say no.
    ends = decoded & ~torch.nn.functional.pad(decoded, (0, 1), value=True)[1:]
    marks = (capture.positions, decoded, starts, ends)
    protected = method.protected(capture.prompt, capture.system or 0)
    schedule, points, live = Schedule(method, protected), [], 0
    for position, is_decoded, first, last in zip(*(m.tolist() for m in marks), strict=True):
        # A token is sampled, and events run, when all before it are fed; it is fed afterwards.
        # Each trigger counts on, also behind one that fires.
        prefill = is_decoded and first and schedule.after_prefill(live, position)
        decode = is_decoded and schedule.after_decode(live, position)
        turn = is_decoded and last and schedule.after_turn(live, position)
        if prefill or decode or turn:
            points.append(position)
            live = method.budget_at(position)
        live += 1
    return points


def replay(capture: Capture, method: Method, events: Sequence[int]) -> list[ScoredEvent]:
    """Run events over a capture as an engine would, each on what the one before has left.

    `events` are logical lengths, ascending; one that finds no more than the budget live is passed
    over. UsageError if they are out of order or past the capture, or the method cannot be replayed.
    """
    last = int(capture.positions[-1]) + 1
    for before, now in pairwise((0, *events)):
        if not before < now <= last:
            raise UsageError(f"event at {now}: expected ascending logical lengths up to {last}")
    if method.positions == "cache":
        raise UsageError(
            f"{method.label} has positions=cache, a capture logical ones; "
            "add --set positions=logical"
        )
    method = ready(method, capture, max(events, default=0))
    cache = _Cache(capture, method)
    traces = []
    with torch.inference_mode():
        for now in events:
            cache.feed(capture.before(now))
            if cache.rows.shape[-1] > method.budget_at(now):
                traces.append(cache.run_event(now))
    return traces


class _Cache:
    """What is live: rows of the capture [layers, heads, live], ascending, and their sums."""

    def __init__(self, capture: Capture, method: Method) -> None:
        self._capture, self._method = capture, method
        self._with_sums = method.query_plan().kind is QueryKind.SUMS
        self._fed = 0
        self._sums = torch.zeros(capture.layers, cache_heads(capture, method), 0)
        self.rows = self._sums.long()

    def feed(self, end: int) -> None:
        """Append the capture's tokens up to `end`, and what their queries attend to."""
        start, capture = self._fed, self._capture
        new = torch.arange(start, end).expand(*self.rows.shape[:2], -1)
        self.rows = torch.cat([self.rows, new], -1)
        self._sums = torch.cat([self._sums, torch.zeros(new.shape)], -1)
        self._fed = end
        if self._with_sums:
            for layer, rows in enumerate(self.rows):
                self._sums[layer] += attention_sums(
                    capture.q[layer, :, start:end],
                    capture.positions[start:end],
                    gathered(capture.k[layer], rows),
                    capture.positions[rows],
                )

    def run_event(self, now: int) -> ScoredEvent:
        sums = self._sums if self._with_sums else None
        given = input_at(self._capture, self._method, now, self.rows, sums)
        selection = given.select(self._method)
        positions = self._capture.positions[self.rows]
        self.rows = self.rows.gather(-1, selection.kept)
        self._sums = self._sums.gather(-1, selection.kept)
        return ScoredEvent.from_selection(now, positions, selection)


def replay_trace(capture: Capture, method: Method) -> Trace:
    """Replay a capture at the events an engine would have had; UsageError if there are none."""
    points = event_points(capture, method)
    events = replay(capture, method, points)
    if not events:
        raise UsageError(
            f"{method.label} would have had no event: the capture has {capture.length} tokens, "
            f"{capture.prompt} of them prompt; lower --budget or --set interval"
        )
    meta = {
        "method": method.label,
        "settings": method.settings(),
        "budget": method.budget,
        "budget_share": method.share,
        "capture": capture.meta,
    }
    return Trace(events, phases_by_position(capture, int(capture.positions[-1]) + 1), meta)


@dataclass(frozen=True)
class CaptureSelection:
    """What a method keeps of a capture; the layer axis is there if the capture has one.

    Query heads take the place of KV heads for a method with a cache per query head.
    """

    kept: Tensor  # tokens of the capture, ascending, int32 [.., kv_heads, budget]
    # float32 [.., kv_heads, tokens]; NaN where always kept, -inf for tokens after the event.
    score: Tensor
    meta: dict[str, Any]

    def save(self, path: Path) -> None:
        write_archive(path, {"kept": self.kept, "score": self.score}, self.meta)


def select_capture(capture: Capture, method: Method) -> CaptureSelection:
    """Run one event at the capture's `now`.

    UsageError if the budget is over the candidates, or the capture lacks what the method needs.
    """
    method = ready(method, capture, capture.now)
    budget = method.budget_at(capture.now)
    if budget > capture.candidates:
        raise UsageError(
            f"budget {budget} is over the {capture.candidates} tokens of the capture before "
            f"position {capture.now}; lower --budget"
        )
    with torch.inference_mode():
        selection = input_at(capture, method, capture.now).select(method)
    after = capture.length - capture.candidates
    score = torch.nn.functional.pad(selection.scores, (0, after), value=-torch.inf)
    layers = slice(None) if capture.layered else 0
    meta = {
        "method": method.name,
        "preset": method.preset or None,
        "settings": method.settings(),
        "budget": budget,
        "budget_share": method.share,
        "version": __version__,
        "T": capture.length,
        "candidates": capture.candidates,
        "now": capture.now,
        "prompt": capture.prompt,
        "layers": capture.layers,
        "q_heads": capture.q_heads,
        "kv_heads": capture.kv_heads,
        "head_dim": capture.q.shape[-1],
        "kept_per": "query_head" if method.per_query_head else "kv_head",
        "capture": capture.meta,
    }
    return CaptureSelection(selection.kept[layers].int(), score[layers].float(), meta)
