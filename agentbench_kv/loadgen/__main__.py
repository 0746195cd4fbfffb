"""A job on stdin, its result on stdout, both JSON: what `process.measure_apart` starts."""

from __future__ import annotations

import sys

import msgspec

from agentbench_kv.loadgen.jobs import Job
from agentbench_kv.loadgen.process import measure

if __name__ == "__main__":
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    sys.stdout.buffer.write(msgspec.json.encode(measure(job)))
