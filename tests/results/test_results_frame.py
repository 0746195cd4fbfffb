"""`load_results` against `RunReader`, on whole, damaged, remote and hostile files."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import fsspec
import msgspec
import pandas as pd
import pytest

from agentbench_kv import load_results
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results.frame import COLUMNS, METRIC_PREFIX, OF_TRIAL, problems
from agentbench_kv.results.records import TrialRecord, encode
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.runs import load_runs
from agentbench_kv.results.store import RunStore

KV = {"peak_live": 400, "longest_prefill": 90, "logical": 1000, "events": 2, "budget": 256}
GOOD = {
    "sample_id": "s0",
    "trial": 0,
    "seed": 7,
    "status": "scored",
    "score": 1.0,
    "metrics": {"right": 3, "share": 0.5, "word": "yes", "none": None},
    "kv": KV | {"mean_decode_kv": 1.5},
    "timing": {"ttft_ms": 1.5, "tpot_ms": None},
    "usage": {"requests": 2},
    "cluster": "c",
}


@pytest.fixture
def store(tmp_path, spec, make_trial):
    """Two runs: repeated trials, every kind of value, a superseded record; and a full one."""
    store = RunStore(tmp_path / "runs")
    with store.open("first", spec | {"params": {"b": 1, "a": 2}}, expected_trials=4) as run:
        run.append_trial(make_trial("s1", status="infra_error", error="net"))
        run.append_trial(make_trial("s0", kv=KV, metrics={"right": 3, "word": "yes"}))
        run.append_trial(make_trial("s0", 1, score=0.5, kv=KV, timing={"ttft_ms": 2.5}))
        run.append_trial(make_trial("s1", kv=KV, cluster="c", metrics={"right": 2.5}))
        run.append_trial(make_trial("é[x]", status="timeout", error="\x1b[2J", attempts=3))
    full = spec | {"method": "full", "budget": None, "seed": 4}
    with store.open("second", full, expected_trials=9) as run:
        run.append_trial(make_trial("s0", kv={"logical": 900, "peak_live": 900}))
    return store


def expected_rows(runs) -> pd.DataFrame:
    """Lay records out by another way: as JSON, flattened by pandas."""
    documents = []
    for run in runs:
        for record in run.trials():
            document = json.loads(encode(record))
            document["headline"] = record.headline
            document["run_id"] = run.info.run_id
            documents.append(document)
    return pd.json_normalize(documents, sep="_")


def assert_agrees(frame: pd.DataFrame, runs) -> None:
    wanted = expected_rows(runs).rename(columns={"seed": "trial_seed"})
    names = {"metrics_" + c.removeprefix(METRIC_PREFIX): c for c in frame if METRIC_PREFIX in c}
    for name in wanted:
        column = frame[names.get(name, name)]
        ours, theirs = column.astype(object), wanted[name].astype(object)
        if name in names and isinstance(column.dtype, pd.CategoricalDtype):
            theirs = theirs.map(lambda value: value if pd.isna(value) else str(value))
        both_missing = ours.isna() & theirs.isna()
        assert (both_missing | (ours == theirs)).all(), name
    assert len(frame) == len(wanted)


def test_every_trial_is_a_row_and_the_last_record_counts(store):
    frame = load_results(store.root)
    assert_agrees(frame, [store.find("first"), store.find("second")])
    assert frame["sample_id"].tolist() == ["s1", "s0", "s0", "é[x]", "s0"]
    assert frame["headline"].tolist() == [1.0, 1.0, 0.5, 0.0, 1.0]
    assert problems(frame).empty


def test_columns_are_the_documented_ones_with_their_types(store):
    frame = load_results(store.root)
    assert list(frame)[: len(COLUMNS)] == [column.name for column in COLUMNS]
    assert list(frame)[len(COLUMNS) :] == ["metric_right", "metric_word"]
    assert {c.name: c.dtype for c in COLUMNS} == {c.name: str(frame[c.name].dtype) for c in COLUMNS}
    assert all(column.meaning for column in COLUMNS)


def test_every_field_of_a_record_has_a_column(make_trial):
    names = {
        f"{outer}_{inner}"
        for outer in ("kv", "timing", "usage")
        for inner in msgspec.to_builtins(getattr(make_trial(), outer))
    }
    own = set(TrialRecord.__struct_fields__) - {"kv", "timing", "usage", "metrics", "seed"}
    assert names | own | {"headline", "trial_seed"} == {c.name for c in OF_TRIAL}


def test_columns_of_the_run(store):
    frame = load_results(store.root).groupby("run_id", observed=True).first()
    first, second = frame.loc["first"], frame.loc["second"]
    assert (first["budget"], first["budget_tokens"], first["seed"]) == ("256", 256, 3)
    assert first["params"] == '{"a": 2, "b": 1}'
    assert pd.isna(second["budget"])
    assert pd.isna(second["budget_tokens"])
    assert (first["run_status"], first["run_state"]) == ("complete", "valid")
    assert second["run_state"] == "incomplete"


def test_state_and_budget_in_tokens_are_those_of_the_arms(tmp_path, spec, make_trial):
    store = RunStore(tmp_path)
    cases = {
        "share": {"budget": "25%", "method": "snapkv@rkv"},
        "never": {"budget": 4096},
        "none": {"budget": None, "method": "full"},
    }
    for name, changes in cases.items():
        with store.open(name, spec | changes, expected_trials=2) as run:
            for trial, logical in enumerate((1001, 3003)):
                run.append_trial(make_trial(trial=trial, kv={"logical": logical, "peak_live": 90}))
    frame = load_results(tmp_path)
    runs, _ = load_runs([tmp_path])
    for run in runs:
        row = frame[frame["run_id"] == run.run_id].iloc[0]
        assert row["run_state"] == run.summary.validity.state
        assert (None if pd.isna(row["budget_tokens"]) else row["budget_tokens"]) == run.tokens
        assert (row["method"], row["task"]) == (run.method, run.setting.task)
    shared = frame[frame["run_id"] == "share"].iloc[0]
    assert (shared["preset"], shared["budget_tokens"]) == ("rkv", 501)


def test_one_path_or_several_and_no_run_twice(store):
    first = store.root / "first"
    assert len(load_results(first)) == 4
    assert len(load_results(str(store.root))) == 5
    assert len(load_results([first, store.root / "second", str(store.root)])) == 5
    assert len(load_results(f"file://{store.root}")) == 5


def test_any_file_system(store):
    memory = fsspec.filesystem("memory")
    memory.put(str(store.root), "/kvbench-frame/runs", recursive=True)
    try:
        remote = load_results("memory://kvbench-frame/runs")
    finally:
        memory.rm("/kvbench-frame", recursive=True)
    local = load_results(store.root)
    assert sorted(remote["path"].unique()) == [
        "/kvbench-frame/runs/first",
        "/kvbench-frame/runs/second",
    ]
    pd.testing.assert_frame_equal(remote.drop(columns="path"), local.drop(columns="path"))


def damage(path: Path) -> None:
    whole = path.read_bytes()
    older = json.dumps({k: GOOD[k] for k in ("sample_id", "trial", "seed", "status", "score")})
    newer = json.dumps(GOOD | {"sample_id": "new", "flavour": "mint"})
    lines = [b"not json", b"[]", b"\xff\xfe", b"", older.encode(), newer.encode(), b'{"sample_id'
             b'":"x"}']  # fmt: skip
    path.write_bytes(b"\n".join(lines) + b"\n" + whole + whole[:40])


def test_a_damaged_file_loads_as_the_reader_reads_it(store):
    run = store.find("first")
    damage(run.path / "samples.jsonl")
    frame = load_results(run.path)
    assert_agrees(frame, [run])
    assert "new" in frame["sample_id"].tolist()
    found = problems(frame)
    assert found["line"].dropna().tolist() == [odd.line for odd in run.trial_lines().unreadable]
    assert found["line"].dropna().tolist() == [1, 2, 3, 6, 7]
    assert "torn last line" in found["reason"].iloc[-1]
    assert set(found["path"]) == {str(run.path)}


def test_many_odd_lines_are_counted_not_listed(store):
    path = store.root / "second" / "samples.jsonl"
    path.write_bytes(path.read_bytes() + b"?\n" * 500)
    found = problems(load_results(store.root))
    assert len(found) == 21
    assert found["reason"].iloc[-1] == "and 480 more lines that were not understood"


def test_metrics_with_text_become_text_everywhere(tmp_path, spec, make_trial):
    store = RunStore(tmp_path)
    for name, value in (("numbers", 3), ("words", "many")):
        with store.open(name, spec) as run:
            run.append_trial(make_trial(metrics={"n": value, name: 0.25}))
    frame = load_results(tmp_path).set_index("run_id")
    assert frame["metric_n"].to_dict() == {"numbers": "3", "words": "many"}
    assert frame["metric_words"].isna().to_dict() == {"numbers": True, "words": False}
    assert frame["metric_words"].dtype == "float64"


def test_runs_that_cannot_be_read_are_problems_not_ends(store):
    (store.root / "second" / "run.json").write_text("{}")
    (store.root / "first" / "samples.jsonl").rename(store.root / "aside")
    (store.root / "empty folder").mkdir()
    frame = load_results(store.root)
    assert frame.empty
    assert list(frame)[: len(COLUMNS)] == [column.name for column in COLUMNS]
    (found,) = problems(frame).itertuples()
    assert found.path == str(store.root / "second")
    assert found.reason.startswith("run.json: ")


def test_a_spec_of_another_shape_leaves_fields_empty(tmp_path, make_trial):
    spec = {"method": "agentkv", "budget": "a lot", "seed": 2**70, "temperature": "warm"}
    with RunStore(tmp_path).open("odd", spec) as run:
        run.append_trial(make_trial())
    row = load_results(tmp_path).iloc[0]
    assert row["budget"] == "a lot"
    assert row[["task", "budget_tokens", "seed", "temperature", "run_state"]].isna().all()


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        ("nowhere", UsageError, "No such file"),
        ("gopher://x", UsageError, "gopher"),
        ([], UsageError, "no run in an empty list"),
        (".", UsageError, r"no run in \.; kvbench run writes one"),
    ],
)
def test_bad_places_are_one_line(tmp_path, monkeypatch, target, kind, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=message):
        load_results(target)


def test_a_missing_backend_names_its_package(monkeypatch):
    def missing(_text):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(PrerequisiteError, match="Install s3fs"):
        load_results("s3://bucket/runs")


def test_the_top_level_stays_light():
    code = (
        "import sys, agentbench_kv; heavy = {'pandas', 'numpy', 'msgspec'} & set(sys.modules);"
        "from agentbench_kv import load_results as f; sys.exit(bool(heavy) or not callable(f))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    import agentbench_kv

    with pytest.raises(AttributeError, match="load_everything"):
        agentbench_kv.load_everything  # noqa: B018


def test_the_benchmarks_runs_load_as_real_ones(tmp_path):
    path = Path(__file__).parents[2] / "benchmarks" / "results.py"
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_file_location("benchmarks_results", path)
    )
    module.__spec__.loader.exec_module(module)
    made = module.make_runs(tmp_path, 3, 12, per_sample=2, turns=3, summaries="derived")
    runs, found = load_runs([tmp_path])
    assert (len(runs), found) == (3, [])
    assert_agrees(load_results(made), [RunReader(path) for path in made])
    assert [len(RunReader(path).turns()) for path in made] == [36] * 3
