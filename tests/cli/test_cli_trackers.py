"""`kvbench export --to wandb|mlflow|trackio`: with the packages, offline; without, with fakes."""

from __future__ import annotations

import json
import math
import sqlite3
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import count
from types import ModuleType, SimpleNamespace

import pytest

from agentbench_kv.cli import show
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.trackers import TRACKERS

NAMES = ("alpha", "beta")


@pytest.fixture
def runs(tmp_path):
    """Two runs of one right and one failed trial, with summaries that somebody edited."""
    store = RunStore(tmp_path / "runs")
    for name in NAMES:
        spec = {"method": "agentkv", "task": "t/1", "budget": 64, "params": {"a": [1, 2]}}
        provenance = {"packages": {"torch": "2", "odd@name": None}, "long": "x" * 9_000}
        with store.open(name, spec, provenance, expected_trials=2) as run:
            kv = {"peak_live": 60, "logical": 100, "events": 2}
            good = {"status": "scored", "score": 1.0, "kv": kv, "metrics": {"x": 0.25}}
            run.append_trial(TrialRecord(**{"sample_id": "s0", "trial": 0, "seed": 1} | good))
            run.append_trial(TrialRecord(sample_id="s1", trial=0, seed=2, status="timeout"))
        (store.root / name / "summary.json").write_text('{"score": {"point": 0.99}}')
    return store.root


def needs(name):
    return pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")


def export(kvbench_process, name, tmp_path, *more):
    done = kvbench_process(
        "export", "runs", "--to", name, "--project", "p", "--offline", *more,
        TRACKIO_DIR=str(tmp_path / "trackio"), WANDB_API_KEY="", MLFLOW_TRACKING_URI="",
        HTTPS_PROXY="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def twice(kvbench_process, name, tmp_path):
    """Export three times; what a second one says, and that stdout is one line or one document."""
    assert export(kvbench_process, name, tmp_path) == f"2 runs in {name}, project p\n"
    again = f"0 runs in {name}, project p; 2 were there, --force writes them again\n"
    assert export(kvbench_process, name, tmp_path) == again
    forced = json.loads(export(kvbench_process, name, tmp_path, "--force", "--json"))
    assert (forced["written"], forced["there"]) == (list(NAMES), [])


def check_figures(figures):
    """The figures of two trials, one right, one failed; Wilson's interval of 1 in 2."""
    assert (figures["score.point"], figures["trials"], figures["samples"]) == (0.5, 2, 2)
    half = 1.959964 * math.sqrt(2 * 0.25 + 1.959964**2 / 4) / (2 + 1.959964**2)
    assert figures["score.low"] == pytest.approx(0.5 - half, abs=1e-6)
    assert figures["score.high"] == pytest.approx(0.5 + half, abs=1e-6)
    assert figures["kv.median_peak_live"] == 60
    assert figures["failures.timeout"] == 1


@needs("mlflow")
@pytest.mark.usefixtures("runs")
def test_mlflow_keeps_one_run_each_in_a_database_here(kvbench_process, tmp_path):
    twice(kvbench_process, "mlflow", tmp_path)
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        active = "from runs join {0} on runs.run_uuid = {0}.run_uuid where lifecycle_stage='active'"
        alive = "select name, status from runs where lifecycle_stage='active' order by name"
        assert base.execute(alive).fetchall() == [(name, "FINISHED") for name in NAMES]
        of_one = f"select key, value {active} and name='alpha'"
        check_figures(dict(base.execute(of_one.format("latest_metrics"))))
        params = dict(base.execute(of_one.format("params")))
        tags = dict(base.execute(of_one.format("tags")))
    assert (params["method"], params["budget"], params["params.a"]) == ("agentkv", "64", "[1, 2]")
    assert params["provenance.packages.odd_name"] == "None"
    assert set(params["provenance.long"]) == {"x"}
    assert (tags["kvbench.run_id"], tags["validity.state"]) == ("alpha", "valid")
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("mlruns/**/trial_table.json")]
    assert all(len(table["data"]) == 2 for table in tables)


@needs("trackio")
@pytest.mark.usefixtures("runs")
def test_trackio_keeps_one_run_each_in_a_database_here(kvbench_process, tmp_path):
    twice(kvbench_process, "trackio", tmp_path)
    with sqlite3.connect(tmp_path / "trackio" / "p.db") as base:
        logged = base.execute("select run_name, metrics from metrics order by run_name").fetchall()
        configs = base.execute("select run_name, config from configs order by run_name").fetchall()
    assert [name for name, _ in logged] == [name for name, _ in configs] == list(NAMES)
    figures, config = json.loads(logged[0][1]), json.loads(configs[0][1])
    check_figures(figures)
    assert [row["status"] for row in figures["trial_table"]["_value"]] == ["scored", "timeout"]
    assert (config["budget"], config["params.a"]) == (64, "[1, 2]")


@needs("wandb")
@pytest.mark.usefixtures("runs")
def test_wandb_writes_offline_runs_with_the_runs_ids(kvbench_process, tmp_path):
    assert export(kvbench_process, "wandb", tmp_path) == "2 runs in wandb, project p\n"
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert {path.name.rpartition("-")[2] for path in folders} == set(NAMES)
    again = export(kvbench_process, "wandb", tmp_path, "--json")
    assert json.loads(again)["there"] == list(NAMES)
    assert sorted((tmp_path / "wandb").glob("offline-run-*")) == folders
    for folder in folders:
        (log,) = folder.glob("run-*.wandb")
        assert b"kv.median_peak_live" in log.read_bytes()
        (path,) = folder.glob("files/media/table/trial_table*.json")
        table = json.loads(path.read_text())
        assert [row[table["columns"].index("status")] for row in table["data"]] == [
            "scored", "timeout",
        ]  # fmt: skip


class FakeWandb(ModuleType):
    """What our side of W&B touches; keeps what it was given by run id."""

    class Run(SimpleNamespace):
        finish = staticmethod(lambda: None)

    class CommError(Exception):
        pass

    def __init__(self, refuse=None):
        super().__init__("wandb")
        self.kept, self.refuse = {}, refuse
        self.errors = SimpleNamespace(Error=self.CommError, CommError=self.CommError)
        self.Settings = self.Table = lambda **fields: SimpleNamespace(**fields)
        self.Api = lambda: SimpleNamespace(run=self.find)

    def find(self, path):
        if path.removeprefix("p/") not in self.kept:
            raise self.CommError("no such run")

    def init(self, **fields):
        if self.refuse:
            raise self.CommError(self.refuse)
        self.kept[fields["id"]] = self.Run(**fields, summary={})
        return self.kept[fields["id"]]


@pytest.mark.usefixtures("runs")
def test_wandb_online_overwrites_the_summary_of_one_id(kvbench, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    call = ("export", "runs", "--to", "wandb", "--project", "p")
    assert kvbench(*call).stdout == "2 runs in wandb, project p\n"
    assert kvbench(*call).stdout.startswith("0 runs in wandb, project p; 2 were there")
    assert kvbench(*call, "--force").stdout == "2 runs in wandb, project p\n"
    assert sorted(fake.kept) == list(NAMES)
    run = fake.kept["alpha"]
    assert (run.mode, run.resume, run.name) == ("online", "allow", "alpha")
    assert (run.config["budget"], run.config["provenance.packages.torch"]) == (64, "2")
    check_figures(run.summary)
    table = run.summary["trial_table"]
    assert "path" not in table.columns
    assert table.data[1][table.columns.index("score")] is None


class FakeMlflow(ModuleType):
    """What our side of MLflow touches: runs in a list, the deleted ones gone from it."""

    def __init__(self):
        super().__init__("mlflow")
        self.kept, self.ids, self.uri = [], count(), None
        self.exceptions = SimpleNamespace(MlflowException=RuntimeError)
        self.log_params = lambda values: self.kept[-1].params.update(values)
        self.log_metrics = lambda values: self.kept[-1].metrics.update(values)
        self.set_tags = lambda values: self.kept[-1].tags.update(values)
        self.log_table = lambda data, file: self.kept[-1].tables.update({file: data})
        self.set_experiment = lambda name: SimpleNamespace(experiment_id=name)
        self.set_tracking_uri = lambda uri: setattr(self, "uri", uri)

    def start_run(self, run_name, tags):
        assert tags == {"kvbench.run_id": run_name}
        info = SimpleNamespace(run_id=next(self.ids), status="FINISHED")
        run = SimpleNamespace(info=info, tags=dict(tags), params={}, metrics={}, tables={})
        self.kept.append(run)
        return nullcontext()

    def search_runs(self, experiments, query, output_format):
        assert (experiments, output_format) == (["p"], "list")
        return [run for run in self.kept
                if query == f"tags.`kvbench.run_id` = '{run.tags['kvbench.run_id']}'"]  # fmt: skip

    def delete_run(self, old):
        self.kept = [run for run in self.kept if run.info.run_id != old]


class FakeTrackio(ModuleType):
    """What our side of trackio touches: a row for each call of `log`."""

    def __init__(self):
        super().__init__("trackio")
        self.kept = []
        self.Table = lambda data: data
        self.Api = lambda: SimpleNamespace(runs=self.runs)
        self.log = lambda row: self.kept[-1].rows.append(row)
        self.finish = lambda: None

    def runs(self, project):
        if not self.kept:
            raise ValueError(f"no project {project}")
        return self.kept

    def init(self, project, name, config, **_):
        assert project == "p"
        run = SimpleNamespace(name=name, config=config, rows=[])
        run.delete = lambda: self.kept.remove(run)
        self.kept.append(run)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("fake", [FakeMlflow, FakeTrackio])
def test_what_is_there_is_replaced_by_force_only(kvbench, monkeypatch, fake):
    module = fake()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    call = ("export", "runs", "--to", module.__name__, "--project", "p", "--offline")
    assert kvbench(*call).stdout == f"2 runs in {module.__name__}, project p\n"
    first = list(module.kept)
    assert ", project p; 2 were there" in kvbench(*call).stdout
    assert module.kept == first
    assert kvbench(*call, "--force").stdout == f"2 runs in {module.__name__}, project p\n"
    assert len(module.kept) == 2
    assert not any(run is old for run in module.kept for old in first)
    run = module.kept[0]
    if fake is FakeTrackio:
        (row,) = run.rows
        check_figures(row)
        assert (run.name, run.config["method"], len(row["trial_table"])) == ("alpha", "agentkv", 2)
        return
    check_figures(run.metrics)
    assert module.uri == "sqlite:///mlflow.db"
    assert (run.params["budget"], run.tags["validity.state"]) == (64, "valid")
    assert run.tables["trial_table.json"]["score"] == [1.0, None]


@pytest.mark.usefixtures("runs")
def test_what_a_tracker_refuses_is_one_line(kvbench, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb("no API key\nconfigured"))
    done = kvbench("export", "runs", "--to", "wandb")
    assert done.returncode == 2
    assert "wandb refused: no API key configured; --offline writes to this" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_line_names_the_trackers_there_are():
    assert tuple(TRACKERS) == show.TRACKERS


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_names_its_extra(kvbench, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    done = kvbench("export", "runs", "--to", name)
    assert done.returncode == 2
    assert f'pip install ".[{name}]"; elsewhere, pip install -U {name}' in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none", "--to", "wandb"), "no run 'none'"),
        (("runs", "--to", "wandb", "--card"), "--card is for a parquet file"),
        (("runs", "--to", "x.csv", "--offline"), "are for --to wandb, mlflow, trackio"),
        (("runs", "--to", "x.csv", "--project", "p"), "are for --to wandb, mlflow, trackio"),
        (("runs", "--to", "x.csv", "--card"), "name one that ends in .parquet"),
        (("runs", "--to", "comet"), "expected a name that ends in .parquet"),
    ],
)
def test_requests_that_make_no_sense(kvbench, monkeypatch, tmp_path, arguments, message):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    done = kvbench("export", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "x.csv").exists()
