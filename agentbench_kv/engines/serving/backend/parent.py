"""What a backend's first process does: refuse an untested version, end with its harness."""

from __future__ import annotations

import os
import signal
import threading
import time

ALLOW_UNTESTED = "KVBENCH_ALLOW_UNTESTED_ENGINE"
_LOOK_S = 1.0
_GRACE_S = 10.0


def refuse_untested(engine: str, version: str, tested: str) -> None:
    """End the process unless this is the tested version, or another one is allowed."""
    if version != tested and not os.environ.get(ALLOW_UNTESTED):
        raise SystemExit(
            f"kvbench: {engine} {version} is here, the adapter was tested with {tested}; "
            "install that, or go on with --allow-untested-engine"
        )


def follow_parent() -> None:
    """End this process's group once its parent is gone, however that ended.

    The harness starts every backend in a group of its own.
    """
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), name="kvbench-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os.killpg(0, signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.killpg(0, signal.SIGKILL)
