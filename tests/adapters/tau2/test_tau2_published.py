"""What the data must be, and what is said of data that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentbench_kv.adapters.tau2.task import V0, V1, data_state, git_blob, require_data
from agentbench_kv.errors import PrerequisiteError


def retail_file(data: Path, name: str) -> Path:
    return data / V0.data / "tau2" / "domains" / "retail" / name


def test_a_blob_id_is_gits(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("what is up, doc?")
    # The example in the book "Pro Git".
    assert git_blob(path) == "bd9dbf5aae1a3862dd1526723246b20206e5fc37"


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
    with pytest.raises(PrerequisiteError, match="is not the published file: git blob"):
        require_data(V0, "retail")


def test_another_database_is_allowed_and_told(made_data: Path) -> None:
    retail_file(made_data, "db.json").write_text("{}")
    assert data_state(V0, "retail", require_data(V0, "retail"))["data_not_as_published"] == [
        "db.json"
    ]


def test_the_releases_share_no_task_and_no_folder() -> None:
    assert V0.data != V1.data
    assert set(V0.published) == set(V1.published)
    for domain, blobs in V1.published.items():
        assert blobs["tasks.json"] != V0.published[domain]["tasks.json"]
        assert "split_tasks.json" in blobs


@pytest.mark.usefixtures("made_data")
def test_the_data_of_one_release_is_not_taken_for_the_others() -> None:
    with pytest.raises(PrerequisiteError, match=r"no tau2_v1\.0\.1 in .*v1\.0\.1/data"):
        require_data(V1, "retail")
