"""The HTTP client of a job, and the key it sends."""

from __future__ import annotations

import os

import aiohttp

_CONNECT_S = 20.0
# Below uvicorn's 5 s, so that a request never takes a connection that the server is closing.
_KEEP_ALIVE_S = 2.0


def authorization() -> dict[str, str]:
    """Return the header with the server's key, which comes from KVBENCH_API_KEY."""
    key = os.environ.get("KVBENCH_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def open_client() -> aiohttp.ClientSession:
    """Return a client that keeps its connections and lets any number be open at once.

    It must be made inside the event loop. How long an answer may take is up to the caller.
    """
    return aiohttp.ClientSession(
        headers={**authorization(), "Accept-Encoding": "identity"},
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_S),
    )
