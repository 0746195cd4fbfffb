"""`README.md` beside an exported parquet file: the card that a data hub shows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import pandas as pd

from agentbench_kv import __version__
from agentbench_kv.results.columns import COLUMNS
from agentbench_kv.results.tables.formats import markdown_text

FILE = "README.md"
_TYPES = {"category": "string", "Int64": "int64", "int64": "int64", "float64": "float64"}
_MEANINGS = {column.name: column.meaning for column in COLUMNS}
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M"))
_OF_RUN = ("run_id", "task", "method", "budget", "model", "engine", "seed")


def card(frame: pd.DataFrame, file: str, command: str) -> str:
    """Return the card of a file that holds the frame and that the command wrote."""
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
