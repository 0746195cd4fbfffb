"""Markdown tables of micro-task runs: success and sub-scores by method and budget.

    kvbench run --task micro/recall-5k --method full --method agentkv ... --limit 100
    python benchmarks/micro_table.py runs > table.md

Reads the summaries of every run in a folder; nothing is recomputed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SUB_SCORES = ("think", "act", "tool", "others", "recurring", "one_shot")
CROSSED = tuple(
    f"{phase}_{kind}"
    for kind in ("recurring", "one_shot")
    for phase in ("think", "act", "tool", "others")
)


def load(folder: Path) -> list[dict[str, Any]]:
    """Read the summaries, ordered by task, seed, method and budget."""
    found = [json.loads(path.read_text()) for path in folder.glob("*/summary.json")]
    return sorted(
        found,
        key=lambda s: (s["task"], s["method"] != "full", s["method"], s["budget"] or 0, s["seed"]),
    )


def percent(interval: dict[str, Any] | None, *, ends: bool = True) -> str:
    """Render an interval in percent."""
    if interval is None:
        return ""
    point = f"{100 * interval['point']:.1f}"
    return f"{point} [{100 * interval['low']:.0f}, {100 * interval['high']:.0f}]" if ends else point


def ratio(summary: dict[str, Any], name: str) -> str:
    """Render a sub-score."""
    score = summary["sub_scores"].get(name)
    return percent(score["interval"], ends=False) if score else ""


def row(summary: dict[str, Any], names: tuple[str, ...], *, figures: bool) -> list[str]:
    """Render one run."""
    kv = summary["kv"]
    head = [summary["method"], str(summary["budget"] or ""), str(summary["seed"])]
    score = [percent(summary["score"]), ratio(summary, "messages")] if figures else []
    parts = [ratio(summary, name) for name in names]
    size = kv.get("median_peak_bytes")
    tail = [
        f"{size / 1e6:.2f}" if size else "not known",
        f"{kv['median_peak_live']:.0f}",
        f"{kv['median_logical']:.0f}",
        f"{kv['events'] / max(1, summary['trials']):.1f}",
        summary["validity"]["state"],
    ]
    return head + score + parts + (tail if figures else [])


def table(summaries: list[dict[str, Any]], names: tuple[str, ...], *, figures: bool) -> str:
    """Render a markdown table."""
    head = ["method", "budget", "seed"]
    head += ["success [95% CI]", "messages"] if figures else []
    head += [name.replace("_", " ") for name in names]
    head += (
        ["peak live MB", "peak live", "logical", "events/session", "validity"] if figures else []
    )
    lines = [head, ["---"] * len(head)]
    lines += [row(summary, names, figures=figures) for summary in summaries]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    """Print two tables a task: scores with KV figures, and evidence by phase and kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    summaries = load(folder)
    for task in dict.fromkeys(s["task"] for s in summaries):
        chosen = [s for s in summaries if s["task"] == task]
        trials = sorted({s["trials"] for s in chosen})
        print(f"### {task} ({', '.join(map(str, trials))} sessions a row)\n")
        print(table(chosen, SUB_SCORES, figures=True))
        print(f"\n{task}: evidence found, percent, by phase and kind\n")
        print(table(chosen, CROSSED, figures=False) + "\n")


if __name__ == "__main__":
    main()
