"""The table of pass^k, and `compare --metric pass^k`, against counting every k-subset by hand."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from click.testing import CliRunner

from agentbench_kv.cli.report import report
from agentbench_kv.errors import UsageError
from agentbench_kv.results.compare import compare
from agentbench_kv.results.papers import headlines
from agentbench_kv.results.runs import load_runs
from agentbench_kv.results.stats import level, pass_scores
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.tables.report import report_tables

TASK = "tau2/retail"
FULL = {"a": [1, 1, 1, 0], "b": [1, 1, 1, 1], "c": [0, 0, 1, 0], "d": [0, 1, 0, 1]}
OURS = {"a": [1, 0, 1, 0], "b": [1, 1, 1, 1], "c": [0, 0, 0, 0], "d": [0, 1, 0, 1]}
NULL = {"a": [0, 0], "b": [1, 1], "c": [0, 0], "d": [0, 0]}


@pytest.fixture
def write(make_trial, tmp_path):
    """Return a function that writes one finished run from the scores of each sample's trials."""

    def run(name, scores, expected=None, **spec):
        base = {"task": TASK, "model": "m", "engine": "embedded", "seed": 0, "budget": None}
        total = sum(map(len, scores.values()))
        with RunStore(tmp_path).open(
            name, base | spec, expected_trials=expected or total
        ) as writer:
            for sample, tries in scores.items():
                for trial, score in enumerate(tries):
                    kv = {"events": 1, "peak_live": 90, "logical": 99}
                    own = {"kv": kv, "seed": (base | spec)["seed"]}
                    writer.append_trial(make_trial(sample, trial, score=float(score), **own))
        return tmp_path / name

    return run


def by_hand(scores, k):
    """Try every choice of k trials of every sample."""
    return fmean(fmean(all(some) for some in combinations(t, k)) for t in scores.values())


def passes(tmp_path):
    tables = report_tables(load_runs([tmp_path])[0])
    return [table for table in tables if table.title.startswith("pass^k")]


def row(table, name):
    (found,) = [row for row in table.rows if row.cells[0].value == name]
    return dict(zip([column.title for column in table.columns], found.cells, strict=True)), found


def test_columns_are_what_every_choice_of_k_trials_gives(write, tmp_path):
    write("full", FULL, method="full")
    write("ours", OURS, method="rkv", budget=100)
    (table,) = passes(tmp_path)
    for name, scores in (("full", FULL), ("rkv", OURS)):
        cells, _ = row(table, name)
        assert (cells["K"].value, cells["samples"].value) == (4, 4)
        for k in range(1, 5):
            assert cells[f"pass^{k}"].value == pytest.approx(by_hand(scores, k))
    assert "K = 4 trials" in table.notes


def test_intervals_are_those_of_graded_scores(write, tmp_path):
    rng = np.random.default_rng(3)
    scores = {f"s{i}": (rng.random(4) < rng.random()).astype(int).tolist() for i in range(60)}
    write("full", scores, method="full")
    cells, _ = row(passes(tmp_path)[0], "full")
    for k in range(1, 5):
        cell, expected = cells[f"pass^{k}"], level(pass_scores(scores, k))
        assert (cell.low, cell.high) == (expected.low, expected.high)


def test_the_null_agent_and_rows_with_fewer_trials_stand_in_the_same_table(write, tmp_path):
    write("full", FULL, method="full")
    write("null", NULL, method="full", model="null", engine="scripted")
    (table,) = passes(tmp_path)
    cells, _ = row(table, "null agent")
    assert cells["pass^2"].value == 0.25
    assert cells["pass^3"].value is None
    assert "K = 2, 4 trials" in table.notes


def test_two_seeds_of_a_method_are_tries_of_the_same_samples(write, tmp_path):
    write("first", {name: tries[:2] for name, tries in FULL.items()}, method="full", seed=0)
    write("second", {name: tries[2:] for name, tries in FULL.items()}, method="full", seed=1)
    cells, _ = row(passes(tmp_path)[0], "full")
    assert cells["pass^4"].value == pytest.approx(by_hand(FULL, 4))


def test_repeats_of_the_same_trials_are_no_more_trials(write, tmp_path):
    """Audit A7: the same seeds at another concurrency made pass^3 25.3 of 20.0."""
    write("first", {name: tries[:3] for name, tries in FULL.items()}, method="full")
    other = {name: [1 - score for score in tries[:3]] for name, tries in FULL.items()}
    write("again", other, method="full", concurrency=8)
    cells, _ = row(passes(tmp_path)[0], "full")
    assert cells["K"].value == 3
    first = {name: tries[:3] for name, tries in FULL.items()}
    assert cells["pass^3"].value == pytest.approx(by_hand(first, 3))


def test_a_smaller_set_of_samples_is_no_row_of_the_larger(write, tmp_path):
    write("full", FULL, method="full")
    write("ours", OURS, method="rkv", budget=100)
    write("easy", {"b": [1, 1, 1, 1]}, method="snapkv", budget=100)
    _, found = row(passes(tmp_path)[0], "snapkv")
    assert found.below == "other samples: it has 1 of the 4 that others were asked"


def test_k_is_what_every_sample_has(write, tmp_path):
    write("full", FULL | {"d": [1, 0]}, method="full")
    cells, _ = row(passes(tmp_path)[0], "full")
    assert cells["K"].value == 2
    assert "pass^3" not in cells


def test_an_unfinished_run_stands_below_the_line(write, tmp_path):
    write("full", FULL, method="full", expected=20)
    _, found = row(passes(tmp_path)[0], "full")
    assert "16 of 20" in found.below


@pytest.mark.parametrize(
    "scores", [{"a": [1], "b": [0]}, {"a": [0.5, 1], "b": [0, 1]}], ids=["one trial", "graded"]
)
def test_there_is_no_table_of_one_trial_or_of_graded_scores(scores, write, tmp_path):
    write("full", scores, method="full")
    assert passes(tmp_path) == []


def test_the_report_prints_it(write, tmp_path):
    write("full", FULL, method="full")
    shown = CliRunner().invoke(report, [str(tmp_path), "--format", "csv"])
    assert shown.exit_code == 0, shown.output
    (line,) = [line for line in shown.output.splitlines() if ",pass^4," in line]
    assert float(line.split(",pass^4,share,")[1].split(",")[0]) == by_hand(FULL, 4)


def test_compare_pairs_pass_k_by_sample(write):
    full = load_runs([write("full", FULL, method="full")])[0]
    ours = load_runs([write("ours", OURS, method="rkv", budget=100)])[0]
    (found,) = compare(full, ours, metric="pass^2").rows
    assert found.base_level == pytest.approx(by_hand(FULL, 2))
    assert found.cand_level == pytest.approx(by_hand(OURS, 2))
    assert found.point == pytest.approx(by_hand(OURS, 2) - by_hand(FULL, 2))
    assert found.n == 4


def test_compare_refuses_more_trials_than_there_are(write):
    (full,), (ours,) = (
        load_runs([write(name, scores, method=name)])[0]
        for name, scores in (("full", FULL), ("rkv", OURS))
    )
    with pytest.raises(UsageError, match="--trials 5"):
        compare([full], [ours], metric="pass^5")
    with pytest.raises(UsageError, match="no sub-score 'pass\\^0'"):
        compare([full], [ours], metric="pass^0")


def test_two_releases_of_a_benchmark_share_no_table_and_no_verdict(write, tmp_path):
    sides = {"base": FULL, "cand": OURS}
    for task in ("tau2/retail", "tau2-v1/retail", "bfcl/memory"):
        for side, scores in sides.items():
            write(f"{task.replace('/', '_')}-{side}", scores, method=side, task=task)
    arms, _ = load_runs([tmp_path])
    tables = report_tables(load_runs([tmp_path])[0])
    assert {table.where["task"] for table in tables} == {arm.setting.task for arm in arms}
    for table in tables:
        others = {"tau2/retail", "tau2-v1/retail"} - {table.where["task"]}
        assert not any(f"{other}," in table.title for other in others)
    base, cand = ([arm for arm in arms if arm.method == side] for side in sides)
    with pytest.raises(UsageError, match=r"tau2 and tau2-v1 are two releases .*--by task"):
        compare(base, cand)
    assert [row.tasks for row in compare(base, cand, by_task=True).rows] == [
        [task] for task in ("bfcl/memory", "tau2-v1/retail", "tau2/retail")
    ]
    pooled = compare(*([a for a in side if "-v1" not in a.setting.task] for side in (base, cand)))
    assert pooled.rows[0].tasks == ["bfcl/memory", "tau2/retail"]


def test_published_figures_stand_beside_the_release_they_are_of():
    figures = [headlines(f"{name}/airline", "Qwen3-32B") for name in ("tau2", "tau2-v1")]
    assert figures[0]
    assert not figures[1]
