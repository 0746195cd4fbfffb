"""Starts `kvbench` many times without loading PyTorch each time.

Reads orders from standard input, a JSON object a line: `arguments` of the command line,
`environment` to add, `stdout` and `stderr` files. Each is carried out by a fork of this process,
in a session of its own, which goes on exactly as `kvbench` does. Answers `{"pid": …}` at once and
`{"status": …}`, the exit code or minus the signal, when it has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from typing import Any


def preload() -> None:
    """Load what a run needs; nothing may start a thread, which a fork would lose."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from agentbench_kv.environments import process_env

    process_env.apply()
    from transformers import AutoTokenizer  # noqa: F401

    import agentbench_kv.cli.output
    import agentbench_kv.cli.run
    import agentbench_kv.engines.api.spending
    import agentbench_kv.engines.embedded.engine
    import agentbench_kv.engines.scripted
    import agentbench_kv.run.runner  # noqa: F401


def become(order: dict[str, Any]) -> None:
    """Make this fork the process that was ordered."""
    os.setsid()
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, order["stdout"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, order["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # which looked at the environment before
    sys.argv = ["kvbench", *order["arguments"]]
    # Whoever started the campaign in the background had Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "stale_s" in order:
        _hurry(order["stale_s"])


def _hurry(stale_s: float) -> None:
    """Let a writer count as dead sooner, so that a test of taking over need not take minutes."""
    from agentbench_kv.results import run_info, store

    hurried = (
        (run_info, "STALE_S", stale_s),
        (store, "STALE_S", stale_s),
        (store, "BEAT_S", stale_s / 6),
    )
    for module, name, seconds in hurried:
        if not hasattr(module, name):
            raise SystemExit(f"{module.__name__} has no {name} any more; mend {__file__}")
        setattr(module, name, seconds)


def serve() -> bool:
    """Carry out orders; true in a fork that is to become a run, false when there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        child = os.fork()
        if not child:
            become(json.loads(line))
            return True
        answers.write(json.dumps({"pid": child}) + "\n")
        answers.flush()
        _, status = os.waitpid(child, 0)
        answers.write(json.dumps({"status": os.waitstatus_to_exitcode(status)}) + "\n")
        answers.flush()
    return False


def main() -> None:
    """Serve, or with `--once ORDER` become a run that loaded everything itself."""
    # Ctrl-C is for the campaign, and for the runs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[1:2] == ["--once"]:
        become(json.loads(sys.argv[2]))
    else:
        preload()
        if not serve():
            return
    from agentbench_kv.cli import main as kvbench

    kvbench()


if __name__ == "__main__":
    main()
