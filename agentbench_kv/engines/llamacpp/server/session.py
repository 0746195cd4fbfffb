"""One session of the backend: its tokens, rows and accounting, and the generation that runs.

Streams of generated tokens over a Unix socket, one connection each.

The harness sends a request and gets a line for every token. Where only the caller knows when to
stop, the request is *stepwise*: the harness asks for each token with a line of its own, and the
backend never feeds a token that the caller did not want.
"""

from __future__ import annotations

import itertools
import json
import socketserver
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from agentbench_kv.engines.base import KVStats, Sampling
from agentbench_kv.engines.core.session import SessionLedger
from agentbench_kv.engines.llamacpp.server.rows import Cells, SequenceRows
from agentbench_kv.engines.sampling import Sampler
from agentbench_kv.methods.base import Method
from agentbench_kv.phases.machine import PromptPhases


class Stream:
    """One connection, written by the scheduler's thread and read by its own."""

    def __init__(self, write: Callable[[bytes], Any], wake: Callable[[], None]) -> None:
        self._write = write
        self._wake = wake
        self._lock = threading.Lock()
        self.stepwise = False
        self.ready = True  # the harness waits for the next token
        self.closed = False  # the harness has hung up
        self.ended = threading.Event()

    def send(self, document: dict[str, Any]) -> None:
        """Write one line; a connection that is gone is noted, not raised."""
        with self._lock:
            self.ready = not self.stepwise
            try:
                self._write(json.dumps(document).encode() + b"\n")
            except OSError:
                self.closed = True

    def finish(self, document: dict[str, Any]) -> None:
        """Write the last line."""
        self.send(document)
        self.ended.set()

    def asked(self) -> None:
        """Say that the harness wants the next token."""
        with self._lock:
            self.ready = True
        self._wake()

    def hung_up(self) -> None:
        """Say that the harness is gone."""
        self.closed = True
        self._wake()


class StreamServer:
    """Takes generations on threads of its own.

    `start` takes a request and its stream, and what it raises ends the stream; `wake` tells the
    scheduler that a stream has changed.
    """

    def __init__(
        self, path: Path, start: Callable[[dict[str, Any], Stream], None], wake: Callable[[], None]
    ) -> None:
        path.unlink(missing_ok=True)
        self._server = _Server(str(path), _Connection)
        self._server.start_generation = start
        self._server.wake = wake
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 1024
    start_generation: Callable[[dict[str, Any], Stream], None]
    wake: Callable[[], None]


class _Connection(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        stream = Stream(self.wfile.write, self.server.wake)
        try:
            self.server.start_generation(json.loads(self.rfile.readline()), stream)
        except Exception as error:  # noqa: BLE001  the harness is told
            stream.finish(error_document(error))
        for _ in self.rfile:
            stream.asked()
        stream.hung_up()


def error_document(error: Exception) -> dict[str, Any]:
    """Return what the harness is told of an error."""
    return {"error": {"kind": type(error).__name__, "message": str(error)}}


_clock = itertools.count(1)


class BackendSession:
    """State of one session."""

    def __init__(self, name: str, method: Method, cells: Cells, size: int) -> None:
        self.name = name
        self.prompt = PromptPhases()
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
