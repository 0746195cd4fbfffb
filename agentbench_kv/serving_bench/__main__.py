"""A job on stdin, its result on stdout, both JSON: what `loadgen.measure_apart` starts."""

from __future__ import annotations

import sys

import msgspec

from agentbench_kv.serving_bench.jobs import LoadJob
from agentbench_kv.serving_bench.loadgen import measure

if __name__ == "__main__":
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadJob)
    sys.stdout.buffer.write(msgspec.json.encode(measure(job)))
