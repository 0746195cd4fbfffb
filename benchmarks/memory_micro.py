"""MemArt's grid on `micro/memory`, beside random blocks, the last blocks, and the last sessions.

    python benchmarks/memory_micro.py FOLDER [--limit 50] [--seed 0]

Every row is an ordinary run in FOLDER, so the script goes on where it stopped. It prints the table
of docs/memory.md: exact answers with their 95 % interval, facts, and evidence that came back.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.stats import Scores, level
from agentbench_kv.results.store import RunReader
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve

ROWS = (256, 512, 1024, 2048)  # that come back
FACTS = ("think", "act", "tool", "others")
LAST = (1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(
        "| what comes back | peak live MB | peak live tokens | exact | facts right "
        "| evidence back |"
    )
    print("|---|--:|--:|--:|--:|--:|")
    for name, method, settings in arms():
        spec = RunSpec("embedded", "micro", method, None, "micro/memory", limit=args.limit)
        spec = resolve(RunSpec(**{**spec.document(), "seed": args.seed}), settings)
        run_one(spec, args.folder, lambda *_: None)
        print(row(name, args.folder / spec.id), flush=True)


def arms() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield a name, a method and its settings for every row of the table."""
    yield "everything, read (`full`)", "full", {}
    yield "nothing", "full", {"context": "none"}
    for last in LAST:
        yield f"last {last} sessions, read", "full", {"context": "sessions", "last": str(last)}
    yield "all blocks", "memart", {"topk": "100000"}
    for rows, pick in product(ROWS, ("random", "last")):
        name = {"random": "random blocks", "last": "the last blocks"}[pick]
        yield name, "memart", {"topk": str(rows // 16), "pick": pick}
    for rows, block, normalise, aggregate in product(
        ROWS, (8, 16), ("softmax", "rr"), ("max", "sum")
    ):
        chosen = {"block": str(block), "normalise": normalise, "aggregate": aggregate}
        name = f"{normalise}-{aggregate}, blocks of {block}"
        yield name, "memart", {"topk": str(rows // block), **chosen}
    for rows in ROWS:
        yield "one set for all layers", "memart", {"topk": str(rows // 16), "sets": "shared"}


def row(name: str, run: Path) -> str:
    trials = list(RunReader(run).trials())
    exact = level(Scores.of_trials({trial.sample_id: [trial.score or 0.0] for trial in trials}))
    facts = share(trials, FACTS)
    came = share(trials, ("evidence_recall",))
    live = round(sum(trial.kv.peak_live for trial in trials) / len(trials))
    size = sum(trial.kv.peak_bytes for trial in trials) / len(trials) / 1e6
    interval = f"{100 * exact.point:.0f} % [{100 * exact.low:.0f}, {100 * exact.high:.0f}]"
    return f"| {name} | {size:.2f} | {live:,} | {interval} | {facts} | {came} |"


def share(trials: Sequence[TrialRecord], names: Sequence[str]) -> str:
    """Return the share that is right of all that some sub-scores asked."""
    tallies = [
        trial.sub_scores[name] for trial in trials for name in names if name in trial.sub_scores
    ]
    asked = sum(tally[1] for tally in tallies)
    return f"{100 * sum(tally[0] for tally in tallies) / asked:.0f} %" if asked else ""


if __name__ == "__main__":
    main()
