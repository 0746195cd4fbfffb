"""docs/add-a-method.md, followed literally."""

from __future__ import annotations

import json
import re
import warnings

import pytest

from agentbench_kv.conformance.methods import check_method
from agentbench_kv.errors import UsageError
from agentbench_kv.methods import contract
from agentbench_kv.registry import load_class, load_method, make_method, names


@pytest.fixture
def page(guide):
    return guide("add-a-method.md")


def test_the_example_is_as_short_as_promised(page):
    assert 0 < len([line for line in page.block("python").splitlines() if line.strip()]) <= 15


def test_the_example_keeps_the_contract(page, monkeypatch):
    monkeypatch.syspath_prepend(str(page.folder))
    assert "lastwords" in names("method")
    method = make_method("lastwords", 64, {"voters": "4"})
    assert (method.label, method.query_plan().size) == ("lastwords", 4)
    assert [result for result in check_method(method) if not result.ok] == []


@pytest.mark.slow
def test_the_example_is_listed_and_runs(page):
    listing, _, run = page.commands()
    rows = {row["name"]: row for row in json.loads(page.run(listing))}
    voters = next(p for p in rows["lastwords"]["parameters"] if p["name"] == "voters")
    assert (voters["default"], voters["allowed"]) == (16, "an integer >= 1")
    (summary,) = json.loads(page.run(f"{run.replace('--limit 20', '--limit 1')} --json"))
    assert summary["method"] == "lastwords"
    assert summary["validity"]["state"] == "valid"
    assert summary["kv"]["events"] > 0
    assert summary["kv"]["evicted"] > 0


@pytest.mark.slow
def test_the_example_passes_the_self_test(page):
    _, selftest, _ = page.commands()
    for command in (selftest, f"{selftest}:LastWords"):  # by its entry point, and by its path
        document = json.loads(page.run(f"{command} --json"))
        assert document["ok"]
        assert len(document["checks"]) >= 40


def test_the_page_shows_the_real_message(page, monkeypatch):
    source = page.block("python").replace(
        "def score(self, queries, keys, context)", "def score(self, q, k)"
    )
    (page.folder / "lastwords.py").unlink()  # another test may have imported it under that name
    page.add("shortened", source, {})
    (page.folder / "lastwords-0.1.dist-info" / "entry_points.txt").write_text(
        "[agentbench_kv.methods]\nlastwords = shortened:LastWords\n"
    )
    monkeypatch.syspath_prepend(str(page.folder))
    with pytest.raises(UsageError) as caught:
        load_method("lastwords")
    assert f"kvbench: {caught.value}" in page.text


def test_the_page_names_every_class_attribute_and_hook(page):
    internal = {"select", "budget_at"}
    for name in {*contract.CLASS_ATTRIBUTES, *contract.HOOKS.split()} - internal:
        assert re.search(rf"`{name}[`(]", page.text), name


def test_a_plug_in_written_for_0_1_still_loads(page, monkeypatch):
    source = page.block("python")
    old = "from agentbench_kv.methods.params import param"
    assert "from agentbench_kv.params import param" in source
    page.add("earlier", source.replace("from agentbench_kv.params import param", old), {})
    monkeypatch.syspath_prepend(str(page.folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loaded = load_class("earlier:LastWords")
    assert loaded.parameters()["voters"].doc == "last queries that vote"
