"""The tables of small runs against figures computed from the raw lines of their records."""

from __future__ import annotations

import csv
import io
import json
import shutil
from itertools import pairwise
from statistics import fmean, median

import numpy as np
import pytest
from click.testing import CliRunner

from agentbench_kv.cli.report import report
from agentbench_kv.errors import UsageError
from agentbench_kv.results.run_info import write_info
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.runs import load_runs
from agentbench_kv.results.stats import Scores, change, holm, level
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
        store = RunStore(folder)
        with store.open(name, base | spec, expected_trials=samples) as writer, writer.playing():
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
                        f"s{i}",
                        metrics=counts,
                        kv=kv,
                        prompt_sha=f"p{i}",
                        seed=spec.get("seed", 0),
                        **outcome,
                        **times,
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
    known, problems = load_runs([runs])
    assert problems == []
    return report_tables(known, metrics=["score", "recurring"])


def raw(runs, name):
    lines = (runs / name / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def raw_scores(runs, name):
    return {line["sample_id"]: [line["score"] or 0.0] for line in raw(runs, name)}


def measured(runs, name):
    return Scores.of_trials(raw_scores(runs, name))


def raw_change(runs, name, base):
    return change(measured(runs, name), measured(runs, base))


def tables_of(folder, *kinds, metrics=()):
    return report_tables(load_runs([folder])[0], kinds, metrics)


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
        found = cell(table, method, str(budget))
        expected = level(measured(runs, f"{method}-{budget}"))
        assert (found.value, found.low, found.high) == (expected.point, expected.low, expected.high)
        assert found.value == pytest.approx(
            fmean(line["score"] or 0.0 for line in raw(runs, f"{method}-{budget}"))
        )
    assert cell(table, "full-constrained", "no budget").value is not None
    assert [row.cells[0].value for row in table.ranked][:2] == ["full", "full, agentkv table1"]
    assert f"{SAMPLES} samples" in table.title


def test_a_trial_that_was_played_twice_counts_once(runs, built):
    """full-b is the A/A arm of full-a: same seeds, other luck."""
    table = one(built, "score, %", "all samples", MODEL)
    first = fmean(line["score"] or 0.0 for line in raw(runs, "full-a"))
    assert cell(table, "full", "no budget").value == pytest.approx(first)
    assert raw_scores(runs, "full-a") != raw_scores(runs, "full-b")
    assert f"trials played more than once count once, the earliest: full ({SAMPLES})" in table.notes


def test_the_best_of_a_budget_is_tied_with_who_cannot_be_told_from_it(runs, built):
    table = one(built, "score, %", "all samples", MODEL)
    names = ("agentkv", "rkv", "h2o")
    means = {name: measured(runs, f"{name}-2048").mean for name in names}
    best = max(means, key=means.get)
    expected = {best: Mark.TIED}
    for name in set(names) - {best}:
        pair = (measured(runs, f"{name}-2048"), measured(runs, f"{best}-2048"))
        # Three pairs can be compared in this table.
        expected[name] = Mark.TIED if change(*pair, confidence=1 - 0.05 / 3).tied else None
    assert {name: cell(table, name, "2048").mark for name in names} == expected
    assert set(expected.values()) == {Mark.TIED, None}
    assert cell(table, "full", "no budget").mark is None


def test_a_method_alone_at_its_budget_is_not_the_best_of_it(built):
    table = one(built, "score, %", "all samples", MODEL)
    assert cell(table, "agentkv", "3072").value > 0.5
    assert cell(table, "agentkv", "3072").mark is None


def test_the_triggered_subset_has_its_own_table_without_ranks(runs, built):
    table = one(built, "score, %", "samples with an event", MODEL)
    lines = [line for line in raw(runs, "rkv-2048") if line["kv"]["events"]]
    assert 0 < len(lines) < SAMPLES
    assert cell(table, "rkv", "2048").value == pytest.approx(
        fmean(line["score"] or 0.0 for line in lines)
    )
    assert cell(table, "rkv", "samples").value == len(lines)
    assert "full" not in [row.cells[0].value for row in table.rows]
    assert all(each.mark is None for _, _, each in table.cells())


def test_differences_to_full_are_paired_and_adjusted_as_one_family(runs, built):
    table = one(built, "score, points", MODEL)
    gaps = {key: raw_change(runs, f"{key[0]}-{key[1]}", "full-a") for key in CHANCES}
    adjusted = dict(zip(CHANCES, holm([gap.p_value for gap in gaps.values()]), strict=True))
    for key, gap in gaps.items():
        found = cell(table, key[0], str(key[1]))
        assert (found.value, found.low, found.high) == (gap.point, gap.low, gap.high)
        assert found.p_value == adjusted[key]
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
    assert table.where["samples"] == sum(c["recurring_asked"] > 0 for c in counts)


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


def test_a_single_run_has_a_speed_and_no_claim_about_it(runs, built):
    table = next(t for t in built if t.kind is Kind.THROUGHPUT)
    wall = json.loads((runs / "h2o-2048" / "run.json").read_text())["wall_s"]
    speed = cell(table, "h2o", "output tok/s")
    assert speed.value == pytest.approx(20 * SAMPLES / wall)
    assert speed.low is speed.high is speed.mark is None
    assert not [column.title for column in table.columns if column.title.startswith("x ")]
    times = [
        line["timing"]["ttft_ms"] for line in raw(runs, "h2o-2048") if line["score"] is not None
    ]
    assert cell(table, "h2o", "TTFT ms").value == pytest.approx(median(times))
    assert (cell(table, "h2o", "allowed").value, cell(table, "h2o", "runs").value) == (4, 1)
    assert cell(table, "full", "runs").value == 2


def test_nine_runs_served_alike_have_an_interval_and_a_ratio(tmp_path, write):
    speeds = {"full": [], "rkv": []}
    for i in range(9):
        for name, budget in (("full", None), ("rkv", 2048)):
            write(tmp_path, f"{name}{i}", 0.5, method=name, budget=budget, seed=i, samples=6)
            path = tmp_path / f"{name}{i}" / "run.json"
            document = json.loads(path.read_text())
            document["wall_s"] = 1.0 + i / 100 + (name == "full")
            path.write_text(json.dumps(document))
            speeds[name].append(20 * 6 / document["wall_s"])
    write(tmp_path, "other", 0.5, method="rkv", budget=2048, seed=0, samples=6, concurrency=8)
    (table,) = report_tables(load_runs([tmp_path])[0], [Kind.THROUGHPUT])
    rows = {(row.cells[0].value, row.cells[2].value): row for row in table.ranked}
    speed = rows["rkv", 4].cells[5]
    assert (speed.value, speed.low < speed.value < speed.high) == (median(speeds["rkv"]), True)
    ratio = rows["rkv", 4].cells[6]
    assert table.columns[6].title == "x full"
    assert ratio.value == pytest.approx(median(speeds["rkv"]) / median(speeds["full"]))
    assert 1.8 < ratio.low < ratio.value < ratio.high < 2.2
    assert rows["rkv", 8].cells[5].low is rows["rkv", 8].cells[6].value is None


def test_copies_and_runs_served_otherwise_are_no_repetitions_of_a_speed(tmp_path, write):
    """Nine copies of one lucky pair had an interval of no width, and a ratio."""
    for name, budget in (("full", None), ("rkv", 2048)):
        for i in range(9):
            # Three plain ones, and two each whose speed is another's.
            samples = 6 if i < 5 else 3
            write(tmp_path, f"{name}{i}", 0.5, method=name, budget=budget, seed=0, samples=samples)
            path = tmp_path / f"{name}{i}" / "run.json"
            document = json.loads(path.read_text())
            document["provenance"]["kernels"] = "torch" if i in (3, 4) else "native"
            path.write_text(json.dumps(document))
        for i in range(9):
            shutil.copytree(tmp_path / f"{name}0", tmp_path / f"{name}-copy{i}")
    (table,) = report_tables(load_runs([tmp_path])[0], [Kind.THROUGHPUT])
    titles = [column.title for column in table.columns]
    assert not any(title.startswith("x ") for title in titles)
    numbers = {}
    for row in table.rows:
        numbers.setdefault(row.cells[0].value, []).append(row.cells[titles.index("runs")].value)
        assert row.cells[titles.index("output tok/s")].low is None
    assert {name: sorted(found) for name, found in numbers.items()} == {
        "full": [2, 3, 4],
        "rkv": [2, 3, 4],
    }


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
    table = one(tables_of(tmp_path), "score, %", "all samples")
    assert "24 samples in 6 groups" in table.title
    assert any("p-values rough" in note for note in table.notes)


def test_other_conditions_are_other_tables(tmp_path, write):
    for heat, chance in ((0.0, 0.9), (1.0, 0.3)):
        for name, about in (("full", {"budget": None, "events": 0}), ("rkv", {"budget": 2048})):
            write(tmp_path, f"{name}-{heat}", chance, method=name, temperature=heat, **about)
    write(tmp_path, "lonely", 0.5, method="rkv", budget=2048, temperature=2.0)
    built = tables_of(tmp_path)
    for heat in ("0.0", "1.0"):
        found = cell(one(built, "difference to full", f"[temperature={heat}]"), "rkv", "2048")
        assert found.value == raw_change(tmp_path, f"rkv-{heat}", f"full-{heat}").point
    assert len([table for table in built if "difference to full" in table.title]) == 2
    alone = one(built, "all samples", "[temperature=2.0]")
    assert "no run of full on these samples: nothing to compare with" in alone.notes
    assert len({table.key for table in built if table.kind is Kind.ACCURACY}) == 8


def test_settings_that_no_condition_names_set_rows_apart(tmp_path, write):
    for name, note in (("cool", "a"), ("hot", "b")):
        write(tmp_path, name, 0.5, method="rkv", budget=2048, model="m", note=note)
    write(tmp_path, "s1", 0.5, method="rkv", budget=2048, note="b", seed=1, model="m")
    labels = [row.cells[0].value for row in tables_of(tmp_path)[0].rows]
    assert labels == ["rkv [note=a]", "rkv [note=b]"]


def test_curves_join_the_seeds_of_a_share_and_keep_other_temperatures_apart(tmp_path, write):
    """A share is another number of tokens in each run, as sessions differ in length."""
    for heat in (0.0, 1.0):
        for seed in (0, 1):
            some = {"model": "m", "temperature": heat, "seed": seed, "samples": 12 + seed}
            write(tmp_path, f"f{heat}{seed}", 0.9, method="full", budget=None, events=0, **some)
            for share in ("60%", "80%"):
                name = f"{share[:2]}-{heat}{seed}"
                write(tmp_path, name, 0.7 - heat / 2, budget=share, method="rkv", **some)
    curves = [table for table in tables_of(tmp_path) if "accuracy over budget" in table.title]
    assert [("[temperature=0.0]" in t.title, "[temperature=1.0]" in t.title) for t in curves] == [
        (True, False),
        (False, True),
    ]
    for table in curves:
        (row,) = table.ranked
        assert row.cells[1].value == 2
        assert "13 samples" in table.notes[0]


def test_what_a_tasks_name_does_not_say_stands_under_its_table(tmp_path, write):
    web = {"web": "corpus wiki@0123 (not BFCL web_search)", "corpus": None}
    for name, method in (("a", "full"), ("b", "rkv")):
        write(tmp_path, name, 0.5, method=method, budget=2048, task_params={"route": "chat"})
        info = RunReader(tmp_path / name).info
        told = info.provenance | {"task": web}
        write_info(tmp_path / name, info.model_copy(update={"provenance": told}))
        summarize(RunReader(tmp_path / name))
    tables = tables_of(tmp_path, Kind.ACCURACY)
    assert "web: corpus wiki@0123 (not BFCL web_search)" in tables[0].notes
    assert "route: chat" in tables[0].notes
    assert not any(note.startswith(("corpus", "encoder")) for note in tables[0].notes)


def test_prompts_that_differ_from_full_are_drift(tmp_path, write):
    write(tmp_path, "full", 0.9, method="full", budget=None, events=0)
    write(tmp_path, "rkv", 0.5, method="rkv", budget=2048)
    path = tmp_path / "rkv" / "samples.jsonl"
    path.write_text(path.read_text().replace('"prompt_sha":"p7"', '"prompt_sha":"other"'))
    summarize(RunReader(tmp_path / "rkv"))
    tables = tables_of(tmp_path, Kind.ACCURACY)
    (row,) = tables[0].unranked
    assert row.below == f"drift: prompts differ from the other runs' in 1 of {SAMPLES} trials, " + (
        "first in sample s7 trial 0"
    )


@pytest.mark.parametrize(
    "change_it",
    [
        lambda s: s["score"].update(point=0.99),
        lambda s: s["validity"].update(state="valid", reasons=[]),
        lambda s: s["kv"].update(bytes_read=1),
        lambda s: s.update(method="agentkv"),
        lambda s: s.clear(),
    ],
)
def test_a_summary_edited_by_hand_changes_nothing(tmp_path, write, change_it):
    write(tmp_path, "run", 0.5, method="snapkv", budget=2048, events=0)
    path = tmp_path / "run" / "summary.json"
    honest = tables_of(tmp_path)
    document = json.loads(path.read_text())
    change_it(document)
    path.write_text(json.dumps(document))
    assert tables_of(tmp_path) == honest


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
    tables = tables_of(tmp_path, Kind.ACCURACY)
    titles = [column.title for column in tables[0].columns[1:]]
    assert titles == ["900", "10000", "5%", "50%"]
    sizes = [float(title.strip("%")) for title in titles[:2]]
    assert all(a < b for a, b in pairwise(sizes))
