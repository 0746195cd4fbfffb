"""Nothing leaves the folder that an archive is unpacked into, whatever Python's version."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import pytest

from agentbench_kv.environments.archives import unpack_tar


@pytest.fixture(params=["data_filter", "none"])
def _filters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "none":
        if sys.version_info >= (3, 12):
            pytest.skip("every Python 3.12 has filters")
        monkeypatch.delattr(tarfile, "data_filter", raising=False)


def packed(*members: tuple[str, bytes]) -> io.BytesIO:
    """Pack files by their names; a name that ends in @ is a link to what it holds."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w|") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name.rstrip("@"))
            if name.endswith("@"):
                member.type, member.linkname = tarfile.SYMTYPE, content.decode()
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return io.BytesIO(file.getvalue())


def unpack(file: io.BytesIO, folder: Path) -> None:
    with tarfile.open(fileobj=file, mode="r|") as archive:
        unpack_tar(archive, folder)


@pytest.mark.usefixtures("_filters")
def test_files_come_out_as_they_went_in(tmp_path: Path) -> None:
    unpack(packed(("a", b"1"), ("b/c", b"22")), tmp_path / "out")
    found = {str(p.relative_to(tmp_path / "out")): p.read_bytes() for p in tmp_path.rglob("*[ac]")}
    assert found == {"a": b"1", "b/c": b"22"}


@pytest.mark.usefixtures("_filters")
@pytest.mark.parametrize("member", [("../out-of-it", b"x"), ("b/../../out-of-it", b"x")])
def test_what_leads_outside_is_refused(tmp_path: Path, member: tuple[str, bytes]) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(tarfile.TarError):
        unpack(packed(("a", b"1"), member), tmp_path / "in")
    assert not (tmp_path / "out-of-it").exists()


@pytest.mark.usefixtures("_filters")
@pytest.mark.parametrize("target", ["/etc/passwd", "../secret"])
def test_a_link_that_leads_outside_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(tarfile.TarError):
        unpack(packed(("a@", target.encode())), tmp_path / "in")
    assert not list((tmp_path / "in").iterdir())
