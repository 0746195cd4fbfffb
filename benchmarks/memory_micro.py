"""MemArt's grid on `micro/memory`, beside random blocks, the last blocks, and the last sessions.

    python benchmarks/memory_micro.py FOLDER [--limit 50] [--seed 0]

Every row is an ordinary run in FOLDER, so the script goes on where it stopped. It prints the tables
of docs/memory.md: what is read, MemArt's grid by the rows that come back, and how many more facts
each way of choosing knows than blocks drawn by chance, at equal rows and over the same samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.stats import Scores, change, level
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve

ROWS = (256, 512, 1024, 2048)  # that come back
FACTS = ("think", "act", "tool", "others")
LAST = (1, 2, 4, 8)
RANDOM = "random blocks"

Settings = dict[str, str]
Grid = Mapping[str, Mapping[int, Sequence[TrialRecord]]]  # by the way of choosing, and by rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    def play(method: str, settings: Settings) -> list[TrialRecord]:
        spec = RunSpec("embedded", "micro", method, None, "micro/memory", limit=args.limit)
        spec = resolve(RunSpec(**{**spec.document(), "seed": args.seed}), settings)
        run_one(spec, args.folder, lambda *_: None)
        return list(RunReader(args.folder / spec.id).trials())

    print("| what is before the model | peak live, MB | tokens | exact | facts right | evidence |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, method, settings in read_arms():
        print(row(name, play(method, settings)), flush=True)
    grid = {
        name: {rows: play("memart", chosen) for rows, chosen in zip(ROWS, settings, strict=True)}
        for name, settings in grid_arms()
    }
    print("\n" + table("exact (facts; evidence), %", grid, lambda _, trials: cell(trials)))
    title = f"facts, % less {RANDOM} [95 %]"
    less = {name: by_rows for name, by_rows in grid.items() if name != RANDOM}
    print("\n" + table(title, less, lambda rows, trials: difference(trials, grid[RANDOM][rows])))


def read_arms() -> Iterator[tuple[str, str, Settings]]:
    """Yield a name, a method and its settings for every row that does not choose blocks."""
    yield "everything, read (`full`)", "full", {}
    yield "nothing", "full", {"context": "none"}
    for last in LAST:
        yield f"last {last} sessions, read", "full", {"context": "sessions", "last": str(last)}
    yield "all blocks", "memart", {"topk": "100000"}


def grid_arms() -> Iterator[tuple[str, list[Settings]]]:
    """Yield a way of choosing blocks, and its settings for each number of rows."""
    for name, pick in ((RANDOM, "random"), ("the last blocks", "last")):
        yield name, [{"topk": str(rows // 16), "pick": pick} for rows in ROWS]
    for block, normalise, aggregate in product((8, 16), ("softmax", "rr"), ("max", "sum")):
        chosen = {"block": str(block), "normalise": normalise, "aggregate": aggregate}
        name = f"{normalise}-{aggregate}, blocks of {block}"
        yield name, [{"topk": str(rows // block), **chosen} for rows in ROWS]
    name = "softmax-max, blocks of 16, `sets=shared`"
    yield name, [{"topk": str(rows // 16), "sets": "shared"} for rows in ROWS]


def row(name: str, trials: Sequence[TrialRecord]) -> str:
    exact = level(Scores.of_trials({trial.sample_id: [trial.score or 0.0] for trial in trials}))
    facts, came = share(trials, FACTS), share(trials, ("evidence_recall",))
    live = round(sum(trial.kv.peak_live for trial in trials) / len(trials))
    size = sum(trial.kv.peak_bytes for trial in trials) / len(trials) / 1e6
    interval = f"{100 * exact.point:.0f} % [{100 * exact.low:.0f}, {100 * exact.high:.0f}]"
    back = f"{came} %" if came else ""
    return f"| {name} | {size:.1f} | {live:,} | {interval} | {facts} % | {back} |"


def table(title: str, grid: Grid, told: Callable[[int, Sequence[TrialRecord]], str]) -> str:
    """Return a table with a row for each way of choosing, and a column for each number of rows."""
    lines = [[title, *(f"{rows:,} rows" for rows in ROWS)], ["---", *("--:" for _ in ROWS)]]
    for name, by_rows in grid.items():
        lines.append([name, *(told(rows, trials) for rows, trials in by_rows.items())])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def cell(trials: Sequence[TrialRecord]) -> str:
    exact = 100 * sum(trial.score or 0.0 for trial in trials) / len(trials)
    return f"{exact:.0f} ({share(trials, FACTS)}; {share(trials, ('evidence_recall',))})"


def difference(trials: Sequence[TrialRecord], base: Sequence[TrialRecord]) -> str:
    """Return by how many points more facts are right, over the same samples."""
    found = change(_facts(trials), _facts(base))
    if found is None:
        return ""
    return f"{100 * found.point:+.0f} [{100 * found.low:+.0f}, {100 * found.high:+.0f}]"


def _facts(trials: Sequence[TrialRecord]) -> Scores:
    return Scores.of_counts({trial.sample_id: _tally([trial], FACTS) for trial in trials})


def share(trials: Sequence[TrialRecord], names: Sequence[str]) -> str:
    """Return the percentage that is right of all that some sub-scores asked."""
    right, asked = _tally(trials, names)
    return f"{100 * right / asked:.0f}" if asked else ""


def _tally(trials: Sequence[TrialRecord], names: Sequence[str]) -> tuple[float, float]:
    tallies = [
        trial.sub_scores[name] for trial in trials for name in names if name in trial.sub_scores
    ]
    return sum(tally[0] for tally in tallies), sum(tally[1] for tally in tallies)


if __name__ == "__main__":
    main()
