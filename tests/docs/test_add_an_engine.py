"""docs/add-an-engine.md, followed literally."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re

import pytest

from agentbench_kv.engines.base import Capability, Engine, KVStats


@pytest.fixture
def page(guide):
    return guide("add-an-engine.md")


@pytest.mark.slow
def test_the_commands_do_what_the_page_says(page):
    listing, selftest, here, reference, compare = page.commands()
    rows = {row["name"]: row for row in json.loads(page.run(listing))}
    assert rows["plainhf"]["capabilities"] == ["compress"]
    checked = json.loads(page.run(f"{selftest} --json"))
    assert checked["ok"], [each for each in checked["checks"] if not each["ok"]]
    assert len(checked["checks"]) >= 18
    (summary,) = json.loads(page.run(f"{here} --json"))
    assert summary["validity"]["state"] == "valid"
    assert summary["kv"]["events"] > 0
    page.run(reference)
    found = json.loads(page.run(f"{compare} --json"))
    assert {row["engine"] for row in found["rows"]} == {"plainhf", "embedded"}
    assert all(row["equal_tokens"] == row["trials"] == 2 for row in found["rows"])
    found = [accounts(run) for run in sorted((page.folder / "runs").iterdir())]
    assert found[0] == found[1]


def accounts(run):
    """The KV accounts of a run's trials, by sample."""
    lines = (run / "samples.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    # How rows are moved is the engine's own affair; the embedded engine fills holes.
    return {each["sample_id"]: {**each["kv"], "rows_moved": None} for each in records}


@pytest.mark.slow
def test_what_cannot_run_is_refused_as_shown(page):
    said = page.run("kvbench run --engine plainhf --method agentkv --budget 64 --limit 1", 2)
    assert f"\n{said.splitlines()[-1]}\n```" in page.text


def test_the_page_names_the_whole_contract(page):
    for capability in Capability:
        assert f"`{capability.value}`" in page.text, capability
    for name in Engine.__abstractmethods__:
        assert re.search(rf"`{name}\(", page.text), name
    for field in dataclasses.fields(KVStats):
        assert f"`{field.name}`" in page.text or field.name in {"restored", "figures"}, field.name
    for name, member in inspect.getmembers(Engine, inspect.isfunction):
        named = name in {"note", "recalls", "decode_with"} or re.search(rf"`{name}\b", page.text)
        assert named or name.startswith("_"), (name, member)
