"""The engine under test and the embedded engine on one tiny model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentbench_kv.conformance.engines import plans
from agentbench_kv.conformance.engines.driver import Driver
from agentbench_kv.conformance.engines.models import CONTEXT, load_network, write_model
from agentbench_kv.conformance.tracing import calibrated_for
from agentbench_kv.engines.embedded import EmbeddedEngine
from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.methods.base import Method
from agentbench_kv.phases import TokenCodec, load_tokenizer
from agentbench_kv.registry import make_method

LARGE_POOL = 8 * CONTEXT  # cached tokens over all sessions


class Fixture:
    """Runs engines on a model folder as `write_model` writes it; at most one under test at a time.

    `cls` is an engine class with `create(options)`; `engine_args` go into its options.
    """

    def __init__(
        self, cls: Any, folder: Path, engine_args: Mapping[str, str] | None = None
    ) -> None:
        self.codec = TokenCodec(load_tokenizer(folder))
        self.network = load_network(folder)
        self.family = str(self.network.config.model_type)
        self._cls = cls
        self._folder = folder
        self._engine_args = engine_args or {}
        self._driver: Driver | None = None
        self._pool = 0

    def method(self, name: str) -> Method:
        """Build a method with the suite's budget and interval."""
        if not make_method(name, 1 << 20).compresses:
            return make_method(name, None)
        method = make_method(name, plans.BUDGET, {"interval": plans.INTERVAL})
        return calibrated_for(self.network, method)

    def driver(self, method: Method, pool: int = LARGE_POOL) -> Driver:
        """Return the engine under test with a method: the running one where it can change."""
        if self._driver is not None:
            if self._pool == pool and _can_run(self._driver, method):
                return self._driver
            self.close()
        self._driver = Driver(self._cls, self._options(method, pool), self.codec)
        self._pool = pool
        return self._driver

    @contextmanager
    def reference(self, method: Method) -> Iterator[Driver]:
        """Run the embedded engine."""
        driver = Driver(EmbeddedEngine, self._options(method, LARGE_POOL), self.codec)
        try:
            yield driver
        finally:
            driver.close()

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def _options(self, method: Method, pool: int) -> EngineOptions:
        return EngineOptions(
            model=str(self._folder),
            method=method,
            device="cpu",
            max_live_tokens=pool,
            engine_args=self._engine_args,
        )


@contextmanager
def open_fixture(cls: Any, family: str, engine_args: Mapping[str, str]) -> Iterator[Fixture]:
    """Write a family's model to a temporary folder and work on it."""
    with tempfile.TemporaryDirectory(prefix="kvbench-model-") as folder:
        fixture = Fixture(cls, write_model(Path(folder) / family, family), engine_args)
        try:
            yield fixture
        finally:
            fixture.close()


def _can_run(driver: Driver, method: Method) -> bool:
    """Return whether a running engine has the method, or could change to it."""
    # `full` is the engine as shipped: other flags, so another start.
    as_shipped = "full" in (driver.method.name, method.name)
    return driver.method == method or (not as_shipped and driver.reconfigure(method))
