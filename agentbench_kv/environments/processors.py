"""Which processors this process may use, and how many threads may compute on them."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return how many processors this process may use, of which `taskset` leaves some."""
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def free_threads() -> int:
    """Return how many threads may compute: `OMP_NUM_THREADS`, or the processors nobody uses."""
    # They wait for one another in busy loops: one too many costs a hundredfold.
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen):
        return int(chosen)
    return max(1, usable_cores() - round(os.getloadavg()[0]))
