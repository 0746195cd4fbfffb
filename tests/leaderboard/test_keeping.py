"""Adding submissions: labels, replications, reruns; and a forgery that only a rerun can find."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.browser.corpus import Corpus
from agentbench_kv.adapters.browser.frames import FramesSynthetic
from agentbench_kv.engines.base import EngineInfo
from agentbench_kv.engines.core.ledger import SessionLedger
from agentbench_kv.engines.embedded.model import folder_sha, model_path
from agentbench_kv.engines.serving.model_facts import read_model
from agentbench_kv.errors import UsageError
from agentbench_kv.leaderboard import add, pack, rerun, validate
from agentbench_kv.leaderboard.evidence import MANIFEST, RunEvidence, read_run
from agentbench_kv.leaderboard.identity import check_spec, unfit
from agentbench_kv.leaderboard.replay import RecordedEngine
from agentbench_kv.results.run_names import prefix_parts, run_id
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.runs import load_runs
from agentbench_kv.results.submissions import (
    Label,
    Standing,
    labels,
    replications,
    submissions,
)
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve
from agentbench_kv.run.trial import sample_key


def spec_of(path: Path) -> RunSpec:
    return RunSpec(**json.loads((path / "run.json").read_text())["spec"])


def evidence_of(path: Path) -> RunEvidence:
    evidence = read_run(path, [])
    assert evidence is not None
    return evidence


def packed(run: Path, folder: Path, who: str = "Ann") -> Path:
    pack([RunReader(run)], folder, who=who, method=spec_of(run).method.partition("@")[0])
    return folder


def test_adding_twice_adds_once_and_the_runs_load(honest: dict[str, Path], tmp_path: Path) -> None:
    board, folder = tmp_path / "board", tmp_path / "out"
    runs = [honest["full"], honest["agentkv"]]
    pack([RunReader(run) for run in runs], folder, who="Ann", method="agentkv")
    names = [run.name for run in runs]
    assert add(folder, board).new == names
    again = add(folder, board)
    assert (again.new, again.replications) == ([], [])
    runs, problems = load_runs([board])
    assert sorted(run.run_id for run in runs) == sorted(names)
    assert not problems
    assert {run: each.who for run, each in submissions(board).items()} == dict.fromkeys(
        names, "Ann"
    )
    assert labels(board) == dict.fromkeys(names, Label.RESCORED)
    assert not list(board.glob(".adding-*"))


def test_nothing_is_added_from_a_faulty_submission(forger: Any, tmp_path: Path) -> None:
    forger.trials(lambda row: row.update(score=1.0))
    with pytest.raises(UsageError, match=r"score: is 1\.0, expected 0\.0"):
        add(forger.cover(), tmp_path / "board")
    assert not (tmp_path / "board").exists()


def test_a_replication_is_shown_beside_the_run_and_never_counted(
    honest: dict[str, Path], tmp_path: Path
) -> None:
    board = tmp_path / "board"
    add(packed(honest["agentkv"], tmp_path / "first"), board)
    run_one(spec_of(honest["agentkv"]), tmp_path / "other", lambda *_: None)
    other = tmp_path / "other" / honest["agentkv"].name
    added = add(packed(other, tmp_path / "second", who="Ben"), board)
    assert (added.new, added.replications) == ([], [other.name])
    ((name, (found,)),) = replications(board).items()
    assert name == other.name
    score = sum(record.headline for record in RunReader(other).trials()) / 4
    assert (found.who, found.score, found.trials, found.equal) == ("Ben", score, 4, 4)
    assert found.label is Label.RESCORED
    assert (board / found.path / "samples.jsonl").is_file()
    runs, _ = load_runs([board])
    assert [run.summary.trials for run in runs] == [4]
    assert submissions(board)[other.name].who == "Ann"
    # The same once more is nothing new.
    assert add(tmp_path / "second", board).replications == []


def test_an_edited_copy_is_no_replication(
    honest: dict[str, Path], copied: Callable[[str], Path], tmp_path: Path
) -> None:
    board = tmp_path / "board"
    add(packed(honest["gold"], tmp_path / "first"), board)
    copy = copied("gold")
    info = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(info | {"wall_s": info["wall_s"] + 0.5}))
    second = packed(copy, tmp_path / "second", who="Mallory")
    assert not validate(second).findings
    with pytest.raises(UsageError, match="is an edited copy of"):
        add(second, board)
    assert replications(board) == {}


def test_what_one_method_played_is_not_anothers(
    honest: dict[str, Path], copied: Callable[[str], Path], tmp_path: Path
) -> None:
    """No record names its run: a copy under a plug-in's name took label and rerun of the first."""
    board = tmp_path / "board"
    add(packed(honest["agentkv"], tmp_path / "first"), board)
    copy = copied("agentkv")
    info = json.loads((copy / "run.json").read_text())
    info["spec"]["method"] = "mine"
    info["run_id"] = run_id(prefix_parts(info["spec"]), info["spec"])
    (copy / "run.json").write_text(json.dumps(info))
    renamed = copy.rename(copy.with_name(info["run_id"]))
    with pytest.raises(UsageError, match=r"has the times of .* in 4 trials"):
        add(packed(renamed, tmp_path / "second", who="Mallory"), board)
    assert labels(board) == {honest["agentkv"].name: Label.RESCORED}


def test_a_label_and_a_rerun_are_of_one_run(honest: dict[str, Path], tmp_path: Path) -> None:
    board = tmp_path / "board"
    add(packed(honest["agentkv"], tmp_path / "out"), board)
    name = honest["agentkv"].name
    rerun(evidence_of(tmp_path / "out" / name), 1, 7, leaderboard=board)
    (path,) = (board / "submissions" / "checked").glob("*.json")
    known = Standing.model_validate_json(path.read_bytes())
    shutil.copytree(board / name, board / "mine-0123456789")
    other = known.model_copy(update={"run_id": "mine-0123456789"})
    path.with_name("other.json").write_text(other.model_dump_json())
    assert labels(board) == {name: Label.RERUN, "mine-0123456789": Label.RESCORED}


def test_who_submits_what_is_there_does_not_own_it(honest: dict[str, Path], tmp_path: Path) -> None:
    """Of two manifests that list a run, the one whose hash sorts last had it."""
    board, name = tmp_path / "board", honest["gold"].name
    add(packed(honest["gold"], tmp_path / "first"), board)
    for number in range(4):
        thief = packed(honest["gold"], tmp_path / f"thief{number}", who=f"Mallory {number}")
        assert add(thief, board).new == []
    assert submissions(board)[name].who == "Ann"
    assert len(list((board / "submissions").glob("*.json"))) == 1


def test_another_folder_of_that_name_is_not_replaced(
    honest: dict[str, Path], tmp_path: Path
) -> None:
    taken = tmp_path / "board" / honest["gold"].name
    taken.mkdir(parents=True)
    with pytest.raises(UsageError, match="is no run"):
        add(packed(honest["gold"], tmp_path / "out"), tmp_path / "board")


def test_a_label_is_the_keepers_word_about_these_records(
    honest: dict[str, Path], submit: Any, tmp_path: Path
) -> None:
    board = tmp_path / "board"
    bare = submit("gold", "bare", with_transcripts=False)
    add(bare.folder, board)
    name = honest["gold"].name
    assert labels(board) == {name: Label.SELF_REPORTED}
    # With transcripts the same records can be checked further.
    add(submit("gold", "whole").folder, board)
    assert labels(board) == {name: Label.RESCORED}
    samples = board / name / "samples.jsonl"
    samples.write_text(samples.read_text() + "\n")
    assert labels(board) == {}


def test_labels_of_a_submitter_are_no_labels(submit: Any) -> None:
    made = submit("gold", with_transcripts=False)
    (made.folder / "submissions").mkdir()
    (finding,) = validate(made.folder).findings
    assert str(finding) == "submissions: not listed in submission.json"


def test_a_rerun_of_an_honest_run_gives_the_same_tokens(
    honest: dict[str, Path], tmp_path: Path
) -> None:
    board = tmp_path / "board"
    add(packed(honest["agentkv"], tmp_path / "out"), board)
    evidence = evidence_of(tmp_path / "out" / honest["agentkv"].name)
    outcome = rerun(evidence, 2, 7, leaderboard=board)
    assert (outcome.played, outcome.equal, outcome.accounts, outcome.scores) == (2, 2, 2, 2)
    assert outcome.differs == []
    assert labels(board) == {evidence.name: Label.RERUN}


@pytest.fixture
def perfect_forgery(
    honest: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Make a run of agentkv that never was: full's tokens, with the account agentkv would have."""
    spec, folder = spec_of(honest["agentkv"]), model_path("micro")
    facts = read_model(folder)
    tokens = {
        sample_key(sample): transcript.tokens
        for (sample, _), transcript in evidence_of(honest["full"]).transcripts.items()
    }
    info = EngineInfo(
        "embedded", "micro", folder, folder_sha(folder), "cpu", "float32", facts.context_limit,
        facts.eos_token_ids,
    )  # fmt: skip

    def start(*_: Any, **__: Any) -> RecordedEngine:
        return RecordedEngine(
            lambda session: tokens[session.rpartition("|")[2]],
            info,
            lambda: SessionLedger(spec.built_method, facts.bytes_per_token("float32")),
        )

    with monkeypatch.context() as patched:
        patched.setattr("agentbench_kv.run.engines.start_engine", start)
        run_one(spec, tmp_path / "forged", lambda *_: None)
    return tmp_path / "forged" / spec.id


def test_a_perfect_forgery_is_never_called_re_run(perfect_forgery: Path, tmp_path: Path) -> None:
    """Nothing in the records is wrong: only playing a part of it again tells."""
    board = tmp_path / "board"
    add(packed(perfect_forgery, tmp_path / "out"), board)
    name = perfect_forgery.name
    assert labels(board) == {name: Label.RESCORED}
    outcome = rerun(evidence_of(tmp_path / "out" / name), 4, 0, leaderboard=board)
    assert outcome.equal < outcome.played == 4
    assert "sample recall-1k-" in outcome.differs[0]
    assert labels(board) == {name: Label.RESCORED}


def test_what_a_rerun_refuses(forger: Any, submit: Any) -> None:
    bare = submit("gold", "bare", with_transcripts=False)
    with pytest.raises(UsageError, match="has no transcripts"):
        rerun(evidence_of(bare.run), 1, 0)
    forger.info(lambda info: info["spec"].update(engine_args={"load-format": "pickle"}))
    with pytest.raises(UsageError, match="passes load-format to its engine"):
        rerun(evidence_of(forger.run), 1, 0)
    forger.info(lambda info: info["spec"].pop("engine_args"))
    forger.info(lambda info: info["spec"].update(model="/nowhere/model"))
    with pytest.raises(UsageError, match="name its folder with --model"):
        rerun(evidence_of(forger.run), 1, 0)
    shutil.rmtree(forger.run)


def test_settings_that_lead_elsewhere_are_not_followed(forger: Any) -> None:
    spec = spec_of(forger.run)
    for task, params in (
        ("frames/synthetic", {"judge": "http://127.0.0.1:9/v1|x"}),
        ("frames/synthetic", {"corpus": "../../etc"}),
        ("tau2/airline", {"user": "http://127.0.0.1:9/v1"}),
        ("locomo/qa", {"similarity_model": "/elsewhere/model"}),
        ("bfcl/web_search_base", {"web": "record", "recording": "/elsewhere/web.jsonl"}),
    ):
        changed = RunSpec(**{**vars(spec), "task": task, "task_params": params})
        assert next(iter(params)) in unfit(changed)
    assert not unfit(spec)


def test_a_submission_never_makes_its_reader_ask_anybody(
    forger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(Corpus, "load", refuse)
    settings = FramesSynthetic().settings()
    elsewhere = {"judge": "http://192.0.2.1/v1|x", "corpus": "../../etc"}
    settings |= elsewhere
    forger.info(lambda info: info["provenance"].update(changed_settings=elsewhere))
    forger.info(lambda info: info["spec"].update(task="frames/synthetic", task_params=settings))
    forger.trials(lambda row: row.update(seed=spec_of(forger.run).trial_seed(row["sample_id"], 0)))
    (run,) = validate(forger.cover(rename=True)).runs
    assert not run.findings
    assert run.label is Label.SELF_REPORTED
    assert "played with corpus, judge, which is not started for a submission" in run.notes[0]
    said = elsewhere | {"SOTA": "yes"}  # and what the task has not may not hide behind them
    forger.info(lambda info: info["provenance"].update(changed_settings=said))
    forger.info(lambda info: info["spec"]["task_params"].update(SOTA="yes"))
    (finding,) = validate(forger.cover(rename=True)).findings
    assert "spec.task_params: has 'SOTA', no setting of frames/synthetic" in str(finding)


def test_the_manifest_names_the_files_it_was_made_of(submit: Any) -> None:
    made = submit("gold")
    manifest = json.loads((made.folder / MANIFEST).read_text())
    assert list(manifest["runs"][0]["sha256"]) == [
        "samples.jsonl", "run.json", "turns.jsonl", "transcripts",
    ]  # fmt: skip


def test_an_older_spelling_of_an_engines_argument_is_no_fault(forger: Any) -> None:
    """Such a run keeps its id, and what it stands for is what one with dashes does."""
    asked = replace(spec_of(forger.run), engine="vllm", method="full", budget=None, params={})
    dashed = resolve(replace(asked, engine_args={"max-num-seqs": "9"}), {})
    old = replace(dashed, engine_args={"max_num_seqs": "9"})
    assert old.id != dashed.id
    evidence = evidence_of(forger.run)
    found = [list(check_spec(replace(evidence, spec=each))) for each in (dashed, old)]
    assert found[0] == found[1]
    assert not [each for each in found[1] if "engine_args" in str(each)]
