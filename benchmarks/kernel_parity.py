"""Compare whole micro sessions played with the compiled kernels and with PyTorch's operations.

    python benchmarks/kernel_parity.py [--sessions 100] [--budget 384] [--methods agentkv ...]

Plays every session greedily with both backends. An event counts as equal if every layer and head
keeps the same positions; sessions whose tokens differ are listed with the event before which their
kept sets first differ, and by how little the scores at the edge of the budget differ there.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from agentbench_kv.engines.embedded.observer import EventLog
from agentbench_kv.kernels import describe_backend, use_backend
from agentbench_kv.methods.base import Selection
from agentbench_kv.run.observe import watch
from agentbench_kv.run.spec import RunSpec

METHODS = ["agentkv", "snapkv", "streamingllm", "rkv"]


@dataclass(frozen=True)
class Session:
    """What one backend made of a session: its tokens, and what every event kept."""

    tokens: list[int]
    kept: list[Tensor]
    gaps: list[float]


def play(spec: RunSpec, number: int, backend: str) -> Session:
    """Play a sample with a backend."""
    use_backend(backend)
    kept: list[Tensor] = []
    gaps: list[float] = []

    def keep(logical: int, positions: Tensor, selection: Selection) -> None:  # noqa: ARG001
        kept.append(positions.gather(-1, selection.kept).sort(-1).values.clone())
        gaps.append(edge(selection))

    log = EventLog(keep)
    watch(spec, str(number), log)
    return Session(list(log.tokens), kept, gaps)


def edge(selection: Selection) -> float:
    """Return the smallest relative distance between the last score kept and the first dropped."""
    budget = selection.kept.shape[-1]
    ordered = selection.scores.nan_to_num(float("inf")).sort(-1, descending=True).values
    last, first = ordered[..., budget - 1], ordered[..., budget]
    return float(((last - first) / last.abs().clamp(min=1e-30)).min())


def main() -> None:
    """Compare and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--budget", default="384")
    parser.add_argument("--task", default="micro/recall-1k")
    parser.add_argument(
        "--methods", nargs="+", default=["agentkv", "snapkv", "streamingllm", "rkv"]
    )
    parser.add_argument("--native", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    use_backend(options.native)
    print(f"{describe_backend(options.native)} against PyTorch {torch.__version__}")
    print("| method | sessions | equal tokens | events | equal kept sets |")
    print("|---|--:|--:|--:|--:|")
    for method in options.methods:
        spec = RunSpec(
            engine="embedded",
            model="micro",
            method=method,
            budget=int(options.budget),
            task=options.task,
            limit=options.sessions,
            concurrency=1,
        )
        compare(spec, options.sessions, options.native)


def compare(spec: RunSpec, sessions: int, native: str) -> None:
    """Print one method's row, and a line for every session that differs."""
    same_tokens = events = same_sets = 0
    notes: list[str] = []
    for number in range(sessions):
        ours, theirs = play(spec, number, native), play(spec, number, "torch")
        equal = [torch.equal(a, b) for a, b in zip(ours.kept, theirs.kept, strict=False)]
        events += max(len(ours.kept), len(theirs.kept))
        same_sets += sum(equal)
        same_tokens += ours.tokens == theirs.tokens
        if not all(equal):
            first = equal.index(False)
            notes.append(f"sample {number}: event {first}, edge {theirs.gaps[first]:.1e}")
    print(f"| {spec.method} | {sessions} | {same_tokens} | {events} | {same_sets} |", flush=True)
    for note in notes:
        print(f"  {note}")


if __name__ == "__main__":
    main()
