"""What every engine of ours runs inside a backend's process.

Its policy (method, model, where to write traces), the control channel and the commands that every
scheduler answers, the refusal of untested versions, the watch over the harness.
"""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import signal
import socketserver
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from torch import Tensor

from agentbench_kv.engines.core.ledger import SessionLedger
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.phases.machine import PromptPhases
from agentbench_kv.phases.tokens import StopMatcher, TokenCodec, load_tokenizer

Handler = Callable[[Mapping[str, Any]], Any]


class ControlServer(socketserver.ThreadingUnixStreamServer):
    """Answers commands on a thread of its own until the process ends.

    A request is one line `{"command": NAME, ...}`, its answer one line `{"ok": ...}` or
    `{"error": TEXT}`. Handlers run on the channel's threads. Whoever may open the socket may
    command the engine, so it lies in a private folder.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: Path, commands: Mapping[str, Handler]) -> None:
        path.unlink(missing_ok=True)
        super().__init__(str(path), _CommandConnection)
        self.commands = commands
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _CommandConnection(socketserver.StreamRequestHandler):
    server: ControlServer

    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(json.dumps(self._answer(line)).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            return {"ok": self.server.commands[request["command"]](request)}
        except Exception as error:  # noqa: BLE001  the harness shows it; the engine goes on
            return {"error": f"{type(error).__name__}: {error}"}


@dataclass
class SchedulerSession(ABC):
    """One session as a scheduler knows it, or one request without a session."""

    name: str
    ledger: SessionLedger
    lasting: bool  # it outlives its request; a request without a session does not
    prompt: PromptPhases = field(default_factory=PromptPhases, kw_only=True)

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether a request of it is queued or generates."""


_Session = TypeVar("_Session", bound=SchedulerSession)


class SessionCommands(ABC, Generic[_Session]):
    """What the harness may ask of a scheduler with our plug-in."""

    def __init__(self, sessions: Mapping[str, _Session]) -> None:
        self._sessions = sessions  # by name; the scheduler's own

    def handlers(self) -> dict[str, Handler]:
        return {
            "ping": lambda _: True,
            "stats": self._stats,
            "close": self._close,
            "pool": self._pool,
            "configure": self._configure,
        }

    @abstractmethod
    def abort(self, session: _Session) -> None:
        """End the request of a running session."""

    @abstractmethod
    def forget(self, session: _Session) -> None:
        """Free the rows of a session and forget it."""

    @abstractmethod
    def figures(self) -> dict[str, int]:
        """Return what there is of memory and requests."""

    @abstractmethod
    def use(self, method: dict[str, Any]) -> None:
        """Go on with the method of a document; no session is open."""

    def _stats(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        session = self._sessions.get(request["session"])
        return None if session is None else asdict(session.ledger.snapshot())

    def _close(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        session = self._sessions.get(request["session"])
        if session is None:
            return None
        if session.running:
            self.abort(session)
        stats = asdict(session.ledger.snapshot())
        self.forget(session)
        return stats

    def _pool(self, request: Mapping[str, Any]) -> dict[str, int]:  # noqa: ARG002
        resting = sum(not session.running for session in self._sessions.values())
        return {**self.figures(), "sessions": len(self._sessions), "resting": resting}

    def _configure(self, request: Mapping[str, Any]) -> None:
        if self._sessions:
            raise ValueError(f"{len(self._sessions)} sessions are open; close them first")
        self.use(request["method"])


VARIABLE = "KVBENCH_BACKEND"  # environment variable with the path of the policy's JSON file


@dataclass(frozen=True)
class BackendPolicy:
    """A backend's instructions."""

    method: Method
    model_path: Path  # folder with config and tokenizer
    control: Path  # Unix socket to answer on
    trace: Path | None = None  # folder to write every event's kept positions to

    def save(self, folder: Path) -> Path:
        """Write the policy, and a calibration it has; return its path, the value of `VARIABLE`."""
        document = {
            "method": method_document(self.method, folder),
            "model_path": str(self.model_path),
            "control": str(self.control),
            "trace": None if self.trace is None else str(self.trace),
        }
        path = folder / "policy.json"
        path.write_text(json.dumps(document))
        return path

    @classmethod
    def load(cls) -> Self:
        """Read the policy this process was started with; KeyError if it was not."""
        document = json.loads(Path(os.environ[VARIABLE]).read_text())
        trace = document["trace"]
        paths = (Path(document["model_path"]), Path(document["control"]))
        return cls(method_from(document["method"]), *paths, None if trace is None else Path(trace))

    def with_method(self, document: dict[str, Any]) -> BackendPolicy:
        return replace(self, method=method_from(document))

    def stop_matcher(self, document: dict[str, Any]) -> StopMatcher:
        """Return a matcher of the texts that end a generation, given as `StopMatcher.document`."""
        return StopMatcher.from_document(document, _codec(self.model_path))


_SIZE = ("budget", "share", "preset")  # fields of every method, beside its settings


def method_document(method: Method, folder: Path) -> dict[str, Any]:
    """Describe a method for another process; a calibration goes to a file in `folder`."""
    cls = type(method)
    calibration: Calibration | None = getattr(method, "calibration", None)
    path = None
    if calibration is not None:
        path = folder / f"calibration-{id(calibration):x}.safetensors"
        calibration.save(path)
    given = {each.name: getattr(method, each.name) for each in fields(method) if each.init}
    # What a method is made of, parameters or not, as far as JSON holds it.
    settings = {
        k: v for k, v in given.items() if k not in _SIZE and isinstance(v, int | float | str)
    }
    return {
        "class": f"{cls.__module__}:{cls.__qualname__}",
        **{name: getattr(method, name) for name in _SIZE},
        "settings": settings,
        "calibration": None if path is None else str(path),
    }


def method_from(document: dict[str, Any]) -> Method:
    module, _, name = document["class"].partition(":")
    cls = getattr(import_module(module), name)
    size = {name: document[name] for name in _SIZE}
    method: Method = cls(**size, **document["settings"])
    if document["calibration"] is not None:
        method = method.with_calibration(Calibration.load(Path(document["calibration"])))
    return method


@cache
def _codec(model_path: Path) -> TokenCodec:
    return TokenCodec(load_tokenizer(model_path))


ALLOW_UNTESTED = "KVBENCH_ALLOW_UNTESTED_ENGINE"
_LOOK_S = 1.0
_GRACE_S = 10.0


def refuse_untested(engine: str, version: str, tested: str) -> None:
    """End the process unless this is the tested version, or another one is allowed."""
    if version != tested and not os.environ.get(ALLOW_UNTESTED):
        raise SystemExit(
            f"kvbench: {engine} {version} is here, the adapter was tested with {tested}; "
            "install that, or go on with --allow-untested-engine"
        )


def symbol_problems(symbols: Mapping[str, Sequence[str]], *, exact: bool) -> list[str]:
    """Return what is missing or different in an engine's insides, in words.

    `symbols` names functions with parameters, and dataclasses with fields, that are relied on; with
    `exact` there may be no others.
    """
    found = []
    for path, expected in symbols.items():
        try:
            symbol = pkgutil.resolve_name(path)
        except (ImportError, AttributeError) as error:
            found.append(f"{path} is gone ({type(error).__name__})")
            continue
        actual = _parameters(symbol) if expected else []
        if exact and actual != list(expected):
            found.append(f"{path} takes {', '.join(actual)}; expected {', '.join(expected)}")
        elif missing := [name for name in expected if name not in actual]:
            found.append(f"{path} has no {', '.join(missing)}")
    return found


def _parameters(symbol: Any) -> list[str]:
    if is_dataclass(symbol):
        return [each.name for each in fields(symbol)]
    return list(inspect.signature(getattr(symbol, "__func__", symbol)).parameters)


def refuse_unsupported(engine: str, problems: Mapping[str, bool]) -> None:
    """Raise ValueError with the problems that there are."""
    if found := [name for name, there in problems.items() if there]:
        raise ValueError(f"kvbench: eviction in {engine} does not support {', '.join(found)}")


def follow_parent() -> None:
    """End this process's group, which the harness made for it, once its parent is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os.killpg(0, signal.SIGTERM)
        time.sleep(_GRACE_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="kvbench-parent", daemon=True).start()


def rope_frequencies(model_path: Path) -> Tensor:
    """Return inverse frequencies [head_dim / 2], float32, of a decoder with standard RoPE."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config: Any = AutoConfig.from_pretrained(model_path, local_files_only=True)
    frequencies: Tensor = LlamaRotaryEmbedding(config).inv_freq
    return frequencies
