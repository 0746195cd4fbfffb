"""How fast results open: the index of 10,000 runs, 1,000,000 trial records as a DataFrame.

    python benchmarks/results.py [--arms index load] [--runs N] [--records N] [--folder DIR]

Writes made-up runs with the shape of real ones (30 metrics a trial) to a temporary folder, then
measures each arm in a process of its own: seconds on the clock and of the processor, imports left
out, and the peak memory of that process. The files were just written, so they come from the page
cache: "cold" means without an index. Prints a Markdown table with the machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agentbench_kv.results.records import (
    KVAccount,
    Timing,
    TrialRecord,
    TrialStatus,
    TurnRecord,
    Usage,
)
from agentbench_kv.results.run_info import RunInfo, RunStatus, write_info
from agentbench_kv.results.run_names import prefix_parts, run_id
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.summary import FILE, build, summarize

METHODS = ("full", "agentkv", "snapkv", "h2o", "rkv", "streamingllm", "triattention", "random")
BUDGETS = (256, 384, 512, 640, 768)
PARTS = ("think", "act", "tool", "others", "one_shot", "recurring", "messages")
PAIRS = [*PARTS, *(f"{a}_{b}" for a in PARTS[:4] for b in ("one_shot", "recurring"))]
INTERVAL = 128
MEGABYTE = 1 << 20

Measured = tuple[str, float, float, float]


def make_runs(
    folder: Path,
    runs: int,
    trials: int,
    per_sample: int = 1,
    turns: int = 0,
    summaries: str = "none",
    seed: int = 0,
) -> list[Path]:
    """Write made-up runs that load as real ones do.

    Tasks, methods and budgets are crossed; runs past the grid's end repeat it with another seed.
    The chance to solve a sample grows with the budget and is shared by all methods on the sample,
    so that pairing finds something. 2% of the trials fail.

    Parameters
    ----------
    folder : Path
        Where the run directories go.
    runs, trials : int
        How many runs; trials in each.
    per_sample : int
        Trials of one sample; `trials` should be a multiple of it.
    turns : int
        Records in `turns.jsonl` per trial; 0 writes no such file.
    summaries : str
        `none`; `derived` from each run's records; `copied` from the first run's, which is wrong
        in its figures but takes no time.
    seed : int
        Equal seeds write equal runs.
    """
    rng = np.random.default_rng(seed)
    ease = rng.random(-(-trials // per_sample))
    made = []
    for number in range(runs):
        info = _info(number, trials, per_sample)
        path = folder / info.run_id
        path.mkdir(parents=True)
        write_info(path, info)
        rows = list(_rows(rng, info.spec, ease, trials, per_sample))
        (path / "samples.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(rows))
        if turns:
            lines = [turn for row in rows for turn in _turns(row, turns)]
            (path / "turns.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(lines))
        made.append(path)
        _summarize(path, made[0], summaries)
    return made


def _info(number: int, trials: int, per_sample: int) -> RunInfo:
    cells = list(product(("micro/recall-1k", "micro/recall-5k"), METHODS, BUDGETS))
    task, method, budget = cells[number % len(cells)]
    spec = {
        "engine": "embedded",
        "model": "micro",
        "method": method,
        "budget": None if method == "full" else budget,
        "task": task,
        "params": {} if method == "full" else {"interval": INTERVAL},
        "limit": trials // per_sample,
        "trials": per_sample,
        "seed": number,
        "concurrency": 16,
        "temperature": 0.0,
    }
    now = 1.79e9 + number
    return RunInfo(
        run_id=run_id(prefix_parts(spec), spec),
        spec=spec,
        status=RunStatus.COMPLETE,
        created=now,
        heartbeat=now + 60,
        pid=1,
        host="made-up",
        owner="benchmark",
        wall_s=60.0,
        expected_trials=trials,
        provenance={"kvbench": "made up by benchmarks/results.py"},
    )


def _rows(
    rng: np.random.Generator, spec: dict[str, Any], ease: Any, trials: int, per_sample: int
) -> Iterator[TrialRecord]:
    budget = spec["budget"]
    chance = 0.95 if budget is None else 0.2 + budget / 1000
    logical = rng.integers(900, 1300, trials)
    lucky = rng.random(trials)
    fails = rng.random(trials) < 0.02
    right = rng.integers(0, 5, (trials, len(PAIRS))).tolist()
    times = rng.random((trials, 3)).round(6).tolist()
    for i in range(trials):
        sample = i // per_sample
        seen = int(logical[i])
        peak = seen if budget is None else min(seen, budget + INTERVAL + 200)
        metrics: dict[str, Any] = {}
        for name, value in zip(PAIRS, right[i], strict=True):
            metrics |= {f"{name}_right": value, f"{name}_asked": 4}
        ttft, tpot, seconds = times[i]
        solved = 0.5 * ease[sample] + 0.5 * lucky[i] < chance
        yield TrialRecord(
            sample_id=f"sample-{sample}",
            trial=i % per_sample,
            seed=i,
            status=TrialStatus.TIMEOUT if fails[i] else TrialStatus.SCORED,
            score=None if fails[i] else float(solved),
            metrics={} if fails[i] else metrics,
            kv=KVAccount(
                peak_live=peak,
                logical=seen,
                events=int(peak < seen),
                evicted=seen - peak,
                bytes_read=seen * 400_000,
                prefill_tokens=seen * 2 // 3,
                longest_prefill=300,
                decode_tokens=seen // 3,
                mean_decode_kv=peak * 0.7,
                budget=budget,
            ),
            timing=Timing()
            if fails[i]
            else Timing(ttft_ms=50 * ttft, tpot_ms=10 * tpot, e2e_s=9 * seconds),
            usage=Usage(prompt_tokens=6 * seen, completion_tokens=seen // 3, requests=10),
            prompt_sha=f"{sample:064x}",
            transcript=f"transcripts/sample-{sample}-t{i % per_sample}.json",
            error="the time is up" if fails[i] else None,
        )


def _turns(row: TrialRecord, turns: int) -> Iterator[TurnRecord]:
    step, live = row.kv.logical // turns, 0
    for turn in range(turns):
        before, grown = live, live + step
        event = grown > row.kv.peak_live
        live = min(grown, row.kv.budget or grown) if event else grown
        yield TurnRecord(
            sample_id=row.sample_id,
            trial=row.trial,
            turn=turn,
            prompt_tokens=step * turn + step // 2,
            output_tokens=step // 2,
            phases={"think": step // 4, "act": step // 4, "tool": step // 4, "others": step // 4},
            live_before=before,
            live_after=live,
            events=int(event),
            evicted=grown - live,
            prefill_tokens=step // 2,
            kv_bytes_read=grown * 40_000,
            ttft_ms=40.0,
            tpot_ms=8.0,
        )


def _summarize(path: Path, first: Path, how: str) -> None:
    if how == "derived":
        summarize(RunReader(path))
    elif how == "copied":
        names = ("method", "budget", "task", "seed")
        info = RunReader(path).info
        if path == first:
            document = build(RunReader(path)).model_dump(mode="json")
        else:
            document = json.loads((first / FILE).read_bytes())
        document |= {"run_id": info.run_id} | {name: info.spec[name] for name in names}
        (path / FILE).write_text(json.dumps(document, indent=2))


def open_index(folder: Path) -> str:
    """Open the folder's index; warm if it has one."""
    from agentbench_kv.results.index import read_index

    return f"{len(read_index(folder)):,} runs"


def load_frame(folder: Path) -> str:
    """Load every record of the folder into a DataFrame."""
    from agentbench_kv import load_results

    frame = load_results(folder)
    size = frame.memory_usage(deep=True).sum() / MEGABYTE
    return f"{len(frame):,} rows x {frame.shape[1]} columns, {size:,.0f} MB"


def measured(work: Callable[[Path], str], folder: Path) -> Measured:
    """Run `work` in a fresh process; return what it says, its seconds, CPU seconds, peak in MB."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_timed, (work, folder))


def _timed(work: Callable[[Path], str], folder: Path) -> Measured:
    import agentbench_kv.results.frame
    import agentbench_kv.results.index  # noqa: F401  imports are not what is measured

    start, busy = time.perf_counter(), time.process_time()
    said = work(folder)
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    return said, seconds, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def index_arm(folder: Path, runs: int) -> Iterator[tuple[str, str, float, float, float]]:
    """Measure the index without one, and with one."""
    make_runs(folder, runs, trials=4, summaries="copied")
    for name in ("index, cold", "index, warm"):
        yield name, *measured(open_index, folder)


def load_arm(folder: Path, records: int) -> Iterator[tuple[str, str, float, float, float]]:
    """Measure `load_results`."""
    trials = 5000
    make_runs(folder, max(1, records // trials), min(trials, records), per_sample=5)
    yield "load_results", *measured(load_frame, folder)


def main() -> None:
    """Measure what was asked for and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", nargs="+", choices=("index", "load"), default=["index", "load"])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the made-up runs go; default: /tmp")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores,", end=" ")
    print(f"Python {platform.python_version()}, load average {os.getloadavg()[0]:.1f}\n")
    print("| what | found | seconds | CPU seconds | peak MB |\n|---|---|--:|--:|--:|")
    for arm in arguments.arms:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            work = index_arm if arm == "index" else load_arm
            size = arguments.runs if arm == "index" else arguments.records
            for name, found, seconds, cpu, peak in work(Path(folder), size):
                row = f"| {name} | {found} | {seconds:.1f} | {cpu:.1f} | {peak:,.0f} |"
                print(row, flush=True)


if __name__ == "__main__":
    main()
