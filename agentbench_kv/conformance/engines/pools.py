"""What an engine says of its memory."""

from __future__ import annotations

import time
from typing import Any

PATIENCE_S = 10.0
_COMPARED = {"free_blocks", "total_blocks", "sessions", "allocated_bytes"}


def pool_of(engine: Any) -> dict[str, Any] | None:
    """Return what an engine says of its memory; None if it says nothing."""
    return {key: value for key, value in engine.pool().items() if key in _COMPARED} or None


def settled(engine: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Wait until the pool is as wanted, at most `PATIENCE_S`; return it as it is then.

    Engines free what a closed session held on a thread of their own.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (pool := pool_of(engine) or {}) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return pool
