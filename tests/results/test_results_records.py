from __future__ import annotations

import json
import math

import pytest
from pydantic import ValidationError

from agentbench_kv.results.records import Timing, TrialRecord, TrialStatus, TurnRecord

FAILURES = [status for status in TrialStatus if status is not TrialStatus.SCORED]


@pytest.mark.parametrize("status", FAILURES)
def test_a_failed_trial_carries_neither_score_nor_performance(make_trial, status):
    assert make_trial(status=status).headline == 0.0
    with pytest.raises(ValidationError, match="must not carry a score"):
        make_trial(status=status, score=0.0)
    for figure in ("ttft_ms", "tpot_ms", "e2e_s"):
        with pytest.raises(ValidationError, match="must not carry performance"):
            make_trial(status=status, timing={figure: 1.0})


def test_a_scored_trial_must_have_a_score_in_the_unit_interval(make_trial):
    assert make_trial(score=0.25, timing={"tpot_ms": 3.5}).headline == 0.25
    for bad in (None, -0.1, 1.1, math.nan):
        with pytest.raises(ValidationError):
            make_trial(status="scored", score=bad)


def test_only_infrastructure_failures_are_run_again(make_trial):
    unfinished = [status for status in FAILURES if not make_trial(status=status).finished]
    assert unfinished == [TrialStatus.INFRA_ERROR]


def test_records_are_frozen_and_refuse_unknown_fields(make_trial):
    record = make_trial()
    with pytest.raises(ValidationError):
        record.score = 0.0
    with pytest.raises(ValidationError, match="Extra inputs"):
        make_trial(surprise=1)
    with pytest.raises(ValidationError, match="Extra inputs"):
        TurnRecord(sample_id="a", trial=0, turn=0, surprise=1)


@pytest.mark.parametrize(
    ("sent", "stored"),
    [(3, 3), (0.5, 0.5), (math.nan, None), (-math.inf, None), ("a\ud800b", "a?b"), (None, None)],
)
def test_metrics_survive_json_whatever_the_checker_says(make_trial, sent, stored):
    record = make_trial(metrics={"m": sent})
    back = TrialRecord.model_validate_json(record.model_dump_json())
    assert back == record
    assert back.metrics["m"] == stored
    assert type(back.metrics["m"]) is type(stored)


def test_model_text_with_lone_surrogates_can_be_written(make_trial):
    record = make_trial(status="engine_error", error="bad \udfff text\u2028line")
    line = record.model_dump_json()
    assert "\n" not in line
    assert json.loads(line)["error"] == "bad ? text\u2028line"


def test_negative_times_and_counts_are_refused():
    with pytest.raises(ValidationError):
        Timing(ttft_ms=-1.0)
    with pytest.raises(ValidationError):
        TurnRecord(sample_id="a", trial=0, turn=0, evicted=-1)
