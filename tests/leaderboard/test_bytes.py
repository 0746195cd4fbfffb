"""Bytes of methods that are not here: held to the least that their tokens take."""

from __future__ import annotations

import pytest

from agentbench_kv.leaderboard.consistency import _check_bytes, _RowBytes
from agentbench_kv.results.records import KVAccount, TrialRecord, TrialStatus


@pytest.mark.parametrize(
    ("peak_bytes", "exact", "faults"),
    [(5000, True, 0), (4999, True, 1), (5001, True, 1), (1, False, 1), (4999, False, 1),
     (5000, False, 0), (20000, False, 0)],
)  # fmt: skip
def test_a_plug_ins_rows_take_at_least_what_its_tokens_do(
    peak_bytes: int, exact: bool, faults: int
) -> None:
    """With one byte it stood in the lowest tier; it may keep rows for every query head."""
    account = KVAccount(peak_live=50, logical=50, peak_bytes=peak_bytes)
    record = TrialRecord(
        sample_id="s", trial=0, seed=0, status=TrialStatus.SCORED, score=1.0, kv=account
    )
    assert len(list(_check_bytes(("s", 0), record, _RowBytes(100, exact)))) == faults
