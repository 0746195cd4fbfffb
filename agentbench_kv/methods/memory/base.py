"""What all memories have in common: they compress nothing, and need a task with a past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentbench_kv.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Memory(Method):
    """Brings earlier sessions back to a later one."""

    compresses: ClassVar[bool] = False
    spans: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    # Fields of the base that mean nothing here: no `param`, so `--set` does not take them.
    interval: int = 128
    trigger: str = "every"
    kept_set: str = "shared"
    sinks: int = 0
    keep_recent: int = 0
    protect: str = "none"
    prefix: str = "own"
    chunk: int = 1
    positions: str = "logical"
