"""How the harness starts the backend and takes tokens from it."""

from __future__ import annotations

import json
import socket
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.engines.serving.backend.policy import VARIABLE, Policy
from agentbench_kv.engines.serving.control import ControlClient
from agentbench_kv.engines.serving.links import link_packages
from agentbench_kv.engines.serving.process import Launch
from agentbench_kv.engines.serving.wire import Request, Wire, stop_document
from agentbench_kv.errors import CapacityError, KVBenchError
from agentbench_kv.methods.base import Method

SETTINGS = "KVBENCH_LLAMACPP"  # environment variable of the backend; see `backend.server.Settings`
_START_S = 300.0
_ANSWER_S = 3600.0  # a token may wait behind a queue of prefills


@dataclass(eq=False)
class LlamaCppWire(Wire):
    """One backend on two Unix sockets in a private folder."""

    _options: EngineOptions
    _python: Path  # the environment's interpreter
    _model: Path  # GGUF file
    _tokenizer: Path  # its folder
    _cells: int  # cached tokens of all sessions together
    _folder: Path

    @property
    def _stream(self) -> Path:
        return self._folder / "stream"

    def details(self) -> dict[str, str]:
        return {"setup": "llama-cpp-python 0.3.36, unified cache", "cells": str(self._cells)}

    def use(self, method: Method) -> None:
        self._options = replace(self._options, method=method)

    @property
    def control(self) -> Path:
        return self._folder / "control"

    def launch(self) -> Launch:
        options = self._options
        policy = Policy(options.method, self._tokenizer, self.control, options.trace)
        settings = {
            "model": str(self._model),
            "stream": str(self._stream),
            "dtype": options.dtype,
            "cells": self._cells,
            "sessions": options.concurrency,
        }
        links = link_packages(self._folder / "path", [type(options.method).__module__], {})
        environment = {
            VARIABLE: str(policy.save(self._folder)),
            SETTINGS: json.dumps(settings),
            "PYTHONPATH": str(links),
            "TRANSFORMERS_OFFLINE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [str(self._python), "-m", "agentbench_kv.engines.llamacpp.backend.server"]
        return Launch(command, self._ready, environment, _START_S)

    def _ready(self) -> bool:
        with closing(ControlClient(self.control)) as control:
            return self._stream.exists() and control.answers()

    def stream(self, request: Request) -> Generator[int]:
        document = _document(request)
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(str(self._stream))
            with connection.makefile("rb") as lines:
                connection.sendall(json.dumps(document).encode() + b"\n")
                while (token := _answer(lines.readline())) is not None:
                    yield token
                    if document["stepwise"]:
                        connection.sendall(b"\n")


def _document(request: Request) -> dict[str, Any]:
    sampling, stop = request.sampling, stop_document(request.sampling)
    same = ("temperature", "top_p", "top_k", "seed")
    return {
        "session": request.session,
        "recipe": request.recipe,
        "tokens": list(request.tokens[request.known :]),
        "known": request.known,
        "stop": stop,
        "stepwise": sampling.stop is not None and stop is None,
        "sampling": {
            "max_tokens": request.max_tokens,
            **{name: getattr(sampling, name) for name in same},
            "stop_token_ids": sorted(sampling.stop_token_ids),
        },
    }


def _answer(line: bytes) -> int | None:
    """Return a token, or None at the end of the stream."""
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the backend hung up")
    document = json.loads(line)
    if "error" in document:
        error = document["error"]
        kind = CapacityError if error["kind"] == "CapacityError" else KVBenchError
        raise kind(error["message"])
    return int(document["token"]) if "token" in document else None
