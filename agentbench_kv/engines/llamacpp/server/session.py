"""A session of the server, the turn that runs in it, and the connection its tokens go to."""

from __future__ import annotations

import itertools
import json
import socketserver
import threading
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from agentbench_kv.engines.base import KVStats, Sampling
from agentbench_kv.engines.core.ledger import SessionLedger
from agentbench_kv.engines.core.memory import SessionMemory
from agentbench_kv.engines.llamacpp.server.cells import Cells
from agentbench_kv.engines.llamacpp.server.rows import SequenceRows
from agentbench_kv.engines.sampling import Sampler
from agentbench_kv.methods.base import Method
from agentbench_kv.phases.machine import PromptPhases

PREFILL_CHUNK = 512
_clock = itertools.count(1)


class BackendSession:
    """Tokens, rows and accounting of one session."""

    def __init__(self, name: str, method: Method, cells: Cells, size: int) -> None:
        self.name = name
        self._method = method
        self.prompt = PromptPhases()
        self.tokens: list[int] = []  # given or generated; the last ones may not be fed yet
        self.rows = SequenceRows(cells)
        self.memory: SessionMemory | None = None
        self._to_look_at = 0  # tokens that are read twice for it
        self.mark = object()  # tells its rows in a memory bank from others'
        self.ledger = SessionLedger(method, size)
        self.drawn = 0  # how many of the tokens to feed are an answer's, if several are given
        self.reserved = 0  # rows it may come to hold before its turn ends
        self.generating = False  # admitted, and not ended
        self.used = 0  # rises with every turn: the smallest was not used for longest
        # Tokens and phases of the rows that it may share, until it has begun; None: it shares none.
        self.prefix_key: bytes | None = None
        self.prefix_tokens = 0
        self.computes_prefix = False  # for the sessions that need it, too

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.ledger.fed

    def begin_turn(self, prompt: int) -> None:
        self.ledger.opens_with(self.prompt.prompt, self.prompt.system)
        memory, passes = self.memory, 1
        if memory is not None and prompt:
            memory.begin()
            passes = memory.passes
            if memory.looking:
                self._to_look_at = self.pending
        self.ledger.begin_turn(prompt, passes)
        self.drawn = 0
        self.used = next(_clock)

    def attach(self, memory: SessionMemory) -> None:
        """Make room before the session's own rows for what its prompts bring back."""
        self.memory = memory
        self.rows.begin_behind(memory.rows)
        self.ledger.restore(memory.rows)

    @property
    def next_rows(self) -> int:
        """How many tokens the next forward is fed: a prefix ends with one."""
        rows = min(self.pending, PREFILL_CHUNK)
        return min(rows, self.prefix_tokens - self.ledger.fed) if self.computes_prefix else rows

    @property
    def rows_elsewhere(self) -> int:
        """Rows in common with others that it will never have to copy."""
        return self.leaves_prefix(self.rows.common)

    def leaves_prefix(self, rows: int) -> int:
        """Return so many first rows if nothing that falls due changes them, else none."""
        method = self._method
        kept = not method.compresses or self.ledger.protects(rows)
        return rows if kept and method.positions != "cache" else 0

    def begin_with(self, prefix: BackendSession) -> None:
        """Go on from a prefix, as if it had been fed; it has a sequence, and no rows yet."""
        self.rows.begin_with(prefix.rows)
        self.ledger.find(prefix.ledger.fed, prefix.ledger.fed)
        self.prefix_key = None

    def leave_prefix(self, name: str, sequence: int) -> BackendSession:
        """Return what was fed as a prefix, which others begin with."""
        self.prefix_key, self.computes_prefix = None, False
        prefix = self.fork(name, sequence)
        del prefix.tokens[prefix.ledger.fed :]
        self.rows.has_begun_with(prefix.rows)
        return prefix

    @property
    def positions_taken(self) -> int:
        """RoPE positions before the session's own, which a memory's rows have."""
        return self.rows.first

    @property
    def looking(self) -> bool:
        """Whether what it is fed next is only looked at, and comes again."""
        return self.memory is not None and self.memory.looking

    @property
    def recalls(self) -> bool:
        """Whether the next forward is to ask its memory."""
        return self.memory is not None and self.memory.due

    def before_forward(self) -> None:
        """Have cells for what a prompt brings back, and none while it is looked at."""
        if self.recalls:
            (self.rows.drop_front if self.looking else self.rows.make_front)()

    def ask(self, layer: int, queries: Tensor, first: int) -> None:
        """Have the memory take in, or bring back, what a layer's queries need.

        Queries [q_heads, n, head_dim], RoPE pairs half a head apart, are at positions from `first`.
        """
        if self.memory is None:
            return
        self.memory.ask(layer, queries, first)
        if not self.memory.looking:
            self.rows.write_front(layer, *self.memory.front(layer))

    def fork(self, name: str, sequence: int) -> BackendSession:
        """Return a session that goes on from here; see `SequenceRows.fork`."""
        twin = copy(self)
        twin.name, twin.tokens, twin.used = name, self.tokens.copy(), next(_clock)
        twin.rows, twin.ledger = self.rows.fork(sequence), self.ledger.fork()
        twin.memory = None if self.memory is None else self.memory.fork()
        twin.mark = object()
        return twin

    def add_drawn(self, tokens: list[int]) -> None:
        """Add an answer's tokens behind the one to feed; no event may fall due with any of them."""
        self.tokens += tokens
        self.drawn = self.pending

    def fed(self, cells: Tensor) -> None:
        self.rows.append(cells, self.ledger.fed)
        if self.drawn:
            self.ledger.forward_drawn(len(cells))
            self.drawn = 0
        else:
            self.ledger.forward(len(cells))

    def looked(self) -> int | None:
        """Take in that a forward is over; return where to go on if the prompt is to come again."""
        memory = self.memory
        if memory is None or not memory.due:
            return None
        if not memory.looking:
            memory.due = False
        elif not self.pending:
            memory.choose()
            self.ledger.read_again(self._to_look_at)
            self.rows.rewind(self.ledger.fed)
            return self.ledger.fed
        return None

    def rewind(self, length: int) -> None:
        """Forget the tokens from logical position `length` on; its rows are in the cache."""
        del self.tokens[length:]
        if length < self.ledger.fed:
            self.rows.rewind(length)
        self.ledger.rewind(length, self.rows.live)

    def lose(self) -> None:
        """Start over: everything must be computed again."""
        self.rows.free()
        self.ledger.lose()
        if self.memory is not None:
            self.ledger.restore(self.memory.rows)

    def stats(self) -> KVStats:
        snapshot = self.ledger.snapshot()
        snapshot.logical, snapshot.shared = len(self.tokens), self.rows.common
        return snapshot


class Stream:
    """A connection, written by the scheduler's thread and read by its own.

    The harness sends a request and gets a line for every token. Where only the caller knows when to
    stop, the request is *stepwise*: the harness asks for each token with a line of its own, and the
    backend never feeds a token that the caller did not want.
    """

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self.stepwise = False
        self.ready = True  # the harness waits for the next token
        self.closed = False  # the harness has hung up
        self.ended = threading.Event()  # there is no more to write

    def send(self, document: dict[str, Any]) -> None:
        """Write one line; a connection that is gone is noted, not raised."""
        with self._lock:
            self.ready = not self.stepwise
            try:
                self._write(json.dumps(document).encode() + b"\n")
            except OSError:
                self.closed = True

    def end(self) -> None:
        self.send({"done": True})
        self.ended.set()

    def fail(self, error: Exception) -> None:
        self.send({"error": {"kind": type(error).__name__, "message": str(error)}})
        self.ended.set()

    def asked(self) -> None:
        with self._lock:
            self.ready = True


class StreamServer(socketserver.ThreadingUnixStreamServer):
    """Takes generations over a Unix socket, one connection each, on threads of its own.

    `start` takes a request and its stream, and what it raises ends the stream; `wake` tells the
    scheduler that a stream has changed.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(
        self, path: Path, start: Callable[[dict[str, Any], Stream], None], wake: Callable[[], None]
    ) -> None:
        path.unlink(missing_ok=True)
        super().__init__(str(path), _StreamHandler)
        self.start_generation = start
        self.wake = wake
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _StreamHandler(socketserver.StreamRequestHandler):
    server: StreamServer

    def handle(self) -> None:
        stream = Stream(self.wfile.write)
        try:
            self.server.start_generation(json.loads(self.rfile.readline()), stream)
        except Exception as error:  # noqa: BLE001  the harness is told
            stream.fail(error)
        for _ in self.rfile:
            stream.asked()
            self.server.wake()
        stream.closed = True
        self.server.wake()
        # Who hung up may still wait to hear that the session is at rest.
        stream.ended.wait()


@dataclass(eq=False)
class BackendGeneration:
    """A turn that runs: prompt tokens to feed, then tokens to sample."""

    session: BackendSession
    sampling: Sampling
    stream: Stream
    given: deque[int] = field(default_factory=deque)  # tokens to be taken as drawn
    predict: bool = False  # whether to say what would have been drawn instead
    stretch: list[int] = field(default_factory=list)  # those of them fed with the next forward
    produced: int = 0
    best: deque[int] = field(default_factory=deque)  # of the tokens to hand over, if asked for

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.sampling)

    def draw(self, logits: Tensor) -> int:
        """Return what comes next: the token that is given, or one of the model's."""
        return self.given.popleft() if self.given else self.sampler.draw(logits)

    def take_stretch(self, most: int) -> None:
        """Have the next forward take given tokens at once up to one with which an event falls due.

        Until then the cache only grows, so that one forward says of each what a decode would.
        """
        left = len(self.given)
        rows = min(self.session.ledger.quiet(left) + 1, left, most)
        self.stretch = [self.given.popleft() for _ in range(rows - 1)]
        self.session.add_drawn(self.stretch)

    def rows_wanted(self, end: int) -> range:
        """Return the rows whose predictions are asked for, of those that end before `end`."""
        return range(end - 1 - len(self.stretch) * self.predict, end)

    def note_best(self, logits: Tensor) -> None:
        """Take what the last rows of a forward predict, which are this generation's."""
        if self.predict:
            self.best.extend(logits[-len(self.rows_wanted(0)) :].argmax(-1).tolist())

    def hand_over_stretch(self) -> None:
        """Hand over the tokens that a forward took besides."""
        for token in self.stretch:
            self.push(token)
        self.stretch = []

    def push(self, token: int) -> bool:
        """Hand a token over; return whether the generation ends with it."""
        self.produced += 1
        last = self.sampling.ends(token, self.produced) is not None
        best = {"best": self.best.popleft()} if self.predict else {}
        self.stream.send({"token": token, **best})
        return last
