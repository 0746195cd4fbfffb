"""One session of the backend: its tokens, rows and accounting, and the generation that runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from agentbench_kv.engines.base import KVStats, Sampling
from agentbench_kv.engines.llamacpp.backend.cells import Cells
from agentbench_kv.engines.llamacpp.backend.rows import SequenceRows
from agentbench_kv.engines.llamacpp.backend.streams import Stream
from agentbench_kv.engines.sampling import Sampler
from agentbench_kv.engines.serving.backend.ledger import SessionLedger
from agentbench_kv.methods.base import Method

_clock = itertools.count(1)


class BackendSession:
    """State of one session."""

    def __init__(self, name: str, recipe: str, method: Method, cells: Cells, size: int) -> None:
        self.name = name
        self.recipe = recipe
        self.tokens: list[int] = []  # given or generated; the last ones may not be fed yet
        self.rows = SequenceRows(cells)
        self.ledger = SessionLedger(method, size)
        self.reserved = 0  # cells it may need before its turn ends
        self.generating = False  # admitted, and not ended
        self.used = 0  # rises with every turn: the smallest was not used for longest

    @property
    def pending(self) -> int:
        """Tokens that are not fed yet."""
        return len(self.tokens) - self.ledger.fed

    def begin_turn(self, prompt: int) -> None:
        """Start a turn whose prompt has `prompt` new tokens."""
        self.ledger.begin_turn(prompt)
        self.used = next(_clock)

    def fed(self, cells: Tensor) -> None:
        """Account for a forward that wrote the next tokens into `cells`."""
        self.rows.append(cells, self.ledger.fed)
        self.ledger.forward(len(cells))

    def lose(self) -> None:
        """Start over: everything must be computed again."""
        self.rows.free()
        self.ledger.lose()

    def stats(self) -> KVStats:
        snapshot = self.ledger.snapshot()
        snapshot.logical = len(self.tokens)
        return snapshot


class EventStore:
    """The rows of one session during an event, as `serving.backend.rows.RowStore`."""

    def __init__(self, cells: Cells, rows: SequenceRows) -> None:
        self._cells = cells
        self._rows = rows

    def read(self) -> tuple[Tensor, Tensor]:
        return self._cells.read(self._rows.cells)

    def keep(self, kept: Tensor, positions: Tensor, extras: Sequence[Tensor], *, sort: bool) -> int:
        """Move the kept rows to the session's last cells and let go of the others."""
        moved = self._cells.compact(self._rows.cells, kept, (positions, *extras), sort=sort)
        self._rows.keep_last(kept.shape[-1])
        return moved

    def rotate(self, shifts: Tensor, frequencies: Tensor) -> None:  # noqa: ARG002
        """Turn the keys to the positions of their rows, and number rows by them."""
        self._cells.rotate(self._rows.cells, shifts)
        self._rows.renumber()


class BackendGeneration:
    """A turn that runs: prompt tokens to feed, then tokens to sample."""

    def __init__(self, session: BackendSession, sampling: Sampling, stream: Stream) -> None:
        self.session = session
        self.sampling = sampling
        self.sampler = Sampler(sampling)
        self.stream = stream
        self.produced = 0

    def sample(self, logits: Tensor) -> int:
        """Pick the next token from logits [vocabulary]."""
        return int(logits.argmax()) if self.sampler.greedy else self.sampler.draw(logits)

    def push(self, token: int) -> bool:
        """Hand a token over; return whether the generation ends with it."""
        self.produced += 1
        sampling = self.sampling
        last = token in sampling.stop_token_ids or self.produced >= sampling.max_tokens
        last = last or (sampling.stop is not None and sampling.stop(token))
        self.stream.send({"token": token})
        return last
