"""Rows of one session, which lie in cells of llama.cpp's cache or outside of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from agentbench_kv.engines.llamacpp.server.blob import Blob
from agentbench_kv.engines.llamacpp.server.cells import PADDING, Cells


class SequenceRows:
    """Rows of one session, by ascending label: a `RowStore` of `engines.core.rows`.

    Three numbers belong to a row. Its *logical* position counts the tokens the session has ever
    seen; its *RoPE* position is what its key is rotated to; its *label* is the position llama.cpp
    knows of the cell. Labels only serve the mask (a query sees labels up to its own position), so
    they may differ from the other two, except that the largest must precede the next token's
    position.

    After a per-head compaction a row's heads hold different tokens, so that `rope` and `logical`
    mean nothing any more; cells and labels do.

    Rows from elsewhere, a memory's, may stand before its own: they have the first positions, and
    negative logical ones.

    A fork has its source's cells. To drop one or to decode behind them changes nothing for others;
    whoever writes to a cell, or gives it another label, copies it first if others have it.

    Sessions may begin with the rows of a *prefix*. They are in common as long as the cells are: an
    event leaves those alone that it keeps in every head.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self.sequence = -1  # llama.cpp's number; -1 while the rows are parked outside of the cache
        self.first = 0  # RoPE position of its first own token
        self._clear()

    def _clear(self) -> None:
        self.next = self.first  # RoPE position of the next token
        self._table = torch.zeros(4, 0, dtype=torch.int64)  # cells, labels, RoPE, logical
        self._stand_ins = False
        self._parked: list[Blob] | None = None  # the rows in common by themselves, then the others
        self.prefix: SequenceRows | None = None  # that it began with
        self._begun = 0  # how many of its first rows are still that
        self._came = 0  # rows in common as it was parked

    @property
    def cells(self) -> Tensor:
        return self._table[0]

    @property
    def labels(self) -> Tensor:
        return self._table[1]

    @property
    def rope(self) -> Tensor:
        return self._table[2]

    @property
    def logical(self) -> Tensor:
        return self._table[3]

    @property
    def live(self) -> int:
        """Rows held, in the cache or parked."""
        return self._table.shape[1]

    @property
    def resident(self) -> int:
        """Rows held in the cache."""
        return 0 if self._parked is not None else self.live

    @property
    def shared(self) -> int:
        """Rows in cells that other sessions have too."""
        return 0 if self._parked is not None else int((self._cells.holders[self.cells] > 1).sum())

    @property
    def common(self) -> int:
        """First rows that it has in common with others, of those that it began with.

        While it is parked: those that it will find again.
        """
        if self._parked is not None:
            return self._came if self.prefix is not None and self.prefix.live else 0
        held = self._cells.holders[self.cells[: self._begun]] > 1
        return int(held.cumprod(0).sum())

    @property
    def stand_ins(self) -> int:
        """Rows whose label is another one's; of sessions whose heads hold the same tokens."""
        return int((self.labels != self.rope).sum())

    def append(self, cells: Tensor, first_logical: int) -> None:
        """Add rows that a decode wrote at the next positions."""
        each = torch.arange(len(cells))
        places = self.next + each
        self._insert(self.live, cells, places, places, first_logical + each)
        self.next += len(cells)

    def _insert(self, row: int, *columns: Tensor) -> None:
        table = self._table
        self._cells.holders[columns[0]] += 1
        self._table = torch.cat([table[:, :row], torch.stack(columns), table[:, row:]], 1)

    def fork(self, sequence: int) -> SequenceRows:
        """Return the rows of a session that goes on from here, in the same cells.

        `sequence` is its own, -1 if there is none left: then it starts parked, with a copy.
        """
        twin = SequenceRows(self._cells)
        twin.next, twin._table, twin._stand_ins = self.next, self._table.clone(), self._stand_ins
        twin.first = self.first
        twin.prefix, twin._begun = self.prefix, self._begun
        twin._parked, twin._came = self._parked, self._came
        if self._parked is not None or not self.live:
            return twin
        if sequence < 0:
            twin._parked, twin._came = self._copies()
            return twin
        twin.sequence = sequence
        self._cells.context.share(self.sequence, sequence)
        self._cells.holders[self.cells] += 1
        return twin

    def begin_with(self, prefix: SequenceRows) -> None:
        """Have the rows of a prefix; it holds none yet."""
        self.next, self._table = prefix.next, prefix._table.clone()
        self.has_begun_with(prefix)
        self._join(prefix, prefix.live)

    def has_begun_with(self, prefix: SequenceRows) -> None:
        """Take in that the first rows, in the same cells already, are a prefix's."""
        self.prefix, self._begun = prefix, prefix.live

    def _join(self, prefix: SequenceRows, rows: int) -> None:
        """Have the cells of a prefix's first rows for one's own, which the table knows."""
        cells, end = prefix.cells[:rows], int(prefix.labels[rows - 1]) + 1
        self._cells.context.share(prefix.sequence, self.sequence, -1, end)
        self._cells.holders[cells] += 1
        self._table[0, :rows] = cells

    def begin_behind(self, rows: int) -> None:
        """Leave the first positions of a session that has none yet to rows from elsewhere."""
        self.first = self.next = rows

    def make_front(self) -> None:
        """Have rows before its own, in cells that nobody shares; what is in them is yet to come."""
        front = self.logical < 0
        if bool(front.any()) and int(self._cells.holders[self.cells[front]].max()) == 1:
            return
        self.drop(front)
        places = torch.arange(self.first)
        self.restore(Blob.blank(self._cells.form, places), places - self.first)

    def drop_front(self) -> None:
        """Let go of the rows before its own."""
        self.drop(self.logical < 0)

    def write_front(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write a layer's rows [kv_heads, first, head_dim] before its own."""
        self._cells.write(layer, self.cells[: self.first], keys, values)

    def read_own(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Copy some of its own tokens' keys and values, as `Cells.read` does."""
        own = (self.logical >= start) & (self.logical < end)
        return self._cells.read(self.cells[own])

    def park(self) -> None:
        """Move all rows out of the cache, to the last bit; what others share stays in it too."""
        if self.live:
            self._parked, self._came = self._copies()
            self._leave()
        self.sequence = -1

    def _copies(self) -> tuple[list[Blob], int]:
        """Copy all rows out of the cache: those in common by themselves, and how many they are."""
        common = self.common
        if common in (0, self.live):
            return [self._cells.save(self.sequence, [(-1, -1)])], common
        cut = int(self.labels[common])
        spans = [(-1, cut)], [(cut, -1)]
        return [self._cells.save(self.sequence, span) for span in spans], common

    def _leave(self) -> None:
        """Let go of all cells."""
        self._cells.context.remove(self.sequence)
        self._cells.holders[self.cells] -= 1

    def unpark(self, sequence: int) -> None:
        """Move all rows back, under another sequence."""
        self.sequence = sequence
        row, blobs = self.common, self._parked or []
        self._parked = None
        if self.prefix is not None and row:  # they are still there
            self._join(self.prefix, row)
            blobs = blobs[1:]
        for blob in blobs:
            # Rows of a blob are in the order of the cells they came from.
            cells = self._cells.load(sequence, blob)
            self._cells.holders[cells] += 1
            self._table[0, row : row + blob.tokens] = cells[blob.positions.argsort()]
            row += blob.tokens

    def free(self) -> None:
        if self.sequence >= 0:
            self._leave()
        self._clear()

    def keys(self, layer: int) -> Tensor:
        return self._cells.form.shape.in_halves(self._cells.keys[layer][:, self.cells])

    def values(self, layer: int) -> Tensor:
        return self._cells.values[layer][:, self.cells]

    def keep(self, kept: Tensor, positions: Tensor, extras: Sequence[Tensor], *, sort: bool) -> int:
        """Move the kept rows to the session's last cells and let go of the others.

        Rows in common that all heads keep stay where they are.
        """
        first = self._staying(kept)
        kept = kept[..., first:] - first
        self._own(first + self._written(kept, self.live - first, sort=sort))
        tensors = [tensor[..., first:] for tensor in (positions, *extras)]
        moved = self._cells.compact(self.cells[first:], kept, tensors, sort=sort)
        self.keep_last(kept.shape[-1], first)
        return moved

    def _staying(self, kept: Tensor) -> int:
        """Return how many rows in common there are, if ascending sets begin with all of them."""
        rows = self.common
        stay = 0 < rows < kept.shape[-1] and bool((kept[..., rows - 1] == rows - 1).all())
        return rows if stay else 0

    def keep_last(self, budget: int, first: int = 0) -> None:
        """Drop all rows but the first ones and those with the largest labels, the compacted."""
        rows = torch.arange(self.live)
        self._select((rows < first) | (rows >= self.live - budget))

    def _written(self, kept: Tensor, live: int, *, sort: bool) -> Tensor:
        """Return which rows a compaction writes to, in any head: places of others' tokens."""
        budget = kept.shape[-1]
        last = torch.arange(live - budget, live)
        if sort:
            stay = (kept == last).flatten(0, -2).all(0)
        else:
            stay = torch.bincount(kept.flatten(), minlength=live)[last] == kept[..., 0].numel()
        return last[~stay]

    def _own(self, rows: Tensor) -> None:
        """Move those of the rows whose cells others have too to cells of their own."""
        rows = rows[self._cells.holders[self.cells[rows]] > 1]
        if len(rows):
            self._put_back(rows, self.labels[rows])

    def _put_back(self, rows: Tensor, labels: Tensor) -> None:
        """Move rows, ascending, to free cells under other labels: no others in the session have.

        llama.cpp itself would turn the keys, and for everybody.
        """
        blob, left = self._save(rows), runs(self.labels[rows].tolist())
        self._begun = min(self._begun, int(rows[0]))
        blob.set_positions(labels)
        for start, end in left:
            self._cells.context.remove(self.sequence, start, end)
        self._cells.holders[self.cells[rows]] -= 1
        cells = self._cells.load(self.sequence, blob)
        self._cells.holders[cells] += 1
        self._table[0, rows], self._table[1, rows] = cells, labels

    def rotate(self, shifts: Tensor, frequencies: Tensor | None = None) -> None:  # noqa: ARG002
        """Turn the keys to the positions of their places, and number rows by them."""
        places = torch.arange(self.live)
        if self.live:
            self._put_back(places, places)
            self._cells.rotate(self.cells, shifts)
        self._table[1:3] = places
        self.next = self.live

    def drop(self, gone: Tensor) -> None:
        """Drop rows [live], bool."""
        self._select(~gone)
        self._anchor()

    def rewind(self, length: int) -> None:
        """Drop rows from logical position `length` on, and go on behind all that stay."""
        gone = self.logical >= length
        self.next = max([self.first + length, *(self.rope[~gone] + 1).tolist()])
        self.drop(gone)

    def save(self, chosen: Tensor) -> Blob:
        """Copy some rows [live], bool, out of the cache, by ascending label."""
        return self._save(chosen.nonzero()[:, 0])

    def _save(self, rows: Tensor) -> Blob:
        blob = self._cells.save(self.sequence, runs(self.labels[rows].tolist()))
        # Rows of a blob are in the order of the cells they came from.
        order = blob.positions.argsort()
        return blob if bool((order.diff() > 0).all()) else blob.reordered(order)

    def restore(self, blob: Blob, logical: Tensor) -> None:
        """Put the rows of tokens `logical` back at the blob's positions, neighbours and free."""
        rope = blob.positions
        if self._stand_ins:
            self._free_labels(rope)
        cells = self._cells.load(self.sequence, blob)
        first, end = int(rope[0]), int(rope[0]) + len(rope)
        behind = first >= self.next
        row = self.live if behind else int(torch.searchsorted(self.labels, first))
        self._insert(row, cells, rope, rope, logical)
        self.next = max(self.next, end)
        if not behind:
            self._anchor()

    def pack(self) -> None:
        """Turn every key to the position of its row in the cache, and number rows by it."""
        places = torch.arange(self.live)
        shape = self._cells.form.shape
        shifts = (places - self.rope).expand(shape.layers, shape.kv_heads, -1)
        self.rotate(shifts)

    def descend(self, slack: int = PADDING) -> None:
        """Move rows that lie far above as many cells as are used, and are nobody else's, down.

        A step's attention goes up to the highest cell that any session uses. Nothing is moved
        within `slack` cells.
        """
        cells = self.cells
        high = (cells >= self._cells.used + slack) & (self._cells.holders[cells] == 1)
        if bool(high.any()):
            rows = high.nonzero()[:, 0]
            self._put_back(rows, self.labels[rows])

    def _select(self, kept: Tensor) -> None:
        for start, end in runs(self.labels[~kept].tolist()):
            self._cells.context.remove(self.sequence, start, end)
        self._cells.holders[self.cells[~kept]] -= 1
        self._begun = int(kept[: self._begun].cumprod(0).sum())
        self._table = self._table[:, kept]

    def _anchor(self) -> None:
        """Let the last row stand in for a last position that has gone: llama.cpp goes on there."""
        if self.live and int(self.labels[-1]) != self.next - 1:
            self._relabel(self.live - 1, self.next - 1)
            self._stand_ins = True

    def _free_labels(self, wanted: Tensor) -> None:
        """Give rows their own labels back that stand in for one that returns."""
        for row in ((self.labels != self.rope) & torch.isin(self.labels, wanted)).nonzero():
            self._relabel(int(row), int(self.rope[row]))
        self._table = self._table[:, self.labels.argsort()]

    def _relabel(self, row: int, label: int) -> None:
        self._put_back(torch.tensor([row]), torch.tensor([label]))


def runs(labels: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as spans [start, end)."""
    spans: list[tuple[int, int]] = []
    for label in labels:
        if spans and spans[-1][1] == label:
            spans[-1] = (spans[-1][0], label + 1)
        else:
            spans.append((label, label + 1))
    return spans
