"""What a run shows while it runs."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from agentbench_kv.cli.output import LiveProgress, PlainProgress, Quiet, run_progress
from agentbench_kv.results.records import KVAccount, TrialRecord, TrialStatus
from agentbench_kv.run.spec import RunSpec

SPEC = RunSpec(
    engine="embedded", model="micro", method="agentkv", budget=384, task="micro/recall-1k"
)


def record(number: int, score: float | None = 1.0) -> TrialRecord:
    kv = KVAccount(peak_live=400 + number, logical=1000, events=2, decode_tokens=100)
    status = TrialStatus.SCORED if score is not None else TrialStatus.TURN_LIMIT
    return TrialRecord(
        sample_id=str(number), trial=0, seed=0, status=status, score=score, kv=kv, attempts=1
    )


def shown(progress_class, terminal: bool, records) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200, soft_wrap=True)
    with progress_class(console) as progress:
        progress(SPEC, 5, 5 + len(records), None)
        progress(SPEC, 5, 5 + len(records), None)  # the engine stands
        for number, each in enumerate(records):
            progress(SPEC, 6 + number, 5 + len(records), each)
    return text.getvalue()


@pytest.mark.parametrize(
    ("progress_class", "terminal"), [(PlainProgress, False), (LiveProgress, True)]
)
def test_progress_tells_trials_live_tokens_events_and_failures(progress_class, terminal):
    text = shown(progress_class, terminal, [record(0), record(2), record(4, score=None)])
    assert "agentkv at 384 tokens on micro/recall-1k" in text
    assert "8/8" in text
    for figure in ("live 402", "6 events", "1 failed", "tok/s"):
        assert figure in text


def test_plain_progress_prints_about_ten_lines_without_control_characters():
    text = shown(PlainProgress, False, [record(number) for number in range(195)])
    assert 10 <= len(text.splitlines()) <= 13
    assert "(5 done before)" in text
    assert "\x1b" not in text


def test_speed_counts_from_the_first_trial_on(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("agentbench_kv.cli.output.time", clock)
    text = io.StringIO()
    progress = PlainProgress(Console(file=text, width=200))
    progress(SPEC, 0, 1, None)
    now[0] = 30.0
    progress(SPEC, 0, 1, None)
    now[0] = 32.0
    progress(SPEC, 1, 1, record(0))
    lines = text.getvalue().splitlines()
    assert len(lines) == 2
    assert "50 tok/s" in lines[1]


def test_progress_fits_where_it_is_shown():
    assert isinstance(run_progress(console=Console(file=io.StringIO())), PlainProgress)
    assert isinstance(run_progress(console=Console(force_terminal=True)), LiveProgress)
    assert type(run_progress(quiet=True)) is Quiet


def test_a_quiet_run_says_nothing_on_stderr(kvbench, tmp_path):
    arguments = [
        "--task",
        "micro/recall-1k",
        "--limit",
        "1",
        "--budget",
        "384",
        "--out",
        str(tmp_path),
    ]
    done = kvbench("run", "--quiet", "--json", *arguments)
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_run_in_which_nothing_ends_says_so_ever_more_rarely(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("agentbench_kv.cli.output.time", clock)
    text = io.StringIO()
    progress = PlainProgress(Console(file=text, width=200))
    progress(SPEC, 0, 2, None)
    for second in range(0, 600, 5):
        now[0] = float(second)
        progress(SPEC, 0, 2, f"2 under way at {second}")
    said = [line for line in text.getvalue().splitlines() if "under way" in line]
    assert said == [f"  0/2 trials, 2 under way at {second}" for second in (60, 120, 240, 480)]
    progress(SPEC, 1, 2, record(0))
    now[0] += 59
    progress(SPEC, 1, 2, "1 under way")
    assert "1 under way" not in text.getvalue()
    now[0] += 1
    progress(SPEC, 1, 2, "1 under way")
    assert "  1/2 trials, 1 under way" in text.getvalue()
