"""Where the two sides of a comparison come from: run, folder, baseline or URL."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from agentbench_kv.errors import UsageError
from agentbench_kv.results.baseline import NAME, read_baseline
from agentbench_kv.results.places import children, locate, reaching
from agentbench_kv.results.runs import Problem, Run, load_runs, run_folders
from agentbench_kv.results.store import RunStore

BASELINES = Path("baselines")
_FILES = ("run.json", "samples.jsonl")
_MOST_COMMANDS = 4
_OPTIONS = {
    "task": ("task", None), "method": ("method", None), "budget": ("budget", None),
    "engine": ("engine", "embedded"), "model": ("model", "micro"), "limit": ("limit", None),
    "trials": ("trials", 1), "seed": ("seed", 0), "concurrency": ("concurrency", 16),
    "temperature": ("temperature", 0.0), "max_tokens": ("max-tokens", 1024),
    "timeout_s": ("timeout", 3600.0), "dtype": ("dtype", "float32"), "device": ("device", "auto"),
}  # fmt: skip
"""Parts of a spec with the option of `kvbench run` that sets each, and what it is without one."""


@contextmanager
def open_sides(
    sources: Sequence[str], out: Path
) -> Iterator[tuple[list[list[Run]], list[Problem]]]:
    """Load the sides of a comparison; their records may be read inside the context only.

    A source is a run directory, a folder of runs (or of folders of runs), a baseline file, the name
    of one in `baselines/`, the id of a run in `out`, or a URL of any of these that fsspec reaches.
    Yields the runs of each source, and what could not be read. A UsageError or PrerequisiteError if
    a source is none of these or cannot be reached.
    """
    with tempfile.TemporaryDirectory(prefix="kvbench-") as scratch:
        found = [
            _remote(source, Path(scratch) / str(i)) if "://" in source else _local(source, out)
            for i, source in enumerate(sources)
        ]
        yield [runs for runs, _ in found], [problem for _, odd in found for problem in odd]


def absent_baseline(source: str, out: Path) -> Path | None:
    """Return the baseline file that a source means where there is none, nor any run; else None."""
    named = "/" not in source and not source.endswith(".json")
    path = BASELINES / f"{source}.json" if named else Path(source)
    if "://" in source or path.suffix != ".json" or not NAME.fullmatch(path.stem):
        return None
    places = (Path(source), path, out / source / "run.json")
    return None if any(place.exists() for place in places) else path


def how_to_make(baseline: Path, runs: Sequence[Run], out: Path) -> str:
    """Say which command makes a baseline like some runs; without any, what it looks like."""
    made = [f"kvbench run {run_options(run)} --out {shlex.quote(str(out))}" for run in runs]
    kept = [shlex.quote(str(out / run.run_id)) for run in runs]
    if not 1 <= len(runs) <= _MOST_COMMANDS:
        made, kept = ["kvbench run ..."], ["RUN"]
    folder = "" if baseline.parent == BASELINES else f" --to {shlex.quote(str(baseline.parent))}"
    save = f"kvbench baseline save {shlex.quote(baseline.stem)} {' '.join(kept)}{folder}"
    return (
        f"no baseline {baseline}, nor a run of that name; on the version to compare with: "
        f"{' && '.join([*made, save])} (kvbench compare --bootstrap takes CAND itself)"
    )


def run_options(run: Run) -> str:
    """Return the options of `kvbench run` that make a run, without those at their default."""
    given = [
        (f"--{option}", str(run.spec[name]))
        for name, (option, default) in _OPTIONS.items()
        if run.spec.get(name) not in (None, default)
    ]
    changed = run.info.provenance.get("changed_settings")
    settings = changed.items() if isinstance(changed, dict) else ()
    given += [("--set", f"{name}={value}") for name, value in settings]
    arguments = run.spec.get("engine_args") or {}
    given += [("--engine-arg", f"{name}={value}") for name, value in arguments.items()]
    return " ".join(f"{option} {shlex.quote(value)}" for option, value in given)


def _local(source: str, out: Path) -> tuple[list[Run], list[Problem]]:
    path, saved = Path(source), BASELINES / f"{source}.json"
    if path.is_dir():
        return load_runs([path] if run_folders([path]) else [path, *sorted(path.glob("*/"))])
    if not path.is_file() and saved.is_file() and not (out / source).exists():
        path = saved
    if not path.is_file():
        return load_runs([RunStore(out).find(source).path])
    return read_baseline(path.read_bytes(), str(path)).loaded(path), []


def _remote(url: str, scratch: Path) -> tuple[list[Run], list[Problem]]:
    fs, root = locate(url)
    with reaching(url):
        if fs.isfile(root):
            return read_baseline(fs.cat_file(root), url).loaded(Path(root)), []
        copied = [_copy(fs, folder, scratch) for folder in (root, *children(fs, root))]
    if not any(copied):
        raise UsageError(f"no run in {url}; name a run, a folder of runs or a baseline file")
    return load_runs([scratch])


def _copy(fs: Any, folder: str, scratch: Path) -> bool:
    """Fetch what a comparison reads of one run; whether it is a run at all."""
    name = PurePosixPath(folder).name
    if not fs.isfile(f"{folder}/{_FILES[0]}") or name in ("", ".", ".."):
        return False
    target = scratch / name
    target.mkdir(parents=True, exist_ok=True)
    for file in _FILES:
        if fs.isfile(f"{folder}/{file}"):
            (target / file).write_bytes(fs.cat_file(f"{folder}/{file}"))
    return True
