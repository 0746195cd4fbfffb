"""docs/architecture.md says what is so: packages, imports, files."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv import __version__

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def layout() -> Any:
    """The layering test, whose table is the rule."""
    spec = importlib.util.spec_from_file_location("layout", ROOT / "tests/test_package_layout.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quoted(cell: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", cell))


def test_the_table_of_packages_is_the_layering_rule():
    allowed = layout().ALLOWED
    found = {}
    for line in PAGE.partition("| package |")[2].splitlines():
        cells = line.strip().strip("|").split(" | ")
        if line.startswith("| `") and len(cells) == 3:
            for package in quoted(cells[0]):
                found[package] = (quoted(cells[2]), cells[2].strip())
    assert set(found) == set(allowed)
    for package, (names, text) in found.items():
        wanted = allowed[package] - {package, "errors"}
        assert names == wanted or (text == "every package" and package == "cli"), package
        assert names or text in {"nothing", "every package"}, package


def test_every_file_and_name_of_the_page_exists():
    plain = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    paths = {text for text in quoted(plain) if "/" in text}
    assert len(paths) > 30
    missing = []
    for text in paths:
        places = (ROOT / "agentbench_kv", ROOT)
        if not any(list(place.glob(text)) for place in places):
            missing.append(text)
    assert missing == []


@pytest.mark.parametrize("flow", ["option to eviction", "token to score", "trial to table"])
def test_the_counts_are_those_of_the_tables(flow):
    end = flow.rpartition(" ")[2]
    sections = PAGE.split("\n## ")
    section = next(s for s in sections if s.startswith("From") and s.split("\n")[0].endswith(end))
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    files = {file for row in rows for file in quoted(row)}
    (counted,) = re.findall(rf"^\| {flow} \| (\d+) \|", PAGE, re.MULTILINE)
    assert len(files) == int(counted)


def test_where_to_look_names_what_is_there():
    for file, name in (
        ("methods/base.py", "def select"),
        ("engines/embedded/session.py", "def compress"),
        ("phases/syntax.py", "SYNTAXES"),
        ("gateway/calls.py", "READERS"),
        ("phases/machine.py", "FAMILIES"),
        ("results/validity.py", "def assess"),
        ("results/stats.py", "class Interval"),
    ):
        assert name in (ROOT / "agentbench_kv" / file).read_text("utf-8"), file


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in target:
                assert (page.parent / target).exists(), (page.name, target)


def test_every_decision_is_in_the_index_once_under_its_title():
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text("utf-8")
    pages = sorted(folder.glob("0*.md"))
    assert len(pages) >= 31
    for number, page in enumerate(pages, start=1):
        title = page.read_text("utf-8").splitlines()[0].removeprefix("# ")
        assert index.count(f"| {number}. [{title}]({page.name}) |") == 1, page.name


def test_the_change_log_has_a_section_for_this_version():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"^## {re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)$", text, re.MULTILINE)
    assert text.index("## Unreleased") < text.index(f"## {__version__}")
