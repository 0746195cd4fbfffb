"""The server's process: what it answers about sessions, spans of them and the model."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentbench_kv import __version__
from agentbench_kv.engines.base import KVStats, Sampling
from agentbench_kv.engines.core.control import ControlServer
from agentbench_kv.engines.core.grammar import GrammarVocabulary
from agentbench_kv.engines.core.host import follow_parent
from agentbench_kv.engines.core.policy import BackendPolicy
from agentbench_kv.engines.core.prefixes import PREFIXES
from agentbench_kv.engines.core.rings import span_attention
from agentbench_kv.engines.llamacpp.models import KV_ROW_TYPES, ROW_TYPES
from agentbench_kv.engines.llamacpp.server import library
from agentbench_kv.engines.llamacpp.server.blob import Blob
from agentbench_kv.engines.llamacpp.server.context import Context
from agentbench_kv.engines.llamacpp.server.memory import MemoryCommands, past_files
from agentbench_kv.engines.llamacpp.server.rows import SequenceRows
from agentbench_kv.engines.llamacpp.server.scheduler import STEP_TOKENS, BatchScheduler
from agentbench_kv.engines.llamacpp.server.session import BackendSession, Stream, StreamServer
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.methods.memory.files import PastFiles
from agentbench_kv.methods.spans import SpanRange, check_whole_tokens, within

SETTINGS = "KVBENCH_LLAMACPP"  # environment variable with the settings as JSON
PART = 4096  # rows that are float32 at the same time


@dataclass(frozen=True)
class Settings:
    """What the server is started with, besides its `BackendPolicy`."""

    model: str  # GGUF file
    stream: str  # Unix socket for generations
    dtype: str  # of cached rows
    cells: int  # cached tokens of all sessions together
    sessions: int  # that generate at once
    context_limit: int = 0  # of a session; 0 for what the file says
    kv_dtype: str = ""  # of cached rows, where it is not `dtype`
    flash: bool = False  # see `Context`
    banks: str = ""  # folder for what memories read of the past; empty: none is kept
    sha: str = ""  # of the model
    tokenizer: str = ""  # `tokenizer.json`, for grammars
    ends: Sequence[int] = ()  # ids that end a turn
    threads: int = 1  # that compute


class Backend:
    """Answers the harness."""

    def __init__(self, settings: Settings, policy: BackendPolicy) -> None:
        self._folder = Path(settings.stream).parent
        self._policy = policy
        context = Context(
            Path(settings.model),
            cells=settings.cells,
            # One for every session that generates, some that rest, prefixes, and a scratch one.
            sequences=2 * (settings.sessions + PREFIXES + 1) + 2,
            row_type={**ROW_TYPES, **KV_ROW_TYPES}[settings.kv_dtype or settings.dtype],
            flash=settings.flash,
            batch=STEP_TOKENS,
            context_limit=settings.context_limit,
            threads=settings.threads,
        )
        self.scheduler = BatchScheduler(context, policy)
        self._spans = SpanCommands(self.scheduler)
        self._memories = MemoryCommands(self.scheduler, _past_files(settings, self.scheduler))
        self._settings = settings
        self._embeddings = Embeddings(Path(settings.model))
        self._files = 0

    def commands(self) -> Mapping[str, Callable[[Mapping[str, Any]], Any]]:
        """Return what the control channel answers; `call` works on the scheduler's thread."""
        scheduler, spans, call = self.scheduler, self._spans, self.scheduler.call
        return {
            "ping": lambda _: True,
            "stats": lambda r: _plain(call(lambda: scheduler.stats(r["session"]))),
            "close": lambda r: _plain(call(lambda: scheduler.close_session(r["session"]))),
            "pool": lambda _: call(scheduler.pool),
            "save_block": self._save,
            "evict_spans": lambda r: call(lambda: spans.evict(r["session"], r["spans"])),
            "restore_block": self._restore,
            "span_attention": lambda r: call(
                lambda: spans.attention(r["session"], r["spans"], r["layers"], r["decay"])
            ),
            "fork": lambda r: call(lambda: scheduler.fork(r["session"], r["new"])),
            "drop_prefixes": lambda _: call(scheduler.drop_prefixes),
            "rewind": lambda r: call(lambda: scheduler.rewind(r["session"], r["length"])),
            "embed_tokens": lambda r: self._embeddings.rows(r["tokens"]),
            **self._memories.handlers(),
            "configure": self._configure,
        }

    def start(self, request: dict[str, Any], stream: Stream) -> None:
        texts, chosen = request["stop"], request["sampling"]
        stop = None if texts is None else self._policy.stop_matcher(texts)
        ends = frozenset(chosen["stop_token_ids"])
        grammar = request["grammar"]
        held = None if grammar is None else self._vocabulary.constraint(grammar)
        more = {"stop_token_ids": ends, "stop": stop, "constraint": held}
        sampling = Sampling(**{**chosen, **more})
        self.scheduler.start(request, sampling, stream)

    @cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        document = Path(self._settings.tokenizer).read_text("utf-8")
        return GrammarVocabulary(document, self._settings.ends)

    def _configure(self, request: Mapping[str, Any]) -> None:
        policy = self._policy.with_method(request["method"])
        self.scheduler.call(lambda: self.scheduler.configure(policy))

    def _save(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Save a block; its bytes go through a file, whose reader deletes it."""
        at, data = self.scheduler.call(
            lambda: self._spans.save(request["session"], request["start"], request["end"])
        )
        self._files += 1
        path = self._folder / f"block-{self._files}.saved"
        path.write_bytes(data)
        return {"at": at, "path": str(path)}

    def _restore(self, request: Mapping[str, Any]) -> None:
        path = Path(request["path"])
        data = bytearray(path.read_bytes())
        path.unlink()
        session, start, at = request["session"], request["start"], request["at"]
        self.scheduler.call(lambda: self._spans.restore(session, start, data, at))


def _past_files(settings: Settings, scheduler: BatchScheduler) -> PastFiles | None:
    if not settings.banks:
        return None
    about = {"kvbench": __version__, "llama.cpp": library.PINNED, "model": settings.sha}
    return past_files(Path(settings.banks), about, scheduler)


def _plain(stats: KVStats | None) -> dict[str, Any] | None:
    return None if stats is None else asdict(stats)


class SpanCommands:
    """Saving, evicting and restoring whole tokens of a session; called on the scheduler's thread.

    Positions are logical, as in `engines.base.Engine`. No forward pass runs, and llama.cpp is never
    asked to shift positions: that would rotate keys of all cells of the cache, whoever's they are.
    """

    def __init__(self, scheduler: BatchScheduler) -> None:
        self._scheduler = scheduler

    def save(self, name: str, start: int, end: int) -> tuple[int, bytearray]:
        """Return the first token's RoPE position and the bytes; UsageError if any token is away."""
        rows = self._session(name).rows
        chosen = within(rows.logical, [(start, end)])
        found = rows.logical[chosen].tolist()
        if start >= end or found != list(range(start, end)):
            raise UsageError(
                f"cannot save positions {start} to {end} of session {name}: "
                f"{len(found)} of {end - start} are in the cache"
            )
        rope = rows.rope[chosen]
        # Packed, what comes back between two turns is put before an answer's last token.
        if not self._packed and int(rope[-1] - rope[0]) != len(rope) - 1:
            raise UsageError(f"positions {start} to {end} are no neighbours any more")
        blob = rows.save(chosen)
        blob.set_positions(rope)
        return int(rope[0]), blob.data

    def evict(self, name: str, spans: Sequence[SpanRange]) -> int:
        """Remove spans from all layers and heads; return the tokens removed."""
        session = self._session(name)
        rows, before = session.rows, session.rows.live
        gone = within(rows.logical, spans)
        if not bool(gone.any()):
            return 0
        rows.drop(gone)
        if self._packed:  # close the gap that the rows left
            rows.pack()
        session.ledger.evict(rows.live)
        self._settle(session, before)
        self._scheduler.descend()
        return before - rows.live

    def restore(self, name: str, start: int, data: bytearray, at: int | None) -> None:
        """Put saved rows back as logical positions from `start`; UsageError if they cannot be."""
        blob = Blob(self._scheduler.cells.form, data)
        session = self._session(name, more=blob.tokens)
        rows, ledger, before = session.rows, session.ledger, session.rows.live
        end = start + blob.tokens
        if end > ledger.fed or bool(within(rows.logical, [(start, end)]).any()):
            raise UsageError(
                f"cannot restore positions {start} to {end} of session {name}: "
                f"they are in the cache, or past its {ledger.fed} tokens"
            )
        first = self._target(rows, blob, at)
        shifts = torch.arange(first, first + blob.tokens) - blob.positions
        if bool(shifts.any()):
            blob.rotate(int(shifts[0]) if bool((shifts == shifts[0]).all()) else shifts)
        rows.restore(blob, torch.arange(start, end))
        ledger.restore(blob.tokens)
        self._settle(session, before)

    def attention(
        self, name: str, spans: Sequence[SpanRange], layers: Sequence[int], decay: float
    ) -> list[float]:
        rows = self._session(name).rows
        keys, _ = self._scheduler.cells.read(rows.cells)
        queries = self._scheduler.worker.queries(name)
        return span_attention(queries, list(keys), rows.logical, spans, layers, decay)

    @property
    def _packed(self) -> bool:
        """Whether positions are the cache's, without gaps."""
        return self._scheduler.policy.method.positions == "cache"

    def _session(self, name: str, more: int = 0) -> BackendSession:
        """Return a session at rest, with room for `more` tokens in the cache."""
        check_whole_tokens(self._scheduler.policy.method)
        return self._scheduler.idle_session(name, more)

    def _target(self, rows: SequenceRows, blob: Blob, at: int | None) -> int:
        if self._packed:
            if at not in (None, rows.live):
                raise UsageError("where positions are the cache's, blocks come back at its end")
            return rows.live
        first = int(blob.positions[0]) if at is None else at
        taken = (rows.rope >= first) & (rows.rope < first + blob.tokens)
        if first < 0 or bool(taken.any()):
            raise UsageError(f"RoPE positions {first} to {first + blob.tokens} are taken")
        return first

    def _settle(self, session: BackendSession, before: int) -> None:
        """Account for a session that had `before` rows."""
        if self._packed:
            self._scheduler.worker.shift_queries(session.name, session.rows.live - before)
        self._scheduler.admission.settle(session)


class Embeddings:
    """Rows of the file's `token_embd.weight`, made float32 one by one: it may be quantised."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rows(self, tokens: Sequence[int]) -> list[list[float]]:
        """Return embeddings [tokens, hidden] less their mean over all ids."""
        found: list[list[float]] = (self._plain(list(tokens)) - self._mean).tolist()
        return found

    def _plain(self, tokens: Any) -> NDArray[np.float32]:
        from gguf.quants import dequantize

        rows: NDArray[np.float32] = dequantize(self._tensor.data[tokens], self._tensor.tensor_type)
        return rows.astype(np.float32)

    @cached_property
    def _mean(self) -> NDArray[np.float64]:
        count = len(self._tensor.data)
        parts = (slice(first, first + PART) for first in range(0, count, PART))
        sums = [self._plain(part).sum(0, dtype=np.float64) for part in parts]
        return np.asarray(np.stack(sums).sum(0) / count)

    @cached_property
    def _tensor(self) -> Any:
        from gguf import GGUFReader

        tensors = GGUFReader(self._path).tensors
        return next(each for each in tensors if each.name == "token_embd.weight")


def main() -> int:
    """Serve until told to end; an error before that is one line and exit code 2."""
    follow_parent()
    settings = Settings(**json.loads(os.environ[SETTINGS]))
    policy = BackendPolicy.load()
    try:
        backend = Backend(settings, policy)
    except KVBenchError as error:
        print(error, file=sys.stderr)  # noqa: T201  the harness shows the last lines
        return error.exit_code
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    StreamServer(Path(settings.stream), backend.start, backend.scheduler.wake)
    ControlServer(policy.control, backend.commands())
    ended.wait()
    # There is nothing to save, and taking everything down in order takes seconds.
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
