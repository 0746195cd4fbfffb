"""The runs behind docs/real-model-results.md: a real model on BFCL and LoCoMo.

    python benchmarks/real_models.py MODEL --out FOLDER [--tasks locomo bfcl] [--hours 2.5]

MODEL is a Hugging Face folder. Every cell is a `kvbench run` in a process of its own, one after the
other; one that was cut off goes on with the next call of this script. At the end of the time the
cell in progress is interrupted, as by Ctrl-C. Prints what of every cell is there, and the tables.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

METHODS = ("agentkv", "snapkv", "rkv", "h2o", "streamingllm", "random")
ENTRY = "from agentbench_kv.cli import main; main()"


@dataclass(frozen=True)
class Plan:
    """One task, its budgets and the options that all of its cells share."""

    task: str
    samples: int
    budgets: tuple[int, ...]
    options: tuple[str, ...]
    evicting: tuple[str, ...] = ()  # options of the methods that evict


PLANS = {
    # Answers are ten tokens long: without `prefill` in the trigger nothing would be evicted before
    # the twelfth question.
    "locomo": Plan(
        *("locomo/qa", 3, (2048, 4096, 1024)),
        ("--concurrency", "3", "--max-tokens", "48"),
        ("--set", "trigger=prefill+every"),
    ),
    "bfcl": Plan(
        *("bfcl/multi_turn_base", 100, (2048, 1024, 512)),
        ("--concurrency", "16", "--set", "route=chat", "--tool-syntax", "json"),
    ),
}


def commands(plan: Plan, model: str, out: Path) -> list[list[str]]:
    """Return the arguments of `kvbench run` for each cell, the baselines first."""
    common = ["run", "--task", plan.task, "--limit", str(plan.samples), "--out", str(out)]
    common += ["--timeout", "100000", "--quiet"]
    real = [*common, *plan.options, "--model", model, "--dtype", "bfloat16"]
    cells = [
        [*common, *plan.options, "--engine", "scripted", "--model", "null", "--method", "full"],
        [*real, "--method", "full"],
    ]
    arms = [(method, budget) for budget in plan.budgets for method in METHODS]
    return cells + [
        [*real, "--method", method, "--budget", str(budget), *plan.evicting]
        for method, budget in arms
    ]


def play(command: list[str], until: float) -> int | None:
    """Run one cell; return its exit code, None if it was cut off when the time was up."""
    with subprocess.Popen([sys.executable, "-c", ENTRY, *command]) as process:
        try:
            return process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
            return None


def main() -> None:
    """Play the cells in order, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--hours", type=float, default=1000.0)
    parser.add_argument("--list", action="store_true", help="print the cells' commands and stop")
    asked = parser.parse_args()
    cells = [cell for name in asked.tasks for cell in commands(PLANS[name], asked.model, asked.out)]
    if asked.list:
        print("\n".join(f"kvbench {' '.join(cell)}" for cell in cells))
        return
    # Children of a background job would ignore the interrupt that ends a cell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.nice(10)
    until = time.monotonic() + 3600 * asked.hours
    for cell in cells:
        code = play(cell, until)
        print("cut off" if code is None else f"exit {code}", " ".join(cell), flush=True)
        if code is None:
            break
    for name in asked.tasks:
        folders = sorted(asked.out.glob(f"{PLANS[name].task.replace('/', '_')}*"))
        if folders:
            show = ["report", *map(str, folders), "--table", "accuracy", "--format", "markdown"]
            subprocess.run([sys.executable, "-c", ENTRY, *show], check=False)


if __name__ == "__main__":
    main()
