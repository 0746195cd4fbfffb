"""The client in a process of its own: a job goes in, figures come out."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from typing import Any

import msgspec

from agentbench_kv.errors import KVBenchError
from agentbench_kv.loadgen.answers import Turn
from agentbench_kv.loadgen.jobs import Job
from agentbench_kv.loadgen.load import run
from agentbench_kv.loadgen.metrics import figures, kv_figures

_MOST_ERRORS = 5


class Result(msgspec.Struct, frozen=True):
    """One measurement."""

    figures: dict[str, int | float]  # see `metrics.figures`
    kv: dict[str, Any] | None  # see `metrics.kv_figures`
    errors: dict[str, int]  # what failed requests said and how often, the most frequent ones
    warmup_errors: int  # failed requests of the warm-up
    requests: list[Turn]  # every request, without its gaps


def measure(job: Job) -> Result:
    """Play a job in this process."""
    outcome = asyncio.run(run(job))
    errors = Counter(turn.error for turn in outcome.turns if turn.error)
    return Result(
        figures=figures(outcome),
        kv=kv_figures(outcome.turns),
        errors=dict(errors.most_common(_MOST_ERRORS)),
        warmup_errors=len(outcome.warmup_errors),
        requests=[msgspec.structs.replace(turn, itls_s=[]) for turn in outcome.turns],
    )


def measure_apart(job: Job) -> Result:
    """Play a job in a process of its own; `KVBenchError` if that process dies."""
    command = [sys.executable, "-m", "agentbench_kv.loadgen"]
    done = subprocess.run(command, input=msgspec.json.encode(job), capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = said[-1] if said else "it said nothing"
        raise KVBenchError(f"the load generator ended with code {done.returncode}: {why}")
    return msgspec.json.decode(done.stdout, type=Result)
