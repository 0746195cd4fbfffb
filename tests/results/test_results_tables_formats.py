"""One table in every format; hostile text stays text in each."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace

import pytest

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results.tables.formats import (
    CSV_COLUMNS,
    FORMATS,
    SCHEMA,
    choose_format,
    render_csv,
    render_json,
    render_markdown,
    render_terminal,
    write,
)
from agentbench_kv.results.tables.model import Cell, Column, Kind, Mark, Row, Table, Unit, cell_text
from agentbench_kv.results.terminal import visible

HOSTILE = "a|b\n<script>x</script> **b** [l](javascript:1) \\end{tabular} $x_1$ 5% & \x1b[31m\u202e"


def table(name="m", key="t"):
    """One ranked row, one published, one below the line."""
    columns = (Column("method"), Column("256", Unit.SHARE), Column("tok/s", Unit.RATE))
    rows = (
        Row((Cell(name), Cell(0.5, 0.25, 0.75, mark=Mark.BEST), Cell(1234.5))),
        Row((Cell("paper"), Cell(0.125), Cell()), published=True),
        Row((Cell("bad"), Cell(float("nan")), Cell(7.0)), below="drift: " + name),
    )
    return Table(Kind.ACCURACY, key, f"score of {name}", columns, rows, ("a note",), {"task": "t"})


def markdown_cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_terminal_marks_and_separates():
    text = render_terminal([table()])
    ranked, published, line, below = text.splitlines()[2:6]
    assert "50.0 [25.0, 75.0] *" in ranked
    assert "paper (published)" in published
    assert line.strip() == "--"
    assert below.split()[0] == "bad"
    assert "drift: m" in below
    assert text.rstrip().endswith("a note")


def test_markdown_bolds_the_best_and_keeps_the_shape():
    lines = render_markdown([table()]).splitlines()
    grid = [markdown_cells(line) for line in lines if line.startswith("|")]
    assert grid[1] == [":--", "--:", "--:", ":--"]
    assert grid[2][1] == r"**50.0 \[25.0, 75.0\]**"
    assert grid[4] == ["bad", "", "7", "drift: m"]
    assert lines[-1] == "- a note"


def test_csv_has_one_exact_line_for_each_number():
    rows = list(csv.DictReader(io.StringIO(render_csv([table(), table(key="u")]))))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert len(rows) == 2 * 4
    assert rows[0] | {"row": "m", "column": "256", "unit": "share", "value": "0.5"} == rows[0]
    assert (rows[0]["low"], rows[0]["high"], rows[0]["mark"]) == ("0.25", "0.75", "best")
    assert [row["published"] for row in rows[:4]] == ["0", "0", "1", "0"]
    assert rows[3]["below_the_line"] == "drift: m"


def test_json_is_strict_and_complete():
    def refuse(name):
        raise AssertionError(name)

    document = json.loads(render_json([table()]), parse_constant=refuse)
    (found,) = document["tables"]
    assert document["schema"] == SCHEMA
    assert [column["unit"] for column in found["columns"]] == ["text", "share", "tokens/s"]
    assert found["rows"][0]["cells"][1] == {
        "value": 0.5, "low": 0.25, "high": 0.75, "p_value": None, "mark": "best",
    }  # fmt: skip
    assert found["rows"][2]["cells"][1]["value"] is None
    assert found["rows"][2]["below_the_line"] == "drift: m"


@pytest.mark.parametrize("name", FORMATS)
def test_hostile_text_has_no_control_characters_left(name):
    text = FORMATS[name][1]([table(HOSTILE)])
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_hostile_text_stays_one_markdown_cell():
    lines = render_markdown([table(HOSTILE)]).splitlines()
    grid = [markdown_cells(line) for line in lines if line.startswith("|")]
    assert {len(cells) for cells in grid} == {4}
    cell = grid[2][0]
    for sign in "<>[]*$_|":
        assert re.search(rf"(?<!\\)\{sign}", cell) is None, sign


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@x"])
def test_csv_text_is_no_formula(name):
    rows = list(csv.DictReader(io.StringIO(render_csv([table(name)]))))
    assert rows[0]["row"] == "'" + name


def test_csv_leaves_negative_numbers_alone():
    columns = (Column("m"), Column("d", Unit.POINTS))
    gap = Table(Kind.ACCURACY, "k", "t", columns, (Row((Cell("a"), Cell(-0.5))),))
    assert next(csv.DictReader(io.StringIO(render_csv([gap]))))["value"] == "-0.5"


@pytest.mark.parametrize(
    ("cell", "unit", "text"),
    [
        (Cell(0.1234, 0.1, 0.2), Unit.SHARE, "12.3 [10.0, 20.0]"),
        (Cell(-0.05, p_value=0.0004), Unit.POINTS, "-5.0 p <0.001"),
        (Cell(12345.6), Unit.TOKENS, "12,346"),
        (Cell(0.5), Unit.MILLISECONDS, "0.50"),
        (Cell(None), Unit.SHARE, ""),
        (Cell("> 1024", text="> 1024"), Unit.TOKENS, "> 1024"),
        (Cell(float("inf")), Unit.RATIO, ""),
    ],
)
def test_values_as_text(cell, unit, text):
    assert cell_text(cell, unit) == text


def test_visible_spells_out_what_cannot_be_seen():
    assert visible("a\n\u202eb\tc") == "a\\n\\u202eb\\tc"


def test_a_row_of_another_width_is_refused():
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table(Kind.CURVES, "k", "t", (Column("a"), Column("b")), (Row((Cell("x"),)),))


def test_the_suffix_chooses_the_format(tmp_path):
    suffixes = {"md": "markdown", "csv": "csv", "tex": "latex", "json": "json", "txt": "terminal"}
    for suffix, name in suffixes.items():
        assert choose_format(None, tmp_path / f"t.{suffix}") == name
    assert choose_format("csv", tmp_path / "t.md") == "csv"
    assert choose_format(None, tmp_path) == choose_format(None, None) == "terminal"
    with pytest.raises(UsageError, match=r"no format ends in '.docx'"):
        choose_format(None, tmp_path / "t.docx")


def test_a_folder_gets_a_file_for_each_table_whatever_the_keys(tmp_path):
    paths = write([table(), table(key="u"), table()], "csv", tmp_path / "new")
    assert [path.name for path in paths] == ["t.csv", "u.csv", "t-2.csv"]
    assert all(path.read_text().startswith("table,") for path in paths)


def test_a_target_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(PrerequisiteError, match="cannot write"):
        write([table()], "csv", tmp_path / "file" / "t.csv")


def test_a_legend_is_said_once_in_a_document_and_in_every_file_of_its_own(tmp_path):
    several = [replace(table(key=key), legend=("how to read",)) for key in "ab"]
    for name in ("terminal", "markdown", "latex"):
        text = FORMATS[name][1](several)
        assert (text.count("how to read"), text.count("a note")) == (1, 2), name
    paths = write(several, "markdown", tmp_path)
    assert all("how to read" in path.read_text() for path in paths)
    document = json.loads(render_json(several))
    assert [each["notes"] for each in document["tables"]] == [["a note", "how to read"]] * 2
