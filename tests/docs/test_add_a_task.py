"""docs/add-a-task.md, followed literally."""

from __future__ import annotations

import inspect
import json
import re

import pytest

from agentbench_kv.adapters.base import Reply, Task


@pytest.fixture
def page(guide):
    return guide("add-a-task.md")


@pytest.mark.slow
def test_the_example_is_listed_and_refuses_a_wrong_setting(page):
    listing, *_ = page.commands()
    rows = {row["name"]: row["summary"] for row in json.loads(page.run(listing))}
    assert rows["phonebook/lookup"] == "look a number up, answer with it alone"
    line = page.run("kvbench run --task phonebook/lookup --set most_calls=0 --method full", 2)
    assert "most_calls=0: expected an integer >= 1" in line


@pytest.mark.slow
def test_the_commands_do_what_the_page_says(page):
    _, selftest, gold, compressed = page.commands()
    checked = json.loads(page.run(f"{selftest} --json"))
    assert checked["ok"], checked
    assert {check["part"] for check in checked["checks"]} >= {"gold", "corrupt", "null", "resume"}
    (summary,) = json.loads(page.run(f"{gold} --json"))
    assert (summary["score"]["point"], summary["trials"]) == (1.0, 5)
    (summary,) = json.loads(page.run(f"{compressed} --json"))
    assert summary["validity"]["state"] == "valid"
    assert summary["kv"]["events"] > 0


def test_the_page_names_every_attribute_and_hook(page):
    hooks = {name for name, _ in inspect.getmembers(Task, callable) if not name.startswith("_")}
    attributes = {name for name in Task.__annotations__ if not name.startswith("_")}
    for name in hooks | attributes:
        assert re.search(rf"`{name}[`(]", page.text), name
    for name in set(Reply.__annotations__) - {"raw"}:
        assert f"`{name}`" in page.text, name
