"""Evidence found against budget, every method beside AgentKV on the same samples: table and plot.

    kvbench run --task micro/recall-1k --limit 100 --method agentkv --method rkv --budget 256 ...
    python benchmarks/micro_curves.py runs --task micro/recall-1k --plot docs/micro-curves-1k.svg

"Evidence" is every recalled fact of a session, of all phases and kinds: right over asked. Intervals
are those of every report; differences are paired, Holm-adjusted within a budget.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.stats import Change, Interval, Scores, change, holm, level

SOURCES = ("think", "act", "tool", "others")
Counts = dict[str, tuple[float, float]]
Arms = dict[tuple[str, int], Counts]


def counts(trials: list[TrialRecord]) -> Counts:
    """Return right and asked of every sample, all sources together."""
    found: Counts = {}
    for record in trials:
        parts = [[record.metrics.get(f"{s}_{part}", 0) for s in SOURCES] for part in ENDS]
        right, asked = (sum(float(value or 0) for value in part) for part in parts)
        found[record.sample_id] = (right, asked)
    return found


ENDS = ("right", "asked")


def load(folder: Path, task: str, seed: int) -> tuple[Arms, Counts]:
    """Return every compressed arm by method and budget, and the full cache."""
    arms: Arms = {}
    full: Counts = {}
    for path in sorted(folder.glob("*/run.json")):
        reader = RunReader(path.parent)
        spec = reader.info.spec
        if (spec["task"], spec["seed"]) != (task, seed):
            continue
        if spec["method"] == "full":
            full = counts(reader.trials())
        elif isinstance(spec["budget"], int):
            arms[spec["method"], spec["budget"]] = counts(reader.trials())
    return arms, full


def share(arm: Counts) -> Interval | None:
    """Return right over asked with its interval."""
    scores = Scores.of_counts(arm)
    return level(scores) if scores.parts else None


def differences(arms: Arms, budget: int, base: str) -> dict[str, tuple[Change, float]]:
    """Compare every method with `base` at a budget."""
    others = [method for method, size in arms if size == budget and method != base]
    if (base, budget) not in arms:
        return {}
    gaps = {
        m: change(Scores.of_counts(arms[m, budget]), Scores.of_counts(arms[base, budget]))
        for m in others
    }
    known = {method: gap for method, gap in gaps.items() if gap is not None}
    adjusted = holm([gap.p_value for gap in known.values()])
    return {m: (gap, p) for (m, gap), p in zip(known.items(), adjusted, strict=True)}


def percent(interval: Interval | None) -> str:
    """Write a share with its interval."""
    if interval is None:
        return ""
    return f"{100 * interval.point:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def table(arms: Arms, full: Counts, base: str) -> str:
    """Return the Markdown table."""
    lines = [
        f"| budget | method | evidence, % [95 % CI] | less {base} [95 % CI] | p (Holm) | n |",
        "|--:|---|---|---|--:|--:|",
    ]
    if full:
        lines.append(f"| | full | {percent(share(full))} | | | {len(full)} |")
    for budget in sorted({size for _, size in arms}):
        gaps = differences(arms, budget, base)
        here = [(m, arm) for (m, size), arm in arms.items() if size == budget]
        for method, arm in sorted(here, key=lambda item: -_point(share(item[1]))):
            gap = ""
            if method in gaps:
                d, p = gaps[method]
                gap = f"{100 * d.point:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}] | {p:.3f}"
            cells = (str(budget), method, percent(share(arm)), gap or " |", str(len(arm)))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _point(interval: Interval | None) -> float:
    return interval.point if interval else 0.0


def plot(arms: Arms, full: Counts, title: str, path: Path) -> None:
    """Draw one line a method, with intervals."""
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and equal data gives equal bytes.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvbench"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.8))
    if (whole := share(full) if full else None) is not None:
        axes.axhline(100 * whole.point, color="0.5", linestyle="--", label="full cache")
    styles = zip(sorted({method for method, _ in arms}), "osD^v<>pXP*h", strict=False)
    for method, marker in styles:
        sizes = sorted(size for name, size in arms if name == method)
        found = [share(arms[method, size]) for size in sizes]
        points = [100 * _point(interval) for interval in found]
        low = [100 * (i.point - i.low) if i else 0 for i in found]
        high = [100 * (i.high - i.point) if i else 0 for i in found]
        wide = 2.4 if method == "agentkv" else 1.2
        axes.errorbar(
            sizes, points, yerr=[low, high], marker=marker, label=method, linewidth=wide, capsize=2
        )
    axes.set(xlabel="budget, tokens per layer and KV head", ylabel="evidence found, %", title=title)
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def summary(arms: Mapping[tuple[str, int], Counts]) -> str:
    """Say who leads at each budget."""
    leaders = []
    for budget in sorted({size for _, size in arms}):
        here = {m: _point(share(arm)) for (m, size), arm in arms.items() if size == budget}
        best = max(here, key=lambda method: here[method])
        leaders.append(f"{budget}: {best}")
    return "leaders: " + ", ".join(leaders)


def main() -> None:
    """Print the table and write the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--task", default="micro/recall-1k")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", default="agentkv")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    arms, full = load(options.runs, options.task, options.seed)
    print(table(arms, full, options.base))
    print()
    print(summary(arms))
    if options.plot:
        plot(arms, full, f"{options.task}, micro model", options.plot)


if __name__ == "__main__":
    main()
