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

from agentbench_kv.engines.base import Sampling
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

SETTINGS = "KVBENCH_LLAMACPP"
"""Environment variable with the settings as JSON."""


@dataclass(frozen=True)
class Settings:
    """What the backend is started with, besides its `Policy`."""

    model: str
    stream: str
    dtype: str
    cells: int
    sessions: int


class Backend:
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
        return {
            "ping": lambda _: True,
            "stats": self._stats,
            "close": self._close,
            "pool": self._pool,
            "save_block": self._save,
            "evict_spans": self._evict,
            "restore_block": self._restore,
            "span_attention": self._attention,
            "embed_tokens": self._embed,
            "configure": self._configure,
        }

    def start(self, request: dict[str, Any], stream: Stream) -> None:
        self.scheduler.start(request, self._sampling(request), stream)

    def _sampling(self, request: Mapping[str, Any]) -> Sampling:
        chosen = request["sampling"]
        stop = None
        if request["stop"] is not None:
            if self._codec is None:
                self._codec = TokenCodec(load_tokenizer(self._policy.model_path))
            stop = StopMatcher.from_document(request["stop"], self._codec)
        return Sampling(
            max_tokens=chosen["max_tokens"],
            temperature=chosen["temperature"],
            top_p=chosen["top_p"],
            top_k=chosen["top_k"],
            seed=chosen["seed"],
            stop_token_ids=frozenset(chosen["stop_token_ids"]),
            stop=stop,
        )

    def _stats(self, request: Mapping[str, Any]) -> Any:
        name = request["session"]

        def work() -> Any:
            session = self.scheduler.sessions.get(name)
            return None if session is None else asdict(session.stats())

        return self.scheduler.call(work)

    def _close(self, request: Mapping[str, Any]) -> Any:
        stats = self.scheduler.call(lambda: self.scheduler.close_session(request["session"]))
        return None if stats is None else asdict(stats)

    def _configure(self, request: Mapping[str, Any]) -> None:
        policy = self._policy.with_method(request["method"])
        self.scheduler.call(lambda: self.scheduler.configure(policy))

    def _pool(self, _: Mapping[str, Any]) -> Any:
        return self.scheduler.call(self.scheduler.pool)

    def _save(self, request: Mapping[str, Any]) -> Any:
        at, data = self.scheduler.call(
            lambda: self._blocks.save(request["session"], request["start"], request["end"])
        )
        self._files += 1
        path = Path(self._settings.stream).with_name(f"block-{self._files}.saved")
        path.write_bytes(data)
        return {"at": at, "path": str(path)}

    def _evict(self, request: Mapping[str, Any]) -> int:
        spans = [(start, end) for start, end in request["spans"]]
        return self.scheduler.call(lambda: self._blocks.evict(request["session"], spans))

    def _restore(self, request: Mapping[str, Any]) -> None:
        path = Path(request["path"])
        data = bytearray(path.read_bytes())
        path.unlink()
        session, start, at = request["session"], request["start"], request["at"]
        self.scheduler.call(lambda: self._blocks.restore(session, start, data, at))

    def _attention(self, request: Mapping[str, Any]) -> list[float]:
        spans = [(start, end) for start, end in request["spans"]]
        session, layers, decay = request["session"], request["layers"], request["decay"]
        return self.scheduler.call(lambda: self._blocks.attention(session, spans, layers, decay))

    def _embed(self, request: Mapping[str, Any]) -> list[list[float]]:
        return self._embeddings.rows(request["tokens"])


def main() -> int:
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
