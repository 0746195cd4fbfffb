"""What the data must be, and what is said of data that is not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from agentbench_kv.adapters.tau2.task import V0, V1, data_state, git_id, require_data
from agentbench_kv.errors import PrerequisiteError


def retail_file(data: Path, name: str) -> Path:
    return data / V0.data / "tau2" / "domains" / "retail" / name


def test_a_blob_id_is_gits(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("what is up, doc?")
    # The example in the book "Pro Git".
    assert git_id(path) == "bd9dbf5aae1a3862dd1526723246b20206e5fc37"


def test_a_folders_id_is_gits(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    # A folder sorts as if its name ended with a slash: after `a.txt` and before `a0`.
    for name in ("a.txt", "a/one", "a/two", "a0", "B"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    git = ("git", "-c", "init.defaultBranch=main", "-C", str(folder))
    for command in (("init", "-q"), ("add", ".")):
        subprocess.run((*git, *command), check=True)
    wanted = subprocess.run((*git, "write-tree"), check=True, capture_output=True, text=True).stdout
    shutil.rmtree(folder / ".git")
    assert git_id(folder) == wanted.strip()


def test_published_data_is_taken(made_data: Path) -> None:
    root = require_data(V0, "retail")
    assert root == made_data / V0.data
    assert data_state(V0, "retail", root)["data_not_as_published"] == []


def test_no_data_says_where_it_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path))
    with pytest.raises(PrerequisiteError, match=r"no tau2_v0\.2\.0 in .*sierra-research") as caught:
        require_data(V0, "retail")
    assert "\n" not in str(caught.value)
    assert "KVBENCH_DATA" in str(caught.value)


def test_a_missing_file_is_named(made_data: Path) -> None:
    retail_file(made_data, "db.json").unlink()
    with pytest.raises(PrerequisiteError, match=r"no tau2_v0\.2\.0/tau2/domains/retail/db\.json"):
        require_data(V0, "retail")


@pytest.mark.parametrize("name", ["tasks.json", "policy.md"])
def test_other_tasks_and_policies_are_refused(made_data: Path, name: str) -> None:
    retail_file(made_data, name).write_text("another")
    with pytest.raises(PrerequisiteError, match="is not the published file: git id"):
        require_data(V0, "retail")


def test_another_database_is_allowed_and_told(made_data: Path) -> None:
    retail_file(made_data, "db.json").write_text("{}")
    assert data_state(V0, "retail", require_data(V0, "retail"))["data_not_as_published"] == [
        "db.json"
    ]


def test_the_releases_share_no_task_and_no_folder() -> None:
    assert V0.data != V1.data
    assert set(V1.published) - set(V0.published) == {"banking_knowledge"}
    for domain, files in V0.published.items():
        assert V1.published[domain]["tasks.json"] != files["tasks.json"]
        assert "split_tasks.json" in V1.published[domain]


@pytest.mark.usefixtures("made_data")
def test_the_data_of_one_release_is_not_taken_for_the_others() -> None:
    with pytest.raises(PrerequisiteError, match=r"no tau2_v1\.0\.1 in .*v1\.0\.1/data"):
        require_data(V1, "retail")
