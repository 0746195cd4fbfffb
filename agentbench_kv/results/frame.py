"""`load_results`: the trials of many runs as one pandas DataFrame."""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count, starmap
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import ValidationError

from agentbench_kv.accounting import RECORDED
from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import Target, children, locate, reaching
from agentbench_kv.results.lines import Lines, parse_lines
from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.results.run_info import RunInfo, RunStatus
from agentbench_kv.results.run_reader import latest_trials
from agentbench_kv.results.validity import RunState, assess

METRIC_PREFIX = "metric_"
Dtype = Literal["category", "int64", "Int64", "float64"]


class FrameColumn(NamedTuple):
    """One column."""

    name: str
    dtype: Dtype  # pandas' name; only `int64` columns have no missing values
    meaning: str


_RUN: tuple[tuple[str, Dtype, str], ...] = (
    ("run_id", "category", "the run's name"),
    ("path", "category", "where the run directory is"),
    ("task", "category", "benchmark slice"),
    ("method", "category", "`name` or `name@preset`"),
    ("preset", "category", "what follows the @; missing for a method's own default"),
    ("params", "category", "the method's parameters as JSON, keys sorted"),
    ("budget", "category", "as in the spec, tokens or a share such as `25%`; missing for none"),
    ("budget_tokens", "Int64", "the budget in tokens; a share of the median logical length"),
    ("engine", "category", "engine name"),
    ("model", "category", "model name or path"),
    ("seed", "Int64", "the run's seed"),
    ("limit", "Int64", "first samples only; missing for all"),
    ("concurrency", "Int64", "sessions driven at once"),
    ("temperature", "float64", "of sampling"),
    ("run_status", "category", "running, complete or failed, as the last writer left it"),
    ("run_state", "category", "validity; only `valid` runs are ranked"),
)
_DTYPES: Mapping[str, Dtype] = {"int": "int64", "float": "float64", "int | None": "Int64"}
_KV = tuple(
    (f"kv.{each.name}", _DTYPES[str(each.type)], each.metadata["meaning"]) for each in RECORDED
)
# Where in the record, type, meaning; the column's name has `_` for the dot.
_TRIAL: tuple[tuple[str, Dtype, str], ...] = (
    ("sample_id", "category", "the sample"),
    ("trial", "int64", "index of the attempt at the sample"),
    ("seed", "int64", "the trial's own seed"),
    ("status", "category", "how the trial ended"),
    ("score", "float64", "the checker's score in [0, 1]; missing unless scored"),
    ("headline", "float64", "the score, 0 for every failure"),
    *_KV,
    ("timing.ttft_ms", "float64", "milliseconds to the first token"),
    ("timing.tpot_ms", "float64", "milliseconds per later token"),
    ("timing.e2e_s", "float64", "seconds in all"),
    ("usage.prompt_tokens", "int64", "prompt tokens billed"),
    ("usage.completion_tokens", "int64", "completion tokens billed"),
    ("usage.requests", "int64", "requests"),
    ("session_resets", "int64", "times the client broke the token log"),
    ("prompt_sha", "category", "hash of the first rendered prompt"),
    ("transcript", "category", "path of the transcript in the run directory"),
    ("error", "category", "why the trial failed"),
    ("attempts", "int64", "times the trial was started"),
    ("cluster", "category", "group of dependent samples"),
)
OF_RUN = tuple(starmap(FrameColumn, _RUN))
OF_TRIAL = tuple(
    # The run has a seed, too.
    FrameColumn("trial_seed" if source == "seed" else source.replace(".", "_"), dtype, meaning)
    for source, dtype, meaning in _TRIAL
)
COLUMNS = (*OF_RUN, *OF_TRIAL)
_GET = tuple(attrgetter(source) for source, *_ in _TRIAL)
_FIXED: Mapping[str, list[str]] = {
    "status": [status.value for status in TrialStatus],
    "run_status": [status.value for status in RunStatus],
    "run_state": [state.value for state in RunState],
}


class _Words:
    """The values of one categorical column, numbered in the order they first came; None is -1."""

    def __init__(self, values: Sequence[str] = ()) -> None:
        self._numbers: defaultdict[str | None, int] = defaultdict(count().__next__)
        for value in values:
            self._numbers[value]
        self.number = self._numbers.__getitem__

    def codes(self, values: Sequence[str | None]) -> NDArray[np.int32]:
        if None not in values:
            return np.fromiter(map(self.number, values), np.int32, len(values))
        numbers = (-1 if value is None else self.number(value) for value in values)
        return np.fromiter(numbers, np.int32, len(values))

    def categorical(self, codes: NDArray[np.int32]) -> pd.Categorical:
        return pd.Categorical.from_codes(codes, pd.Index(list(self._numbers), dtype="str"))


class Columns:
    """Collects rows run by run in arrays, and makes them a frame."""

    def __init__(self) -> None:
        self.runs = 0  # added so far, with or without rows
        self._rows = 0
        self._parts: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
        self._missing: defaultdict[str, list[NDArray[np.bool_]]] = defaultdict(list)
        self._metrics: defaultdict[str, list[tuple[int, NDArray[Any]]]] = defaultdict(list)
        words = (column.name for column in COLUMNS if column.dtype == "category")
        self._words = {name: _Words(_FIXED.get(name, ())) for name in words}

    def add(self, run: Mapping[str, Any], trials: Sequence[TrialRecord]) -> None:
        """Add the trials of one run; `run` holds the columns that all of them share."""
        self.runs += 1
        if not trials:
            return
        for column in OF_RUN:
            self._append(column, [run[column.name]], repeat=len(trials))
        for column, get in zip(OF_TRIAL, _GET, strict=True):
            self._append(column, list(map(get, trials)))
        metrics = [trial.metrics for trial in trials]
        for name in dict.fromkeys(chain.from_iterable(metrics)):
            values = [each.get(name) for each in metrics]
            kind = object if str in set(map(type, values)) else np.float64
            self._metrics[name].append((self._rows, np.array(values, kind)))
        self._rows += len(trials)

    def frame(self) -> pd.DataFrame:
        data: dict[str, Any] = {column.name: self._finished(column) for column in COLUMNS}
        for name in sorted(self._metrics):
            data[METRIC_PREFIX + name] = self._metric(self._metrics.pop(name))
        return pd.DataFrame(data, copy=False)

    def _append(self, column: FrameColumn, values: list[Any], repeat: int = 1) -> None:
        if column.dtype == "category":
            part: NDArray[Any] = self._words[column.name].codes(values)
        elif column.dtype == "Int64":
            missing = np.fromiter((value is None for value in values), np.bool_, len(values))
            self._missing[column.name].append(missing.repeat(repeat))
            part = np.fromiter((value or 0 for value in values), np.int64, len(values))
        else:
            # numpy reads None as NaN here.
            part = np.array(values, column.dtype)
        self._parts[column.name].append(part.repeat(repeat))

    def _finished(self, column: FrameColumn) -> Any:
        empty = np.empty(0, "int32" if column.dtype == "category" else column.dtype.lower())
        values = np.concatenate([empty, *self._parts.pop(column.name, [])])
        if column.dtype == "category":
            return self._words[column.name].categorical(values)
        if column.dtype == "Int64":
            missing = self._missing.pop(column.name, [])
            return pd.arrays.IntegerArray(values, np.concatenate([np.empty(0, bool), *missing]))
        return values

    def _metric(self, parts: Sequence[tuple[int, NDArray[Any]]]) -> Any:
        if all(values.dtype == np.float64 for _, values in parts):
            column = np.full(self._rows, np.nan)
            for start, values in parts:
                column[start : start + len(values)] = values
            return column
        texts: list[str | None] = [None] * self._rows
        for start, values in parts:
            texts[start : start + len(values)] = map(_as_text, values.tolist())
        words = _Words()
        return words.categorical(words.codes(texts))


def _as_text(value: float | str | None) -> str | None:
    if value is None or value != value:
        return None
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value)


_MOST_PER_RUN = 20


def load_results(path: Target | Iterable[Target]) -> pd.DataFrame:
    """Load the trials of every run at or directly below a path, one row each.

    As everywhere, the last record of each (sample, trial) counts. A line or a run that cannot be
    read is left out and listed by `problems(frame)`.

    Parameters
    ----------
    path : str, path or several of them
        A run directory, a folder of runs, or any URL that fsspec opens (`s3://bucket/runs`).

    Returns
    -------
    pandas.DataFrame
        The columns of `agentbench_kv.results.frame.COLUMNS`, then one `metric_<name>` for every
        metric of any trial: float64, or a category of texts if any of its values is text.

    Raises
    ------
    UsageError
        If a path does not exist or there is no run in all of them.
    PrerequisiteError
        If a URL needs a package that is not installed.

    Examples
    --------
    >>> frame = load_results("runs")  # doctest: +SKIP
    >>> arms = frame.groupby(["task", "method", "budget"], observed=True)  # doctest: +SKIP
    >>> arms["headline"].mean()  # doctest: +SKIP
    """
    targets = [path] if isinstance(path, str | os.PathLike) else list(path)
    columns, found = Columns(), []
    for fs, place in _run_folders(targets):
        found += _load(fs, place, columns)
    if not columns.runs:
        places = ", ".join(map(str, targets)) or "an empty list of paths"
        why = f" ({found[0]['path']}: {found[0]['reason']})" if found else ""
        raise UsageError(f"no run in {places}{why}; kvbench run writes one")
    frame = columns.frame()
    frame.attrs["problems"] = found
    return frame


def problems(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what `load_results` could not read.

    Returns
    -------
    pandas.DataFrame
        One row per problem: `path` of the run, `line` of its `samples.jsonl` (from 1; missing if
        the problem is not one line's), `reason`. At most 20 lines of a run are named, the rest
        counted. Empty if all was read.
    """
    table = pd.DataFrame(frame.attrs.get("problems", []), columns=["path", "line", "reason"])
    return table.astype({"path": "str", "line": "Int64", "reason": "str"})


def _run_folders(targets: Sequence[Target]) -> list[tuple[Any, str]]:
    """Return every folder that may be a run, each once: the targets and the folders in them."""
    folders: dict[tuple[str, str], tuple[Any, str]] = {}
    for target in targets:
        fs, root = locate(target)
        with reaching(target):
            for place in (root, *children(fs, root)):
                folders.setdefault((type(fs).__name__, place), (fs, place))
    return list(folders.values())


def _load(fs: Any, place: str, columns: Columns) -> list[dict[str, Any]]:
    """Add the run in a folder, if there is one; return its problems."""
    try:
        info = RunInfo.model_validate_json(fs.cat_file(f"{place}/run.json"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValidationError) as error:
        return [_problem(place, None, f"run.json: {_first_line(error)}")]
    try:
        with fs.open(f"{place}/samples.jsonl", "rb") as file:
            lines = parse_lines(file, TrialRecord)
    except FileNotFoundError:
        lines = Lines()
    except OSError as error:
        return [_problem(place, None, f"samples.jsonl: {_first_line(error)}")]
    trials = latest_trials(lines.records)
    columns.add(_identity(info, place, trials), trials)
    return _line_problems(place, lines)


def _identity(info: RunInfo, place: str, trials: Sequence[TrialRecord]) -> dict[str, Any]:
    spec = info.spec
    texts = ("task", "method", "budget", "engine", "model")
    known = {name: None if spec.get(name) is None else str(spec[name]) for name in texts}
    warmth = spec.get("temperature")
    return {
        "run_id": info.run_id,
        "path": place,
        **known,
        "preset": (known["method"] or "").partition("@")[2] or None,
        "params": json.dumps(spec.get("params") or {}, sort_keys=True),
        "budget_tokens": _budget_tokens(spec.get("budget"), trials),
        **{name: _whole(spec.get(name)) for name in ("seed", "limit", "concurrency")},
        "temperature": float(warmth) if isinstance(warmth, int | float) else None,
        "run_status": info.status.value,
        "run_state": _state(info, trials),
    }


def _state(info: RunInfo, trials: Sequence[TrialRecord]) -> str | None:
    """Return the validity's word; none for a budget that is no budget."""
    try:
        verdict = assess(info.spec, trials, info.expected_trials, provenance=info.provenance)
        return verdict.state.value
    except (UsageError, ValueError, TypeError):
        return None


def _budget_tokens(budget: Any, trials: Sequence[TrialRecord]) -> int | None:
    """Return the budget in tokens; a share counts by the median session's length."""
    if budget is None:
        return None
    logical = [each.kv.logical for each in trials if each.kv.logical]
    try:
        return Budget.parse(budget).at(int(statistics.median(logical)) if logical else 0)
    except UsageError:
        return None


def _line_problems(place: str, lines: Lines[TrialRecord]) -> list[dict[str, Any]]:
    found = [_problem(place, odd.line, odd.reason) for odd in lines.unreadable[:_MOST_PER_RUN]]
    if (more := len(lines.unreadable) - len(found)) > 0:
        found.append(_problem(place, None, f"and {more} more lines that were not understood"))
    if lines.torn:
        found.append(_problem(place, None, "samples.jsonl: the torn last line was dropped"))
    return found


# Of plain JSON types: pandas copies attrs with every frame and writes them into parquet files.
def _problem(path: str, line: int | None, reason: str) -> dict[str, Any]:
    return {"path": path, "line": line, "reason": reason}


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return str(error.errors(include_url=False)[0]["msg"])
    return " ".join(str(error).split())


def _whole(value: Any) -> int | None:
    fits = isinstance(value, int) and -(2**63) <= value < 2**63
    return int(value) if fits else None
