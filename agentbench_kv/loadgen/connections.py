"""One HTTP client, with one connection, for each session that is open."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import httpx

from agentbench_kv.loadgen.transport import StreamTransport

__all__ = ["Connections", "authorization"]


def authorization() -> dict[str, str]:
    """Return the header with the server's key, which comes from KVBENCH_API_KEY."""
    key = os.environ.get("KVBENCH_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


class Connections:
    """Hands out clients of one server, and takes them back.

    Parameters
    ----------
    base : str
        The server's URL.
    transport : httpx.AsyncBaseTransport, optional
        Instead of a network.
    """

    def __init__(self, base: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._base = base
        self._transport = transport
        self._free: list[httpx.AsyncClient] = []
        self._made: list[httpx.AsyncClient] = []

    @contextmanager
    def one(self) -> Iterator[httpx.AsyncClient]:
        """Give a client that nobody else has until the block ends."""
        client = self._free.pop() if self._free else self._new()
        try:
            yield client
        finally:
            self._free.append(client)

    async def close(self) -> None:
        """Close all."""
        for client in self._made:
            await client.aclose()

    def _new(self) -> httpx.AsyncClient:
        client = httpx.AsyncClient(
            base_url=self._base,
            headers={**authorization(), "Accept-Encoding": "identity"},
            timeout=None,
            transport=self._transport or StreamTransport(_certificates()),
        )
        self._made.append(client)
        return client


@cache
def _certificates() -> ssl.SSLContext:
    """Return the certificates to trust; reading them takes longer than all else in a client."""
    return httpx.create_ssl_context()
