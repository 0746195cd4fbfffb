"""Submissions: what is recomputed, what is refused, and that nothing half-copied is left."""

from __future__ import annotations

import hashlib
import json

import pytest

from agentbench_kv.errors import UsageError
from agentbench_kv.results.arms import load_arms
from agentbench_kv.results.leaderboard import MANIFEST, add, pack, submissions, validate
from agentbench_kv.results.reader import RunReader
from agentbench_kv.results.store import RunStore


def write(root, name, spec, make_trial, peak=400, trials=6, expected=None):
    with RunStore(root).open(name, spec, expected_trials=expected or trials) as run:
        for i in range(trials):
            kv = {"peak_live": peak, "logical": 1000, "events": 1, "longest_prefill": 90}
            link = run.save_transcript(f"s{i}", 0, {"transcript": []})
            run.append_trial(make_trial(f"s{i}", score=float(i % 2), kv=kv, transcript=link))
    return RunReader(root / name)


@pytest.fixture
def runs(tmp_path, spec, make_trial):
    root = tmp_path / "runs"
    full = spec | {"method": "full", "budget": None}
    return [
        write(root, "one", spec, make_trial),
        write(root, "two", full, make_trial, peak=1000),
    ]


@pytest.fixture
def submission(runs, tmp_path):
    folder = tmp_path / "submission"
    pack(runs, folder, who="Ann", method="agentkv", link="https://example.org/paper")
    return folder


def rehash(folder, name):
    """Make the manifest fit a run's files again, as somebody who edits them would."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for run in manifest["runs"]:
        if run["run_id"] == name:
            for file in run["sha256"]:
                content = (folder / name / file).read_bytes()
                run["sha256"][file] = hashlib.sha256(content).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))


def edit(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def lines(folder):
    return [str(finding) for finding in validate(folder)]


def test_a_packed_submission_is_valid_and_holds_hashes_anybody_can_check(submission):
    assert validate(submission) == []
    for run in json.loads((submission / MANIFEST).read_text())["runs"]:
        for file, digest in run["sha256"].items():
            content = (submission / run["run_id"] / file).read_bytes()
            assert hashlib.sha256(content).hexdigest() == digest


def test_transcripts_come_along_only_if_asked(runs, submission, tmp_path):
    assert not list(submission.glob("*/transcripts"))
    pack(runs, tmp_path / "more", who="Ann", method="agentkv", transcripts=True)
    assert len(list((tmp_path / "more").glob("*/transcripts/*.json"))) == 12


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("score.point", 0.75),
        ("score.high", 0.99),
        ("kv.median_peak_live", 10.0),
        ("kv.events", 0),
        ("validity.triggered_samples", 1),
        ("budget", 128),
        ("tokens_per_s", 5.0),
    ],
)
def test_an_edited_summary_is_named_with_both_values(submission, field, value):
    path = submission / "one" / "summary.json"
    *parents, name = field.split(".")
    before = json.loads(path.read_text())
    for parent in parents:
        before = before[parent]

    def change(document):
        for parent in parents:
            document = document[parent]
        document[name] = value

    edit(path, change)
    (line,) = lines(submission)
    assert line == (f"one: summary.json: {field}: is {value!r}, the records give {before[name]!r}")


def test_changed_records_break_the_hash_even_with_a_summary_that_fits(submission):
    path = submission / "one" / "samples.jsonl"
    path.write_text(path.read_text().replace('"score":0.0', '"score":1.0'))
    (line,) = lines(submission)
    assert line.startswith("one: samples.jsonl: sha256 is ")
    rehash(submission, "one")
    assert any("score.point" in line for line in lines(submission))


@pytest.mark.parametrize("change", ["edit", "remove"])
def test_turns_are_what_was_promised(runs, tmp_path, change):
    with (runs[0].path / "turns.jsonl").open("a") as turns:
        turns.write('{"sample_id":"s0","trial":0,"turn":0}\n')
    folder = tmp_path / "with-turns"
    pack(runs, folder, who="Ann", method="agentkv")
    assert validate(folder) == []
    (path,) = folder.glob("*/turns.jsonl")
    path.unlink() if change == "remove" else path.write_text("")
    assert [finding.field for finding in validate(folder)] == ["turns.jsonl"]


def test_budget_evidence_is_recomputed(tmp_path, spec, make_trial):
    run = write(tmp_path / "runs", "over", spec, make_trial, peak=900)
    pack([run], tmp_path / "out", who="Ann", method="agentkv")
    assert any("over: validity: budget_not_applied" in line for line in lines(tmp_path / "out"))


def test_an_unfinished_run_is_no_submission(tmp_path, spec, make_trial):
    run = write(tmp_path / "runs", "part", spec, make_trial, expected=9)
    pack([run], tmp_path / "out", who="Ann", method="agentkv")
    assert any("6 of 9 trials finished" in line for line in lines(tmp_path / "out"))


def test_missing_extra_and_linked_files_are_named(submission, tmp_path):
    (submission / "one" / "summary.json").unlink()
    assert lines(submission) == ["one: summary.json: is missing or not a plain file"]
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (submission / "one" / "summary.json").symlink_to(secret)
    assert lines(submission) == ["one: summary.json: is missing or not a plain file"]
    (submission / "extra").mkdir()
    (submission / "extra" / "run.json").write_text("{}")
    assert "extra: not listed in submission.json" in lines(submission)


def test_a_method_that_no_run_is_of(runs, tmp_path):
    pack(runs, tmp_path / "out", who="Ann", method="mine")
    assert lines(tmp_path / "out") == ["method: is 'mine', the runs are of ['agentkv', 'full']"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"link": "javascript:alert(1)"}, "link"),
        ({"schema": 2}, "schema"),
        ({"who": "a\nb"}, "who"),
        ({"runs": []}, "runs"),
        ({"surprise": 1}, "surprise"),
        ({"runs": [{"run_id": "../../etc", "sha256": {}}]}, "runs.0.run_id"),
    ],
)
def test_a_manifest_that_is_none(submission, change, said):
    edit(submission / MANIFEST, lambda document: document.update(change))
    with pytest.raises(UsageError, match=f"{MANIFEST}: {said}"):
        validate(submission)


def test_a_folder_without_a_manifest_says_how_to_make_one(tmp_path):
    with pytest.raises(UsageError, match="leaderboard pack"):
        validate(tmp_path)


def test_adding_twice_adds_once_and_the_runs_load(submission, tmp_path):
    board = tmp_path / "board"
    assert add(submission, board) == ["one", "two"]
    assert add(submission, board) == []
    arms, problems = load_arms([board])
    assert [arm.run_id for arm in arms] == ["two", "one"]
    assert not problems
    assert {run: manifest.who for run, manifest in submissions(board).items()} == {
        "one": "Ann",
        "two": "Ann",
    }
    assert not list(board.glob(".adding-*"))


def test_nothing_is_added_from_a_faulty_submission(submission, tmp_path):
    edit(submission / "one" / "summary.json", lambda document: document.update(budget=1))
    with pytest.raises(UsageError, match="budget: is 1, the records give 256"):
        add(submission, tmp_path / "board")
    assert not (tmp_path / "board").exists()


def test_another_run_of_the_same_name_is_not_replaced(submission, tmp_path, spec, make_trial):
    write(tmp_path / "board", "one", spec, make_trial, trials=3)
    with pytest.raises(UsageError, match="another run of this name"):
        add(submission, tmp_path / "board")
    assert len(RunReader(tmp_path / "board" / "one").trials()) == 3


def test_packing_never_writes_over_anything(runs, submission):
    with pytest.raises(UsageError, match="not empty"):
        pack(runs, submission, who="Ann", method="agentkv")
