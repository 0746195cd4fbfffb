"""The backend's process: a context, a scheduler, and two sockets to speak to them."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentbench_kv.engines.base import KVStats, Sampling
from agentbench_kv.engines.llamacpp.backend.blocks import Blocks
from agentbench_kv.engines.llamacpp.backend.context import Context, free_threads
from agentbench_kv.engines.llamacpp.backend.embeddings import Embeddings
from agentbench_kv.engines.llamacpp.backend.scheduler import STEP_TOKENS, Scheduler
from agentbench_kv.engines.llamacpp.backend.streams import Stream, StreamServer
from agentbench_kv.engines.llamacpp.shape import ROW_TYPES
from agentbench_kv.engines.serving.backend.control import ControlServer
from agentbench_kv.engines.serving.backend.parent import follow_parent
from agentbench_kv.engines.serving.backend.policy import Policy
from agentbench_kv.errors import KVBenchError
from agentbench_kv.phases import TokenCodec, load_tokenizer
from agentbench_kv.phases.decoding import StopMatcher

SETTINGS = "KVBENCH_LLAMACPP"  # environment variable with the settings as JSON


@dataclass(frozen=True)
class Settings:
    """What the backend is started with, besides its `Policy`."""

    model: str  # GGUF file
    stream: str  # Unix socket for generations
    dtype: str  # of cached rows
    cells: int  # cached tokens of all sessions together
    sessions: int  # that generate at once


class Backend:
    """Answers the harness."""

    def __init__(self, settings: Settings, policy: Policy) -> None:
        self._settings = settings
        self._policy = policy
        context = Context(
            Path(settings.model),
            cells=settings.cells,
            # One for every session that generates, some that rest, and the scratch sequence.
            sequences=2 * settings.sessions + 2,
            row_type=ROW_TYPES[settings.dtype],
            batch=STEP_TOKENS,
            threads=free_threads(),
        )
        self.scheduler = Scheduler(context, policy)
        self._blocks = Blocks(self.scheduler)
        self._embeddings = Embeddings(Path(settings.model))
        self._codec: TokenCodec | None = None
        self._files = 0

    def commands(self) -> Mapping[str, Callable[[Mapping[str, Any]], Any]]:
        """Return what the control channel answers; `call` works on the scheduler's thread."""
        scheduler, blocks = self.scheduler, self._blocks
        call = scheduler.call
        return {
            "ping": lambda _: True,
            "stats": lambda r: _plain(call(lambda: scheduler.stats(r["session"]))),
            "close": lambda r: _plain(call(lambda: scheduler.close_session(r["session"]))),
            "pool": lambda _: call(scheduler.pool),
            "save_block": self._save,
            "evict_spans": lambda r: call(lambda: blocks.evict(r["session"], r["spans"])),
            "restore_block": self._restore,
            "span_attention": lambda r: call(
                lambda: blocks.attention(r["session"], r["spans"], r["layers"], r["decay"])
            ),
            "embed_tokens": lambda r: self._embeddings.rows(r["tokens"]),
            "configure": self._configure,
        }

    def start(self, request: dict[str, Any], stream: Stream) -> None:
        """Start a generation."""
        stop = None
        if request["stop"] is not None:
            if self._codec is None:
                self._codec = TokenCodec(load_tokenizer(self._policy.model_path))
            stop = StopMatcher.from_document(request["stop"], self._codec)
        chosen = request["sampling"]
        ends = frozenset(chosen["stop_token_ids"])
        sampling = Sampling(**{**chosen, "stop_token_ids": ends, "stop": stop})
        self.scheduler.start(request, sampling, stream)

    def _configure(self, request: Mapping[str, Any]) -> None:
        policy = self._policy.with_method(request["method"])
        self.scheduler.call(lambda: self.scheduler.configure(policy))

    def _save(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Save a block; its bytes go through a file, whose reader deletes it."""
        at, data = self.scheduler.call(
            lambda: self._blocks.save(request["session"], request["start"], request["end"])
        )
        self._files += 1
        path = Path(self._settings.stream).with_name(f"block-{self._files}.saved")
        path.write_bytes(data)
        return {"at": at, "path": str(path)}

    def _restore(self, request: Mapping[str, Any]) -> None:
        path = Path(request["path"])
        data = bytearray(path.read_bytes())
        path.unlink()
        session, start, at = request["session"], request["start"], request["at"]
        self.scheduler.call(lambda: self._blocks.restore(session, start, data, at))


def _plain(stats: KVStats | None) -> dict[str, Any] | None:
    return None if stats is None else asdict(stats)


def main() -> int:
    """Serve until told to end; an error before that is one line and exit code 2."""
    follow_parent()
    settings = Settings(**json.loads(os.environ[SETTINGS]))
    policy = Policy.load()
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
