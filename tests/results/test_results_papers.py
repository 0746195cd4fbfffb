"""The published figures, counted again from the files with nothing but the csv module."""

from __future__ import annotations

import csv
from collections import defaultdict
from importlib.resources import files

import pytest
from pydantic import ValidationError

from agentbench_kv.results.papers import FILES, PublishedFigure, count_first, figures, leaders
from agentbench_kv.results.tables.accuracy import published_tables
from agentbench_kv.results.tables.model import Mark


def rows(name):
    folder = files("agentbench_kv.results") / "published"
    return list(csv.DictReader((folder / f"{name}.csv").read_text().splitlines()))


def test_every_file_of_the_folder_is_loaded():
    folder = files("agentbench_kv.results") / "published"
    assert {path.name for path in folder.iterdir()} == {f"{name}.csv" for name in FILES}


@pytest.mark.parametrize("name", FILES)
def test_every_row_is_a_figure_with_source_and_place(name):
    found = figures(name)
    assert len(found) == len(rows(name))
    for figure, row in zip(found, rows(name), strict=True):
        assert figure.source == row["source"]
        assert figure.where == (row.get("table") or row["where"])
        values = [row[key] for key in ("value", "low", "high") if row.get(key)]
        assert [float(v) for v in values] == [
            v for v in (figure.value, figure.low, figure.high) if v is not None
        ]


def brute_force_firsts(method):
    cells = defaultdict(dict)
    for row in rows("accuracy_vs_budget"):
        if row["method"] != "full":
            place = (row["benchmark"], row["task"], row["model"], row["budget"])
            cells[place][row["method"]] = float(row["value"])
    counts = defaultdict(lambda: [0, 0])
    for (benchmark, *_), scores in cells.items():
        counts[benchmark][0] += all(scores[method] >= other for other in scores.values())
        counts[benchmark][1] += 1
    return {name: tuple(pair) for name, pair in counts.items()}


@pytest.mark.parametrize("method", ["agentkv", "rkv", "triattention"])
def test_firsts_are_counted_from_the_data(method):
    found = {count.benchmark: (count.first, count.cells) for count in count_first(method)}
    assert found == brute_force_firsts(method)


def test_the_authors_own_count_is_reproduced():
    found = {count.benchmark: (count.first, count.cells) for count in count_first("agentkv")}
    assert found == {"bfcl": (14, 18), "tau2": (11, 18)}


def test_a_changed_figure_changes_the_count():
    published = list(figures("accuracy_vs_budget"))
    index, winner = next(
        (i, f) for i, f in enumerate(published) if f.method == "agentkv" and f.value == 15
    )
    published[index] = winner.model_copy(update={"value": 0.0})
    counts = {count.benchmark: count.first for count in count_first("agentkv", published)}
    assert counts == {"bfcl": 13, "tau2": 11}


def test_leaders_leave_full_out_and_keep_ties():
    cell = [
        PublishedFigure(file="f", source="s", where="t", model="m", metric="a", method=m, value=v)
        for m, v in (("full", 9), ("a", 3), ("b", 3), ("c", 2))
    ]
    assert [figure.method for figure in leaders(cell)] == ["a", "b"]


@pytest.mark.parametrize("ends", [{}, {"low": 1}, {"value": 1, "low": 0, "high": 2}])
def test_a_figure_is_a_value_or_a_range(ends):
    with pytest.raises(ValidationError, match="either a value or a range"):
        PublishedFigure(file="f", source="s", where="t", model="m", metric="a", **ends)


def test_the_papers_tables_hold_every_accuracy_figure_and_mark_the_firsts():
    tables = [t for t in published_tables() if "accuracy-vs" not in t.key and t.where]
    shown, marked = defaultdict(list), defaultdict(int)
    for table in tables:
        for row, column, cell in table.cells():
            method = row.cells[0].value
            if column.title != "method":
                shown[method].append(cell.value)
                marked[method] += cell.mark in (Mark.BEST, Mark.TIED)
    expected = defaultdict(list)
    for row in rows("accuracy_vs_budget"):
        expected[row["method"]].append(float(row["value"]))
    assert {name: sorted(values) for name, values in shown.items()} == {
        name: sorted(values) for name, values in expected.items()
    }
    for method in ("agentkv", "rkv", "triattention"):
        assert marked[method] == sum(first for first, _ in brute_force_firsts(method).values())
    assert marked["full"] == 0


def test_every_other_file_is_listed_row_by_row():
    listed = [table for table in published_tables() if not table.where]
    assert sorted(len(table.rows) for table in listed) == sorted(
        len(rows(name)) for name in FILES if name != "accuracy_vs_budget"
    )
    assert all(row.published for table in listed for row in table.rows)
