from __future__ import annotations

import pytest
from statsmodels.stats.proportion import proportion_confint

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results import files
from agentbench_kv.results.records import TrialStatus
from agentbench_kv.results.run_info import read_info, write_info
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.stats import Scores, level
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.summary import Summary, build, summarize


@pytest.fixture
def run(tmp_path, spec):
    """Return a function that writes trials as a finished run and gives its reader."""

    def write(*trials, wall_s=None, expected=None, **changes):
        with RunStore(tmp_path).open("r", spec | changes, expected_trials=expected) as writer:
            for record in trials:
                writer.append_trial(record)
        if wall_s is not None:
            info = read_info(tmp_path / "r").model_copy(update={"wall_s": wall_s})
            write_info(tmp_path / "r", info)
        return RunReader(tmp_path / "r")

    return write


def kv(**fields):
    return {"kv": {"logical": 1000, "peak_live": 400, "longest_prefill": 90, "events": 1} | fields}


def test_a_summary_is_rebuilt_equal_and_reads_back(run, make_trial):
    trials = [
        make_trial("b", 1, score=0.5, metrics={"think_right": 1, "think_asked": 3}, **kv()),
        make_trial("b", 0, score=1.0, metrics={"think_right": 3, "think_asked": 3}, **kv()),
        make_trial("a", 0, status="timeout", **kv()),
        make_trial("a", 1, status="scored", score=0.0, **kv(events=0)),
    ]
    reader = run(*trials, expected=4)
    summary = summarize(reader)
    written = (reader.path / "summary.json").read_bytes()
    assert Summary.model_validate_json(written) == summary
    (reader.path / "summary.json").unlink()
    assert summarize(reader) == summary
    assert (reader.path / "summary.json").read_bytes() == written


def test_figures_do_not_depend_on_the_order_of_completion(run, make_trial, tmp_path, spec):
    trials = [make_trial(f"s{i}", score=i / 7, **kv(peak_live=300 + i)) for i in range(7)]
    first = build(run(*trials))
    with RunStore(tmp_path / "other").open("r", spec) as writer:
        for record in reversed(trials):
            writer.append_trial(record)
    other = build(RunReader(tmp_path / "other" / "r"))
    same = {"wall_s": first.wall_s, "tokens_per_s": first.tokens_per_s}
    assert other.model_copy(update=same) == first


def test_failures_count_as_zero_and_are_shown_apart(run, make_trial):
    failures = [make_trial(s.value, status=s, **kv()) for s in TrialStatus if s != "scored"]
    summary = build(run(make_trial("good", **kv()), *failures, expected=8))
    assert summary.score.point == 1 / 8
    wilson = proportion_confint(1, 8, method="wilson")
    assert (summary.score.low, summary.score.high) == pytest.approx(wilson)
    assert summary.score_completed.point == 1.0
    assert summary.score_completed.n == 1
    assert summary.failures == {s.value: 1 for s in TrialStatus if s != "scored"}
    assert summary.non_completion_rate == 7 / 8
    assert summary.validity.state == "incomplete"


def test_the_triggered_subset_is_the_samples_with_an_event_in_any_trial(run, make_trial):
    trials = [
        make_trial("a", 0, score=0.0, **kv(events=2)),
        make_trial("a", 1, score=1.0, **kv(events=0)),
        make_trial("b", 0, score=1.0, **kv(events=0)),
        make_trial("b", 1, score=1.0, **kv(events=0)),
    ]
    summary = build(run(*trials))
    assert summary.score.point == 0.75
    assert (summary.score_triggered.point, summary.score_triggered.n) == (0.5, 1)
    assert summary.validity.triggered_samples == 1


def test_sub_scores_are_ratios_of_sums_over_samples(run, make_trial):
    asked = {"a": (1, 10), "b": (2, 2), "c": (0, 4)}
    trials = [
        make_trial(name, metrics={"think_right": right, "think_asked": of, "act_right": 1}, **kv())
        for name, (right, of) in asked.items()
    ]
    trials.append(make_trial("d", metrics={"think_right": None, "think_asked": "x"}, **kv()))
    trials.append(make_trial("e", metrics={"tool_right": 0, "tool_asked": 0}, **kv()))
    summary = build(run(*trials))
    assert list(summary.sub_scores) == ["think"]
    think = summary.sub_scores["think"]
    assert (think.right, think.asked, think.interval.n) == (3, 16, 3)
    counts = {"a": (1.0, 10.0), "b": (2.0, 2.0), "c": (0.0, 4.0)}
    assert think.interval == level(Scores.of_counts(counts))


def test_repeated_trials_have_pass_k_in_which_a_failure_is_no_success(run, make_trial):
    outcomes = {"a": (1.0, 1.0, None), "b": (1.0, 0.0, 1.0), "c": (0.0, 0.0, 0.0)}
    trials = [
        make_trial(name, i, **({"status": "timeout"} if s is None else {"score": s}), **kv())
        for name, scores in outcomes.items()
        for i, s in enumerate(scores)
    ]
    shares = {name: ends.point for name, ends in build(run(*trials)).pass_k.items()}
    assert shares == pytest.approx({"pass^1": 4 / 9, "pass^2": 2 / 9, "pass^3": 0.0})


def test_kv_and_serving_figures(run, make_trial):
    trials = [
        make_trial(
            "a",
            timing={"ttft_ms": 10, "tpot_ms": 2},
            **kv(peak_live=100, logical=1000, decode_tokens=60, bytes_read=5, evicted=7),
        ),
        make_trial(
            "b",
            timing={"ttft_ms": 30},
            **kv(peak_live=300, logical=600, decode_tokens=40, rows_moved=3, events=4),
        ),
        make_trial("never started", status="engine_error"),
    ]
    summary = build(run(*trials, wall_s=4.0))
    assert summary.tokens_per_s == 25.0
    assert (summary.ttft_ms, summary.tpot_ms) == (20.0, 2.0)
    figures = summary.kv
    assert (figures.median_peak_live, figures.max_peak_live) == (200, 300)
    assert figures.median_logical == 800
    assert figures.live_over_logical == pytest.approx((0.1 + 0.5) / 2)
    assert (figures.events, figures.evicted, figures.rows_moved, figures.bytes_read) == (5, 7, 3, 5)


def test_a_users_failures_are_not_the_infrastructures(run, make_trial):
    trials = [
        make_trial("mended", status="user_error", attempts=1),
        make_trial("mended", status="infra_error", attempts=2),
        make_trial("mended", attempts=3),
        *(make_trial("hopeless", status="user_error", attempts=n) for n in (1, 2, 3)),
    ]
    summary = build(run(*trials))
    assert (summary.user_retries, summary.infra_retries) == (1 + 2, 1)
    assert summary.failures == {"user_error": 1}
    assert summary.score.point == 0.5


def test_infra_retries_are_counted_once(run, make_trial):
    trials = [
        make_trial("recorded", status="infra_error", attempts=1),
        make_trial("recorded", status="infra_error", attempts=2),
        make_trial("recorded", attempts=3),
        make_trial("inline", attempts=2),
        make_trial("hopeless", status="infra_error", attempts=4),
        make_trial("smooth"),
    ]
    summary = build(run(*trials))
    assert summary.infra_retries == 2 + 1 + 3
    assert summary.failures == {"infra_error": 1}
    assert (summary.trials, summary.samples) == (4, 4)


def test_clusters_widen_the_unit(run, make_trial):
    trials = [make_trial(f"q{i}", score=float(i % 3 > 0), cluster=f"c{i // 4}") for i in range(12)]
    score = build(run(*trials)).score
    assert (score.method, score.groups) == ("groups", 3)


def test_an_empty_run_has_a_summary(run):
    summary = build(run(expected=5))
    assert (summary.score, summary.kv, summary.tokens_per_s) == (None, None, None)
    assert summary.validity.reasons == ["0 of 5 trials finished"]


def test_a_spec_of_another_shape_still_has_a_summary(tmp_path, make_trial):
    with RunStore(tmp_path).open("r", {"method": {"name": "full"}, "model": 3}) as writer:
        writer.append_trial(make_trial())
    summary = build(RunReader(tmp_path / "r"))
    assert (summary.task, summary.model, summary.budget) == (None, "3", None)


def test_damage_and_resumes_are_noted(make_trial, tmp_path, spec):
    with RunStore(tmp_path).open("r", spec, {"git": "1"}) as writer:
        writer.append_trial(make_trial())
    with RunStore(tmp_path).open("r", spec, {"git": "2", "code": "new"}) as writer:
        writer.append_trial(make_trial("s1"))
    reader = RunReader(tmp_path / "r")
    with (reader.path / "samples.jsonl").open("ab") as file:
        file.write(b'not json\n{"sample_id": "x')
    summary = build(reader)
    assert summary.alien_lines == 1
    assert summary.trials == 2
    assert any("line 3" in note for note in summary.notes)
    assert any("torn last line" in note for note in summary.notes)
    assert "resumed with another git: 1 -> 2" in summary.notes
    assert "resumed with another code: not recorded -> new" in summary.notes


def test_a_summary_that_cannot_be_written_is_one_clear_line(run, make_trial, monkeypatch):
    reader = run(make_trial())

    def refuse(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(PrerequisiteError, match="no space left"):
        summarize(reader)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="not a run directory"):
        build(RunReader(tmp_path))


@pytest.mark.parametrize(
    ("read", "calls", "engine", "said"),
    [
        ("hermes", [0, 0], "vllm", ["needs --tool-syntax json"]),
        ("json", [0, 0], "vllm", ["the model writes none"]),
        ("endpoint", [0, 0], "api", ["the endpoint's tool parser may be off"]),
        ("hermes", [0, 1], "vllm", []),
        ("hermes", [0, 0], "scripted", []),
        ("hermes", [], "vllm", []),
    ],
)
def test_a_model_that_calls_nothing_is_named(make_trial, tmp_path, spec, read, calls, engine, said):
    provenance = {"tool_parser": read}
    with RunStore(tmp_path).open("r", spec | {"engine": engine}, provenance) as writer:
        writer.append_trial(make_trial("uncounted"))
        for number, made in enumerate(calls):
            writer.append_trial(make_trial(f"s{number}", metrics={"calls": made}))
    notes = build(RunReader(tmp_path / "r")).notes
    begins = f"warning: no call of a tool in {len(calls)} trials, read as {read}; "
    assert [note.startswith(begins) for note in notes] == [True] * len(said)
    assert all(note.endswith(end) for note, end in zip(notes, said, strict=True))
