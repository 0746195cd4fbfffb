"""Speed and memory of whole sessions at long prompts: every engine, every arm, in repetitions.

    python benchmarks/serving_shapes.py run --model FOLDER --prompt 8k --repeats 9 --out runs/shapes
    python benchmarks/serving_shapes.py table runs/shapes
    python benchmarks/serving_shapes.py pack runs/shapes RECORDS.jsonl.xz   # for `table`, too

`run` writes a trace of agent sessions (`serving_shapes_trace.py`) for each model and prompt, and
measures each cell (an engine with an arm) by `kvbench bench serving --trace` in a process of its
own: first every cell once, then every cell again. Within a repetition an engine's arms follow one
another in rotated order, so that ratios can be paired. A cell's folder is its record. The same
command goes on where it was interrupted, with a higher `--repeats` too; a cell that failed keeps
its one line, and `--retry` measures it again. `table` shows what there is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from serving_shapes_records import pack, unpack
from serving_shapes_table import (
    ABOUT,
    BEGUN,
    CELL,
    DECODER,
    HARDWARE,
    TRACE,
    cell_path,
    counted,
    shapes_tables,
)
from serving_shapes_trace import TraceShape, write_trace

from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.results.files import json_bytes, write_atomic
from agentbench_kv.results.tables.formats import FORMATS
from agentbench_kv.results.tables.model import slug
from agentbench_kv.serving_bench.jobs import K
from agentbench_kv.serving_bench.measurements import serving_folders
from agentbench_kv.serving_bench.tables import serving_tables

KVBENCH = (sys.executable, "-c", "from agentbench_kv.cli import main; main()")
ENGINES = ("embedded", "vllm", "sglang", "llamacpp")
BUDGETS = (1024, 2048)
# The precision of cached rows that each has on a CPU; the embedded engine simulates it.
_QUANTISED = {"embedded": "int8", "vllm": "fp8", "sglang": "fp8_e4m3", "llamacpp": "q8_0"}
_OTHER_DTYPES = {("llamacpp", "bfloat16"): "float16"}  # the nearest that an engine has
# As shipped, which `full` is there, they have a prefix cache; this is the plug-in's.
_SHARED = dict.fromkeys(("vllm", "sglang"), "full-constrained,prefix=shared")
_MACHINE = (
    "import json, sys; from agentbench_kv.serving_bench.hardware import document, measure_hardware;"
    "print(json.dumps(document(measure_hardware(sys.argv[1], 'cpu'))))"
)
_STOP_S = 120.0


@dataclass(frozen=True)
class Arm:
    """What is compared: a name of its own, and how `kvbench bench serving` is asked for it."""

    name: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One repetition of an arm on an engine, at one model and prompt."""

    place: Path  # of the model and the prompt
    model: str
    engine: str
    arm: Arm
    repetition: int  # from 0
    rank: int = 0  # of the engine, and then of the arm, in tables

    @property
    def folder(self) -> Path:
        return self.place / cell_path(self.engine, self.repetition, self.arm.name)

    @property
    def record(self) -> dict[str, Any] | None:
        """What is known of it, if it was measured or has failed."""
        path = self.folder / CELL
        return json.loads(path.read_text()) if path.is_file() else None

    def due(self, *, retry: bool) -> bool:
        """Whether it is to be measured; what failed only if asked for."""
        known = self.record
        return known is None or (retry and "error" in known)


def arms_of(engine: str, prompt: int, budgets: Sequence[int] = BUDGETS) -> list[Arm]:
    """Return an engine's arms; those it cannot run are refused by `kvbench`, in its words."""
    shared = _SHARED.get(engine, "full@prefix")
    precision = _QUANTISED[engine]
    half = prompt // 2
    arms = [
        Arm("full", ("--method", "full")),
        Arm(shared, ("--method", shared)),
        Arm(f"full kv={precision}", ("--method", "full", "--kv-dtype", precision)),
        Arm(f"clear-tools {half}", ("--method", "clear-tools", "--budget", str(half))),
    ]
    for name, budget in product(("agentkv", "snapkv"), budgets):
        words = ("--method", name, "--budget", str(budget), "--set", "trigger=prefill+every")
        arms.append(Arm(f"{name} {budget}", words))
    # The message, an eighth of the prompt, is protected: a budget has to leave something beyond it.
    quarter, method = str(prompt // 4), "agentkv@system,prefix=shared"
    words = ("--method", method, "--budget", quarter, "--set", "trigger=prefill+every")
    return [*arms, Arm(f"{method} {quarter}", words)]


def cells(
    places: Sequence[tuple[Path, str, int]],
    engines: Sequence[str],
    repeats: int,
    arms: Sequence[str] = (),
    budgets: Sequence[int] = BUDGETS,
) -> Iterator[Cell]:
    """Yield all cells in the order in which they are measured, of the named arms or of all."""
    for repetition, (place, model, prompt), engine in product(range(repeats), places, engines):
        offered = arms_of(engine, prompt, budgets)
        ranked = enumerate(offered, start=100 * ENGINES.index(engine))
        chosen = _named(offered, arms) if arms else offered
        own = [(rank, arm) for rank, arm in ranked if arm in chosen]
        first = repetition % max(len(own), 1)
        for rank, arm in [*own[first:], *own[:first]]:
            yield Cell(place, model, engine, arm, repetition, rank)


def _named(offered: Sequence[Arm], names: Sequence[str]) -> list[Arm]:
    """Return the arms of these names; a method's, which is no arm's, is of all its arms."""
    exact = {arm.name for arm in offered}
    return [
        arm
        for arm in offered
        if arm.name in names or any(arm.name.startswith(f"{n} ") for n in names if n not in exact)
    ]


def check_arms(
    names: Sequence[str], engines: Sequence[str], prompts: Sequence[int], budgets: Sequence[int]
) -> None:
    """Refuse names that are no arm's; nothing would be measured, or less than was asked for."""
    pairs = product(engines, prompts)
    offered = [arm for engine, prompt in pairs for arm in arms_of(engine, prompt, budgets)]
    for name in names:
        if not _named(offered, [name]):
            known = ", ".join(dict.fromkeys(arm.name for arm in offered))
            raise UsageError(f"--arm {name!r}: there is none; these are: {known}")


def command_of(cell: Cell, args: argparse.Namespace, longest: int) -> list[str]:
    """Return how a user would measure a cell; `longest` are the tokens of its longest session."""
    sizes: dict[str, dict[str, Any]] = {
        "vllm": {"max-model-len": -(-longest // 64) * 64 + 64},
        # SGLang wants the weights to fit into this share of what is free; its pool has a size.
        "sglang": {"context-length": longest + 64, "mem-fraction-static": 0.8},
        "llamacpp": {"cells": args.sessions * (-(-longest // 256) * 256 + 256)},
    }
    words = [*KVBENCH, "bench", "serving", "--engine", cell.engine, "--model", cell.model]
    dtype = _OTHER_DTYPES.get((cell.engine, args.dtype), args.dtype)
    words += ["--dtype", dtype, "--device", "cpu", "--trace", str(cell.place / TRACE)]
    words += ["--alone", *cell.arm.words, "--sessions", str(args.sessions)]
    words += ["--concurrency", str(args.concurrency), "--warmup", "0"]
    words += ["--repeats", "1", "--no-exact-calls", "--timeout", str(args.timeout)]
    own = own_of(args, cell.engine)["engine_arg"]
    for name, value in (sizes.get(cell.engine, {}) | own).items():
        words += ["--engine-arg", f"{name}={value}"]
    return [*words, "--out", str(cell.folder), "--quiet", "--json"]


def measure(cell: Cell, command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Measure a cell and write its record; what was begun before stays, and is counted."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    (cell.folder / CELL).unlink(missing_ok=True)
    _count(cell)
    began, load = time.perf_counter(), os.getloadavg()[0]
    with (cell.folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
        )
        try:
            code = process.wait()
        except BaseException:
            _stop(process)
            raise
    record: dict[str, Any] = {
        "engine": cell.engine,
        "arm": cell.arm.name,
        "repetition": cell.repetition,
        "rank": cell.rank,
        "wall_s": time.perf_counter() - began,
        "load": [load, os.getloadavg()[0]],
    }
    if code:
        record["error"] = _said(cell.folder / "log.txt", code)
    write_atomic(cell.folder / CELL, json_bytes(record, indent=2))
    return record


def _count(cell: Cell) -> None:
    """Note that a cell is begun, where it stays if the cell's folder is removed."""
    about, name = cell.place / ABOUT, str(cell.folder.relative_to(cell.place))
    known = json.loads(about.read_text()) if about.is_file() else {}
    counts = known.setdefault(BEGUN, {})
    counts[name] = counts.get(name, 0) + 1
    write_atomic(about, json_bytes(known, indent=2))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let a measurement end its engine, as after a Ctrl-C; kill what does not."""
    process.terminate()  # `nohup` and a shell's `&` leave SIGINT ignored
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _said(log: Path, code: int) -> str:
    """Return the last line that a failed command said."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}; was there memory enough?"
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), f"exit code {code}, nothing said")


def prepared(args: argparse.Namespace) -> Iterator[tuple[Path, str, int, int]]:
    """Yield a folder with its trace for each model and prompt, and its longest session's tokens.

    A UsageError where a folder's trace is of another shape, or its cells have other settings.
    """
    same = {name: getattr(args, name) for name in ("dtype", "concurrency", "threads")}
    for model, prompt in product(args.model, args.prompt):
        place = args.out / slug(Path(model).name, f"{prompt}")
        part = max(prompt // 8, 32)
        shape = TraceShape(
            *(prompt, args.output, args.turns, args.sessions),
            *(args.system or part, args.result or part, args.seed),
        )
        about = place / ABOUT
        known = json.loads(about.read_text()) if about.is_file() else None
        if known is None:
            place.mkdir(parents=True, exist_ok=True)
            found = write_trace(place / TRACE, shape, model)
            longest = max(each.tokens for each in found)
            known = {"shape": asdict(shape), "settings": same, "longest": longest}
            write_atomic(about, json_bytes(known, indent=2))
        elif known["shape"] != asdict(shape):
            raise UsageError(f"{place} holds sessions of another shape; choose another --out")
        elif known["settings"] != same:
            was = ", ".join(f"--{name} {value}" for name, value in known["settings"].items())
            raise UsageError(f"{place} was measured with {was}; choose another --out")
        if DECODER not in known:
            decoder = counted(model)
            known[DECODER] = decoder and asdict(decoder)
        _same_of_engines(about, known, args)
        yield place, model, prompt, int(known["longest"])


def _same_of_engines(about: Path, known: dict[str, Any], args: argparse.Namespace) -> None:
    """Note what each engine gets of its own, or refuse other than what it got before."""
    noted = known.setdefault("engines", {})
    for engine in args.engine:
        own = own_of(args, engine)
        if noted.setdefault(engine, own) != own:
            was = [
                f"--{option.replace('_', '-')} {engine}:{name}={value}"
                for option, pairs in noted[engine].items()
                for name, value in pairs.items()
            ]
            raise UsageError(
                f"{engine} in {about.parent} was measured with {', '.join(was) or 'nothing'} of "
                "its own; choose another --out"
            )
    write_atomic(about, json_bytes(known, indent=2))


def run(args: argparse.Namespace) -> None:
    """Measure every cell that has no record."""
    places = {place: (model, prompt, longest) for place, model, prompt, longest in prepared(args)}
    asked = [(place, model, prompt) for place, (model, prompt, _) in places.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    check_arms(args.arm, args.engine, [prompt for _, _, prompt in asked], args.budget)
    plan = list(cells(asked, args.engine, args.repeats, args.arm, args.budget))
    for number, cell in enumerate(plan, start=1):
        if not cell.due(retry=args.retry):
            continue
        _measure_machine(cell.folder / HARDWARE, args.dtype, environment)
        own = own_of(args, cell.engine)["env"]
        command = command_of(cell, args, places[cell.place][2])
        found = measure(cell, command, environment | own)
        said = found.get("error") or f"{found['wall_s']:.0f} s"
        head = f"{number}/{len(plan)} {cell.place.name} {cell.engine} {cell.arm.name}"
        rest = time_left(plan, [each for each in plan[number:] if each.due(retry=args.retry)])
        print(f"{head}, repetition {cell.repetition + 1}: {said}; {rest}", flush=True)


def time_left(plan: Sequence[Cell], rest: Sequence[Cell]) -> str:
    """Say how many cells are left, and how long they take if they are like those of the plan."""
    known: dict[tuple[Path, str], list[float]] = {}
    missing = [(cell.place, cell.engine) for cell in rest]
    for cell in plan:
        record = cell.record
        if record is not None and not record.get("error"):
            known.setdefault((cell.place, cell.engine), []).append(record["wall_s"])
    means = {at: statistics.fmean(times) for at, times in known.items()}
    hours = sum(means.get(at, 0.0) for at in missing) / 3600
    least = "at least " * any(at not in means for at in missing)
    return f"{len(missing)} left, {least}{hours:.1f} h"


def own_of(args: argparse.Namespace, engine: str) -> dict[str, dict[str, str]]:
    """Return what an engine gets of its own: `env` and `engine_arg`."""
    found: dict[str, dict[str, str]] = {"env": {}, "engine_arg": {}}
    for option, own in found.items():
        for each in getattr(args, option):
            name, _, text = each.partition(":")
            if name in (engine, "all"):
                key, _, own[key] = text.partition("=")
    return found


def _measure_machine(path: Path, dtype: str, environment: dict[str, str]) -> None:
    """Measure the machine's limits, which drift, with a cell's threads just before it.

    In a process of its own: threads are counted when one begins.
    """
    command = [sys.executable, "-c", _MACHINE, dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip().splitlines() or ["it said nothing"]
        raise UsageError(f"the machine's limits cannot be measured: {why[-1]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json_bytes(json.loads(done.stdout), indent=2))


def table(args: argparse.Namespace) -> None:
    """Print the tables of what was measured, of a folder or of its records in a file."""
    with TemporaryDirectory() as folder:
        if args.out.is_file():
            unpack(args.out, Path(folder))
        out = Path(folder) if args.out.is_file() else args.out
        # Loads that were measured one by one, as at equal memory, have no cells.
        tables = shapes_tables(out) or serving_tables(serving_folders(sorted(out.glob("*"))))
    if not tables:
        raise UsageError(f"{args.out} holds no measured cell; start with the command `run`")
    print(FORMATS[args.format][1](tables), end="")


def keep(args: argparse.Namespace) -> None:
    """Put a folder's records into a file."""
    print(f"{args.file}: {pack(args.out, args.file)} documents")


def tokens(text: str) -> int:
    """Read `8k` (8,192) or a number."""
    number, unit = (text[:-1], K) if text.lower().endswith("k") else (text, 1)
    if not number.isdigit() or not int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, such as 8k or 2000")
    return int(number) * unit


def pair(text: str) -> str:
    """Check `ENGINE:NAME=VALUE`."""
    engine, _, rest = text.partition(":")
    if engine not in (*ENGINES, "all") or "=" not in rest:
        raise argparse.ArgumentTypeError(f"{text!r}: expected ENGINE:NAME=VALUE")
    if rest.startswith("OMP_NUM_THREADS="):
        raise argparse.ArgumentTypeError(f"{text!r}: --threads says it, the same for all")
    return text


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    verbs = parser.add_subparsers(required=True)
    go = verbs.add_parser("run", help="measure what is missing")
    go.set_defaults(act=run)
    go.add_argument("--model", action="append", required=True, help="folder; repeatable")
    go.add_argument("--prompt", action="append", type=tokens, required=True, help="repeatable")
    go.add_argument("--output", type=tokens, default=128)
    go.add_argument("--turns", type=int, default=3)
    go.add_argument("--sessions", type=int, default=4)
    go.add_argument("--concurrency", type=int, help="sessions at once (default: all)")
    go.add_argument("--system", type=tokens, help="tokens all have in common (prompt / 8)")
    go.add_argument("--result", type=tokens, help="tokens of a tool result (prompt / 8)")
    go.add_argument("--engine", action="append", choices=ENGINES, help="repeatable (all)")
    which = "one, or a method with all its budgets; repeatable (all)"
    go.add_argument("--arm", action="append", default=[], help=which)
    go.add_argument("--budget", action="append", type=tokens, help="repeatable (1k, 2k)")
    go.add_argument("--repeats", type=int, default=9)
    go.add_argument("--dtype", default="bfloat16")
    go.add_argument("--threads", type=int, help="of every engine (all processors)")
    go.add_argument("--timeout", type=float, default=14400.0, help="seconds for an answer")
    go.add_argument("--engine-arg", action="append", type=pair, default=[])
    go.add_argument("--env", action="append", type=pair, default=[], help="ENGINE:NAME=VALUE")
    go.add_argument("--seed", type=int, default=0)
    go.add_argument("--retry", action="store_true", help="measure again what failed")
    go.add_argument("--out", type=Path, required=True)
    show = verbs.add_parser("table", help="show what was measured")
    show.set_defaults(act=table)
    show.add_argument("out", type=Path, help="folder, or records in a file")
    show.add_argument("--format", choices=FORMATS, default="markdown")
    away = verbs.add_parser("pack", help="put what was measured into one file")
    away.set_defaults(act=keep)
    away.add_argument("out", type=Path)
    away.add_argument("file", type=Path)
    found = parser.parse_args(words)
    if found.act is run:
        found.engine = found.engine or list(ENGINES)
        found.budget = found.budget or list(BUDGETS)
        found.concurrency = found.concurrency or found.sessions
        found.threads = found.threads or len(os.sched_getaffinity(0))
    return found


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise KeyboardInterrupt


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; what is wrong with it is one line, and exit code 2."""
    args = parsed(words)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        args.act(args)
    except KVBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
