"""The engine under test and the embedded engine, side by side on one tiny model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentbench_kv.conformance.engines import plans
from agentbench_kv.conformance.engines.driver import Rig
from agentbench_kv.conformance.engines.models import CONTEXT, load_network, write_model
from agentbench_kv.conformance.tracing import calibrated_for
from agentbench_kv.engines.embedded import EmbeddedEngine
from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.methods.base import Method
from agentbench_kv.phases import TokenCodec, load_tokenizer
from agentbench_kv.registry import make_method

__all__ = ["Bench", "Subject", "open_bench"]

_ROOM = 8 * CONTEXT


@dataclass(frozen=True)
class Subject:
    """The engine under test.

    Attributes
    ----------
    cls : engine class
        With `create(options)`.
    engine_args : mapping
        Given to it as `EngineOptions.engine_args`.
    """

    cls: Any
    engine_args: Mapping[str, str] = field(default_factory=dict)


class Bench:
    """Runs engines on one model folder, at most one of those under test at a time.

    Parameters
    ----------
    subject : Subject
    folder : Path
        As `write_model` writes it.
    """

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject = subject
        self.codec = TokenCodec(load_tokenizer(folder))
        self.network = load_network(folder)
        self._folder = folder
        self._rig: Rig | None = None
        self._room = 0

    @property
    def family(self) -> str:
        """The model's type."""
        return str(self.network.config.model_type)

    def method(self, name: str) -> Method:
        """Build a method with the suite's budget and interval."""
        if not make_method(name, 1 << 20).compresses:
            return make_method(name, None)
        method = make_method(name, plans.BUDGET, {"interval": plans.INTERVAL})
        return calibrated_for(self.network, method)

    def rig(self, method: Method, room: int = _ROOM) -> Rig:
        """Return the engine under test with a method: the running one where it can change.

        Parameters
        ----------
        method : Method
        room : int
            Cached tokens over all sessions.
        """
        if self._rig is not None:
            if self._room == room and _goes_on(self._rig, method):
                return self._rig
            self.close()
        self._rig = Rig(self.subject.cls, self._options(method, room), self.codec)
        self._room = room
        return self._rig

    @contextmanager
    def reference(self, method: Method) -> Iterator[Rig]:
        """Run the embedded engine."""
        rig = Rig(EmbeddedEngine, self._options(method, _ROOM), self.codec)
        try:
            yield rig
        finally:
            rig.close()

    def close(self) -> None:
        """Shut the engine under test down."""
        if self._rig is not None:
            self._rig.close()
            self._rig = None

    def _options(self, method: Method, room: int) -> EngineOptions:
        return EngineOptions(
            model=str(self._folder),
            method=method,
            device="cpu",
            max_live_tokens=room,
            engine_args=self.subject.engine_args,
        )


@contextmanager
def open_bench(subject: Subject, family: str) -> Iterator[Bench]:
    """Write a family's model to a temporary folder and work on it."""
    with tempfile.TemporaryDirectory(prefix="kvbench-model-") as folder:
        bench = Bench(subject, write_model(Path(folder) / family, family))
        try:
            yield bench
        finally:
            bench.close()


def _goes_on(rig: Rig, method: Method) -> bool:
    """Return whether a running engine can, and now does, run a method."""
    # `full` is the engine as shipped: other flags, so another start.
    alike = "full" not in (rig.method.name, method.name)
    return rig.method == method or (alike and rig.reconfigure(method))
