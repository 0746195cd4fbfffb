"""Objects that one of many processes creates: in folders, in memory, and where that is not so."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results.objects import FolderObjects, Objects, RemoteObjects, objects_at


class Careless(MemoryFileSystem):
    """Says that it can create, and replaces what is there."""

    protocol = "careless"

    def pipe_file(self, path: str, value: bytes, mode: str = "", **kwargs: Any) -> None:
        del mode
        super().pipe_file(path, value, mode="overwrite", **kwargs)


class Plain(MemoryFileSystem):
    """Has what fsspec gives every file system: it looks, and then it writes."""

    protocol = "plain"
    pipe_file = fsspec.AbstractFileSystem.pipe_file


@pytest.fixture(params=["folder", "memory"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "folder":
        return objects_at(str(tmp_path / "o"))
    return objects_at(f"memory://{uuid.uuid4().hex}")


def test_objects_are_written_read_listed_and_deleted(objects):
    assert objects.read("a/b") is None
    assert objects.names("a") == []
    objects.write("a/b", b"1")
    objects.write("a/b", b"2")
    objects.write("a/c", b"")
    objects.write("a/d/e", b"")
    assert (objects.read("a/b"), objects.names("a")) == (b"2", ["b", "c"])
    objects.delete("a/b")
    objects.delete("a/b")
    assert objects.names("a") == ["c"]


def test_of_many_that_create_one_succeeds(objects):
    with ThreadPoolExecutor(16) as pool:
        for number in range(20):
            name = f"x/{number}"
            made = list(pool.map(lambda n, name=name: objects.create(name, b"%d" % n), range(16)))
            assert sum(made) == 1
            assert objects.read(f"x/{number}") == b"%d" % made.index(True)


def test_a_folder_is_left_without_temporary_files(tmp_path):
    objects = FolderObjects(tmp_path)
    objects.create("a", b"1")
    objects.create("a", b"2")
    objects.write("b", b"3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("kind", [Careless, Plain])
def test_a_store_that_cannot_create_exclusively_is_refused(kind):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)
    with pytest.raises(PrerequisiteError) as caught:
        objects_at(f"{kind.protocol}://runs")
    assert f"{kind.__name__} of fsspec cannot create an object exclusively" in str(caught.value)
    assert "s3://" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("nonsense://x", UsageError, "nonsense"),
        ("http://localhost:1/x", UsageError, "http://localhost:1/x: ClientConnectorError"),
    ],
)
def test_urls_that_are_no_place_for_runs(url, error, said):
    with pytest.raises(error, match=said):
        objects_at(url)


def test_a_store_that_is_out_of_reach_is_one_line(monkeypatch):
    objects = RemoteObjects("memory://x")

    def gone(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", gone)
    with pytest.raises(UsageError, match="memory://x: ConnectionError: no route to host"):
        objects.write("a", b"")
