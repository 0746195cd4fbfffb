"""MemArt's grid on `micro/memory`, beside random blocks, the last blocks, and the last sessions.

    python benchmarks/memory_micro.py FOLDER [--limit 50] [--seed 0]

Every row is an ordinary run in FOLDER, so the script goes on where it stopped. It prints the table
of docs/memory.md: exact answers with a 95 % Wilson interval, facts, and evidence that came back.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from agentbench_kv.results.stats import wilson
from agentbench_kv.results.store import RunReader
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve

ROWS = (256, 512, 1024, 2048)  # that come back
FACTS = ("think", "act", "tool", "others")
LAST = (1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("| what comes back | rows | exact | facts right | evidence back |\n|---|--:|--:|--:|--:|")
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


def row(name: str, run: Path) -> str:
    trials = [trial for trial in RunReader(run).trials() if trial.status.value == "scored"]
    exact = sum(trial.score == 1 for trial in trials)
    low, high = wilson(exact, len(trials))
    parts = {
        part: [sum(float(t.metrics.get(f"{n}_{part}", 0) or 0) for t in trials) for n in FACTS]
        for part in ("right", "asked")
    }
    facts = sum(parts["right"]) / sum(parts["asked"])
    held = [t for t in trials if "evidence_recall_asked" in t.metrics]
    came = "–"
    if held:
        right = sum(float(t.metrics["evidence_recall_right"] or 0) for t in held)
        came = f"{100 * right / sum(float(t.metrics['evidence_recall_asked'] or 0) for t in held):.0f} %"
    rows = round(sum(trial.kv.peak_live for trial in trials) / len(trials))
    share = f"{100 * exact / len(trials):.0f} % [{100 * low:.0f}, {100 * high:.0f}]"
    return f"| {name} | {rows:,} | {share} | {100 * facts:.0f} % | {came} |"


if __name__ == "__main__":
    main()
