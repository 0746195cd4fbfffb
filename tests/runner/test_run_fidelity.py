"""`kvbench fidelity` end to end: recordings, what costs nothing, resuming, one's own run."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentbench_kv.cli import kvbench
from agentbench_kv.engines.embedded.model import LoadedModel, load_model
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.results.records import TrialStatus
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.runs import load_runs
from agentbench_kv.results.site import build_site
from agentbench_kv.results.site.tokenline import token_line
from agentbench_kv.results.store import RunStore
from agentbench_kv.run import fidelity, recordings
from agentbench_kv.run.fidelity import one_run
from agentbench_kv.run.recordings import record_gold, record_run

TASK = "micro/recall-1k"


def call(*words: str) -> Any:
    return CliRunner().invoke(kvbench, list(words), catch_exceptions=False)


def played(out: Path, *more: str) -> list[dict[str, Any]]:
    result = call("fidelity", "--task", TASK, "--limit", "2", "--out", str(out), "--json", *more)
    assert result.exit_code == 0, result.output
    lines: list[dict[str, Any]] = json.loads(result.stdout)
    return lines


def test_recordings_are_what_the_gold_agent_says() -> None:
    first, second = record_gold(TASK, "micro", 2, {})
    again, _ = record_gold(TASK, "micro", 2, {})
    assert first.sha == again.sha != second.sha
    codec = TokenCodec(load_tokenizer(Path("agentbench_kv/models/micro").resolve()))
    parts = [(*turn.prompt, *turn.answer) for turn in first.turns]
    text = codec.decode([token for part in parts for token, _ in part])
    assert text.count("<|im_start|>assistant") == len(first.turns)
    for turn in first.turns:
        assert codec.decode([token for token, _ in turn.answer]).endswith("<|im_end|>")
        assert len(turn.kinds) == len(turn.answer)
    assert {phase for turn in first.turns for _, phase in turn.answer} >= {Phase.THINK, Phase.ACT}


def test_a_budget_beyond_the_session_changes_nothing(tmp_path: Path) -> None:
    (line,) = played(tmp_path, "--method", "agentkv", "--budget", "100000")
    assert line["means"]["kl"]["point"] < 1e-6
    assert line["shares"]["top1"]["point"] == 1
    assert line["events"] == 0


def test_tokens_are_counted_from_the_last_event(tmp_path: Path) -> None:
    (line,) = played(tmp_path, "--method", "random", "--budget", "200", "--set", "interval=40")
    (name,) = RunStore(tmp_path).names()
    for record in RunStore(tmp_path).find(name).trials():
        counts = {n.removeprefix("kl"): c for n, (_, c) in record.means.items()}
        assert counts["_to1"] == record.kv.events > 3
        assert counts["_to8"] == 7 * record.kv.events
        groups = ("_before", "_to1", "_to8", "_to32", "_to128")
        assert sum(counts.get(group, 0) for group in groups) == counts[""]
        # Events are 40 tokens apart, so nothing is farther from one than that.
        assert counts["_to128"] <= 8 * record.kv.events
    assert line["events"] > 3


def test_less_budget_costs_more_and_every_figure_is_there(tmp_path: Path) -> None:
    budgets = ("--budget", "512", "--budget", "640")
    small, large = played(tmp_path, "--method", "streamingllm", *budgets)
    assert small["means"]["kl"]["point"] > large["means"]["kl"]["point"] > 0
    assert small["shares"]["top1"]["point"] < 1
    assert {"kl_act", "kl_value", "kl_template", "kl_to32", "kl_turn3"} <= small["means"].keys()
    shown = call("fidelity", "--task", TASK, "--limit", "2", "--out", str(tmp_path),
                 "--method", "streamingllm", *budgets).output  # fmt: skip
    assert "distance from the full cache" in shown
    assert "smallest budget" not in shown  # two sessions say nothing of one
    assert "nobody leads on fewer than 20" in shown
    assert "system message" not in shown  # the task's samples have one each
    small_run, large_run = (
        [record.metrics["system_sha"] for record in run.records()]
        for run in load_runs([tmp_path])[0]
    )
    assert small_run == large_run
    assert len(set(small_run)) == 2
    assert all(run.summary.tokens_per_s is None for run in load_runs([tmp_path])[0])
    assert shown == call("report", str(tmp_path), "--table", "fidelity").output


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = ("--method", "random", "--method", "h2o", "--budget", "200")
    whole = played(tmp_path / "whole", *arms)
    play, calls = fidelity._play, []

    def stops(model: Any, recording: Any, missing: Any, *how: bool) -> None:
        calls.append([recording.sample, len(missing)])
        if len(calls) == 2:
            raise KeyboardInterrupt
        play(model, recording, missing, *how)

    monkeypatch.setattr(fidelity, "_play", stops)
    command = ["fidelity", "--task", TASK, "--limit", "2", "--out", str(tmp_path / "cut"), *arms]
    assert call(*command).exit_code != 0
    assert played(tmp_path / "cut", *arms) == whole
    assert [count for _, count in calls] == [2, 2, 2]
    # What is there is not played again: another arm is played alone.
    played(tmp_path / "cut", *arms, "--method", "streamingllm")
    assert [count for _, count in calls[3:]] == [1, 1]


def test_sessions_are_timed_and_finished_runs_left_alone(tmp_path: Path) -> None:
    arms = ("--method", "random", "--budget", "200")
    whole = played(tmp_path, *arms)
    (record,) = tmp_path.glob("*/run.json")
    before = record.read_bytes()
    assert json.loads(before)["wall_s"] > 0
    assert played(tmp_path, *arms) == whole
    assert record.read_bytes() == before


def test_a_method_may_bring_its_own_settings(tmp_path: Path) -> None:
    arms = ("--method", "agentkv", "--method", "agentkv,pool=max,chunk=4", "--budget", "400")
    plain, changed = played(tmp_path, *arms, "--set", "interval=64")
    assert (plain["method"], changed["method"]) == (
        "agentkv (interval=64)", "agentkv (chunk=4, interval=64, pool=max)",
    )  # fmt: skip
    assert plain["means"]["kl"] != changed["means"]["kl"]


def test_a_run_that_is_not_what_it_says_fails_the_self_check(tmp_path: Path) -> None:
    arm = ("--method", "streamingllm", "--budget", "256", "--set", "interval=64")
    common = ("--out", str(tmp_path), *arm)
    command = ("run", "--task", TASK, "--limit", "1", "--concurrency", "1", "--quiet")
    assert call(*command, *common).exit_code == 0
    run = RunStore(tmp_path).find(RunStore(tmp_path).names()[0])
    lines = (run.path / "samples.jsonl").read_text()
    (run.path / "samples.jsonl").write_text(lines.replace('"events":', '"events":1'))
    result = call("fidelity", "--from", str(run.path), *common)
    assert "FAILED" in result.stderr
    other = ("--out", str(tmp_path), *arm, "--set", "sinks=8")
    stderr = call("fidelity", "--from", str(run.path), *other).stderr
    assert "no self-check of streamingllm" in stderr
    assert "sinks is 8, there 4" in stderr
    both = ("--method", "streamingllm", "--method", "streamingllm,sinks=8", *arm[2:])
    stderr = call("fidelity", "--from", str(run.path), "--out", str(tmp_path), *both).stderr
    assert "no self-check" not in stderr  # one arm is the run's own
    assert "other events in recall-1k-0" in result.stderr
    # Another method on the same sessions is no self-check.
    other = ("--method", "random", "--budget", "256", "--out", str(tmp_path))
    assert "self-check" not in call("fidelity", "--from", str(run.path), *other).stderr


def test_nothing_is_made_up_for_a_trial_that_was_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = ("--method", "full", "--task", TASK, "--limit", "2", "--concurrency", "1", "--quiet")
    assert call("run", *arm, "--max-tokens", "40", "--out", str(tmp_path)).exit_code == 0
    run = RunReader(one_run(tmp_path))
    _, second = run.trials()
    lines = (run.path / "samples.jsonl").read_text().splitlines()
    cut = {
        **json.loads(lines[0]),
        "status": "timeout",
        "score": None,
        "timing": {},
        "error": "time",
    }
    (run.path / "samples.jsonl").write_text(f"{json.dumps(cut)}\n{lines[1]}\n")
    said = run.path / str(second.transcript)
    document = json.loads(said.read_text())
    answers = [[int(each) for each in part.split()] for part in document["generated"]]
    monkeypatch.setattr(logging.getLogger("agentbench_kv"), "propagate", True)
    (recording,) = record_run(run.path).recordings
    assert "1 of the run's trials were cut off and are left out: recall-1k-0" in caplog.text
    assert [[token for token, _ in turn.answer] for turn in recording.turns] == answers
    # An answer that the run does not have is nobody's.
    said.write_text(json.dumps({**document, "generated": document["generated"][:-1]}))
    (shorter,) = record_run(run.path).recordings
    assert [[token for token, _ in turn.answer] for turn in shorter.turns] == answers[:-1]


def test_a_run_says_what_its_sessions_are_of(tmp_path: Path) -> None:
    arm = ("--method", "streamingllm", "--budget", "256", "--set", "interval=64")
    run = ("run", "--task", TASK, "--limit", "1", "--concurrency", "1", "--dtype", "bfloat16")
    assert call(*run, *arm, "--quiet", "--out", str(tmp_path)).exit_code == 0
    source = ("fidelity", "--from", str(tmp_path), "--out", str(tmp_path), *arm)
    assert "on its own run: passed" in call(*source).stderr  # in the run's own dtype
    other = call(*source, "--dtype", "float32").stderr
    assert "no self-check of streamingllm at 256 on its own run: dtype is float32, there" in other
    for option, named in (("--model", "moon"), ("--tool-syntax", "json")):
        with pytest.raises(UsageError, match=f"{option} {named}: the run's sessions are of "):
            call(*source, option, named)
    path = one_run(tmp_path) / "run.json"
    path.write_text(path.read_text().replace('"spec":{', '"spec":{"moon":1,').replace(
        '"spec": {', '"spec": {"moon": 1,'))  # fmt: skip
    with pytest.raises(UsageError, match="spec has moon, which this version"):
        call(*source)


def test_equal_arms_are_one(tmp_path: Path) -> None:
    arm = ("--method", "agentkv", "--method", "agentkv,pool=none", "--budget", "256")
    assert len(played(tmp_path, *arm, "--budget", "256")) == 1


def test_sessions_of_another_file_are_not_mixed_in(tmp_path: Path) -> None:
    def written(name: str, *ids: str) -> str:
        path = tmp_path / name / "s.jsonl"
        path.parent.mkdir()
        rows = [
            json.dumps({"id": each, "messages": [
                {"role": "user", "content": f"hi {each}"}, {"role": "assistant", "content": "yes"}
            ]})
            for each in ids
        ]  # fmt: skip
        path.write_text("\n".join(rows))
        return str(path)

    command = ("fidelity", "--method", "full", "--out", str(tmp_path / "runs"), "--json", "--from")
    assert call(*command, written("a", "a1", "a2")).exit_code == 0
    (line,) = json.loads(call(*command, written("more", "a1", "a2", "a3")).stdout)
    assert line["sessions"] == 3
    assert call(*command, written("first", "a1")).exit_code == 0
    for name, ids in (
        ("b", ["b1"]),
        ("edited", ["a1", "a3"]),
        ("longer", ["a1", "b2", "a2", "b3"]),
    ):
        with pytest.raises(UsageError, match="holds sessions of something else"):
            call(*command, written(name, *ids))


@pytest.mark.parametrize("limit", ["2", "3"], ids=["whole", "lacks a session"])
def test_sessions_under_other_weights_are_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    (before,) = played(tmp_path, "--method", "full")

    def trained_on(*asked: str) -> LoadedModel:
        return replace(load_model(*asked), sha="other")

    monkeypatch.setattr(fidelity, "load_model", trained_on)
    with pytest.raises(UsageError, match=r"the model micro changed since run .* began; choose"):
        played(tmp_path, "--method", "full", "--limit", limit)
    monkeypatch.undo()
    assert played(tmp_path, "--method", "full") == [before]


def test_every_token_can_be_kept_and_is_drawn(tmp_path: Path) -> None:
    arm = ("--method", "streamingllm", "--budget", "400", "--set", "interval=64")
    (line,) = played(tmp_path / "runs", *arm, "--save-tokens")
    assert line["means"]["kl"]["high"] is None  # of two sessions there is no interval
    (run,) = load_runs([tmp_path / "runs"])[0]
    recordings = record_gold(TASK, "micro", 2, {})
    for record, recording in zip(run.records(), recordings, strict=True):
        kept = RunReader(run.path).transcript(record)["fidelity"]
        answers = [(turn, *one) for turn, each in enumerate(recording.turns) for one in each.answer]
        assert list(zip(kept["turn"], kept["token"], strict=True)) == [a[:2] for a in answers]
        assert sum(kept["kl"]) == pytest.approx(record.means["kl"][0], rel=1e-4)
        assert sum(kept["right"]) == record.sub_scores["right"][0]
        assert len(kept["events"]) == record.kv.events
        first = kept["events"][0][0]
        assert max(kept["kl"][:first]) == 0 < max(kept["kl"][first:])
    drawn, name = token_line(run.path, run.records()) or (None, "")
    assert drawn is not None
    assert name in {recording.sample for recording in recordings}
    lengths = {sum(len(turn.answer) for turn in recording.turns) for recording in recordings}
    assert len(drawn.line.split()) in lengths
    assert len(drawn.marks) == 6
    site = build_site([run], [], tmp_path / "site").parent
    (page,) = (site / "runs").glob("*.html")
    assert drawn.line in page.read_text()


def test_damaged_tokens_draw_nothing(tmp_path: Path) -> None:
    arm = ("--method", "streamingllm", "--budget", "400", "--save-tokens")
    played(tmp_path, *arm)
    (run,) = load_runs([tmp_path])[0]
    files = sorted(run.path.glob("transcripts/*"))
    for text in ("", "[]", '{"fidelity": {"kl": [NaN], "turn": [0], "events": []}}',
                 '{"fidelity": {"kl": "x", "turn": [0], "events": []}}'):  # fmt: skip
        for file in files:
            file.write_text(text)
        assert token_line(run.path, run.records()) is None


def test_sessions_of_other_tokens_are_not_mixed(tmp_path: Path) -> None:
    arm = ("--method", "random", "--budget", "200", "--out", str(tmp_path))
    command = ["fidelity", "--task", TASK, "--limit", "1", *arm]
    assert call(*command).exit_code == 0
    (name,) = RunStore(tmp_path).names()
    file = tmp_path / name / "samples.jsonl"
    (recording,) = record_gold(TASK, "micro", 1, {})
    file.write_text(file.read_text().replace(recording.sha, "0" * 64))
    result = CliRunner().invoke(kvbench, command)
    assert result.exit_code != 0
    assert "holds another session" in str(result.exception)


OFTEN = ("agentkv", "snapkv", "h2o", "rkv", "triattention")  # the last one is calibrated
NIGHTLY = (
    *("agentkv@paper", "snapkv@kvpress", "rkv@serving", "streamingllm", "streamingllm@paper"),
    *("tova", "keydiff", "lagkv", "expected-attention", "random"),
)


@pytest.mark.parametrize(
    "method", [*OFTEN, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)]
)
def test_a_run_of_ones_own_is_one_hundred_percent(tmp_path: Path, method: str) -> None:
    arm = ("--method", method, "--budget", "256", "--set", "interval=64")
    common = ("--out", str(tmp_path), *arm)
    command = ("run", "--task", TASK, "--limit", "2", "--concurrency", "1", "--quiet")
    assert call(*command, *common).exit_code == 0
    (name,) = RunStore(tmp_path).names()
    run = RunStore(tmp_path).find(name)
    result = call("fidelity", "--from", str(tmp_path), *common, "--json")
    assert result.exit_code == 0, result.output
    (line,) = json.loads(result.stdout)
    assert line["shares"]["right"]["point"] == 1
    assert f"self-check of {method} at 256 on its own run: passed" in result.stderr
    assert line["events"] * 2 == sum(record.kv.events for record in run.trials()) > 0
    recorded = record_run(run.path)
    recordings, model = recorded.recordings, recorded.model
    assert model == "micro"
    assert sum(r.tokens for r in recordings) == sum(t.kv.logical for t in run.trials())
    assert one_run(tmp_path) == run.path  # what fidelity wrote beside it is no session


def test_sessions_of_many_runs_are_not_guessed(tmp_path: Path) -> None:
    command = ("run", "--task", TASK, "--engine", "scripted", "--model", "gold", "--quiet")
    for limit in ("1", "2"):
        again = (*command, "--limit", limit, "--seed", limit, "--out", str(tmp_path))
        assert call(*again).exit_code == 0
    with pytest.raises(UsageError, match="holds 2 runs, name one: "):
        one_run(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--method", "agentkv", "--budget", "256"), "--from RUN, or --from FILE.jsonl"),
        (("--method", "agentkv", "--task", TASK), "needs a budget"),
        (("--method", "agentkv,pool", "--budget", "256", "--task", TASK), "METHOD,KEY=VALUE"),
        (("--method", "agentkv,moon=1", "--budget", "256", "--task", TASK), "moon"),
        (("--method", "evoke", "--budget", "4096", "--task", TASK), "ranks no rows"),
        (("--method", "oracle", "--budget", "256", "--task", TASK), "ranks no rows"),
        (("--method", "full", "--task", TASK, "--set", "moon=1"), "moon"),
    ],
)  # fmt: skip
def test_what_cannot_be_played_is_said_in_one_line(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    result = CliRunner().invoke(kvbench, ["fidelity", *words, "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)


def test_another_calibration_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "home"))
    text = tmp_path / "text.txt"
    command = ("fidelity", "--task", TASK, "--limit", "1", "--method", "triattention")
    command += ("--budget", "512", "--set", "interval=64", "--out", str(tmp_path / "runs"))
    for words in ("The depot opens at nine. ", "Nobody ships on Sundays. "):
        text.write_text(400 * words)
        assert call("calibrate", "--model", "micro", "--text", str(text)).exit_code == 0
        assert call(*command).exit_code == 0
        assert call(*command).exit_code == 0  # the same one is found again
    runs = load_runs([tmp_path / "runs"])[0]
    hashes = {run.spec["calibration"] for run in runs}
    assert len(runs) == len(hashes) == 2
    assert all(hashes)


def test_a_golden_session_that_was_cut_off_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that died in its third turn of nine left a golden session of three."""
    play = recordings.play_session

    def cut(setup: Any, sample: Any, trial: int) -> Any:
        attempt = play(setup, sample, trial=trial)
        if not sample.id.endswith("-0"):
            return attempt
        ended = replace(attempt.outcome, status=TrialStatus.TIMEOUT, score=None)
        return replace(attempt, outcome=ended)

    whole = [recording.sample for recording in record_gold(TASK, "micro", 2, {})]
    monkeypatch.setattr(recordings, "play_session", cut)
    monkeypatch.setattr(logging.getLogger("agentbench_kv"), "propagate", True)
    assert [recording.sample for recording in record_gold(TASK, "micro", 2, {})] == whole[1:]
    assert "1 of the golden sessions were not answered to their end and are left out" in caplog.text
