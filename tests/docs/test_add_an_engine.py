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
    listing, here, reference, compare = page.commands()
    rows = {row["name"]: row for row in json.loads(page.run(listing))}
    assert rows["plainhf"]["capabilities"] == []
    (summary,) = json.loads(page.run(f"{here} --json"))
    assert summary["validity"]["state"] == "valid"
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
    return {record["sample_id"]: record["kv"] for record in records}


@pytest.mark.slow
def test_what_cannot_be_checked_is_refused_as_shown(page):
    line = page.run("kvbench selftest engine plainhf", 2).strip()
    assert f"\n{line}\n" in page.text
    line = page.run("kvbench run --engine plainhf --method agentkv --budget 64 --limit 1", 2)
    assert "does not compress a cache" in line


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
