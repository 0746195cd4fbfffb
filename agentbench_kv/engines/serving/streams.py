"""Server-sent events of a backend's HTTP endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx

from agentbench_kv.errors import KVBenchError

# A queue of prefills may come before the first token.
_TIMEOUT = httpx.Timeout(30.0, read=3600.0)


class RequestError(KVBenchError):
    """The backend refused a request; the message is its own."""


def post_events(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Post a request and yield its events until `[DONE]`; closing the iterator hangs up.

    Raises RequestError for an answer that is no stream of events.
    """
    with client.stream("POST", path, json=body, timeout=_TIMEOUT) as response:
        if response.status_code != httpx.codes.OK:
            text = response.read().decode(errors="replace")
            raise RequestError(f"the backend answered {response.status_code}: {text[:500]}")
        for line in _lines(response.iter_bytes()):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                raise RequestError(f"the backend failed: {event['error']}")
            yield event


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Split at newlines only: generated text may hold what Unicode calls a line's end."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest
