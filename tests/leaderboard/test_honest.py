"""Honest runs pass, with the label their task allows; packing and reading them."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.data import VARIABLE
from agentbench_kv.adapters.micro.task import Recall1k
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.leaderboard import pack, validate
from agentbench_kv.leaderboard.evidence import MANIFEST
from agentbench_kv.results.records import TrialStatus
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.submissions import Label
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve


def play(tmp_path: Path, settings: dict[str, str] | None = None, **changes: Any) -> Path:
    values = {
        "engine": "scripted",
        "model": "gold",
        "method": "full",
        "budget": None,
        "task": "micro/recall-1k",
        "limit": 2,
        **changes,
    }
    spec = resolve(RunSpec(**values), settings or {})
    run_one(spec, tmp_path / "runs", lambda *_: None)
    return tmp_path / "runs" / spec.id


def checked(runs: list[Path], folder: Path, **options: Any) -> list[tuple[Label, list[str]]]:
    readers = [RunReader(run) for run in runs]
    method = readers[0].info.spec["method"].partition("@")[0]
    pack(readers, folder, who="Ann", method=method)
    verdict = validate(folder, **options)
    assert not verdict.findings, [str(each) for each in verdict.findings[:5]]
    return [(run.label, run.notes) for run in verdict.runs]


def test_micro_runs_are_re_scored(honest: dict[str, Path], tmp_path: Path) -> None:
    names = [name for name in honest if name != "calibrated"]
    found = checked([honest[name] for name in names], tmp_path / "out")
    assert found == [(Label.RESCORED, [])] * len(names)


def test_a_calibrated_run_names_its_text(honest: dict[str, Path], tmp_path: Path) -> None:
    ((label, notes),) = checked([honest["calibrated"]], tmp_path / "out")
    assert label is Label.RESCORED
    (note,) = notes
    assert note.startswith("calibrated on ")
    assert note.endswith(", as its submitter says")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("snapkv", {"trigger": "prefill+every", "kept_set": "shared"}),
        ("snapkv", {"trigger": "turn"}),
        ("snapkv", {"trigger": "slack", "cache_heads": "query"}),
        ("streamingllm", {"positions": "cache"}),
        ("random", {"interval": "7"}),
    ],
    ids=["prefill", "turn", "slack", "cache", "random"],
)
def test_every_schedule_gives_the_account_that_is_derived(
    method: str, settings: dict[str, str], tmp_path: Path
) -> None:
    run = play(
        tmp_path, settings, engine="embedded", model="micro", method=method, budget=300
    )  # fmt: skip
    assert checked([run], tmp_path / "out") == [(Label.RESCORED, [])]


@pytest.mark.slow
def test_a_share_a_short_answer_and_sampling(tmp_path: Path) -> None:
    model = {"engine": "embedded", "model": "micro"}
    runs = [
        play(tmp_path, **model, method="agentkv", budget="25%"),
        play(tmp_path, **model, max_tokens=16),
        play(tmp_path, **model, temperature=0.8, trials=2, seed=3),
    ]
    assert [label for label, _ in checked(runs, tmp_path / "out")] == [Label.RESCORED] * 3


@pytest.mark.slow
def test_spans_come_back_where_only_the_model_knows(tmp_path: Path) -> None:
    model = {"engine": "embedded", "model": "micro", "method": "evoke", "budget": 384}
    ((label, notes),) = checked([play(tmp_path, **model)], tmp_path / "restored")
    assert label is Label.RESCORED
    assert "what the cache held is as reported" in notes[0]
    run = play(tmp_path, {"recovery": "breadcrumb"}, **model)
    ((label, notes),) = checked([run], tmp_path / "reminded")
    assert label is Label.SELF_REPORTED
    assert "reminders put words into the prompts" in notes[0]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def frames(folder: Path) -> str:
    pytest.importorskip("bm25s", reason="the extra [browser] is not installed")
    rows = [
        {"Prompt": f"Who built bridge {i}?", "Answer": f"Ada {i}", "reasoning_types": "Numerical",
         "wiki_links": f"['https://en.wikipedia.org/wiki/Bridge_{i}']"}
        for i in range(4)
    ]  # fmt: skip
    with (folder / "frames_test_set.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return "frames/synthetic"


def browsecomp(folder: Path) -> str:
    pytest.importorskip("bm25s", reason="the extra [browser] is not installed")
    rows = [
        {"query_id": str(i), "query": f"Who owns shop {i}?", "answer": f"Bo {i}",
         "gold_docs": [{"docid": f"d{i}", "url": f"https://example.org/{i}", "text": f"Bo {i}."}]}
        for i in range(4)
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "browsecomp_plus_decrypted.jsonl").write_text(text)
    return "browsecomp-plus/synthetic"


def locomo(folder: Path) -> str:
    pytest.importorskip("nltk", reason="the extra [locomo] is not installed")
    said = [
        {"speaker": ("Ann", "Ben")[i % 2], "dia_id": f"D1:{i + 1}", "text": f"Cat {i} is Tom {i}."}
        for i in range(4)
    ]  # fmt: skip
    asked = [
        {"question": f"What is cat {i} called?", "answer": f"Tom {i}", "category": 4,
         "evidence": [f"D1:{i + 1}"]}
        for i in range(3)
    ]  # fmt: skip
    conversation = {
        "speaker_a": "Ann",
        "speaker_b": "Ben",
        "session_1": said,
        "session_1_date_time": "1:00 pm on 8 May, 2023",
    }
    sample = {"sample_id": "conv-1", "conversation": conversation, "qa": asked}
    (folder / "locomo10.json").write_text(json.dumps([sample]))
    return "locomo/qa"


@pytest.mark.parametrize("agent", ["gold", "corrupt", "null"])
@pytest.mark.parametrize("prepare", [frames, browsecomp, locomo])
def test_tasks_with_data_of_the_users(
    prepare: Callable[[Path], str], agent: str, data: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    task = prepare(data)
    settings = {"check": "off"} if task == "locomo/qa" else {}
    run = play(tmp_path, settings, task=task, model=agent)
    ((label, notes),) = checked([run], tmp_path / "quick")
    assert label is Label.SELF_REPORTED
    assert "validate --rescore does it" in notes[0]
    assert checked([run], tmp_path / "whole", rescore=True) == [(Label.RESCORED, [])]
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    ((label, notes),) = checked([run], tmp_path / "without", rescore=True)
    assert label is Label.SELF_REPORTED
    assert f"what {task} needs is not here" in notes[0]


def test_questions_that_were_made_are_not_those_of_the_benchmark(
    data: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    run = play(tmp_path, {}, task="frames/synthetic", model="gold")
    assert checked([run], tmp_path / "here", rescore=True) == [(Label.RESCORED, [])]
    frames(data)
    monkeypatch.setenv(VARIABLE, str(data))
    ((label, notes),) = checked([run], tmp_path / "with", rescore=True)
    assert label is Label.SELF_REPORTED
    assert "now, not made" in notes[0]


def test_edited_data_of_the_users(data: Path, tmp_path: Path) -> None:
    run = play(tmp_path, {"check": "off"}, task=locomo(data))
    path = data / "locomo10.json"
    path.write_text(path.read_text().replace("Tom 2", "Tim 2"))
    pack([RunReader(run)], tmp_path / "out", who="Ann", method="full")
    findings = [str(each) for each in validate(tmp_path / "out").findings]
    assert any("provenance.task.data_sha256: is" in line for line in findings)


def test_a_ledger_that_its_turns_do_not_bear_out(data: Path, tmp_path: Path) -> None:
    """What reading cost is no mark of the checker's: it has to follow from the turns."""
    run = play(tmp_path, {"check": "off"}, task=locomo(data))
    path = run / "samples.jsonl"
    told = re.sub(r'"(ingest_tokens|answer_s)":[^,}]+', r'"\1":1', path.read_text())
    assert told != path.read_text()
    path.write_text(told)
    pack([RunReader(run)], tmp_path / "out", who="Ann", method="full")
    findings = [str(each) for each in validate(tmp_path / "out", rescore=True).findings]
    for name in ("ingest_tokens", "answer_s"):
        assert any(f"metrics.{name}: is 1" in line for line in findings), findings


@pytest.mark.engine
@pytest.mark.parametrize(
    ("environment", "task"), [("bfcl", "bfcl/multi_turn_base"), ("tau2", "tau2/airline")]
)
def test_tasks_in_environments_of_their_own(environment: str, task: str, tmp_path: Path) -> None:
    try:
        python_of(environment)
    except PrerequisiteError:
        pytest.skip(f"{environment} environment absent: kvbench env create {environment}")
    try:
        run = play(tmp_path, task=task)
    except PrerequisiteError as error:  # the environment is here, the benchmark's data is not
        pytest.skip(str(error))
    ((label, _),) = checked([run], tmp_path / "out", rescore=True)
    assert label is Label.RESCORED


def test_a_packed_submission_holds_hashes_anybody_can_check(submit: Any) -> None:
    made = submit("gold")
    (run,) = json.loads((made.folder / MANIFEST).read_text())["runs"]
    for file in ("samples.jsonl", "run.json", "turns.jsonl"):
        content = (made.run / file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == run["sha256"][file]
    assert "transcripts" in run["sha256"]


def test_transcripts_stay_away_only_if_asked(submit: Any) -> None:
    assert len(list((submit("gold").run / "transcripts").glob("*.json"))) == 3
    bare = submit("gold", "bare", with_transcripts=False)
    assert not (bare.run / "transcripts").exists()
    (run,) = validate(bare.folder).runs
    assert (run.findings, run.label) == ([], Label.SELF_REPORTED)


def test_packing_never_writes_over_anything(honest: dict[str, Path], submit: Any) -> None:
    folder = submit("gold").folder
    with pytest.raises(UsageError, match="not empty"):
        pack([RunReader(honest["gold"])], folder, who="Ann", method="full")


def test_a_method_that_no_run_is_of(honest: dict[str, Path], tmp_path: Path) -> None:
    pack([RunReader(honest["gold"])], tmp_path / "out", who="Ann", method="mine")
    (finding,) = validate(tmp_path / "out").findings
    assert str(finding) == "method: is 'mine', the runs are of ['full']"


def test_an_unfinished_run_is_no_submission(copied: Callable[[str], Path], tmp_path: Path) -> None:
    run = copied("gold")
    lines = (run / "samples.jsonl").read_text().splitlines(keepends=True)
    (run / "samples.jsonl").write_text("".join(lines[:2]))
    (run / json.loads(lines[2])["transcript"]).unlink()
    pack([RunReader(run)], tmp_path / "out", who="Ann", method="full")
    findings = [str(each) for each in validate(tmp_path / "out").findings]
    assert any("expected_trials: is 3, expected 2" in line for line in findings)


def test_missing_extra_and_linked_files_are_named(submit: Any, tmp_path: Path) -> None:
    made = submit("gold")
    secret = tmp_path / "secret"
    secret.write_text("{}")
    samples = made.run / "samples.jsonl"
    before = samples.read_bytes()
    samples.unlink()
    samples.symlink_to(secret)
    assert "samples.jsonl: is missing or not a plain file" in str(validate(made.folder).findings[0])
    samples.unlink()
    samples.write_bytes(before)
    (made.run / "more.py").write_text("")
    assert "more.py: is no file of a submitted run" in str(validate(made.folder).findings[0])
    (made.run / "more.py").unlink()
    (made.folder / "extra").mkdir()
    assert str(validate(made.folder).findings[0]) == "extra: not listed in submission.json"
    (made.folder / "extra").rmdir()
    (made.run / "transcripts" / "link.json").symlink_to(secret)
    assert "transcripts: holds something else" in str(validate(made.folder).findings[0])


def test_changed_files_break_the_hash(submit: Any) -> None:
    made = submit("gold")
    made.transcripts(lambda document: document.update(error="x"))
    (finding,) = validate(made.folder).findings
    assert str(finding).startswith(f"{made.run.name}: transcripts: sha256 is ")


def test_an_edited_summary_changes_nothing(submit: Any, tmp_path: Path) -> None:
    from agentbench_kv.leaderboard import add

    made = submit("gold")
    made.json("summary.json", lambda document: document["score"].update(point=0.1))
    add(made.folder, tmp_path / "board")
    stored = json.loads((tmp_path / "board" / made.run.name / "summary.json").read_text())
    assert stored["score"]["point"] == 1.0


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
def test_a_manifest_that_is_none(submit: Any, change: dict[str, Any], said: str) -> None:
    folder = submit("gold").folder
    document = json.loads((folder / MANIFEST).read_text()) | change
    (folder / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(UsageError, match=f"{MANIFEST}: {said}"):
        validate(folder)


def test_a_folder_without_a_manifest_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leaderboard pack"):
        validate(tmp_path)


@pytest.mark.slow
def test_trials_that_ran_out_of_time_are_what_the_clock_said(tmp_path: Path) -> None:
    model = {"engine": "embedded", "model": "micro", "method": "agentkv", "budget": 256}
    run = play(tmp_path, {"interval": "16"}, **model, timeout_s=0.5, limit=3)
    statuses = {record.status for record in RunReader(run).trials()}
    pack([RunReader(run)], tmp_path / "out", who="Ann", method="agentkv")
    (verdict,) = validate(tmp_path / "out").runs
    # How far a session comes in half a second is the machine's affair; that is no fault.
    assert all("validity: " in str(each) for each in verdict.findings)
    if not verdict.findings and TrialStatus.TIMEOUT in statuses:
        assert verdict.label is Label.SELF_REPORTED
        assert "trials ended by the clock or an error" in verdict.notes[0]


def test_a_run_that_was_stopped_and_resumed(tmp_path: Path) -> None:
    spec = resolve(
        RunSpec("scripted", "gold", "full", None, "micro/recall-1k", limit=3, concurrency=1), {}
    )

    def stop(*told: Any) -> None:
        if told[-1] is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_one(spec, tmp_path / "runs", stop)
    run = tmp_path / "runs" / spec.id
    assert 0 < len(RunReader(run).trials()) < 3
    run_one(spec, tmp_path / "runs", lambda *_: None)
    assert RunReader(run).info.resumes
    assert checked([run], tmp_path / "out") == [(Label.RESCORED, [])]


def test_an_attempt_lost_to_the_infrastructure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = []

    def once(self: Recall1k, sample: Any, context: Any) -> Any:
        if not lost:
            lost.append(sample)
            raise RuntimeError("the worker is gone")
        return genuine(self, sample, context)

    genuine = Recall1k.run_trial
    monkeypatch.setattr(Recall1k, "run_trial", once)
    run = play(tmp_path)
    assert len(RunReader(run).trial_lines().records) == 3
    ((label, notes),) = checked([run], tmp_path / "out")
    assert label is Label.RESCORED
    assert notes == ["1 attempts are said to have been lost, and were repeated"]
