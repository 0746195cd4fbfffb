"""Trials as a file (parquet, CSV, JSON lines), with the card that a data hub shows beside it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import IO, Any

import msgspec
import pandas as pd

from agentbench_kv import __version__
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results.files import Target, locate, writing_to
from agentbench_kv.results.frame import COLUMNS, load_results
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.tables.formats import markdown_text
from agentbench_kv.results.terminal import console, plain, print_json

FILE = "README.md"
_TYPES = {"category": "string", "Int64": "int64", "int64": "int64", "float64": "float64"}
_MEANINGS = {column.name: column.meaning for column in COLUMNS}
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M"))
_OF_RUN = ("run_id", "task", "method", "budget", "model", "engine", "seed")


def card(frame: pd.DataFrame, file: str, command: str) -> str:
    counts = f"{len(frame)} trials of {frame['run_id'].nunique()} runs"
    about = (
        f"{counts}, one row a trial, measured with kvbench and written by its version "
        f"{__version__}: KV-cache methods on LLM agents. A run is a method at a budget on an "
        "engine, a model and a task, with its number of trials and its seed."
    )
    made = (
        f"Written by `{command}`. As everywhere in kvbench, the last record of each (sample, "
        "trial) counts; scores are the benchmark's own checker's, and a failed trial has none and "
        "a `headline` of 0. The sample is the unit of every interval, not the trial. `path` names "
        "folders of the machine that exported."
    )
    tasks = sorted(frame["task"].dropna().astype(str).unique())
    parts = (
        _front_matter(frame, file),
        f"# Trials of {', '.join(map(markdown_text, tasks))}",
        about,
        "## Runs",
        _table((*_OF_RUN, "trials", "validity"), _runs(frame)),
        "## Columns",
        _table(("column", "type", "meaning"), _columns(frame)),
        "## How it was made",
        made,
        "## Licence",
        "Not chosen yet: add `license:` to the lines at the top. Scores and hashes are yours; a "
        "benchmark's own licence covers what `sample_id` and `error` quote of it.",
    )
    return "\n\n".join(parts) + "\n"


def _front_matter(frame: pd.DataFrame, file: str) -> str:
    """Return the YAML that hubs read; JSON strings are YAML."""
    size = next((name for most, name in _SIZES if len(frame) < most), "n>1M")
    features = [
        f"  - name: {json.dumps(str(name))}\n    dtype: {_TYPES[str(frame[name].dtype)]}"
        for name in frame
    ]
    lines = (
        "---",
        'pretty_name: "kvbench trials"',
        "tags:\n- kvbench\n- kv-cache\n- llm-agents",
        f"size_categories:\n- {size}",
        "configs:\n- config_name: default\n  data_files:",
        f"  - split: trials\n    path: {json.dumps(file)}",
        "dataset_info:\n  config_name: default\n  features:",
        *features,
        "---",
    )
    return "\n".join(lines)


def _runs(frame: pd.DataFrame) -> Iterable[Sequence[str]]:
    for _, trials in frame.groupby("path", observed=True, sort=False):
        first = trials.iloc[0]
        cells = (*(first[name] for name in _OF_RUN), len(trials), first["run_state"])
        yield ["" if pd.isna(cell) else markdown_text(str(cell)) for cell in cells]


def _columns(frame: pd.DataFrame) -> Iterable[Sequence[str]]:
    for name in map(str, frame):
        meaning = _MEANINGS.get(name, "the checker's figure of that name")
        yield markdown_text(name), _TYPES[str(frame[name].dtype)], meaning


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_ROWS_AT_ONCE = 50_000


def _write_jsonl(frame: pd.DataFrame, file: IO[bytes]) -> None:
    # Not pandas' own: it cuts floats to 15 digits and builds the whole text in memory.
    encode = msgspec.json.Encoder().encode_lines
    names = list(frame)
    for start in range(0, len(frame), _ROWS_AT_ONCE):
        part = frame.iloc[start : start + _ROWS_AT_ONCE]
        columns = [_plain_values(part[name]) for name in names]
        rows = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
        file.write(encode(rows))


def _plain_values(column: pd.Series[Any]) -> list[Any]:
    """Return Python values; what is missing is None or NaN, both `null` in the file."""
    if column.dtype == "Int64":
        return column.astype(object).where(column.notna(), None).tolist()
    return column.tolist()


FORMATS: dict[str, Callable[[pd.DataFrame, IO[bytes]], None]] = {
    ".parquet": lambda frame, file: frame.to_parquet(file, engine="pyarrow", index=False),
    ".csv": lambda frame, file: frame.to_csv(
        file, index=False, encoding="utf-8", lineterminator="\n"
    ),
    ".jsonl": _write_jsonl,
}


def export_trials(
    out: Path, runs: Sequence[str], target: str, with_card: bool, force: bool, as_json: bool
) -> None:
    """Write the trials of some runs, and print what was written and what could not be read.

    Runs are paths, URLs, or ids of runs in `out`; a card is `README.md` beside a parquet file.
    Errors as of `export_runs`.
    """
    beside = f"{target.removesuffix(PurePosixPath(target).name)}{FILE}"
    if with_card:
        if _suffix(target) != ".parquet":
            raise UsageError(
                f"{target}: a card is for a parquet file; name one that ends in .parquet"
            )
        _refuse_to_overwrite(beside, force)
    here = [run for run in runs if "://" in run or Path(run).exists()]
    places = [run if run in here else RunStore(out).find(run).path for run in runs]
    frame = export_runs(places, target, force)
    if with_card:
        command = shlex.join(["kvbench", "export", *runs, "--to", target, "--card"])
        text = card(frame, PurePosixPath(target).name, command)
        _replace(beside, lambda file: file.write(text.encode()))
    found = frame.attrs["problems"]
    if as_json:
        rows, columns = frame.shape
        print_json({"to": target, "rows": rows, "columns": columns, "problems": found})
        return
    screen = console()
    for each in found:
        line = "" if each["line"] is None else f" line {each['line']}"
        screen.print(plain(f"{each['path']}{line}: {each['reason']}"), soft_wrap=True)
    screen.print(plain(f"{len(frame)} trials in {target}"), soft_wrap=True)


def export_runs(runs: Sequence[Target], target: Target, force: bool = False) -> pd.DataFrame:
    """Write the trials of what `load_results` reads to a path or URL; return what was written.

    A UsageError if its suffix is none of `FORMATS`, the file exists and `force` is not set, or
    there is no run; a PrerequisiteError if it cannot be written or a package is missing.
    """
    # Before anything is read.
    if _suffix(target) == ".parquet" and find_spec("pyarrow") is None:
        raise PrerequisiteError(
            "parquet needs pyarrow, from the extra [parquet]: in the clone, pip install "
            '".[parquet]"; elsewhere, pip install pyarrow'
        )
    _refuse_to_overwrite(target, force)
    frame = load_results(runs)
    write_frame(frame, target)
    return frame


def _refuse_to_overwrite(target: Target, force: bool) -> None:
    fs, path = locate(target)
    with writing_to(target):
        if fs.exists(path) and (fs.isdir(path) or not force):
            what = "is a folder" if fs.isdir(path) else "exists; --force replaces it"
            raise UsageError(f"{os.fspath(target)} {what}")


def write_frame(frame: pd.DataFrame, target: Target) -> None:
    """Write a frame in the format of the target's suffix; raises like `export_runs`."""
    write = FORMATS[_suffix(target)]
    _replace(target, lambda file: write(frame, file))


def _replace(target: Target, write: Callable[[IO[bytes]], object]) -> None:
    fs, path = locate(target)
    # On a local disk the new file takes the place of the old one at the end; an object store
    # does the same by itself.
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    part = f"{path}.{os.getpid()}.part" if "file" in protocols else path
    with writing_to(target):
        try:
            with fs.open(part, "wb") as file:
                write(file)
            if part != path:
                os.replace(part, path)  # noqa: PTH105  fsspec's paths are text
        finally:
            if part != path and fs.exists(part):
                fs.rm(part)


def _suffix(target: Target) -> str:
    suffix = PurePosixPath(os.fspath(target)).suffix.lower()
    if suffix not in FORMATS:
        raise UsageError(
            f"{os.fspath(target)}: expected a name that ends in {', '.join(FORMATS)}, "
            f"found {suffix or 'no suffix'}"
        )
    return suffix
