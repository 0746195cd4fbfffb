"""What a worker of a sweep does, whoever starts its process; `python -m` this for a local one."""

from __future__ import annotations

import json
import sys
from typing import Any

from agentbench_kv.cli import interrupts, show_notes
from agentbench_kv.environments import process_env
from agentbench_kv.errors import KVBenchError


def work(order: dict[str, Any]) -> None:
    """Play what a sweep has left, in this process; an interruption ends it in good order."""
    from agentbench_kv.cli.output import run_progress
    from agentbench_kv.sweeps.worker import Order, Worker

    with interrupts.interruptible(), run_progress() as progress:
        Worker(Order(**order), progress).work()


def main() -> None:
    """Carry out the order that the command line holds as JSON."""
    interrupts.raise_interrupts()
    show_notes()
    process_env.apply()
    try:
        work(json.loads(sys.argv[1]))
    except KVBenchError as error:
        sys.stderr.write(f"kvbench: {' '.join(str(error).split())}\n")
        sys.exit(error.exit_code)
    finally:
        interrupts.end_at_once()


if __name__ == "__main__":
    main()
