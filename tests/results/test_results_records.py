from __future__ import annotations

import json
import math
from dataclasses import fields

import msgspec
import numpy as np
import pytest

from agentbench_kv import accounting
from agentbench_kv.accounting import KVEvent, KVStats
from agentbench_kv.results.frame import COLUMNS
from agentbench_kv.results.records import (
    KVAccount,
    Timing,
    TrialRecord,
    TrialStatus,
    TurnRecord,
    encode,
)
from agentbench_kv.results.summary import KVSummary

FAILURES = [status for status in TrialStatus if status is not TrialStatus.SCORED]


@pytest.mark.parametrize("status", FAILURES)
def test_a_failed_trial_carries_neither_score_nor_performance(make_trial, status):
    assert make_trial(status=status).headline == 0.0
    with pytest.raises(ValueError, match="must not carry a score"):
        make_trial(status=status, score=0.0)
    for figure in ("ttft_ms", "tpot_ms", "e2e_s"):
        with pytest.raises(ValueError, match="must not carry performance"):
            make_trial(status=status, timing={figure: 1.0})


def test_a_scored_trial_must_have_a_score_in_the_unit_interval(make_trial):
    assert make_trial(score=0.25, timing={"tpot_ms": 3.5}).headline == 0.25
    for bad in (None, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="score"):
            make_trial(status="scored", score=bad)


def test_what_engine_and_infrastructure_failed_at_is_run_again(make_trial):
    unfinished = {status for status in FAILURES if not make_trial(status=status).finished}
    assert unfinished == {TrialStatus.ENGINE_ERROR, TrialStatus.INFRA_ERROR}


def test_records_are_frozen_and_refuse_unknown_fields(make_trial):
    record = make_trial()
    with pytest.raises(AttributeError):
        record.score = 0.0
    with pytest.raises(ValueError, match="unknown field `surprise`"):
        make_trial(surprise=1)
    with pytest.raises(ValueError, match="unknown field `surprise`"):
        TurnRecord(sample_id="a", trial=0, turn=0, surprise=1)


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        (3, 3),
        (0.5, 0.5),
        (math.nan, None),
        (-math.inf, None),
        ("a\ud800b", "a?b"),
        (None, None),
        (2**63 - 1, 2**63 - 1),
        (2**63, 2.0**63),
        (-(10**400), None),
        (True, 1),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.float64("nan"), None),
    ],
)
def test_metrics_survive_json_whatever_the_checker_says(make_trial, sent, stored):
    record = make_trial(metrics={"m": sent})
    back = msgspec.json.decode(encode(record), type=TrialRecord)
    assert back == record
    assert back.metrics["m"] == stored
    assert type(back.metrics["m"]) is type(stored)


def test_model_text_with_lone_surrogates_can_be_written(make_trial):
    record = make_trial(status="engine_error", error="bad \udfff text\u2028line")
    line = encode(record)
    assert b"\n" not in line
    assert json.loads(line)["error"] == "bad ? text\u2028line"


@pytest.mark.parametrize("bad", [-1, -0.5, math.nan, math.inf, "5", [1]])
def test_times_that_are_none_are_refused(bad):
    with pytest.raises(ValueError, match=r"ttft_ms: Expected `float"):
        Timing(ttft_ms=bad)


@pytest.mark.parametrize("bad", [-1, 0.5, 1.0, 2**63, 10**400, "5", None, math.nan])
def test_counts_that_are_none_are_refused(bad):
    with pytest.raises(ValueError, match=r"evicted: Expected `int"):
        KVAccount(evicted=bad)
    with pytest.raises(ValueError, match=r"evicted: Expected `int"):
        TurnRecord(sample_id="a", trial=0, turn=0, evicted=bad)
    with pytest.raises(ValueError, match=r"phases"):
        TurnRecord(sample_id="a", trial=0, turn=0, phases={"act": bad})


@pytest.mark.parametrize("sample", ["", None, 5])
def test_a_record_needs_a_sample(make_trial, sample):
    with pytest.raises(ValueError, match="sample_id"):
        make_trial(sample)
    with pytest.raises(ValueError, match="sample_id"):
        TurnRecord(sample_id=sample, trial=0, turn=0)


def test_figures_of_numpy_are_figures(make_trial):
    kv = KVAccount(peak_live=np.int32(4), mean_decode_kv=np.float64(2.5))
    record = make_trial(score=np.float32(0.5), kv=kv, timing=Timing(e2e_s=np.int64(2)))
    assert encode(record) == encode(
        make_trial(score=0.5, kv={"peak_live": 4, "mean_decode_kv": 2.5}, timing={"e2e_s": 2.0})
    )


def test_any_text_is_written(make_trial):
    bad = "a\ud800"
    texts = dict.fromkeys(("prompt_sha", "transcript", "error", "cluster"), bad)
    record = make_trial(bad, **texts, metrics={bad: bad})
    assert encode(record).count(b'"a?"') == 7


def test_what_an_engine_counts_reaches_the_record():
    events = [KVEvent(128, 300, 200, 100, 7), KVEvent(256, 500, 220, 100, 9)]
    first = KVStats(
        peak_live=200, logical=300, live=100, evicted=100, decode_tokens=128, decode_kv_sum=1280,
        longest_prefill=50, rows_moved=7, budget=90, events=events[:1], restarts=[(1, 4)],
    )  # fmt: skip
    now = KVStats(
        peak_live=150, logical=200, live=80, evicted=20, decode_tokens=72, decode_kv_sum=720,
        longest_prefill=90, rows_moved=9, budget=100, events=events[1:], restarts=[(0, 5)],
    )  # fmt: skip
    refused = first.followed_by(KVStats())  # a prompt for which there was no room
    assert (refused.logical, refused.peak_live) == (300, 200)
    both = first.followed_by(now)
    assert (both.live, both.restarts, both.events) == (80, [(1, 4), (1, 5)], events)
    assert both.as_dict() == {"live": 80, **both.recorded()}
    assert KVAccount(**both.recorded()) == KVAccount(
        peak_live=200, logical=200, events=2, evicted=120, decode_tokens=200, mean_decode_kv=10.0,
        longest_prefill=90, rows_moved=16, budget=100,
    )  # fmt: skip


def test_every_figure_has_a_field_and_a_column():
    names = [each.name for each in fields(accounting.KVAccount)]
    assert set(names) == {each.name for each in msgspec.structs.fields(KVAccount)}
    columns = {each.name: each.meaning for each in COLUMNS}
    assert all(columns[f"kv_{name}"] for name in names)
    assert set(KVSummary.model_fields) > set(accounting.TOTALS)
