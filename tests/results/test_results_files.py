from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.results import files
from agentbench_kv.results.files import append_lines, json_bytes, write_atomic
from agentbench_kv.results.lines import read_lines
from agentbench_kv.results.records import TrialRecord, encode

text = st.text(min_size=1, max_size=12)


def keys(path: Path) -> list[tuple[str, int]]:
    return [record.key for record in read_lines(path, TrialRecord).records]


def whole_lines(path: Path) -> bool:
    raw = path.read_bytes()
    return raw.endswith(b"\n") and all(json.loads(line) for line in raw.split(b"\n")[:-1])


@settings(max_examples=5, deadline=None)
@given(names=st.lists(text, min_size=1, max_size=3), error=text)
def test_a_tear_at_any_byte_loses_at_most_the_torn_record(
    tmp_path_factory, make_trial, names, error
):
    path = tmp_path_factory.mktemp("tear") / "samples.jsonl"
    records = [make_trial(n, i, status="timeout", error=error) for i, n in enumerate(names)]
    raw = b"".join(encode(record) + b"\n" for record in records)
    extra = make_trial("after the tear", 99)
    for cut in range(len(raw) + 1):
        path.write_bytes(raw[:cut])
        complete = raw[:cut].count(b"\n") + (raw[cut : cut + 1] == b"\n")
        lines = read_lines(path, TrialRecord)
        assert lines.records == records[:complete]
        assert not lines.unreadable
        assert lines.torn == (
            cut > 0 and raw[cut - 1 : cut] != b"\n" and raw[cut : cut + 1] != b"\n"
        )
        if cut % 61 == 0 or cut >= len(raw) - 2:
            append_lines(path, [encode(extra)])
            assert read_lines(path, TrialRecord).records == [*records[:complete], extra]
            assert whole_lines(path)


def test_a_torn_tail_longer_than_a_block_is_cut_at_its_line(tmp_path, make_trial):
    path = tmp_path / "samples.jsonl"
    append_lines(path, [encode(make_trial("a"))])
    with path.open("ab") as file:
        file.write(b'{"sample_id":"' + b"x" * 200_000)
    append_lines(path, [encode(make_trial("b"))])
    assert keys(path) == [("a", 0), ("b", 0)]
    assert path.stat().st_size < 2000


def test_a_partial_write_is_taken_back(tmp_path, make_trial):
    """RLIMIT_FSIZE makes the kernel accept part of a line and refuse the rest, as a full disk."""
    path = tmp_path / "samples.jsonl"
    append_lines(path, [encode(make_trial("first"))])
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, hard))
    try:
        with pytest.raises(PrerequisiteError, match="no space left") as caught:
            append_lines(path, [encode(make_trial("second"))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    append_lines(path, [encode(make_trial("second"))])
    assert keys(path) == [("first", 0), ("second", 0)]


def test_a_partial_write_that_cannot_be_taken_back_is_repaired_later(
    tmp_path, make_trial, monkeypatch
):
    path = tmp_path / "samples.jsonl"
    append_lines(path, [encode(make_trial("first"))])

    def refuse(*_args):
        raise OSError(errno.EIO, "Input/output error")

    def write_some(fd, data):
        os.write(fd, data[:30])
        refuse()

    with monkeypatch.context() as broken:
        broken.setattr(files, "_write_all", write_some)
        broken.setattr(files.os, "ftruncate", refuse)
        with pytest.raises(PrerequisiteError, match="Input/output error"):
            append_lines(path, [encode(make_trial("second"))])
    assert read_lines(path, TrialRecord).torn
    append_lines(path, [encode(make_trial("third"))])
    assert keys(path) == [("first", 0), ("third", 0)]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    """As `--out /dev/stdout` asks for; a device that is replaced is gone for everybody."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(pipe, b"said")
    assert os.read(reader, 100) == b"said"
    os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_failed_replacement_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_atomic(path, b"old")

    def full(_fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(files.os, "fsync", full)
        with pytest.raises(PrerequisiteError, match="no space left"):
            write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_read_only_place_names_the_way_out(tmp_path, monkeypatch, code):
    def refuse(*_args, **_options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(PrerequisiteError, match="choose a place that can be written"):
        append_lines(tmp_path / "samples.jsonl", [b"{}"])


def test_json_bytes_carries_surrogates_and_objects():
    data = {"text": "a\ud800\u4e2d", "path": Path("/x")}
    assert json.loads(json_bytes(data)) == {"text": "a\ud800\u4e2d", "path": "/x"}
