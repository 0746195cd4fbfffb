"""`kvbench export` as a user calls it."""

from __future__ import annotations

import json
import re

import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml

from agentbench_kv import __version__
from agentbench_kv.results.frame import COLUMNS
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.store import RunStore


@pytest.fixture
def runs(tmp_path):
    store = RunStore(tmp_path / "runs")
    for name in ("alpha", "beta"):
        with store.open(name, {"method": "full", "task": name}) as run:
            run.append_trial(
                TrialRecord(sample_id="s", trial=0, seed=0, status="scored", score=0.5)
            )
    return store.root


def test_ids_paths_and_urls_in_one_file(kvbench, runs, tmp_path):
    done = kvbench("export", "alpha", f"file://{runs}/beta", "--to", "all.csv")
    assert (done.returncode, done.stdout) == (0, "2 trials in all.csv\n")
    assert pd.read_csv(tmp_path / "all.csv")["task"].tolist() == ["alpha", "beta"]
    again = kvbench("export", "runs", "--to", "all.csv")
    assert again.returncode == 2
    assert again.stderr == "kvbench: all.csv exists; --force replaces it\n"
    assert kvbench("export", "runs", "--to", "all.csv", "--force").returncode == 0


def test_a_card_says_what_the_parquet_file_holds(kvbench, runs, tmp_path):
    with RunStore(runs).open("odd", {"method": "[x](y) | z", "task": "alpha"}) as run:
        metrics = {"a: b|c": 0.5, "text": "x"}
        record = {"sample_id": "s", "trial": 0, "seed": 0, "status": "scored", "score": 0.5}
        run.append_trial(TrialRecord(**record, metrics=metrics))
    done = kvbench("export", "runs", "--to", "data/trials.parquet", "--card")
    assert "cannot write data/" in done.stderr
    (tmp_path / "data").mkdir()
    assert kvbench("export", "runs", "--to", "data/trials.parquet", "--card").returncode == 0
    _, front, body = (tmp_path / "data" / "README.md").read_text().split("---\n", 2)
    card = yaml.safe_load(front)
    (config,) = card["configs"]
    assert config["data_files"] == [{"split": "trials", "path": "trials.parquet"}]
    info = card["dataset_info"]
    assert "3 trials of 3 runs" in body
    # The file's own types: a category is text.
    file = pq.ParquetFile(tmp_path / "data" / "trials.parquet").schema
    types = {"BYTE_ARRAY": "string", "INT64": "int64", "DOUBLE": "float64"}
    assert info["features"] == [
        {"name": file.column(i).name, "dtype": types[file.column(i).physical_type]}
        for i in range(len(file))
    ]
    assert "license" not in card
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in body.splitlines() if line[:1] == "|"]
    of_columns = [row for row in rows if len(row) == 3][2:]
    assert [len(row) for row in rows].count(9) == 2 + 3
    assert len(of_columns) == len(info["features"])
    assert all(meaning.strip() for _, _, meaning in of_columns)
    meanings = [row[2].strip() for row in of_columns]
    assert meanings[: len(COLUMNS)] == [each.meaning for each in COLUMNS]
    assert "kvbench export runs --to data/trials.parquet --card" in body
    assert f"version {__version__}" in body


def test_a_card_there_is_not_overwritten(kvbench, runs, tmp_path):
    (tmp_path / "README.md").write_text("precious")
    done = kvbench("export", str(runs), "--to", "x.parquet", "--card")
    assert done.returncode == 2
    assert "README.md exists; --force replaces it" in done.stderr
    assert not (tmp_path / "x.parquet").exists()
    assert kvbench("export", str(runs), "--to", "x.parquet", "--card", "--force").returncode == 0
    assert (tmp_path / "README.md").read_text().startswith("---\n")


def test_problems_are_said_and_escaped(kvbench, runs):
    (runs / "alpha" / "samples.jsonl").write_bytes(b'{"\x1b[2J[red]": 1}\n')
    done = kvbench("export", "runs", "--to", "x.jsonl")
    assert done.returncode == 0
    assert "alpha line 1: " in done.stdout
    assert "\x1b" not in done.stdout
    document = json.loads(kvbench("export", "runs", "--json", KVBENCH_TO="y.jsonl").stdout)
    assert (document["rows"], document["problems"][0]["line"]) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("alpa", "--to", "x.csv"), "did you mean alpha?"),
        (("empty", "--to", "x.csv"), "no run in empty"),
        (("runs", "--to", "x.xlsx"), "expected a name that ends in .parquet, .csv, .jsonl"),
        (("runs", "--to", "none/x.csv"), "cannot write none/x.csv"),
        (("gopher://x", "--to", "x.csv"), "gopher"),
    ],
)
@pytest.mark.usefixtures("runs")
def test_bad_requests_are_one_line(kvbench, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    done = kvbench("export", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "x.csv").exists()
