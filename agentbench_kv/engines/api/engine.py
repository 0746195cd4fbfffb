"""The api engine: any OpenAI-compatible endpoint, or a litellm model name, at text level.

Nothing is seen of tokens or cache, so only `full` runs here: a reference row from a closed model.
Variables: see `docs/engine-api.md`.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Self

from agentbench_kv.engines.api.asking import Asker, RetryPolicy
from agentbench_kv.engines.api.completions import request_body
from agentbench_kv.engines.api.endpoints import Endpoint, parse_model
from agentbench_kv.engines.api.spending import PRICES, Prices, Spending, spending_of_this_command
from agentbench_kv.engines.api.transports import (
    HttpTransport,
    LitellmTransport,
    Transport,
    check_litellm,
)
from agentbench_kv.engines.base import EngineInfo, EngineOptions, FinishReason
from agentbench_kv.engines.text import TextEngine, TextReply, TextRequest, TextSampling
from agentbench_kv.errors import UsageError

_STOP_S = 5.0


class ApiEngine(TextEngine):
    """Asks somebody else's endpoint; retries, paces and counts what it costs."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        model: str,
        policy: RetryPolicy | None = None,
        prices: Prices | None = None,
        spending: Spending | None = None,
    ) -> None:
        policy = policy or RetryPolicy.from_environment()
        self._endpoint = endpoint
        self._prices = prices
        kind = LitellmTransport if endpoint.litellm else HttpTransport
        self._transport: Transport = kind(endpoint, policy.timeout_s)
        account = spending or Spending()
        self._asker = Asker(endpoint, self._transport, policy, prices, account)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="kvbench-api", daemon=True)
        self._thread.start()
        sha = hashlib.sha256(f"{endpoint.shown} {endpoint.model}".encode()).hexdigest()
        self.info = EngineInfo("api", model, Path(), sha, "endpoint", "unknown", 0, ())

    @classmethod
    def check_model(cls, model: str) -> None:
        """Refuse a name of another form, a missing key, wrong variables, a limit without prices."""
        if parse_model(model).litellm:
            check_litellm()
        RetryPolicy.from_environment()
        prices = Prices.from_environment()
        if spending_of_this_command().limit is not None and prices is None:
            raise UsageError(
                "--max-cost needs prices, which are never guessed; set "
                f"{PRICES}=PROMPT,OUTPUT, money per million tokens"
            )

    @classmethod
    def create(cls, options: EngineOptions) -> Self:
        cls.check_model(options.model)
        return cls(
            parse_model(options.model),
            model=options.model,
            prices=Prices.from_environment(),
            spending=spending_of_this_command(),
        )

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        sampling: TextSampling,
    ) -> TextRequest:
        # OpenAI's newer models refuse the old name, older servers do not know the new one.
        limit_name = "max_completion_tokens" if self._endpoint.public else "max_tokens"
        body = request_body(self._endpoint.model, messages, tools, sampling, limit_name)
        return _Request(asyncio.run_coroutine_threadsafe(self._asker.ask(body), self._loop))

    def provenance(self) -> dict[str, Any]:
        prices = self._prices
        rates = None if prices is None else [prices.prompt, prices.output, prices.cached]
        return {
            "api_endpoint": self._endpoint.shown,
            "api_model": self._endpoint.model,
            "api_prices_per_million": rates,
        }

    def shutdown(self) -> None:
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._transport.close()

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


class _Request(TextRequest):
    """A request in the engine's event loop."""

    def __init__(self, future: Future[TextReply]) -> None:
        self._future = future

    def result(self) -> TextReply:
        try:
            return self._future.result()
        except CancelledError:
            return TextReply(finish_reason=FinishReason.CANCELLED.value)

    def cancel(self) -> None:
        self._future.cancel()
