"""The demo of docs/leaderboard.md: run the grid on micro/recall-1k, then build the site.

    python benchmarks/demo_site.py --out demo [--limit 100] [--methods …] [--budgets …]

Every run is a `kvbench run` that finishes what an earlier call left. Runs go to OUT/runs, the
second run of `full` (the A/A arm) to OUT/again, the site to OUT/site. `--limit 20 --methods
agentkv snapkv --budgets 384 768` takes a minute or two; `--site-only` builds from what there is.
`--screenshot FILE.png` also takes a picture of the first page (Playwright and Chromium).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

TASK = "micro/recall-1k"
METHODS = ("agentkv", "snapkv", "streamingllm", "rkv", "h2o", "triattention", "random")
BUDGETS = ("256", "384", "512", "640", "768")
KVBENCH = (sys.executable, "-c", "from agentbench_kv.cli import main; main()")


def commands(out: Path, methods: Sequence[str], budgets: Sequence[str]) -> Iterator[list[str]]:
    """Yield what tells one `kvbench run` of the grid from the others, the references first."""
    runs, again = ["--out", str(out / "runs")], ["--out", str(out / "again")]
    yield ["--method", "full", *runs]
    yield ["--method", "full", *again]
    yield ["--engine", "scripted", "--model", "null", *runs]
    yield ["--method", "full-constrained", *runs]
    for budget in budgets:
        for method in methods:
            yield ["--method", method, "--budget", budget, *runs]


def screenshot(page: Path, file: Path) -> None:
    """Take a picture of a page as it is on a wide screen."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        tab = chromium.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        tab.goto(page.resolve().as_uri())
        tab.screenshot(path=file, full_page=True)
        chromium.close()


def main() -> None:
    """Read the options, run the grid, build the site."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--site-only", action="store_true", help="run nothing")
    parser.add_argument("--screenshot", type=Path)
    options = parser.parse_args()
    common = ["--task", TASK, "--limit", str(options.limit), "--quiet"]
    common += ["--concurrency", str(options.concurrency)]
    grid = commands(options.out, options.methods, options.budgets)
    for own in () if options.site_only else grid:
        print("kvbench run", *common, *own, flush=True)
        subprocess.run([*KVBENCH, "run", *common, *own], check=True)
    runs = [str(folder) for name in ("runs", "again") if (folder := options.out / name).is_dir()]
    subprocess.run([*KVBENCH, "report", *runs, "--html", str(options.out / "site")], check=True)
    if options.screenshot:
        screenshot(options.out / "site" / "index.html", options.screenshot)


if __name__ == "__main__":
    main()
