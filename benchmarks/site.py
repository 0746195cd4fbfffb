"""How fast the HTML report builds: 200 runs of 500 trials, 10 turns each.

    python benchmarks/site.py [--runs 200] [--trials 500] [--turns 10] [--folder DIR]

Writes made-up runs with `benchmarks/results.py` (with `--folder` they are kept for the next time),
then loads them and builds the site in a process of its own. Prints a Markdown table with wall and
CPU seconds, imports left out, and peak memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import resource
import tempfile
import time
from pathlib import Path

from results import make_runs


def build(runs: Path, site: Path) -> list[tuple[str, float, float, float]]:
    """Load and build; return name, wall seconds, CPU seconds and peak MB after each step."""
    from agentbench_kv.results.runs import load_runs
    from agentbench_kv.results.site import build_site

    marks = [(time.perf_counter(), time.process_time(), 0.0)]
    found, problems = load_runs([runs])
    marks.append((time.perf_counter(), time.process_time(), _peak()))
    build_site(found, problems, site)
    marks.append((time.perf_counter(), time.process_time(), _peak()))
    steps = zip(("load", "build"), marks, marks[1:], strict=False)
    return [(name, b[0] - a[0], b[1] - a[1], b[2]) for name, a, b in steps]


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(folder: Path, runs: int, trials: int, turns: int) -> None:
    """Make what is missing, measure, and print a Markdown table."""
    made, site = folder / "runs", folder / "site"
    if not made.exists():
        make_runs(made, runs, trials, turns=turns)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},")
    print(f"load average {os.getloadavg()[0]:.1f}; {runs} runs x {trials} trials x {turns} turns\n")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        steps = pool.apply(build, (made, site))
    print("| step | wall, s | CPU, s | peak so far, MB |\n|---|--:|--:|--:|")
    for name, wall, cpu, peak in steps:
        print(f"| {name} | {wall:.1f} | {cpu:.1f} | {peak:,.0f} |")
    sizes = [path.stat().st_size for path in site.rglob("*.html")]
    print(f"\n{len(sizes)} pages, {sum(sizes) / 1e6:,.0f} MB")


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="keep runs and site here")
    arguments = parser.parse_args()
    sizes = (arguments.runs, arguments.trials, arguments.turns)
    if arguments.folder:
        measure(arguments.folder, *sizes)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), *sizes)


if __name__ == "__main__":
    main()
