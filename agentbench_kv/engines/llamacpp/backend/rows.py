"""One session's rows in the cache: which cells, under which labels, at which positions.

Three numbers belong to a row. Its *logical* position counts the tokens the session has ever seen;
its *RoPE* position is what its key is rotated to; its *label* is the position llama.cpp knows of
the cell. Labels only serve the mask (a query sees labels up to its own position), so they may
differ from the other two, except that the largest must precede the next token's position.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from agentbench_kv.engines.llamacpp.backend.blob import Blob
from agentbench_kv.engines.llamacpp.backend.cells import Cells


class SequenceRows:
    """Rows of one session, by ascending label.

    After a per-head compaction a row's heads hold different tokens, so that `rope` and `logical`
    mean nothing any more; cells and labels do.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self.sequence = -1  # llama.cpp's number; -1 while the rows are parked outside of the cache
        self._clear()

    def _clear(self) -> None:
        self.next = 0  # RoPE position of the next token
        self._table = torch.zeros(4, 0, dtype=torch.int64)  # cells, labels, RoPE, logical
        self._stand_ins = False
        self._parked: Blob | None = None

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

    def append(self, cells: Tensor, first_logical: int) -> None:
        """Add rows that a decode wrote at the next positions."""
        each = torch.arange(len(cells))
        places = self.next + each
        self._insert(self.live, cells, places, places, first_logical + each)
        self.next += len(cells)

    def _insert(self, row: int, *columns: Tensor) -> None:
        table = self._table
        self._table = torch.cat([table[:, :row], torch.stack(columns), table[:, row:]], 1)

    def park(self) -> None:
        """Move all rows out of the cache, to the last bit."""
        if self.live:
            self._parked = self._cells.save(self.sequence, [(-1, -1)])
            self._cells.context.remove(self.sequence)
        self.sequence = -1

    def unpark(self, sequence: int) -> None:
        """Move all rows back, under another sequence."""
        self.sequence = sequence
        blob, self._parked = self._parked, None
        if blob is not None:
            # Rows of a blob are in the order of the cells they came from.
            cells = self._cells.load(sequence, blob)
            self._table[0] = cells[blob.positions.argsort()]

    def free(self) -> None:
        """Give all cells back."""
        if self.sequence >= 0:
            self._cells.context.remove(self.sequence)
        self._clear()

    def keep_last(self, budget: int) -> None:
        """Drop all rows but those with the largest labels, which a compaction filled."""
        self._select(torch.arange(self.live) >= self.live - budget)

    def drop(self, gone: Tensor) -> None:
        """Drop rows [live], bool."""
        self._select(~gone)
        self._anchor()

    def save(self, chosen: Tensor) -> Blob:
        """Copy some rows [live], bool, out of the cache, by ascending label."""
        return self._sorted(self._cells.save(self.sequence, runs(self.labels[chosen].tolist())))

    def restore(self, blob: Blob, logical: Tensor) -> None:
        """Put rows back at the positions the blob names, neighbours that no row has.

        `logical` [tokens] says which of the session's tokens they are.
        """
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
        self._cells.rotate(self.cells, shifts)
        self.renumber()

    def renumber(self) -> None:
        """Give rows the positions of their places; their keys are turned to them already."""
        places = torch.arange(self.live)
        if self.live:
            blob = self._sorted(self._cells.save(self.sequence, [(-1, -1)]))
            blob.set_positions(places)
            self._cells.context.remove(self.sequence)
            self._table[0] = self._cells.load(self.sequence, blob)
        self._table[1:3] = places
        self.next = self.live

    def _select(self, kept: Tensor) -> None:
        for start, end in runs(self.labels[~kept].tolist()):
            self._cells.context.remove(self.sequence, start, end)
        self._table = self._table[:, kept]

    def _anchor(self) -> None:
        """Let the last row stand in for the one before the next position, if that has gone.

        llama.cpp goes on from the largest label only.
        """
        if self.live and int(self.labels[-1]) != self.next - 1:
            self._move_label(self.live - 1, self.next - 1)
            self._stand_ins = True

    def _free_labels(self, wanted: Tensor) -> None:
        """Give rows their own labels back that stand in for one that returns."""
        for row in ((self.labels != self.rope) & torch.isin(self.labels, wanted)).nonzero():
            self._move_label(int(row), int(self.rope[row]))
        self._table = self._table[:, self.labels.argsort()]

    def _move_label(self, row: int, new: int) -> None:
        """Put one row under another label; llama.cpp would rotate its key, so it is copied."""
        old = int(self.labels[row])
        blob = self._cells.save(self.sequence, [(old, old + 1)])
        blob.set_positions(torch.tensor([new]))
        self._cells.context.remove(self.sequence, old, old + 1)
        self._table[0, row] = self._cells.load(self.sequence, blob)[0]
        self._table[1, row] = new

    def _sorted(self, blob: Blob) -> Blob:
        order = blob.positions.argsort()
        return blob if bool((order.diff() > 0).all()) else blob.reordered(order)


def runs(labels: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as spans [start, end)."""
    spans: list[tuple[int, int]] = []
    for label in labels:
        if spans and spans[-1][1] == label:
            spans[-1] = (spans[-1][0], label + 1)
        else:
            spans.append((label, label + 1))
    return spans
