"""The reference implementation in PyTorch; runs on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentbench_kv.kernels.layout import (
    PagedRows,
    RowsBefore,
    SeenRows,
    ascending_rows,
    by_position,
    gather_layer,
    gather_rows,
    scatter_layer,
)

# Bytes of similarities that exist at a time; a CPU works best inside its cache.
BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
BLOCK_LOGITS = 1 << 24  # of attention that exist at the same time, where there is a choice
# Whether products of halves can be summed in floats, and given as such (PyTorch 2.8).
_SUMS_HALVES = "dtype" in torch.ops.aten.bmm.overloads()  # type: ignore[no-untyped-call]


class TorchBackend:
    """PyTorch operations, no compilation."""

    name = "torch"

    def __init__(self, about: str = "PyTorch operations") -> None:
        self.about = about

    def ring_write(self, ring: Tensor, rows: Tensor, slots: Tensor) -> None:
        ring.index_copy_(0, slots, rows.to(ring.dtype))

    def attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        seen: SeenRows,
        scaling: float,
        sinks: Tensor | None,
        before: Sequence[RowsBefore | None],
    ) -> Tensor:
        if any(before):
            keys, values = _put_together(keys, values, before, seen.longest)
        sessions, heads, n, head_dim = queries.shape
        kv_heads = keys.shape[1]
        keys, values = keys[:, :, : seen.longest], values[:, :, : seen.longest]
        if sinks is not None:
            size = max(1, BLOCK_LOGITS // (sessions * heads * seen.longest))
            pairs = (torch.split(each, size, 2) for each in (queries, seen.mask))
            blocks = zip(*pairs, strict=True)
            parts = [_beside(part, keys, values, mask, scaling, sinks) for part, mask in blocks]
            return torch.cat(parts, 2).transpose(1, 2)
        # A group's query heads are laid along the query axis, so grouped keys are never repeated.
        grouped = queries.reshape(sessions, kv_heads, heads // kv_heads * n, head_dim)
        mask = seen.mask if n == 1 else seen.mask.repeat(1, 1, heads // kv_heads, 1)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
        return out.reshape(sessions, heads, n, head_dim).transpose(1, 2)

    def attention_mass(
        self,
        queries: Tensor,
        keys: Tensor,
        gqa: str,
        query_positions: Tensor | None,
        key_positions: Tensor | None,
    ) -> Tensor:
        """Score some KV heads at a time, so that few logits exist."""
        kv_heads, tokens, head_dim = keys.shape
        heads, n, _ = queries.shape
        grouped = queries.reshape(kv_heads, heads // kv_heads, n, head_dim)
        hidden = None
        if query_positions is not None and key_positions is not None:
            hidden = key_positions[:, None, None, :] > query_positions[None, None, :, None]
        size = max(1, BLOCK_LOGITS // max(1, heads // kv_heads * n * tokens))
        starts = range(0, kv_heads, size)
        some = [slice(first, first + size) for first in starts]
        return torch.cat(
            [
                _mass(grouped[at], keys[at], gqa, None if hidden is None else hidden[at])
                for at in some
            ]
        )

    def select_top(
        self, scores: Tensor, budget: int, always: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """Take the rows above the threshold, then the first of those that equal it."""
        if not budget or not scores.numel():
            shape = (*scores.shape[:-1], min(budget, scores.shape[-1]))
            return scores.new_empty(shape, dtype=torch.int64)
        if positions is not None:
            return self._select_rows(scores, budget, always, positions.expand(scores.shape))
        ranked = _sortable(scores)
        if always is not None:
            ranked = ranked.masked_fill(always, torch.iinfo(torch.int64).max)
        if budget >= ranked.shape[-1]:
            every = torch.arange(ranked.shape[-1], device=scores.device)
            return every.expand(*ranked.shape[:-1], -1).contiguous()
        threshold = ranked.topk(budget, -1).values[..., -1:]
        above = ranked > threshold
        level = ranked == threshold
        room = budget - above.sum(-1, keepdim=True)
        kept = above | (level & (level.cumsum(-1) <= room))
        return kept.nonzero()[:, -1].reshape(*ranked.shape[:-1], budget)

    def _select_rows(
        self, scores: Tensor, budget: int, always: Tensor | None, positions: Tensor
    ) -> Tensor:
        tokens = scores.shape[-1]
        _, order = by_position(positions.reshape(1, -1, tokens))
        order = order.reshape(scores.shape)
        marks = None if always is None else always.expand(scores.shape).gather(-1, order)
        ranks = self.select_top(scores.gather(-1, order), budget, marks, None)
        rows = order.gather(-1, ranks).reshape(1, -1, ranks.shape[-1])
        return ascending_rows(rows, tokens).reshape(ranks.shape)

    def compact(self, caches: Sequence[Tensor], kept: Tensor, length: int, sort: bool) -> int:
        """Move rows by advanced indexing over flattened (layer, head)s."""
        layers, heads, budget = kept.shape
        flat = kept.reshape(layers * heads, budget)
        row, source, target = _sorted_moves(flat) if sort else _hole_moves(flat, length)
        layer, head = row // heads, row % heads
        for cache in caches:
            cache[layer, head, target] = cache[layer, head, source]
        return int(row.numel())

    def attention_mass_paged(
        self,
        queries: Tensor,
        keys: PagedRows,
        table: Tensor | None,
        lengths: Tensor | None,
        length: int,
        gqa: str,
        query_positions: Tensor | None,
        key_positions: PagedRows | None,
        valid: Tensor | None,
    ) -> Tensor:
        """Score session by session and layer by layer, over gathered keys."""
        sessions, layers, q_heads, _, _ = queries.shape
        outputs = (q_heads // keys.kv_heads,) if gqa == "per_head" else ()
        mass = queries.new_zeros(
            (sessions, layers, keys.kv_heads, *outputs, length), dtype=torch.float32
        )
        whole = _table(table, sessions, queries.device)
        for s in range(sessions):
            own = length if lengths is None else int(lengths[s])
            at = None if key_positions is None else gather_rows(key_positions, whole, s, own)
            used = slice(None) if valid is None else valid[s].bool()
            seen = None if query_positions is None else query_positions[s][used]
            for i in range(layers):
                chosen, places = queries[s, i][:, used], None if at is None else at[i]
                gathered = gather_layer(keys.layers[i], whole, s, own)
                own_mass = self.attention_mass(chosen, gathered, gqa, seen, places)
                mass[s, i, ..., :own] = own_mass
        return mass

    def compact_paged(
        self,
        tensors: Sequence[PagedRows],
        table: Tensor | None,
        kept: Tensor,
        counts: Tensor | None,
        sort: bool,
    ) -> Tensor:
        """Compact a copy of a layer's rows at a time, and write it back."""
        moved = 0
        whole = _table(table, len(kept), kept.device)
        for s, own in enumerate(kept):
            chosen = own if counts is None else own[..., : int(counts[s])]
            if not chosen.numel():
                continue
            length = int(chosen.max()) + 1
            for i, kept_here in enumerate(chosen):
                layers = [rows.layers[i] for rows in tensors]
                copies = [gather_layer(layer, whole, s, length)[None] for layer in layers]
                moved += self.compact(copies, kept_here[None], length, sort)
                for layer, copy in zip(layers, copies, strict=True):
                    scatter_layer(layer, whole, s, copy[0])
        return torch.tensor(moved, device=kept.device)

    def rope_rotate(
        self,
        keys: PagedRows,
        table: Tensor | None,
        lengths: Tensor | None,
        shifts: Tensor,
        frequencies: Tensor,
        interleaved: bool,
    ) -> None:
        """Rotate a copy of a layer's rows at a time, and write it back."""
        whole = _table(table, len(shifts), shifts.device)
        for s, own in enumerate(shifts):
            length = own.shape[-1] if lengths is None else int(lengths[s])
            for layer, shift in zip(keys.layers, own, strict=True):
                copy = gather_layer(layer, whole, s, length)
                turned = rotated(copy, shift[..., :length], frequencies, interleaved)
                scatter_layer(layer, whole, s, turned)

    def aabb(self, keys: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Reduce each block; a short last one is padded with its own last key."""
        tokens = keys.shape[1]
        index = torch.arange(-(-tokens // block) * block, device=keys.device).clamp(max=tokens - 1)
        blocks = keys.float()[:, index].reshape(len(keys), -1, block, keys.shape[-1])
        return blocks.amin(2), blocks.amax(2)

    def aabb_score(self, queries: Tensor, lows: Tensor, highs: Tensor) -> Tensor:
        """Take the better corner of the box channel by channel: highs where q >= 0, else lows."""
        grouped = queries.float().reshape(len(lows), -1, *queries.shape[1:])
        signs = torch.cat([grouped.clamp(min=0), grouped.clamp(max=0)], -1)
        corners = torch.cat([highs, lows], -1).float()
        return torch.einsum("hgnd,hbd->hgnb", signs, corners).flatten(0, 1)

    def similarity_column_mean(self, keys: Tensor, threshold: float) -> Tensor:
        """Multiply a block of rows at a time."""
        units = keys.float()
        units = units / (units.norm(dim=-1, keepdim=True) + 1e-8)
        # One head at a time fits a CPU's cache; a GPU wants few, large products.
        at_once = 1 if keys.device.type == "cpu" else len(units)
        return torch.cat([_mean_cosines(part, threshold) for part in units.split(at_once)])


def _mass(grouped: Tensor, keys: Tensor, gqa: str, hidden: Tensor | None) -> Tensor:
    """Score keys [kv_heads, tokens, head_dim] by queries [kv_heads, group, n, head_dim].

    `hidden` [kv_heads, 1, n, tokens] says which keys a query does not see. Some queries at a time
    where all of them would make too many logits.
    """
    kv_heads, group, n, _ = grouped.shape
    size = max(1, BLOCK_LOGITS // max(1, kv_heads * group * keys.shape[1]))
    means = torch.zeros((), device=keys.device)
    for part in (slice(first, first + size) for first in range(0, max(n, 1), size)):
        some = grouped[:, :, part]
        own = _mean_probs(some, keys, gqa, None if hidden is None else hidden[:, :, part])
        means = own if n <= size else means + own * (some.shape[2] / n)
    if gqa == "per_head":
        return means
    return means.amax(1) if gqa == "max_prob" else means.mean(1)


def _mean_probs(grouped: Tensor, keys: Tensor, gqa: str, hidden: Tensor | None) -> Tensor:
    """Return means over queries of their probabilities: [kv_heads, group, tokens].

    With `max_logit` a group has one probability, that of its largest logits.
    """
    n = grouped.shape[2]
    logits = _products(grouped.flatten(1, 2), keys).mul_(grouped.shape[-1] ** -0.5)
    logits = logits.reshape(*grouped.shape[:3], keys.shape[1])
    if hidden is not None:
        logits = logits.masked_fill_(hidden, float("-inf"))
    if gqa == "max_logit":
        logits = logits.amax(1, keepdim=True)
    probs = torch.softmax(logits, -1)
    if hidden is not None:
        # A query that sees no key gives no mass; its softmax alone would be NaN.
        probs = probs.masked_fill_(torch.isneginf(logits), 0.0)
    return probs.mean(2) if n else probs.new_zeros(*probs.shape[:2], probs.shape[3])


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """Return all dot products [heads, n, tokens], float32; on a GPU of halves as they are."""
    halves = queries.dtype == keys.dtype and queries.dtype in (torch.bfloat16, torch.float16)
    if halves and queries.is_cuda and _SUMS_HALVES:
        return torch.bmm(queries, keys.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(queries.float(), keys.float().transpose(1, 2))


def _table(table: Tensor | None, sessions: int, device: torch.device) -> Tensor:
    """Return the table, or the one of a contiguous cache: session `s` has block `s`."""
    return torch.arange(sessions, device=device)[:, None] if table is None else table


def rotated(vectors: Tensor, shifts: Tensor, frequencies: Tensor, interleaved: bool) -> Tensor:
    """Turn the first `2 * len(frequencies)` channels of vectors [..., tokens, head_dim]."""
    # Angles in float64: positions reach 1e5, where float32 is off by more than logits allow.
    angles = shifts[..., None].double() * frequencies.double()
    cos, sin = angles.cos().float(), angles.sin().float()
    pairs = len(frequencies)
    whole = vectors.float()
    turning, rest = whole[..., : 2 * pairs], whole[..., 2 * pairs :]
    if interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, -1)
    both = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat((turned, rest), -1).to(vectors.dtype)


def _mean_cosines(units: Tensor, threshold: float) -> Tensor:
    """Column means of the cosines [heads, tokens, tokens], a block of rows at a time."""
    heads, tokens, _ = units.shape
    # Floats hold every index exactly and halve what the comparison below has to move.
    columns = torch.arange(tokens, device=units.device, dtype=torch.float32)
    total = torch.zeros(heads, tokens, device=units.device)
    size = max(1, BLOCK_BYTES.get(units.device.type, 4 << 20) // (4 * heads * max(1, tokens)))
    for first in range(0, tokens, size):
        cosines = units[:, first : first + size] @ units.transpose(1, 2)
        cosines.diagonal(first, 1, 2).zero_()
        spared = ((cosines > threshold) * columns).amax(-1, keepdim=True).long()
        total += cosines.scatter_(-1, spared, 0.0).sum(1)
    return total / tokens


def _sortable(scores: Tensor) -> Tensor:
    """Map scores to int64 of the same order: exact for float64, one zero, NaN below everything."""
    bits = (scores.double() + 0.0).view(torch.int64)
    ordered = bits ^ ((bits >> 63) & torch.iinfo(torch.int64).max)
    return ordered.masked_fill(torch.isnan(scores), torch.iinfo(torch.int64).min)


def _hole_moves(kept: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pair the kept rows past the new end with the holes before it: (row of kept, from, to)."""
    budget = kept.shape[1]
    is_kept = torch.zeros(kept.shape[0], length, dtype=torch.bool, device=kept.device)
    is_kept.scatter_(1, kept, True)
    row, hole = (~is_kept[:, :budget]).nonzero(as_tuple=True)
    _, late = is_kept[:, budget:].nonzero(as_tuple=True)
    return row, late + budget, hole


def _sorted_moves(kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every kept row whose index changes: (row of kept, from, to)."""
    index = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    row, slot = (kept != index).nonzero(as_tuple=True)
    return row, kept[row, slot], slot


def softmax_beside(logits: Tensor, sinks: Tensor) -> Tensor:
    """Return the softmax of logits [..., tokens] with one more logit in each row, the sink's.

    What the sink gets is left out: a row may sum to less than 1. `sinks` broadcast to [..., 1].
    """
    sinks = sinks.to(logits.dtype).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]


def _put_together(
    keys: Tensor, values: Tensor, before: Sequence[RowsBefore | None], longest: int
) -> tuple[Tensor, Tensor]:
    """Copy every session's rows behind those before them: [sessions, kv_heads, longest, d]."""
    both = []
    for own, part in ((keys, "keys"), (values, "values")):
        whole = own.new_zeros(*own.shape[:2], longest, own.shape[3])
        for session, rows in enumerate(before):
            first = 0 if rows is None else rows.keys.shape[1]
            if rows is not None:
                whole[session, :, :first] = getattr(rows, part)[:, :longest]
            count = min(longest - first, own.shape[2])
            whole[session, :, first : first + count] = own[session, :, :count]
        both.append(whole)
    return both[0], both[1]


def _beside(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, sinks: Tensor
) -> Tensor:
    """Attend under a mask [sessions, 1, n, rows], with sinks; [sessions, q_heads, n, head_dim]."""
    sessions, heads, n, head_dim = queries.shape
    kv_heads, rows = keys.shape[1:3]
    grouped = (queries * scaling).float().reshape(sessions, kv_heads, -1, head_dim)
    logits = (grouped @ keys.float().transpose(2, 3)).reshape(sessions, heads, n, rows)
    weights = softmax_beside(logits.masked_fill(~mask, float("-inf")), sinks[:, None, None])
    out = weights.to(values.dtype).reshape(sessions, kv_heads, -1, rows) @ values
    return out.reshape(queries.shape)
