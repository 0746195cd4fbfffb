"""JSON that only kvbench's own writers could have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.errors import UsageError
from agentbench_kv.leaderboard.evidence import (
    HASHED,
    MANIFEST,
    check_files,
    read_manifest,
    strict_json,
)
from agentbench_kv.results.submissions import SubmittedRun

WHOLE = st.integers(-(2**63) + 1, 2**63 - 1)
PARTS = (
    st.none() | st.booleans() | WHOLE | st.floats(-1e18, 1e18, allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.recursive(
        PARTS, lambda each: st.lists(each) | st.dictionaries(TEXT, each), max_leaves=20
    )
)  # fmt: skip
def test_what_json_can_say_exactly_is_read_back(document: Any) -> None:
    assert strict_json(json.dumps(document).encode()) == document


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"9" * 400, "a number of 400 digits"),
        (b"-9223372036854775809", "the most are 64 bits"),
        (b"1e400", "out of range"),
        (b"1e308", "out of range"),
        (b"NaN", "NaN is no JSON number"),
        (b"[-Infinity]", "-Infinity is no JSON number"),
        (b'{"a": 1, "a": 2}', "the same key twice"),
        (b"[" * 100_000, "nested too deep"),
        (b"[" * 70 + b"]" * 70, "nested deeper than 64"),
        (b'"\\ud800"', "half a character"),
        (b"\xff", "not UTF-8 at byte 0"),
        (b'{"a": 1', "not JSON"),
        (b"", "not JSON"),
        (b"{} {}", "not JSON"),
    ],
)
def test_what_two_readers_might_read_in_two_ways_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        strict_json(raw)


@pytest.mark.parametrize("name", ["samples.jsonl", "run.json", "transcripts/a.json"])
def test_a_file_too_large_to_be_read_whole_is_refused(tmp_path: Path, name: str) -> None:
    """A sparse file of a terabyte takes no disk."""
    (tmp_path / "transcripts").mkdir()
    for each in HASHED:
        (tmp_path / each).write_text("{}")
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    listed = SubmittedRun(run_id="a", sha256={})
    (found,) = map(str, check_files(tmp_path, listed))
    assert found.startswith(f"{Path(name).name}: has more than ")


def test_a_manifest_too_large_to_be_read_whole_is_refused(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match="has more than 67,108,864 bytes"):
        read_manifest(tmp_path)
