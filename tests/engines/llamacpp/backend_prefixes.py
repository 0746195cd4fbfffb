"""A walk over rows that begin with a prefix, with the interpreter of the backend's environment.

`python backend_prefixes.py FOLDER SEED STEPS` does random things to sessions that share one, and
ends with an AssertionError where a byte of another session's changes, rows come back as others, or
cells are held wrongly. Prints JSON: how often each thing was done.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from agentbench_kv.engines.llamacpp.gguf import TINY, make_model
from agentbench_kv.engines.llamacpp.server.cells import Cells
from agentbench_kv.engines.llamacpp.server.context import Context, DecodeBatch
from agentbench_kv.engines.llamacpp.server.rows import SequenceRows

LAYERS, KV_HEADS = TINY.num_hidden_layers, TINY.num_key_value_heads
SEQUENCES, PREFIX = 6, 24
Bytes = tuple[torch.Tensor, torch.Tensor]


class Walk:
    """Sessions of one context, one of them the prefix, and what their rows have to be."""

    def __init__(self, model: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.row_type = self.draw.choice([0, 1])
        sizes = {"cells": 1024, "sequences": SEQUENCES + 2, "batch": 128}
        self.context = Context(
            model, **sizes, row_type=self.row_type, flash=self.draw.random() < 0.5
        )
        self.cells = Cells(self.context)
        self.free = list(range(SEQUENCES))
        self.done: Counter[str] = Counter()
        self.parked: dict[SequenceRows, Bytes] = {}
        self.mixed: set[SequenceRows] = set()  # whose heads keep different tokens
        first = SequenceRows(self.cells)
        first.sequence = self.free.pop()
        self.feed(first, PREFIX)
        self.prefix = first.fork(SEQUENCES)
        first.has_begun_with(self.prefix)
        self.sessions = [first]
        self.bytes = {first: self.read(first), self.prefix: self.read(self.prefix)}

    def read(self, rows: SequenceRows) -> Bytes:
        keys, values = self.cells.read(rows.cells)
        return keys.clone(), values.clone()

    def feed(self, rows: SequenceRows, count: int) -> None:
        tokens = [self.draw.randrange(TINY.vocab_size) for _ in range(count)]
        places, sequences = list(range(rows.next, rows.next + count)), [rows.sequence] * count
        first = int(rows.logical[-1]) + 1 if rows.live else 0
        self.context.decode(DecodeBatch(tokens, places, sequences, []))
        rows.append(self.context.watch.cells(), first)

    def step(self) -> None:
        resident = [each for each in self.sessions if each not in self.parked]
        things: dict[str, Callable[[], SequenceRows | None]] = {}
        if self.free and self.prefix.live:
            things["begin"] = self.begin
        if self.free and self.parked:
            things["unpark"] = self.unpark
        if self.parked:
            things["fork a parked one"] = self.fork_parked
        if self.prefix.live and self.draw.random() < 0.1:
            things["drop the prefix"] = self.drop_prefix
        if resident:
            one = self.draw.choice(resident)
            things |= {
                "feed": lambda: self.fed(one),
                "park": lambda: self.park(one),
            }
            if len(resident) > 1:
                things["close"] = lambda: self.close(one)
            if self.free and one.live:
                things["fork"] = lambda: self.fork(one)
            if one.live > 6:
                for each in (
                    self.rewind,
                    self.evict,
                    self.pack,
                    self.descend,
                    self.keep,
                    self.keep,
                ):
                    things[each.__name__] = lambda each=each: each(one)  # type: ignore[misc]
                if one not in self.mixed:
                    things["bring back"] = lambda: self.bring_back(one)
        name = self.draw.choice(sorted(things))
        self.done[name] += 1
        changed = things[name]()
        if changed is not None:
            self.bytes[changed] = self.read(changed)
        self.check(name)

    def begin(self) -> SequenceRows:
        rows = SequenceRows(self.cells)
        rows.sequence = self.free.pop()
        rows.begin_with(self.prefix)
        self.sessions.append(rows)
        self.same("begin", rows, self.bytes[self.prefix])
        return rows

    def unpark(self) -> SequenceRows:
        rows = self.draw.choice(sorted(self.parked, key=self.sessions.index))
        common = rows.common
        rows.unpark(self.free.pop())
        assert rows.common == common
        self.same("unpark", rows, self.parked.pop(rows))
        return rows

    def drop_prefix(self) -> None:
        del self.bytes[self.prefix]
        self.prefix.free()

    def fed(self, rows: SequenceRows) -> SequenceRows:
        self.feed(rows, self.draw.randint(1, 20))
        return rows

    def park(self, rows: SequenceRows) -> None:
        self.parked[rows] = self.bytes.pop(rows)
        self.free.append(rows.sequence)
        rows.park()

    def close(self, rows: SequenceRows) -> None:
        self.sessions.remove(rows)
        del self.bytes[rows]
        self.free.append(rows.sequence)
        rows.free()

    def fork(self, rows: SequenceRows) -> SequenceRows:
        outside = self.draw.random() < 0.3
        twin = rows.fork(-1 if outside else self.free.pop())
        self.sessions.append(twin)
        if rows in self.mixed:
            self.mixed.add(twin)
        if outside:
            self.parked[twin] = self.bytes[rows]
            return rows
        self.same("fork", twin, self.bytes[rows])
        return twin

    def fork_parked(self) -> None:
        rows = self.draw.choice(sorted(self.parked, key=self.sessions.index))
        twin = rows.fork(-1)
        assert twin.common == rows.common
        self.sessions.append(twin)
        self.parked[twin] = self.parked[rows]
        if rows in self.mixed:
            self.mixed.add(twin)

    def rewind(self, rows: SequenceRows) -> SequenceRows:
        rows.rewind(self.draw.randint(1, int(rows.logical.max()) + 1))
        return rows

    def evict(self, rows: SequenceRows) -> SequenceRows:
        start = self.draw.randrange(rows.live - 2)
        gone = torch.zeros(rows.live, dtype=torch.bool)
        gone[start : start + self.draw.randint(1, 9)] = True
        keys, values = self.bytes[rows]
        rows.drop(gone)
        self.same("evict", rows, (keys[:, :, ~gone], values[:, :, ~gone]))
        return rows

    def bring_back(self, rows: SequenceRows) -> SequenceRows:
        """Evict tokens, and put them back where they were."""
        start = self.draw.randrange(rows.live - 2)
        gone = torch.zeros(rows.live, dtype=torch.bool)
        gone[start : start + self.draw.randint(1, 5)] = True
        if bool((rows.rope[gone].diff() != 1).any()):
            return rows
        logical, blob = rows.logical[gone], rows.save(gone)
        rows.drop(gone)
        rows.restore(blob, logical)
        self.same("bring back", rows, self.bytes[rows])
        return rows

    def pack(self, rows: SequenceRows) -> SequenceRows:
        values = self.bytes[rows][1]
        rows.pack()
        assert bool(torch.equal(self.read(rows)[1], values))
        return rows

    def descend(self, rows: SequenceRows) -> SequenceRows:
        table, shared = rows._table[1:].clone(), rows.shared
        rows.descend(0)
        self.same("descend", rows, self.bytes[rows])
        assert bool(torch.equal(rows._table[1:], table))
        assert rows.shared == shared
        return rows

    def keep(self, rows: SequenceRows) -> SequenceRows:
        """Keep the last rows and others, perhaps with all that are in common, in every head."""
        self.mixed.add(rows)
        last = self.draw.randint(1, rows.live // 3)
        first = rows.common if self.draw.random() < 0.7 and rows.common < rows.live - last else 0
        middle = range(first, rows.live - last)
        more = self.draw.randint(0, len(middle))
        heads = [
            [*range(first), *sorted(self.draw.sample(middle, more)), *range(rows.live)[-last:]]
            for _ in range(LAYERS * KV_HEADS)
        ]
        kept = torch.tensor(heads).view(LAYERS, KV_HEADS, -1)
        common, cells = rows.common, rows.cells[:first].tolist()
        places = torch.arange(rows.live).expand(LAYERS, KV_HEADS, -1).clone()
        sort = self.draw.random() < 0.5
        keys, values = self.bytes[rows]
        rows.keep(kept, places, [], sort=sort)
        places = places[..., : kept.shape[-1]]
        assert bool(torch.equal(places.sort(-1).values, kept))
        order = places[..., None].expand(-1, -1, -1, keys.shape[-1])
        self.same("keep", rows, (keys.gather(2, order), values.gather(2, order)))
        if first and first == common:
            assert rows.cells[:first].tolist() == cells
            assert rows.common == common
        return rows

    def same(self, what: str, rows: SequenceRows, expected: Bytes) -> None:
        found = self.read(rows)
        assert all(map(torch.equal, found, expected)), what

    def check(self, name: str) -> None:
        """Check all that a step must have left as it was, and who holds which cell."""
        held: Counter[int] = Counter()
        for rows, expected in self.bytes.items():
            self.same(f"after {name}", rows, expected)
            held.update(rows.cells.tolist())
            assert bool((rows.labels.diff() > 0).all()), name
            common = rows.common
            assert int((self.cells.holders[rows.cells[:common]] < 2).sum()) == 0, name
            if rows is not self.prefix and self.prefix.live:
                assert rows.cells[:common].tolist() == self.prefix.cells[:common].tolist(), name
        assert {i: n for i, n in enumerate(self.cells.holders.tolist()) if n} == held, name


def main() -> None:
    folder, seed, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    model = make_model(folder / "tiny.gguf", TINY)
    torch.set_num_threads(1)
    done: Counter[str] = Counter()
    with torch.inference_mode():
        for number in range(seed, seed + 12):
            walk = Walk(model, number)
            for _ in range(steps):
                walk.step()
            done.update(walk.done)
            walk.context.close()
    sys.stdout.write(json.dumps(done) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
