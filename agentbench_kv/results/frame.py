"""`load_results`: the trials of many runs as one pandas DataFrame."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from pydantic import ValidationError

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError
from agentbench_kv.results.columns import Columns
from agentbench_kv.results.lines import Lines, parse_lines
from agentbench_kv.results.places import Target, children, locate, reaching
from agentbench_kv.results.reader import latest_trials
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.runinfo import RunInfo
from agentbench_kv.results.validity import assess

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
        The columns of `agentbench_kv.results.columns.COLUMNS`, then one `metric_<name>` for every
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
    """Return the columns that are the same in all rows of a run."""
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
        return assess(info.spec, trials, expected=info.expected_trials).state.value
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


def _problem(path: str, line: int | None, reason: str) -> dict[str, Any]:
    # Plain JSON types: pandas copies attrs with every frame and writes them into parquet files.
    return {"path": path, "line": line, "reason": reason}


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return str(error.errors(include_url=False)[0]["msg"])
    return " ".join(str(error).split())


def _whole(value: Any) -> int | None:
    fits = isinstance(value, int) and -(2**63) <= value < 2**63
    return int(value) if fits else None
