"""LaTeX tables: their structure, and what TeX itself says of their widths."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.results.tables.formats import escape, render
from agentbench_kv.results.tables.model import Cell, Column, Kind, Mark, Row, Table, Unit

HOSTILE = (
    "a|b\n<script>x</script> **b** [l](javascript:1) \\end{tabular} $x_1$ 5% & \x1b[31m\u202e "
    '"q" ~ ^ # -- \\\\ \\kvbenchfit ' + "W" * 120
)
REASONS = ("never triggered; logical tokens at most 9", "2 of 5 trials finished")


def table(budgets=3, ranked=3, below=2, name="snapkv", notes=("a note", "a note"), key="t"):
    """Scores of methods over budgets; those below the line have the two reasons in turn."""
    columns = [Column("method"), Column("samples", Unit.NUMBER)]
    columns += [Column(str(64 << i), Unit.SHARE) for i in range(budgets)]
    cells = [Cell(-0.5, 0.25, 0.75, mark=Mark.BEST)] * budgets
    rows = [
        Row(
            (Cell(f"{name}{number}"), Cell(200), *cells),
            below=REASONS[number % 2] if number >= ranked else None,
        )
        for number in range(ranked + below)
    ]
    title = f"score of {name}"
    return Table(Kind.ACCURACY, key, title, tuple(columns), tuple(rows), tuple(notes))


def pieces(text):
    """The rows of each tabular, as lists of cells."""
    bodies = re.findall(r"\\begin\{tabular\}.*?\n(.*?)\\end\{tabular\}", text, re.DOTALL)
    return [
        [re.split(r"(?<!\\)&", line) for line in body.splitlines() if line.endswith(r"\\")]
        for body in bodies
    ]


def test_a_small_table_is_one_booktabs_tabular():
    text = render([table(budgets=2), table(budgets=2, key="u")])
    assert len(pieces(text)) == text.count(r"\toprule") == text.count(r"\bottomrule") == 2
    assert text.count(r"\midrule") == 4
    assert {len(row) for rows in pieces(text) for row in rows} == {4}
    assert r"\textbf{$-$50.0 {[}25.0, 75.0{]}}" in text
    assert r"\label{tab:t}" in text
    assert r"\label{tab:u}" in text


def test_notes_are_said_once_and_reasons_are_notes():
    text = render([table(below=3)])
    assert text.count("a note") == 1
    assert [text.count(reason) for reason in REASONS] == [1, 1]
    (rows,) = pieces(text)
    marks = [re.findall(r"\\textsuperscript\{(\d)\}", row[0]) for row in rows]
    assert marks == [[], [], [], [], ["1"], ["2"], ["1"]]
    assert rf"\textsuperscript{{1}}\,below the line because {REASONS[1]}" in text


def test_a_wide_table_is_split_between_columns_evenly():
    text = render([table(budgets=8)])
    found = pieces(text)
    headings = [cell.strip().rstrip("\\ ") for rows in found for cell in rows[0]]
    assert headings == [
        "method", "samples", "64", "128",
        "method", "256", "512", "1024",
        "method", "2048", "4096", "8192",
    ]  # fmt: skip
    assert text.count(r"\label") == text.count(r"\begin{table}") == 1


def test_a_later_piece_leaves_out_rows_that_are_empty_in_it():
    wide = table(budgets=8)
    gone = Row((*wide.rows[1].cells[:3], *[Cell()] * 7))
    text = render([Table(wide.kind, "t", "t", wide.columns, (wide.rows[0], gone))])
    assert [[row[0].strip() for row in rows[1:]] for rows in pieces(text)] == [
        ["snapkv0", "snapkv1"], ["snapkv0"], ["snapkv0"],
    ]  # fmt: skip


def test_a_long_table_goes_on_in_another_float():
    text = render([table(ranked=70, below=0, budgets=8)])
    floats = text.split(r"\begin{table}")[1:]
    assert len(floats) >= 3
    assert text.count(r"\label") == 1
    assert text.count(", continued}") == len(floats) - 1
    assert "a note" in floats[-1]
    for last in ("128", "1024", "8192"):
        of_group = [rows for rows in pieces(text) if rows[0][-1].split()[0] == last]
        assert [row[0].strip() for rows in of_group for row in rows[1:]] == [
            f"snapkv{number}" for number in range(70)
        ]


@given(st.text(max_size=40))
def test_no_text_breaks_out(text):
    bare = re.sub(r"\\[{}]", "", escape(text))
    assert bare.count("{") == bare.count("}")
    assert re.search(r"(?<!\\)[$&#%_~^]", bare) is None
    allowed = r"\\(text\w+\{\}|char34\{\}|[{}$&#%_])"
    assert "\\" not in re.sub(allowed, "", escape(text))
    assert "--" not in escape(text)


DOCUMENTS = [r"\documentclass{article}", r"\documentclass[twocolumn]{article}",
             r"\documentclass[12pt]{report}\usepackage[T1]{fontenc}"]  # fmt: skip


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")
@pytest.mark.parametrize("head", DOCUMENTS)
def test_tex_finds_nothing_too_wide_or_too_long(tmp_path, head):
    tables = [
        table(),
        table(budgets=12),
        table(budgets=1, name="triattention@paper (trigger=prefill+every, interval=64) "),
        table(ranked=70, below=70, budgets=8),
        table(name=HOSTILE, notes=(HOSTILE, "x/" * 100, "word " * 300)),
        Table(Kind.CURVES, "none", "no rows", (Column("a"), Column("b", Unit.TOKENS)), ()),
        Table(Kind.CURVES, "words", "words", (Column("a"), Column("b")),
              (Row((Cell("[x"), Cell("y " * 60))),)),
    ]  # fmt: skip
    (tmp_path / "tables.tex").write_text(render(tables))
    body = r"\usepackage{booktabs,graphicx}\begin{document}\input{tables}\end{document}"
    (tmp_path / "page.tex").write_text(head + body)
    call = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, check=False, timeout=120)
    log = (tmp_path / "page.log").read_text(errors="replace")
    assert done.returncode == 0, log[-2000:]
    # A page of two columns holds less text than the one that lengths are reckoned for.
    long = "Float too large" if "twocolumn" not in head else "Overfull"
    assert re.findall(rf"Overfull.*|.*{long}.*", log) == []
