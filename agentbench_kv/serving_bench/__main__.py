"""A job on stdin, its result on stdout, both JSON: what `loadgen.measure_apart` starts.

Between them a line each way: the warm-up is over, and the measurement may begin.
"""

from __future__ import annotations

import sys

import msgspec

from agentbench_kv.serving_bench.jobs import LoadJob
from agentbench_kv.serving_bench.loadgen import measure


def _warmed() -> None:
    sys.stdout.buffer.write(b"warm\n")
    sys.stdout.buffer.flush()
    sys.stdin.buffer.readline()


if __name__ == "__main__":
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=LoadJob)
    sys.stdout.buffer.write(msgspec.json.encode(measure(job, _warmed)))
