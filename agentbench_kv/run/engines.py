"""Starting an engine with a method, and keeping it for the next run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentbench_kv.engines.base import Capability, Engine, EngineOptions
from agentbench_kv.engines.core.block_engine import BlockEngine
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.spans import SpanMethod
from agentbench_kv.registry import load_engine
from agentbench_kv.run.calibration import calibrated
from agentbench_kv.run.spec import check_arguments
from agentbench_kv.run.trained import check_trained


def start_engine(name: str, options: EngineOptions, observer: Any = None) -> Engine:
    """Start an engine with a method, after checking that the two fit.

    `observer` is what an engine that can be looked into calls, such as
    `engines.embedded.observer.Observer`. UsageError or PrerequisiteError if the name is unknown,
    the pair is impossible, or the model cannot be loaded.
    """
    cls, options = _checked(name, options, observer)
    extra = {} if observer is None else {"recorder": observer}
    made: Engine = cls.create(_below(options), **extra)
    return _over(made, options.method)


def check_pair(name: str, engine: type[Engine], method: Method) -> None:
    """Refuse a method the engine cannot run."""
    if method.offline:
        raise UsageError(
            f"method {method.label!r} ranks by what happens later, so no engine can run it; "
            "use it on a capture: kvbench select --method oracle --capture FILE"
        )
    missing = sorted(method.needs - {capability.value for capability in engine.capabilities})
    if missing:
        lacks = "does not compress a cache" if "compress" in missing else f"has no {missing[0]}"
        raise UsageError(
            f"engine {name!r} cannot run method {method.label!r}: it {lacks}; "
            "use --method full or another engine (kvbench ls methods --engine NAME)"
        )


@dataclass(frozen=True)
class _Shelved:
    """An engine without sessions, whose last run ended well."""

    name: str
    options: EngineOptions
    engine: Engine


class EngineShelf:
    """Keeps the engine of the last run for a next one that differs in nothing but the method.

    Only engines that can change their method without a new start are kept. An engine whose run
    failed is shut down. One engine exists at a time: another one starts after this one has ended.
    `banks` is the folder where engines keep what memories read of the past.
    """

    def __init__(self, banks: Path | None = None) -> None:
        self.banks = banks
        self._kept: _Shelved | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def clear(self) -> None:
        """Shut down what is kept."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.engine.shutdown()

    @contextmanager
    def lend(self, name: str, options: EngineOptions, observer: Any = None) -> Iterator[Engine]:
        """Lend a run an engine: the one that is kept, or a new one, as `start_engine` makes it."""
        engine = self._taken(name, options) if observer is None else None
        if engine is None:
            self.clear()
            engine = start_engine(name, options, observer)
        try:
            yield engine
        except BaseException:
            engine.shutdown()
            raise
        below = engine.below if isinstance(engine, BlockEngine) else engine
        if below.outlives_runs and observer is None:
            self._kept = _Shelved(name, options, below)
        else:
            engine.shutdown()

    def _taken(self, name: str, options: EngineOptions) -> Engine | None:
        """Return the engine that is kept with this method instead of its own, if it can have it."""
        kept = self._kept
        if kept is None or kept.name != name or not _differ_in_method(kept.options, options):
            return None
        _, options = _checked(name, options, None)
        with suppress(KVBenchError, OSError):  # it has died, or holds a session: start another
            kept.engine.reconfigure(_below(options).method)
            self._kept = None
            return _over(kept.engine, options.method)
        return None


def _checked(name: str, options: EngineOptions, observer: Any) -> tuple[Any, EngineOptions]:
    """Return an engine's class, and options whose method has its calibration."""
    cls, method = load_engine(name), options.method
    check_arguments(name, options.engine_args)
    check_pair(name, cls, method)
    check_trained(options.model, method)
    cls.check_method(options.model, method)
    cls.check_kv_dtype(options)
    if observer is not None and Capability.CAPTURE not in cls.capabilities:
        raise UsageError(f"engine {name!r} cannot be looked into; use --engine embedded")
    return cls, replace(options, method=calibrated(method, options.model, options.device))


def _below(options: EngineOptions) -> EngineOptions:
    return replace(options, method=options.method.below())


def _over(engine: Engine, method: Method) -> Engine:
    return BlockEngine(engine, method) if isinstance(method, SpanMethod) else engine


def _differ_in_method(one: EngineOptions, other: EngineOptions) -> bool:
    """Whether nothing but the method, if that, is different; scripts are a task's."""
    return replace(one, method=other.method, scripts=other.scripts) == other
