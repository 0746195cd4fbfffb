"""Runs in an experiment tracker: Weights & Biases, MLflow or trackio, one tracker run each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.results.baseline import open_sides
from agentbench_kv.results.files import leaves
from agentbench_kv.results.frame import load_results
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.summary import build
from agentbench_kv.results.terminal import console, plain, print_json

PROJECT = "kvbench"
TABLE = "trial_table"
RUN_TAG = "kvbench.run_id"
_ID_LENGTH = 64  # of W&B; the end of a run's name is the hash of its specification
_PARAMS_AT_ONCE = 100  # in one request to an MLflow server
_MLFLOW_KEY = re.compile(r"[^\w./: -]")
_OF_SPEC = {"run_id", "task", "method", "budget", "engine", "model"}
Scalar = str | int | float | bool | None
Errors = tuple[type[Exception], ...]


@dataclass(frozen=True)
class Tracked:
    """A run as a tracker keeps it; nested keys are joined, such as `score.point`."""

    run_id: str
    config: dict[str, Scalar]  # the resolved specification, and `provenance.*`
    summary: dict[str, Scalar]  # derived anew from the records, without what is missing
    trials: pd.DataFrame  # of `load_results`, less the path on this machine

    @property
    def numbers(self) -> dict[str, float]:
        known = self.summary.items()
        return {name: float(value) for name, value in known if isinstance(value, int | float)}

    @property
    def texts(self) -> dict[str, str]:
        return {name: value for name, value in self.summary.items() if isinstance(value, str)}

    def rows(self) -> list[dict[str, Any]]:
        """Return the trials as plain values; what is missing is None."""
        known = self.trials.astype(object).where(self.trials.notna(), None)
        rows = known.to_dict(orient="records")
        return [{str(name): value for name, value in row.items()} for row in rows]


class Tracker(Protocol):
    """One project of a tracker; what it cannot do, it raises as one of its `errors`."""

    errors: Errors

    def has(self, run_id: str) -> bool:
        """Whether the project has the run already."""

    def put(self, run: Tracked) -> None:
        """Write a run, in the place of the one there if there is one."""


class _Wandb:  # figures go to the run's summary: a second export overwrites them and adds no step
    def __init__(self, wandb: Any, project: str, offline: bool) -> None:
        self._wandb, self._project, self._offline = wandb, project, offline
        self._folder = Path(os.environ.get("WANDB_DIR", "."))
        self.errors: Errors = (wandb.errors.Error, OSError)

    def has(self, run_id: str) -> bool:
        name = run_id[-_ID_LENGTH:]
        if self._offline:
            kept = self._folder.glob("*wandb/offline-run-*")
            return any(path.name.endswith(f"-{name}") for path in kept)
        try:
            self._wandb.Api().run(f"{self._project}/{name}")
        except (self._wandb.errors.CommError, ValueError):
            return False
        return True

    def put(self, run: Tracked) -> None:
        settings = self._wandb.Settings(
            silent=True, console="off", x_disable_stats=True, x_disable_meta=True, save_code=False
        )
        writer = self._wandb.init(
            project=self._project,
            id=run.run_id[-_ID_LENGTH:],
            name=run.run_id,
            config=run.config,
            mode="offline" if self._offline else "online",
            resume=None if self._offline else "allow",
            dir=self._folder,
            settings=settings,
        )
        rows = [list(row.values()) for row in run.rows()]
        writer.summary.update(run.summary)
        writer.summary[TABLE] = self._wandb.Table(
            columns=list(map(str, run.trials)), data=rows, allow_mixed_types=True
        )
        writer.finish()


class _Mlflow:
    """A run is found by its tag; another export deletes it, because parameters never change."""

    def __init__(self, mlflow: Any, project: str, offline: bool) -> None:
        # MLflow's own number takes minutes to say that a server is not there.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        self._mlflow = mlflow
        self.errors: Errors = (mlflow.exceptions.MlflowException, OSError)
        if offline:
            mlflow.set_tracking_uri("sqlite:///mlflow.db")
        self._project = project

    def has(self, run_id: str) -> bool:
        return any(run.status == "FINISHED" for run in self._found(run_id))

    def put(self, run: Tracked) -> None:
        mlflow, old = self._mlflow, self._found(run.run_id)
        params = [(_mlflow_key(name), value) for name, value in run.config.items()]
        tags = {RUN_TAG: run.run_id}
        with mlflow.start_run(run_name=run.run_id, tags=tags):
            for start in range(0, len(params), _PARAMS_AT_ONCE):
                mlflow.log_params(dict(params[start : start + _PARAMS_AT_ONCE]))
            mlflow.log_metrics({_mlflow_key(name): value for name, value in run.numbers.items()})
            mlflow.set_tags({_mlflow_key(name): value for name, value in run.texts.items()})
            rows = run.rows()
            columns = {name: [row[name] for row in rows] for name in map(str, run.trials)}
            mlflow.log_table(columns, f"{TABLE}.json")
        for each in old:
            mlflow.delete_run(each.run_id)

    def _found(self, run_id: str) -> list[Any]:
        experiment = self._mlflow.set_experiment(self._project).experiment_id
        query = f"tags.`{RUN_TAG}` = '{run_id}'"
        found = self._mlflow.search_runs([experiment], query, output_format="list")
        return [run.info for run in found]


def _mlflow_key(name: str) -> str:
    return _MLFLOW_KEY.sub("_", name)


class _Trackio:  # always this machine's database: `trackio sync` is what sends it anywhere
    errors: Errors = (ValueError, OSError, sqlite3.Error)

    def __init__(self, trackio: Any, project: str, offline: bool) -> None:
        del offline
        self._trackio, self._project = trackio, project
        # With these set, trackio could not say which runs are there.
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            os.environ.pop(name, None)

    def has(self, run_id: str) -> bool:
        return bool(self._found(run_id))

    def put(self, run: Tracked) -> None:
        for old in self._found(run.run_id):
            old.delete()
        own = {"name": run.run_id, "config": run.config}
        quiet = dict.fromkeys(("embed", "auto_log_gpu", "auto_log_cpu"), False)
        self._trackio.init(self._project, **own, **quiet)
        self._trackio.log({**run.summary, TABLE: self._trackio.Table(data=run.rows())})
        self._trackio.finish()

    def _found(self, run_id: str) -> list[Any]:
        try:
            runs = list(self._trackio.Api().runs(self._project))
        except ValueError:
            return []
        return [run for run in runs if run.name == run_id]


TRACKERS: dict[str, Callable[[Any, str, bool], Tracker]] = {
    "wandb": _Wandb,
    "mlflow": _Mlflow,
    "trackio": _Trackio,
}


def track_runs(
    out: Path,
    runs: Sequence[str],
    name: str,
    project: str,
    offline: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write runs to one of `TRACKERS`, and print which were written and which were there.

    Runs are paths, URLs, or ids of runs in `out`. A UsageError if there is no such run, a
    PrerequisiteError if the tracker is not installed or refuses.
    """
    with contextlib.redirect_stdout(sys.stderr), open_sides(runs, out) as (sides, problems):
        paths = dict.fromkeys(arm.path for side in sides for arm in side)
        tracker = _open(name, project, offline)
        written, there = _write(name, tracker, list(map(_tracked, paths)), force)
    reasons = [f"{problem.path}: {problem.reason}" for problem in problems]
    if as_json:
        told = {"to": name, "project": project, "written": written, "there": there}
        print_json({**told, "problems": reasons})
        return
    screen = console()
    for line in reasons:
        screen.print(plain(line), soft_wrap=True)
    again = f"; {len(there)} were there, --force writes them again" if there else ""
    screen.print(plain(f"{len(written)} runs in {name}, project {project}{again}"), soft_wrap=True)


def _open(name: str, project: str, offline: bool) -> Tracker:
    try:
        module = import_module(name)
    except ImportError as error:
        raise PrerequisiteError(
            f"{name} cannot be imported ({error}): in the clone, pip install "
            f'".[{name}]"; elsewhere, pip install -U {name}'
        ) from error
    return TRACKERS[name](module, project, offline)


def _write(
    name: str, tracker: Tracker, runs: Sequence[Tracked], force: bool
) -> tuple[list[str], list[str]]:
    """Return the ids of the runs that were written, and of those that were there."""
    written, there = [], []
    with _refusals(name, tracker):
        for run in runs:
            if not force and tracker.has(run.run_id):
                there.append(run.run_id)
            else:
                tracker.put(run)
                written.append(run.run_id)
    return written, there


@contextlib.contextmanager
def _refusals(name: str, tracker: Tracker) -> Iterator[None]:
    errors: Errors = (ImportError, *tracker.errors)
    try:
        yield
    except errors as error:
        what = " ".join(str(error).split())
        raise PrerequisiteError(
            f"{name} refused: {what}; --offline writes to this machine only"
        ) from error


def _tracked(path: Path) -> Tracked:
    reader = RunReader(path)
    info = reader.info
    created = datetime.fromtimestamp(info.created, UTC).isoformat(timespec="seconds")
    config = {"created": created, **_flat(info.spec), **_flat(info.provenance, "provenance.")}
    summary = _flat(build(reader).model_dump(mode="json", exclude=_OF_SPEC))
    known: dict[str, Scalar] = {k: value for k, value in summary.items() if value is not None}
    return Tracked(info.run_id, config, known, load_results(path).drop(columns="path"))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Return nested mappings as one, keys joined by dots; a list is JSON text."""
    return {
        name: value if isinstance(value, Scalar) else json.dumps(value, default=str)
        for name, value in leaves(values, prefix)
    }
