"""Requests to an endpoint over HTTP or litellm, and what comes back."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import httpx

from agentbench_kv.engines.api.endpoints import Endpoint
from agentbench_kv.errors import PrerequisiteError

NO_ANSWER = 0  # status of an answer that never came
_CONNECT_S = 20.0


@dataclass(frozen=True)
class EndpointAnswer:
    """What came back."""

    status: int  # of HTTP, or `NO_ANSWER`
    text: str  # body, or what went wrong on the way
    data: Any = None  # body as JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    refused: bool = False  # no connection could be made


class HttpTransport:
    """`POST /chat/completions` of an OpenAI-compatible server; failures are answers too."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        key = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
        self._timeout_s = timeout_s
        self._url = f"{endpoint.base}/chat/completions"
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(headers=key, timeout=timeout, limits=limits)

    async def send(self, body: Mapping[str, Any]) -> EndpointAnswer:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.post(self._url, json=dict(body))
        except TimeoutError:
            return EndpointAnswer(NO_ANSWER, f"no answer within {self._timeout_s:g} s")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return EndpointAnswer(NO_ANSWER, _named(error), refused=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return EndpointAnswer(NO_ANSWER, _named(error))
        try:
            data = response.json()
        except (ValueError, RecursionError):
            data = None
        return EndpointAnswer(response.status_code, response.text, data, response.headers)

    async def close(self) -> None:
        await self._client.aclose()


class LitellmTransport:
    """Any provider litellm knows; its keys are the variables litellm documents."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        # Otherwise the import asks the network for a price list that is not used.
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        check_litellm()
        self._litellm: Any = import_module("litellm")
        self._model = endpoint.model
        self._timeout_s = timeout_s

    async def send(self, body: Mapping[str, Any]) -> EndpointAnswer:
        fields = {**body, "model": self._model, "timeout": self._timeout_s, "num_retries": 0}
        try:
            # Newer releases want the mcp package for any call with tools.
            reply = await self._litellm.acompletion(**fields, _skip_mcp_handler=True)
        except Exception as error:  # noqa: BLE001  every provider has errors of its own
            status = getattr(error, "status_code", NO_ANSWER)
            return EndpointAnswer(status if isinstance(status, int) else NO_ANSWER, _named(error))
        data = reply.model_dump()
        return EndpointAnswer(200, json.dumps(data, default=str), data)

    async def close(self) -> None:
        return None


Transport = HttpTransport | LitellmTransport


def check_litellm() -> None:
    if find_spec("litellm") is None:
        raise PrerequisiteError(
            "--model litellm/NAME needs litellm; install it with: pip install 'agentbench-kv[api]'"
        )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
