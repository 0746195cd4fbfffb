"""Made data in the form of tau2-bench's retail domain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.tau2.task import V0, V1, Release, git_id

ADDRESS = {
    "address1": "1 Long Road", "address2": "", "city": "Springfield", "country": "USA",
    "state": "OH", "zip": "12345",
}  # fmt: skip


def user(name: str) -> dict[str, Any]:
    return {
        "user_id": name, "name": {"first_name": name, "last_name": "Made"}, "address": ADDRESS,
        "email": f"{name}@example.org", "payment_methods": {}, "orders": [],
    }  # fmt: skip


def look(name: str) -> dict[str, Any]:
    return {"name": "get_user_details", "arguments": {"user_id": name}}


def move(name: str, city: str) -> dict[str, Any]:
    return {"name": "modify_user_address", "arguments": {"user_id": name, **ADDRESS, "city": city}}


def made_task(number: int, actions: list[dict[str, Any]], tell: list[str]) -> dict[str, Any]:
    marked = [{"action_id": f"{number}_{i}", **each} for i, each in enumerate(actions)]
    return {
        "id": str(number),
        "description": {"purpose": "made for a test"},
        "user_scenario": {
            "instructions": {
                "task_instructions": "Be brief.", "domain": "retail",
                "reason_for_call": f"You want matter {number} settled.", "known_info": "None.",
            }
        },
        "evaluation_criteria": {"actions": marked, "communicate_info": tell},
    }  # fmt: skip


# Only writing calls change the database, so a task of reading calls is passed without them.
TASKS = [
    made_task(0, [look("ann"), move("ann", "Dayton")], []),
    made_task(1, [look("ben")], ["Springfield"]),
    made_task(2, [look("cleo")], []),
    made_task(3, [look("ben"), move("ben", "Zürich")], []),
    made_task(4, [move("cleo", "Lima"), move("ann", "Lima")], ["two moves"]),
]


def judged_task(number: int, actions: list[dict[str, Any]], claims: list[str]) -> dict[str, Any]:
    made = made_task(number, actions, [])
    basis = {"nl_assertions": claims, "reward_basis": ["DB", "NL_ASSERTION"]}
    return {**made, "evaluation_criteria": {**made["evaluation_criteria"], **basis}}


JUDGED = [
    judged_task(0, [look("ann"), move("ann", "Dayton")], []),
    judged_task(1, [look("ben")], ["The agent says Springfield."]),
    judged_task(2, [move("cleo", "Lima")], ["The agent is kind.", "The agent is brief."]),
]


def write_made_data(root: Path, release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a small retail domain of a release, known as published."""
    retail = root / release.data / "tau2" / "domains" / "retail"
    guidelines = root / release.data / "tau2" / "user_simulator"
    retail.mkdir(parents=True)
    guidelines.mkdir()
    users = {name: user(name) for name in ("ann", "ben", "cleo")}
    (retail / "db.json").write_text(json.dumps({"products": {}, "users": users, "orders": {}}))
    (retail / "policy.md").write_text("Help whoever asks.")
    (retail / "tasks.json").write_text(json.dumps(TASKS if release is V0 else JUDGED))
    if release is V1:
        base = {"base": [task["id"] for task in JUDGED]}
        (retail / "split_tasks.json").write_text(json.dumps(base))
    for name in ("simulation_guidelines.md", "simulation_guidelines_tools.md"):
        (guidelines / name).write_text("Play a customer.")
    blobs = {path.name: git_id(path) for path in retail.iterdir()}
    monkeypatch.setitem(dict_of(release), "retail", blobs)
    monkeypatch.setenv("KVBENCH_DATA", str(root))


def dict_of(release: Release) -> dict[str, Any]:
    """Return the release's own table of published files, to change it for a test."""
    assert isinstance(release.published, dict)
    return release.published


@pytest.fixture
def made_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a small retail domain of v0.2.0; return its folder of data sets."""
    write_made_data(tmp_path / "data", V0, monkeypatch)
    return tmp_path / "data"


@pytest.fixture
def made_data_v1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a small retail domain of v1.0.1, two tasks of which are judged."""
    write_made_data(tmp_path / "data", V1, monkeypatch)
    return tmp_path / "data"
