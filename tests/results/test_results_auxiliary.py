"""What methods ask the model by themselves: in every table and page with costs, if any run does."""

from __future__ import annotations

import io
import json
from statistics import fmean, median

import pytest
from rich.console import Console

from agentbench_kv.results.compare import compare
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.runs import load_runs
from agentbench_kv.results.show import facts_table, summary_table
from agentbench_kv.results.site import build_site
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.summary import build, summarize
from agentbench_kv.results.tables.model import Kind
from agentbench_kv.results.tables.report import report_tables

SAMPLES = 32
CALLS, TOKENS = "auxiliary calls", "auxiliary tokens"


def write(folder, make_trial, name, asks, **spec):
    base = {"task": "micro/recall-1k", "model": "micro", "engine": "embedded", "seed": 0}
    with RunStore(folder).open(name, base | spec, expected_trials=SAMPLES) as run:
        for i in range(SAMPLES):
            kv = {"peak_live": 700, "logical": 1200, "events": 2, "longest_prefill": 300}
            if asks:
                kv |= {"peak_live": 1100 + i, "peak_alone": 700, "auxiliary_calls": 1 + i % 2}
                kv |= {"auxiliary_tokens": 400 + i, "auxiliary_s": 0.5}
            run.append_trial(make_trial(f"s{i}", kv=kv, prompt_sha=f"{i:064x}"))
    summarize(RunReader(folder / name))


@pytest.fixture(scope="module")
def plain(tmp_path_factory, make_trial):
    folder = tmp_path_factory.mktemp("plain")
    write(folder, make_trial, "full", False, method="full", budget=None)
    write(folder, make_trial, "cleared", False, method="clear-tools", budget=600)
    return folder


@pytest.fixture(scope="module")
def asking(tmp_path_factory, make_trial):
    folder = tmp_path_factory.mktemp("asking")
    write(folder, make_trial, "cleared", False, method="clear-tools", budget=600)
    write(folder, make_trial, "summarised", True, method="summarise", budget=600)
    return folder


def accounts(folder, name):
    lines = (folder / name / "samples.jsonl").read_text().splitlines()
    return [json.loads(line)["kv"] for line in lines]


def text_of(*tables):
    console = Console(width=300, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.file.getvalue()


def test_the_efficiency_table_has_them_where_a_run_has_any(asking):
    (table,) = report_tables(load_runs([asking])[0], [Kind.EFFICIENCY])
    titles = [column.title for column in table.columns]
    rows = {row.cells[0].value: dict(zip(titles, row.cells, strict=True)) for row in table.rows}
    kvs = accounts(asking, "summarised")
    row = rows["summarise"]
    assert row[CALLS].value == pytest.approx(fmean(kv["auxiliary_calls"] for kv in kvs)) == 1.5
    assert row[TOKENS].value == pytest.approx(fmean(kv["auxiliary_tokens"] for kv in kvs))
    assert row["peak live"].value == median(kv["peak_live"] for kv in kvs)
    assert rows["clear-tools"][CALLS].value == rows["clear-tools"][TOKENS].value == 0
    assert any(line.startswith("auxiliary: requests") for line in table.legend)


def test_tables_without_such_runs_have_no_such_columns(plain):
    (table,) = report_tables(load_runs([plain])[0], [Kind.EFFICIENCY])
    assert not {CALLS, TOKENS} & {column.title for column in table.columns}
    assert not any("auxiliary" in line for line in table.legend)
    runs = [build(RunReader(plain / name)) for name in ("full", "cleared")]
    assert "aux" not in text_of(summary_table(runs), *map(facts_table, runs))


def test_the_tables_of_a_run_have_them(asking):
    runs = [build(RunReader(asking / name)) for name in ("cleared", "summarised")]
    lines = text_of(summary_table(runs)).splitlines()
    tokens = sum(kv["auxiliary_tokens"] for kv in accounts(asking, "summarised"))
    assert lines[0].split().count("aux") == 2
    assert {"48", str(tokens)} <= set(lines[2].split()) | set(lines[-1].split())
    facts = text_of(facts_table(runs[1]))
    assert f"48 / {tokens} / 16.0" in facts
    assert "peak live without them, worst" in facts
    assert "auxiliary" not in text_of(facts_table(runs[0]))


def test_a_comparison_says_what_else_was_asked(asking, plain):
    base, cand = load_runs([plain / "full"])[0], load_runs([asking / "summarised"])[0]
    for sides in ((base, cand), (cand, base)):
        (note,) = [line for line in compare(*sides).notes if "auxiliary" in line]
        assert note.startswith(
            "summarise at 600 on micro/recall-1k with micro: 1.5 auxiliary requests"
        )
    assert "and 416 auxiliary tokens a session" in note
    other = load_runs([plain / "cleared"])[0]
    assert not [line for line in compare(base, other).notes if "auxiliary" in line]


def test_the_site_has_them_where_a_run_has_any(asking, plain, tmp_path):
    for folder, some in ((asking, True), (plain, False)):
        site = build_site(*load_runs([folder]), tmp_path / str(some)).parent
        (task,) = (page.read_text("utf-8") for page in site.glob("tasks/*.html"))
        assert ("Auxiliary tokens" in task) == some
        assert ('data-v="415.5">416<' in task) == some
        pages = {page.stem: page.read_text("utf-8") for page in site.glob("runs/*.html")}
        assert ("Auxiliary tokens" in "".join(pages.values())) == some
    head = task[task.index("<thead>", task.index('id="runs"')) :]
    assert "Live / logical" in head


def test_achieved_kv_above_1_is_a_place_on_the_site(make_trial, tmp_path):
    """A short session whose summary is longer than what it saved."""
    root = tmp_path / "runs"
    write(root, make_trial, "full", False, method="full", budget=None)
    write(root, make_trial, "summarised", True, method="summarise", budget=600)
    path = root / "summarised" / "samples.jsonl"
    path.write_text(path.read_text().replace('"logical":1200', '"logical":900'))
    runs, problems = load_runs([root])
    assert not problems
    (held,) = [run.summary.kv.live_over_logical for run in runs if run.method == "summarise"]
    assert held > 1
    assert build_site(runs, problems, tmp_path / "site").is_file()
