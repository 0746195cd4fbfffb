"""The tables of small runs against figures computed from the raw lines of their records."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

import numpy as np
import pytest
from click.testing import CliRunner

from agentbench_kv.cli.report import report
from agentbench_kv.errors import UsageError
from agentbench_kv.results.arms import load_arms
from agentbench_kv.results.paired import holm, paired_difference
from agentbench_kv.results.reader import RunReader
from agentbench_kv.results.statistics import interval
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.summary import summarize
from agentbench_kv.results.tables.model import Kind, Mark
from agentbench_kv.results.tables.report import report_tables

TASK = "bfcl/multi_turn_base"
MODEL = "Qwen3-32B"
SAMPLES = 24
CHANCES = {("agentkv", 2048): 0.5, ("agentkv", 3072): 0.9, ("rkv", 2048): 0.55, ("h2o", 2048): 0.02}


@pytest.fixture(scope="module")
def write(make_trial):
    """Return a function that writes one finished run: a chance to be right, or None for idle."""

    def run(folder, name, chance, events=2, samples=SAMPLES, keep=True, **spec):
        base = {"task": TASK, "model": MODEL, "engine": "embedded", "seed": 0, "concurrency": 4}
        rng = np.random.default_rng(list(name.encode()))
        with RunStore(folder).open(name, base | spec, expected_trials=samples) as writer:
            for i in range(samples if keep else samples - 3):
                right = int(rng.random() < chance)
                had = events if i % 3 else 0
                kv = {
                    "peak_live": 900 + i, "logical": 4000 + i, "events": had,
                    "longest_prefill": 900, "bytes_read": 10_000_000 + i, "prefill_tokens": 50 + i,
                    "restored": i, "decode_tokens": 20, "mean_decode_kv": 500.0,
                }  # fmt: skip
                outcome = {"status": "timeout"} if i == 5 else {"score": float(right)}
                times = {} if i == 5 else {"timing": {"ttft_ms": 5.0 + i, "e2e_s": 1.0}}
                counts = {"recurring_right": right * (i % 4), "recurring_asked": i % 4}
                writer.append_trial(
                    make_trial(
                        f"s{i}", metrics=counts, kv=kv, prompt_sha=f"p{i}", **outcome, **times
                    )
                )
        summarize(RunReader(folder / name))

    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory, write):
    """Full twice, its constrained twin, three methods, a null agent and two unranked runs."""
    folder = tmp_path_factory.mktemp("runs")
    write(folder, "full-a", 0.9, method="full", budget=None, events=0)
    write(folder / "again", "full-b", 0.9, method="full", budget=None, events=0)
    (folder / "again" / "full-b").rename(folder / "full-b")
    write(folder, "constrained", 0.9, method="full-constrained", budget=None, events=0)
    for (method, budget), chance in CHANCES.items():
        write(folder, f"{method}-{budget}", chance, method=method, budget=budget)
    write(folder, "never", 0.5, method="snapkv", budget=2048, events=0)
    write(folder, "partial", 0.5, method="rkv", budget=3072, keep=False)
    write(
        folder, "null", 0.0, method="full", budget=None, events=0, engine="scripted", model="null"
    )
    return folder


@pytest.fixture(scope="module")
def built(runs):
    arms, problems = load_arms([runs])
    assert problems == []
    tables, problems = report_tables(arms, metrics=["score", "recurring"])
    assert problems == []
    return tables


def raw(runs, name):
    lines = (runs / name / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def raw_scores(runs, *names):
    scores = {}
    for name in names:
        for line in raw(runs, name):
            scores.setdefault(line["sample_id"], []).append(line["score"] or 0.0)
    return scores


def one(tables, *words):
    (found,) = [t for t in tables if all(word in t.title for word in words)]
    return found


def cell(table, row, column, published=False):
    place = [each.title for each in table.columns].index(column)
    (found,) = [r for r in table.ranked if r.cells[0].value == row and r.published == published]
    return found.cells[place]


def test_scores_and_intervals_follow_from_the_raw_records(runs, built):
    table = one(built, "score, %", "all samples", MODEL)
    for method, budget in CHANCES:
        found, expected = (
            cell(table, method, str(budget)),
            interval(raw_scores(runs, f"{method}-{budget}")),
        )
        assert (found.value, found.low, found.high) == pytest.approx(
            (expected.point, expected.low, expected.high)
        )
    twice = interval(raw_scores(runs, "full-a", "full-b"))
    assert cell(table, "full", "no budget").value == pytest.approx(twice.point)
    assert cell(table, "full-constrained", "no budget").value is not None


def test_the_best_of_a_budget_shares_its_mark_with_who_cannot_be_told_from_it(runs, built):
    table = one(built, "score, %", "all samples", MODEL)
    scores = {name: raw_scores(runs, f"{name}-2048") for name in ("agentkv", "rkv", "h2o")}
    means = {name: fmean(map(fmean, values.values())) for name, values in scores.items()}
    best = max(means, key=means.get)
    for name in scores:
        gap = paired_difference(scores[best], scores[name])
        tied = Mark.TIED if gap.low <= 0 <= gap.high else None
        assert cell(table, name, "2048").mark is (Mark.BEST if name == best else tied)
    assert cell(table, "agentkv", "3072").mark is Mark.BEST
    assert cell(table, "full", "no budget").mark is None
    assert {cell(table, name, "2048").mark for name in scores} == {Mark.BEST, Mark.TIED, None}


def test_the_triggered_subset_has_its_own_table(runs, built):
    table = one(built, "score, %", "samples with an event", MODEL)
    lines = [line for line in raw(runs, "rkv-2048") if line["kv"]["events"]]
    assert 0 < len(lines) < SAMPLES
    assert cell(table, "rkv", "2048").value == pytest.approx(
        fmean(li["score"] or 0.0 for li in lines)
    )
    assert cell(table, "rkv", "samples").value == len(lines)
    assert "full" not in [row.cells[0].value for row in table.rows]


def test_differences_to_full_are_paired_and_adjusted_as_one_family(runs, built):
    table = one(built, "score, points", MODEL)
    full = raw_scores(runs, "full-a", "full-b")
    gaps = {key: paired_difference(raw_scores(runs, f"{key[0]}-{key[1]}"), full) for key in CHANCES}
    for method, budget in CHANCES:
        found, gap = cell(table, method, str(budget)), gaps[method, budget]
        assert found.value == pytest.approx(gap.point)
        assert (found.low, found.high) == pytest.approx((gap.low, gap.high), abs=0.03)
    adjusted = dict(zip(CHANCES, holm([gap.p_value for gap in gaps.values()]), strict=True))
    found = {(m, b): cell(table, m, str(b)).p_value for m, b in CHANCES}
    assert found == pytest.approx(adjusted, abs=0.05)
    assert f"{len(CHANCES)} comparisons" in table.notes[0]


def test_unranked_runs_stand_below_the_line_with_the_reason(built):
    table = one(built, "score, %", "all samples", MODEL)
    assert [(row.cells[0].value, row.below) for row in table.unranked] == [
        ("rkv", f"incomplete: {SAMPLES - 3} of {SAMPLES} trials finished"),
        (
            "snapkv",
            "budget_not_applied: never triggered; logical tokens at most 4023 > budget 2048",
        ),
    ]
    assert all(c.mark is None for row in table.unranked for c in row.cells)


def test_the_null_agent_is_the_floor_of_the_other_cells(built):
    table = one(built, "score, %", "all samples", MODEL)
    assert cell(table, "null agent", "no budget").value == 0.0
    assert not [t for t in built if t.kind is Kind.ACCURACY and t.where["engine"] == "scripted"]


def test_published_figures_stand_beside_equal_cells_only_and_unranked(built):
    table = one(built, "score, %", "all samples", MODEL)
    found = {
        (row.cells[0].value, column.title): value.value
        for row, column, value in table.cells()
        if row.published and column.title[0].isdigit() | (column.title == "no budget")
    }
    budgets = ("no budget", "2048", "3072")
    expected = {
        "full, agentkv table1": (0.52, None, None),
        "agentkv, agentkv table1": (None, 0.22, 0.42),
        "rkv, agentkv table1": (None, 0.13, None),
    }
    assert found == {
        (name, budget): value
        for name, values in expected.items()
        for budget, value in zip(budgets, values, strict=True)
    }
    assert all(c.mark is None for row in table.rows if row.published for c in row.cells)
    assert not any(row.published for row in one(built, "recurring, %", "all", MODEL).rows)


def test_the_noise_floor_is_full_against_full(runs, built):
    a, b = (raw_scores(runs, name) for name in ("full-a", "full-b"))
    (line,) = [n for n in one(built, "score, %", "all samples", MODEL).notes if "A/A" in n]
    changed = sum(a[name] != b[name] for name in a)
    assert f"{changed} of {SAMPLES} samples changed" in line


def test_sub_scores_are_ratios_of_sums(runs, built):
    table = one(built, "sub-score recurring, %", "all samples", MODEL)
    counts = [line["metrics"] for line in raw(runs, "agentkv-3072")]
    ratio = sum(c["recurring_right"] for c in counts) / sum(c["recurring_asked"] for c in counts)
    assert cell(table, "agentkv", "3072").value == pytest.approx(ratio)
    assert cell(table, "agentkv", "samples").value == sum(c["recurring_asked"] > 0 for c in counts)


def test_efficiency_is_the_cost_of_a_session(runs, built):
    table = next(t for t in built if t.kind is Kind.EFFICIENCY and t.where["engine"] == "embedded")
    kvs = [line["kv"] for line in raw(runs, "h2o-2048")]
    expected = {
        "peak live": median(kv["peak_live"] for kv in kvs),
        "worst peak": max(kv["peak_live"] for kv in kvs),
        "live / logical %": fmean(kv["peak_live"] / kv["logical"] for kv in kvs),
        "KV read MB": fmean(kv["bytes_read"] for kv in kvs) / 1e6,
        "prefilled": fmean(kv["prefill_tokens"] for kv in kvs),
        "restored": fmean(kv["restored"] for kv in kvs),
        "failed %": 1 / SAMPLES,
        "timeout": 1,
    }
    for title, value in expected.items():
        assert cell(table, "h2o", title).value == pytest.approx(value), title


def test_throughput_is_relative_to_full_served_alike(runs, built):
    table = next(t for t in built if t.kind is Kind.THROUGHPUT)
    speeds = {
        path.parent.name: 20
        * len(raw(runs, path.parent.name))
        / json.loads(path.read_text())["wall_s"]
        for path in runs.glob("*/run.json")
    }
    base = median([speeds["full-a"], speeds["full-b"]])
    assert cell(table, "h2o", "output tok/s").value == pytest.approx(speeds["h2o-2048"])
    assert cell(table, "h2o", "x full").value == pytest.approx(speeds["h2o-2048"] / base)
    times = [
        line["timing"]["ttft_ms"] for line in raw(runs, "h2o-2048") if line["score"] is not None
    ]
    assert cell(table, "h2o", "TTFT ms").value == pytest.approx(median(times))
    assert cell(table, "h2o", "allowed").value == 4


def test_curves_have_a_row_for_each_method(built):
    table = one(built, "accuracy over budget")
    assert [row.cells[0].value for row in table.rows] == ["agentkv", "h2o", "rkv"]
    areas = [row.cells[2].value for row in table.rows]
    assert areas[0] is not None
    assert areas[1:] == [None, None], "one budget has no area"


def test_the_number_of_groups_is_shown(tmp_path, spec, make_trial):
    own = spec | {"method": "full", "budget": None}
    with RunStore(tmp_path).open("full", own, expected_trials=24) as run:
        for i in range(24):
            run.append_trial(make_trial(f"s{i}", score=float(i % 3 > 0), cluster=f"c{i // 4}"))
    table = one(report_tables(load_arms([tmp_path])[0])[0], "score, %", "all samples")
    (note,) = [note for note in table.notes if "groups" in note]
    assert note.startswith("samples come in 6 groups")
    assert "rough" in note


def test_rows_of_one_method_with_other_settings_are_kept_apart(tmp_path, write):
    for name, heat in (("cool", 0.0), ("hot", 0.7)):
        write(tmp_path, name, 0.5, method="rkv", budget=2048, temperature=heat, model="m")
    write(tmp_path, "s1", 0.5, method="rkv", budget=2048, temperature=0.7, seed=1, model="m")
    tables, _ = report_tables(load_arms([tmp_path])[0], [Kind.ACCURACY])
    labels = [row.cells[0].value for row in tables[0].rows]
    assert labels == ["rkv [temperature=0.0]", "rkv [temperature=0.7]"]
    assert "no run of full" in tables[-1].notes[0]


def test_a_row_is_compared_with_the_full_of_its_own_settings(tmp_path, write):
    for heat, chance in ((0.0, 0.9), (1.0, 0.3)):
        for name, about in (("full", {"budget": None, "events": 0}), ("rkv", {"budget": 2048})):
            write(tmp_path, f"{name}-{heat}", chance, method=name, temperature=heat, **about)
    write(tmp_path, "lonely", 0.5, method="rkv", budget=2048, temperature=2.0)
    arms, _ = load_arms([tmp_path])
    table = one(report_tables(arms)[0], "difference to full")
    for heat in ("0.0", "1.0"):
        own = (raw_scores(tmp_path, f"{name}-{heat}") for name in ("rkv", "full"))
        expected = paired_difference(*own).point
        assert cell(table, f"rkv [temperature={heat}]", "2048").value == pytest.approx(expected)
    assert len(table.ranked) == 2
    assert table.notes[0] == "no full of the same settings and samples: " + (
        "rkv [temperature=2.0] at 2048"
    )
    assert "full [temperature=0.0] or full [temperature=1.0], the one of" in table.notes[1]
    scores = one(report_tables(arms)[0], "all samples")
    marks = [row.cells[-1].mark for row in scores.ranked if "rkv [" in row.cells[0].value]
    assert marks == [Mark.BEST] * 3


def test_curves_join_the_seeds_of_a_share_and_keep_other_temperatures_apart(tmp_path, write):
    """A share is another number of tokens in each run, as sessions differ in length."""
    for heat in (0.0, 1.0):
        for seed in (0, 1):
            some = {"model": "m", "temperature": heat, "seed": seed, "samples": 12}
            write(tmp_path, f"f{heat}{seed}", 0.9, method="full", budget=None, events=0, **some)
            for share in ("60%", "80%"):
                name = f"{share[:2]}-{heat}{seed}"
                write(tmp_path, name, 0.7 - heat / 2, budget=share, method="rkv", **some)
    arms, _ = load_arms([tmp_path])
    moved = [
        replace(arm, summary=arm.summary.model_copy(update={"kv": _longer(arm)})) for arm in arms
    ]
    tables = [table for table in report_tables(moved)[0] if table.kind is Kind.CURVES]
    curves = [table for table in tables if "accuracy over budget" in table.title]
    assert ["temperature=0.0" in table.title for table in curves] == [True, False]
    for table in curves:
        (row,) = table.ranked
        assert row.cells[1].value == 2
        assert "12 samples" in table.notes[0]


def _longer(arm):
    """Sessions of the second seed are longer by a few tokens."""
    longer = arm.summary.kv.median_logical + 10 * arm.summary.seed
    return arm.summary.kv.model_copy(update={"median_logical": longer})


def test_what_a_tasks_name_does_not_say_stands_under_its_table(tmp_path, write):
    web = {"web": "corpus wiki@0123 (not BFCL web_search)", "corpus": None}
    for name, method in (("a", "full"), ("b", "rkv")):
        write(tmp_path, name, 0.5, method=method, budget=2048, task_params={"route": "chat"})
        with RunStore(tmp_path).open(name, RunReader(tmp_path / name).info.spec) as writer:
            writer.annotate({"task": web})
        summarize(RunReader(tmp_path / name))
    tables, _ = report_tables(load_arms([tmp_path])[0], [Kind.ACCURACY])
    assert "web: corpus wiki@0123 (not BFCL web_search)" in tables[0].notes
    assert "route: chat" in tables[0].notes
    assert not any(note.startswith(("corpus", "encoder")) for note in tables[0].notes)


def test_prompts_that_differ_from_full_are_drift(tmp_path, write):
    write(tmp_path, "full", 0.9, method="full", budget=None, events=0)
    write(tmp_path, "rkv", 0.5, method="rkv", budget=2048)
    path = tmp_path / "rkv" / "samples.jsonl"
    path.write_text(path.read_text().replace('"prompt_sha":"p7"', '"prompt_sha":"other"'))
    summarize(RunReader(tmp_path / "rkv"))
    tables, problems = report_tables(load_arms([tmp_path])[0], [Kind.ACCURACY])
    (row,) = tables[0].unranked
    assert row.below == f"drift: prompts differ from the other arm in 1 of {SAMPLES} trials, " + (
        "first in sample s7 trial 0"
    )
    assert problems == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["score"].update(point=0.99), "score 0.990000, the records"),
        (lambda s: s["validity"].update(state="valid"), "validity valid, the records budget_not_"),
        (lambda s: s["kv"].update(bytes_read=1), "bytes_read 1, the records"),
        (lambda s: s.update(method="agentkv"), "method 'agentkv', the spec 'snapkv'"),
    ],
)
def test_a_summary_edited_by_hand_is_named_and_not_believed(tmp_path, write, change, words):
    write(tmp_path, "run", 0.5, method="snapkv", budget=2048, events=0)
    path = tmp_path / "run" / "summary.json"
    arms, _ = load_arms([tmp_path])
    honest, _ = report_tables(arms, [Kind.ACCURACY])
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    tables, (problem,) = report_tables(load_arms([tmp_path])[0], [Kind.ACCURACY])
    assert words in problem.reason
    assert problem.path == tmp_path / "run"
    assert [t.rows for t in tables] == [t.rows for t in honest]


def call(*args, **env):
    return CliRunner().invoke(report, [str(arg) for arg in args], env=env)


def test_the_command_prints_every_table(runs):
    result = call(runs, "--metric", "recurring", "--metric", "score")
    assert result.exit_code == 0
    for words in ("score, %", "sub-score recurring", "KV memory", "throughput", "accuracy over"):
        assert words in result.stdout
    assert result.stderr == ""


def test_the_command_narrows_and_writes(runs, tmp_path):
    result = call(runs, "--table", "efficiency", "--out", tmp_path / "t.csv")
    assert result.exit_code == 0
    assert result.stderr.strip() == str(tmp_path / "t.csv")
    rows = csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text()))
    assert {row["kind"] for row in rows} == {"efficiency"}
    document = json.loads(call(runs, "--json", KVBENCH_TABLE="curves").stdout)
    assert {table["kind"] for table in document["tables"]} == {"curves"}


def test_published_alone_prints_the_counts():
    result = call("--published")
    assert result.exit_code == 0
    for count in ("14 of 18 bfcl", "11 of 18 tau2"):
        assert count in result.stdout


def test_damage_is_told_line_by_line_and_stops_nothing(tmp_path, write):
    write(tmp_path, "ok", 0.5, method="rkv", budget=2048)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    with (tmp_path / "ok" / "samples.jsonl").open("a") as file:
        file.write('{"sample_id": "x", "score": NaN}\n{"torn')
    result = call(tmp_path, "--table", "accuracy")
    assert result.exit_code == 0
    assert "rkv" in result.stdout
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    assert sum("broken" in line for line in lines) == 1
    assert sum("samples.jsonl line" in line for line in lines) == 1
    assert sum("torn last line" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "name runs or a folder of runs"),
        (["nowhere"], "does not exist"),
        (["."], "no run in"),
        (["--published", "--table", "curves"], "no published figures in curves"),
        (["--published", "--html", "site"], "--html needs runs"),
    ],
)
def test_bad_requests_are_one_clear_line(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    result = call(*args)
    assert isinstance(result.exception, UsageError)
    assert words in str(result.exception)


def test_an_unknown_metric_names_the_nearest(runs):
    result = call(runs, "--metric", "recuring")
    assert "did you mean 'recurring'?" in str(result.exception)


def test_budgets_are_sorted_by_size_and_shares_come_last(tmp_path, write):
    for budget in (10_000, 900, "50%", "5%"):
        write(tmp_path, f"b{budget}".strip("%"), 0.5, method="rkv", budget=budget)
    tables, _ = report_tables(load_arms([tmp_path])[0], [Kind.ACCURACY])
    titles = [column.title for column in tables[0].columns[2:]]
    assert titles == ["900", "10000", "5%", "50%"]
    sizes = [float(title.strip("%")) for title in titles[:2]]
    assert all(a < b for a, b in pairwise(sizes))
