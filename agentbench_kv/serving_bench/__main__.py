"""A job on stdin, its result on stdout, both JSON: what `loadgen.measure_apart` starts.

Between them a line each way: the warm-up is over, and the measurement may begin.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import msgspec

from agentbench_kv.serving_bench.jobs import LoadJob
from agentbench_kv.serving_bench.loadgen import measure

_LOOK_S = 0.5


def _end_with(parent: int) -> None:
    """End this process with the one that started it, whose server would go on being loaded."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _warmed() -> None:
    sys.stdout.buffer.write(b"warm\n")
    sys.stdout.buffer.flush()
    sys.stdin.buffer.readline()


if __name__ == "__main__":
    _end_with(os.getppid())
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=LoadJob)
    sys.stdout.buffer.write(msgspec.json.encode(measure(job, _warmed)))
