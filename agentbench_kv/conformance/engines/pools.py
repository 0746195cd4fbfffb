"""What an engine says of its memory."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["pool_of", "settled"]

PATIENCE_S = 10.0
_OF_INTEREST = {"free_blocks", "total_blocks", "sessions", "allocated_bytes"}


def pool_of(engine: Any) -> dict[str, Any] | None:
    """Return what an engine says of its memory; None if it says nothing."""
    pool = {key: value for key, value in engine.pool().items() if key in _OF_INTEREST}
    return pool or None


def settled(engine: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Wait until the pool is as wanted; return it as it is, at the latest when patience ends.

    Engines free what a closed session held on a thread of their own.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (pool := pool_of(engine) or {}) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return pool
