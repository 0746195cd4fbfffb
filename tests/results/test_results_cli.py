from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from agentbench_kv.cli.show import show, summarize
from agentbench_kv.errors import UsageError
from agentbench_kv.results.records import TurnRecord
from agentbench_kv.results.run_info import RunStatus, read_info, write_info
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.terminal import plain

HOSTILE = "[red]x[/red] \x1b[2J\x07 \u202e"


@pytest.fixture
def out(tmp_path, spec, make_trial):
    """Two runs; the first has a hostile failure, turns and a sub-score."""
    store = RunStore(tmp_path / "runs")
    kv = {
        "peak_live": 400,
        "longest_prefill": 90,
        "logical": 1000,
        "events": 2,
        "evicted": 600,
        "decode_tokens": 50,
    }
    with store.open("first", spec, expected_trials=2) as run:
        run.append_turns([TurnRecord(sample_id="s0", trial=0, turn=t) for t in range(3)])
        run.append_trial(make_trial(kv=kv, metrics={"think_right": 1, "think_asked": 2}))
        run.append_trial(make_trial("s1", status="engine_error", error=HOSTILE, kv=kv))
    with store.open("second", spec | {"method": "full", "budget": None}, expected_trials=3) as run:
        run.append_trial(make_trial(kv=kv))
    return store.root


def call(command, *args, **env):
    return CliRunner().invoke(command, [str(arg) for arg in args], env=env)


def test_summarize_rebuilds_and_prints_every_run(out):
    result = call(summarize, "first", out / "second", "--out", out)
    assert result.exit_code == 0
    assert "50.0% [9.5, 90.5]" in result.output
    assert "1 engine_error" in result.output
    assert "think" in result.output
    assert "second: 1 of 3 trials finished" in result.output
    for name in ("first", "second"):
        assert json.loads((out / name / "summary.json").read_text())["run_id"] == name


def test_summarize_json_is_one_document(out):
    result = call(summarize, "first", "second", "--json", KVBENCH_OUT=str(out))
    assert [run["run_id"] for run in json.loads(result.stdout)] == ["first", "second"]


def test_pass_k_is_printed_where_samples_are_repeated(out, spec, make_trial):
    """In `summarize` and `show`; a run without repetitions has an empty cell beside it."""
    with RunStore(out).open("again", spec) as run:
        for sample, scores in {"s0": (1.0, 1.0), "s1": (1.0, 0.0)}.items():
            for trial, score in enumerate(scores):
                run.append_trial(make_trial(sample, trial, score=score))
    both = call(summarize, "first", "again", "--out", out, COLUMNS="200").output
    assert "pass^2" in both
    assert "50.0% [" in both
    assert "pass^2" in call(show, "again", "--out", out, COLUMNS="200").output
    assert "pass^" not in call(show, "first", "--out", out, COLUMNS="200").output


def test_one_unknown_run_stops_summarize_before_it_writes(out):
    result = call(summarize, "first", "secnd", "--out", out)
    assert isinstance(result.exception, UsageError)
    assert "did you mean second?" in str(result.exception)
    assert not (out / "first" / "summary.json").exists()


def test_show_prints_summary_failures_and_turns(out):
    result = call(show, "first", KVBENCH_OUT=str(out))
    assert result.exit_code == 0
    for part in ("agentkv", "engine_error", "2, 2 with an event", "turn", "live before", "valid"):
        assert part in result.output
    assert not (out / "first" / "summary.json").exists()


def test_model_text_is_shown_and_never_obeyed(out):
    result = call(show, "first", "--out", out)
    assert "[red]x[/red] \\x1b[2J\\x07 \\u202e" in result.output
    assert "\x1b" not in result.output
    assert plain("[bold]\nx").plain == "[bold]\\nx"
    assert plain(None).plain == "-"


def test_show_of_one_sample_leaves_the_others_out(out):
    result = call(show, "first", "--sample", "s0", "--json", "--out", out)
    document = json.loads(result.stdout)
    assert {trial["sample_id"] for trial in document["trials"]} == {"s0"}
    assert [turn["turn"] for turn in document["turns"]] == [0, 1, 2]
    assert document["summary"]["samples"] == 2
    text = call(show, "first", "--sample", "s0", "--out", out).output
    assert "phases" in text
    assert "[red]" not in text


def test_an_unknown_sample_names_its_neighbours(out):
    result = call(show, "first", "--sample", "s9", "--out", out)
    assert isinstance(result.exception, UsageError)
    assert "no sample 's9'; did you mean" in str(result.exception)


def test_a_long_list_of_failures_is_cut_and_says_so(out, spec, make_trial):
    with RunStore(out).open("many", spec) as run:
        for i in range(53):
            run.append_trial(make_trial(f"sample-{i}", status="timeout"))
    result = call(show, "many", "--out", out)
    assert "sample-49" in result.output
    assert "sample-50" not in result.output
    assert "and 3 more" in result.output


def test_an_interrupted_run_says_how_to_go_on(out):
    info = read_info(out / "first").model_copy(update={"status": RunStatus.RUNNING, "heartbeat": 0})
    write_info(out / "first", info)
    assert "run the same command again" in call(show, "first", "--out", out).output
    assert "interrupted" not in call(show, "second", "--out", out).output


def test_help_needs_no_statistics_library():
    code = (
        "import sys, agentbench_kv.cli.show, agentbench_kv.cli.show, "
        "agentbench_kv.results.records, agentbench_kv.results.store; "
        "sys.exit(any(m in sys.modules for m in ('scipy', 'pandas', 'statsmodels', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
