"""The columns of `load_results`: their names, types and meanings, and how trials fill them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.results.runinfo import RunStatus
from agentbench_kv.results.validity import RunState

METRIC_PREFIX = "metric_"

Dtype = Literal["category", "int64", "Int64", "float64"]


@dataclass(frozen=True)
class Column:
    """One column."""

    name: str
    dtype: Dtype  # pandas' name; only `int64` columns have no missing values
    meaning: str
    source: str | None = None  # attribute of the trial record; None for a column about the run


def _trial(source: str, dtype: Dtype, meaning: str, name: str | None = None) -> Column:
    return Column(name or source.replace(".", "_"), dtype, meaning, source)


COLUMNS: tuple[Column, ...] = (
    Column("run_id", "category", "the run's name"),
    Column("path", "category", "where the run directory is"),
    Column("task", "category", "benchmark slice"),
    Column("method", "category", "`name` or `name@preset`"),
    Column("preset", "category", "what follows the @; missing for a method's own default"),
    Column("params", "category", "the method's parameters as JSON, keys sorted"),
    Column(
        "budget", "category", "as in the spec, tokens or a share such as `25%`; missing for none"
    ),
    Column("budget_tokens", "Int64", "the budget in tokens; a share of the median logical length"),
    Column("engine", "category", "engine name"),
    Column("model", "category", "model name or path"),
    Column("seed", "Int64", "the run's seed"),
    Column("limit", "Int64", "first samples only; missing for all"),
    Column("concurrency", "Int64", "sessions driven at once"),
    Column("temperature", "float64", "of sampling"),
    Column("run_status", "category", "running, complete or failed, as the last writer left it"),
    Column("run_state", "category", "validity; only `valid` runs are ranked"),
    _trial("sample_id", "category", "the sample"),
    _trial("trial", "int64", "index of the attempt at the sample"),
    _trial("seed", "int64", "the trial's own seed", "trial_seed"),
    _trial("status", "category", "how the trial ended"),
    _trial("score", "float64", "the checker's score in [0, 1]; missing unless scored"),
    _trial("headline", "float64", "the score, 0 for every failure"),
    _trial("kv.peak_live", "int64", "most tokens held at once"),
    _trial("kv.logical", "int64", "tokens ever seen"),
    _trial("kv.events", "int64", "compressions, evictions and restores"),
    _trial("kv.evicted", "int64", "tokens evicted"),
    _trial("kv.restored", "int64", "tokens brought back"),
    _trial("kv.bytes_read", "int64", "bytes of K and V read while decoding, all layers and heads"),
    _trial("kv.prefill_tokens", "int64", "tokens prefilled in all"),
    _trial("kv.longest_prefill", "int64", "most tokens in one prefill"),
    _trial("kv.decode_tokens", "int64", "tokens generated"),
    _trial("kv.mean_decode_kv", "float64", "mean live tokens over the decode steps"),
    _trial("kv.rows_moved", "int64", "cache rows moved by compaction"),
    _trial("kv.recomputed", "int64", "tokens whose KV was computed a second time"),
    _trial("kv.budget", "Int64", "the budget in tokens at the session's end"),
    _trial("timing.ttft_ms", "float64", "milliseconds to the first token"),
    _trial("timing.tpot_ms", "float64", "milliseconds per later token"),
    _trial("timing.e2e_s", "float64", "seconds in all"),
    _trial("usage.prompt_tokens", "int64", "prompt tokens billed"),
    _trial("usage.completion_tokens", "int64", "completion tokens billed"),
    _trial("usage.requests", "int64", "requests"),
    _trial("session_resets", "int64", "times the client broke the token log"),
    _trial("prompt_sha", "category", "hash of the first rendered prompt"),
    _trial("transcript", "category", "path of the transcript in the run directory"),
    _trial("error", "category", "why the trial failed"),
    _trial("attempts", "int64", "times the trial was started"),
    _trial("cluster", "category", "group of dependent samples"),
)

_FIXED: Mapping[str, list[str]] = {
    "status": [status.value for status in TrialStatus],
    "run_status": [status.value for status in RunStatus],
    "run_state": [state.value for state in RunState],
}
_GET: dict[str, Callable[[TrialRecord], Any]] = {
    c.name: attrgetter(c.source) for c in COLUMNS if c.source
}
_OF_RUN = tuple(column for column in COLUMNS if column.source is None)
_OF_TRIAL = tuple(column for column in COLUMNS if column.source is not None)


class _Words:
    """The values of one categorical column, numbered in the order they first came; None is -1."""

    def __init__(self, values: Sequence[str] = ()) -> None:
        self._numbers: defaultdict[str | None, int] = defaultdict(count().__next__)
        for value in values:
            self._numbers[value]
        self.number = self._numbers.__getitem__

    def codes(self, values: Sequence[str | None]) -> NDArray[np.int32]:
        """Return the number of each value."""
        if None not in values:
            return np.fromiter(map(self.number, values), np.int32, len(values))
        numbers = (-1 if value is None else self.number(value) for value in values)
        return np.fromiter(numbers, np.int32, len(values))

    def categorical(self, codes: NDArray[np.int32]) -> pd.Categorical:
        """Return the column that the numbers stand for."""
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
        for column in _OF_RUN:
            self._append(column, [run[column.name]], repeat=len(trials))
        for column in _OF_TRIAL:
            self._append(column, list(map(_GET[column.name], trials)))
        metrics = [trial.metrics for trial in trials]
        for name in dict.fromkeys(chain.from_iterable(metrics)):
            values = [each.get(name) for each in metrics]
            self._metrics[name].append((self._rows, _compact(values)))
        self._rows += len(trials)

    def frame(self) -> pd.DataFrame:
        """Return everything added, as a frame with a fresh index."""
        data: dict[str, Any] = {column.name: self._finished(column) for column in COLUMNS}
        for name in sorted(self._metrics):
            data[METRIC_PREFIX + name] = self._metric(self._metrics.pop(name))
        return pd.DataFrame(data, copy=False)

    def _append(self, column: Column, values: list[Any], repeat: int = 1) -> None:
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

    def _finished(self, column: Column) -> Any:
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


def _compact(values: list[Any]) -> NDArray[Any]:
    """Return one run's values of a metric as float64, or as objects if there is text in it."""
    return np.array(values, object if str in set(map(type, values)) else np.float64)


def _as_text(value: float | str | None) -> str | None:
    if value is None or value != value:
        return None
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value)
