"""A backend does not outlive the harness that started it, however that ends."""

from __future__ import annotations

import os
import signal
import threading
import time

_LOOK_S = 1.0
_GRACE_S = 10.0


def follow_parent() -> None:
    """End this process's group once its parent is gone; for a backend's first process.

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
