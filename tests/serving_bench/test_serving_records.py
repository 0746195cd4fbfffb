"""What whole sessions measured is kept, and the manual's tables say what the records say."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import serving_shapes
from serving_shapes_records import pack, unpack
from serving_shapes_table import shapes_tables

from agentbench_kv.errors import UsageError

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "benchmarks" / "serving_records").glob("*.jsonl.xz"))
PAGE = ROOT / "docs" / "performance.md"
# The manual's columns, and those of `serving_shapes.py table`.
COLUMNS = {
    "peak live MB a session": "peak live MB a session",
    "pool MB": "pool MB",
    "read MB a token": "read MB a token",
    "TTFT turn 1, s": "TTFT turn 1 s",
    "TTFT turns 2+, s": "TTFT turns 2+ s",
    "output tok/s": "output tok/s",
    "of `full`": "of `full`",
    "of `full@prefix`": "of `full@prefix`",
    "of the roofline": "of the roofline %",
}
SECTIONS = {
    "Whole sessions at 8k": "0.5b-instruct-8192",
    "Repetitions of the embedded engine": "0.5b-instruct-8192",
    "Repetitions of vLLM": "0.5b-instruct-8192",
    "A second processor with AMX": "0.5b-instruct-16384",
    "Zen 5": "0.5b-instruct-16384",
    "The 1.5B model": "1.5b-instruct-8192",
}


class Measured(NamedTuple):
    """A row of the records' tables."""

    place: str
    engine: str
    arm: str
    values: dict[str, float]


def test_a_folder_is_kept_in_a_file_and_made_again(tmp_path: Path) -> None:
    one = tmp_path / "shapes" / "m-8192" / "vllm"
    one.mkdir(parents=True)
    told = {"model": "/home/me/models/m", "said": "(log: /tmp/a b/x.log) http://h/p 1/2 a/b"}
    (one / "cell.json").write_text(json.dumps(told))
    (one / "summary.json").write_text("{}")
    (one / "log.txt").write_text("x")
    assert pack(tmp_path / "shapes", tmp_path / "kept.jsonl.xz") == 1
    unpack(tmp_path / "kept.jsonl.xz", tmp_path / "again")
    (found,) = (path for path in (tmp_path / "again").rglob("*") if path.is_file())
    assert found.relative_to(tmp_path / "again") == Path("m-8192/vllm/cell.json")
    said = json.loads(found.read_text())
    assert said["model"] == "m"
    assert said["said"].endswith("http://h/p 1/2 a/b")
    assert "/tmp" not in said["said"]


def test_a_file_that_is_none_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl.xz").write_bytes(b"{}")
    with pytest.raises(UsageError, match=r"x\.jsonl\.xz cannot be read"):
        unpack(tmp_path / "x.jsonl.xz", tmp_path)
    with pytest.raises(UsageError, match="holds no JSON document"):
        pack(tmp_path, tmp_path / "y.jsonl.xz")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.json").write_text("{}")
    pack(tmp_path / "a", tmp_path / "z.jsonl.xz")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Measured]:
    """Return all rows of the records: over all repetitions of a file, and of each alone."""
    found = []
    for file in RECORDS:
        whole = tmp_path_factory.mktemp("records")
        unpack(file, whole)
        each = []
        for name in sorted({path.name for path in whole.glob("*/*/rep*") if path.is_dir()}):
            alone = tmp_path_factory.mktemp("records")
            for path in (*whole.glob(f"*/*/{name}"), *whole.glob("*/*.json")):
                target = alone / path.relative_to(whole)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
            each += list(rows(alone))
        found += [*each, *(paired(row, each) for row in rows(whole))]
    return found


def paired(row: Measured, each: list[Measured]) -> Measured:
    """Add the ratio to `full`, which tables do not show of engines with `full@prefix`."""
    same = [e for e in each if (e.place, e.engine, e.arm) == (row.place, row.engine, row.arm)]
    ratios = [e.values["of `full`"] for e in same if "of `full`" in e.values]
    if len(ratios) == row.values["repeats"]:
        row.values.setdefault("of `full`", statistics.median(ratios))
    return row


def rows(folder: Path) -> Iterator[Measured]:
    for table in shapes_tables(folder):
        titles = [column.title for column in table.columns]
        found = [{t: c.value for t, c in zip(titles, row.cells, strict=True)} for row in table.rows]
        full = {
            str(values["engine"]): float(str(values["output tok/s"]))
            for values in found
            if values["arm"] == "full"
        }
        for values in found:
            numbers = {t: float(v) for t, v in values.items() if isinstance(v, (int, float))}
            if values.get("base"):
                numbers[f"of `{values['base']}`"] = numbers["x base"]
            whole = full.get(str(values["engine"]))
            if whole and numbers["repeats"] == 1:  # a ratio of medians is none of pairs
                numbers.setdefault("of `full`", numbers["output tok/s"] / whole)
            yield Measured(table.title, str(values["engine"]), str(values["arm"]), numbers)


def told(*sections: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the section and the cells of every row of the manual's tables with an output."""
    section, titles = "", list[str]()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section, titles = line.lstrip("# "), []
        elif not line.startswith("|"):
            titles = []
        elif section in sections:
            cells = [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]
            if not titles:
                titles = cells
            elif "output tok/s" in titles and "arm" in titles and set(line) - set("|-: "):
                yield section, dict(zip(titles, cells, strict=True))


TOLD = list(told(*SECTIONS))


def says(cell: str, value: float | None) -> bool:
    """Whether a cell, such as `17.5 (16.9 to 18.1)`, is a value, rounded as the cell is."""
    text = cell.partition(" (")[0].replace(",", "")
    if not text:
        return True
    if text.endswith(" %"):
        text, value = text.removesuffix(" %"), value and 100 * value
    digits = len(text.partition(".")[2])
    return value is not None and abs(value - float(text)) <= 0.5 * 10**-digits + 1e-9


def test_the_manual_has_tables_of_what_was_measured() -> None:
    assert {section for section, _ in TOLD} == SECTIONS.keys()
    assert len(TOLD) > 60


@pytest.mark.parametrize(
    ("section", "row"), TOLD, ids=[f"{s}-{r.get('engine', '')}-{r['arm']}" for s, r in TOLD]
)
def test_a_row_of_the_manual_is_a_row_of_the_records(
    section: str, row: dict[str, str], measured: list[Measured]
) -> None:
    engine = row.get("engine", "vllm" if section == "Repetitions of vLLM" else "embedded")
    engine = engine.partition(",")[0].lower().replace(".", "")
    near = [e for e in measured if SECTIONS[section] in e.place and e.engine == engine]
    near = [each for each in near if each.arm == arm_of(row["arm"])]
    assert near, f"no record of {arm_of(row['arm'])} on {engine} in {section}"
    columns = {theirs: row[ours] for ours, theirs in COLUMNS.items() if ours in row}
    right = [each for each in near if all(says(c, each.values.get(t)) for t, c in columns.items())]
    assert right, f"{row} is none of {[e.values for e in near]}"


def arm_of(told: str) -> str:
    """Return what records call an arm of the manual, such as `agentkv` 1,024."""
    method, rest = re.findall(r"^`([^` ]+)`(.*)", told)[0]
    name, _, prefix = method.partition(",")
    budget = re.match(r" ([\d,]+\d)", rest)
    precision = re.search(r"\b(int8|fp8|q8_0)\b", rest)
    words = [name, *([budget[1].replace(",", "")] if budget else []), *[prefix] * bool(prefix)]
    if precision:
        words += [f"kv={precision[1]}", *["simulated"] * (precision[1] == "int8")]
    return " ".join(words)


def test_the_records_of_equal_memory_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = [each for each in RECORDS if "equal-memory" in each.name]
    assert serving_shapes.main(["table", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "equal memory: every arm has 262 MB for cached rows" in shown
    once = [row for _, row in told("Equal memory") if row["runs"] == "1"]
    assert len(once) == 4
    for row in once:
        arm = row["arm"].partition(", ")[0].replace("`", "").replace(",", "")
        lines = [line for line in shown.splitlines() if f"| c{row['at once']} | {arm}" in line]
        assert any(f"| {row['output tok/s']} " in line for line in lines), row
