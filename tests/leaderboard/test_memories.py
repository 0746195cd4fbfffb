"""Submissions of runs with a memory: played again with the past told, or refused in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.data import VARIABLE
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.environments import python_of
from agentbench_kv.errors import CapacityError, PrerequisiteError, UsageError
from agentbench_kv.leaderboard import rerun, validate
from agentbench_kv.leaderboard.evidence import RunEvidence, read_run
from agentbench_kv.registry import make_method
from agentbench_kv.results.submissions import Label
from agentbench_kv.run.runner import run_all
from agentbench_kv.run.spec import RunSpec, resolve

TOLD = "what the memory brought back"


def play(root: Path, settings: dict[str, str], banks: Path | None = None, **changes: Any) -> Path:
    values = {"engine": "embedded", "task": "micro/memory", "limit": 3, "max_tokens": 64, **changes}
    spec = resolve(RunSpec(model="micro", method="memart", budget=None, **values), settings)
    run_all([spec], root, lambda *_: None, banks)
    return root / spec.id


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Honest runs, never written to."""
    root = tmp_path_factory.mktemp("memories")
    banks = root / "banks"
    return {
        "attention": play(root / "runs", {"topk": "24"}, banks),
        "files": play(root / "files", {"topk": "24"}, banks),
        "random": play(root / "runs", {"topk": "24", "pick": "random"}, banks),
        "ranks": play(
            root / "runs", {"topk": "40", "block": "8", "normalise": "rr", "aggregate": "sum"}
        ),
        "one set": play(root / "runs", {"topk": "24", "sets": "shared"}, banks),
        "turns": play(root / "runs", {"topk": "24", "append": "turns"}, banks),
    }


Packed = Callable[[str], Any]


@pytest.fixture
def packed(runs: dict[str, Path], tmp_path: Path, forger_of: Callable[..., Any]) -> Packed:
    return lambda name: forger_of(runs[name], tmp_path / "submission")


def evidence_of(path: Path) -> RunEvidence:
    found = read_run(path, [])
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["attention", "files", "random", "ranks", "one set", "turns"])
def test_an_honest_run_is_re_scored_with_its_past_told(packed: Packed, name: str) -> None:
    verdict = validate(packed(name).folder)
    assert not verdict.findings, [str(each) for each in verdict.findings[:5]]
    (run,) = verdict.runs
    assert run.label is Label.RESCORED
    assert run.notes == [f"{TOLD} was played again in 3 of 3"]


def test_a_rerun_plays_the_memory(packed: Packed) -> None:
    made = packed("attention")
    outcome = rerun(evidence_of(made.run), 2, 7)
    assert (outcome.played, outcome.equal, outcome.accounts, outcome.scores) == (2, 2, 2, 2)
    made.trials(lambda row: row["metrics"].update(recalled_total=0.5))
    outcome = rerun(evidence_of(made.run), 3, 7)
    assert (outcome.equal, outcome.scores) == (0, 3)
    assert "recalled_total is 0.5" in outcome.differs[0]


def evidence_of_all(f: Any) -> None:
    def edit(row: dict[str, Any]) -> None:
        row["metrics"]["evidence_recall_right"] = row["metrics"]["evidence_recall_asked"]

    f.trials(edit)


def a_layer_that_looks_for_it(f: Any) -> None:
    def edit(row: dict[str, Any]) -> None:
        told = row["metrics"]
        told["best_layer_evidence_right"] = told["best_layer_evidence_asked"]
        told["best_layer_message_right"] /= 2

    f.trials(edit)


def a_layer_that_looks_for_it_and_a_little_more(f: Any) -> None:
    """Leave no sum as it was, so that nothing follows from them."""
    a_layer_that_looks_for_it(f)
    f.trials(
        lambda row: row["metrics"].update(
            recalled_total=row["metrics"]["recalled_total"] * (1 + 1e-7)
        )
    )


def nothing_else_came_back(f: Any) -> None:
    f.trials(lambda row: row["metrics"].update(recalled_total=1.0))


def no_word_of_what_came_back(f: Any) -> None:
    names = ("evidence_recall", "recalled", "best_layer")

    def edit(row: dict[str, Any]) -> None:
        row["metrics"] = {k: v for k, v in row["metrics"].items() if not k.startswith(names)}

    f.trials(edit)


def fewer_messages_needed(f: Any) -> None:
    f.trials(lambda row: row["metrics"].update(evidence_recall_asked=1, evidence_recall_right=1))


def random_blocks_as_attention(f: Any) -> None:
    """Show what random blocks made of the task, as what attention did."""
    f.info(lambda info: info["spec"]["params"].pop("pick"))
    f.info(lambda info: info["provenance"]["changed_settings"].pop("pick"))
    f.cover(rename=True)


def a_past_that_was_hardly_read(f: Any) -> None:
    f.trials(lambda row: row["metrics"].update(ingest_tokens=10))


def fewer_calls(f: Any) -> None:
    f.trials(lambda row: row["metrics"].update(ingest_calls=1))


def a_past_read_in_no_time(f: Any) -> None:
    f.trials(lambda row: row["metrics"].update(ingest_s=1e-6))


def a_past_read_for_longer_than_the_trial(f: Any) -> None:
    f.trials(lambda row: row["metrics"].update(ingest_s=row["timing"]["e2e_s"] + 1))


def more_files_than_sessions(f: Any) -> None:
    f.trials(lambda row: row["metrics"].update(ingest_files=99, ingest_files_s=0.001))


def turns_appended_for_longer_than_the_trial(f: Any) -> None:
    f.trials(lambda row: row["metrics"].update(append_s=row["timing"]["e2e_s"] + 1))


def turns_that_nobody_appended(f: Any) -> None:
    f.trials(lambda row: row["metrics"].update(append_tokens=99, append_s=0.001))


def files_of_minus_one(f: Any) -> None:
    f.trials(lambda row: row["metrics"].update(ingest_files=-1, ingest_files_s=0.001))


def parts_that_were_lost(f: Any) -> None:
    """Invent an excuse: the model could not take in what would have been needed."""
    f.trials(lambda row: row["metrics"].update(ingest_failed=3))


def fewer_rows(f: Any) -> None:
    """Claim 8 blocks where 24 came back, in every file."""

    def less(row: dict[str, Any], *names: str) -> None:
        row.update({name: row[name] - 256 for name in names if row[name]})

    f.info(lambda info: info["spec"]["params"].update(topk=8))
    f.info(lambda info: info["provenance"].update(changed_settings={"topk": 8}))
    f.trials(lambda row: less(row["kv"], "restored", "peak_live", "mean_decode_kv"))
    f.turns(lambda row: less(row, "live_before", "live_after", "restored"))
    f.cover(rename=True)


def prompts_read_once(f: Any) -> None:
    """Claim the tokens that a set for each layer's own would have read."""

    def once(row: dict[str, Any]) -> None:
        row["prefill_tokens"] //= 2

    def half(row: dict[str, Any]) -> None:
        once(row["kv"])
        row["kv"]["recomputed"] = 0

    f.trials(half)
    f.turns(once)


def one_set_as_layers_own(f: Any) -> None:
    """Show what one set made of the task, as what layers' own ones did."""
    prompts_read_once(f)
    f.info(lambda info: info["spec"]["params"].pop("sets"))
    f.info(lambda info: info["provenance"].update(changed_settings={"topk": 24}))
    f.cover(rename=True)


def rows_that_were_evicted(f: Any) -> None:
    f.trials(lambda row: row["kv"].update(evicted=64))
    f.turns(lambda row: row.update(evicted=64 if row["turn"] == 0 else 0))


def a_prompt_that_was_never_sent(f: Any) -> None:
    f.trials(lambda row: row.update(prompt_sha="ab" * 32))


FORGERIES = [
    ("attention", evidence_of_all, f"{TOLD}: is another than was recorded in 3 of 3"),
    ("attention", a_layer_that_looks_for_it, f"{TOLD}: is another than was recorded"),
    ("attention", a_layer_that_looks_for_it_and_a_little_more, f"{TOLD}: is another than was"),
    ("attention", nothing_else_came_back, f"{TOLD}: is another than was recorded"),
    ("attention", no_word_of_what_came_back, "metrics.evidence_recall_asked: is None"),
    ("attention", fewer_messages_needed, "metrics.evidence_recall_asked: is 1"),
    ("random", random_blocks_as_attention, f"{TOLD}: is another than was recorded"),
    ("attention", a_past_that_was_hardly_read, "metrics.ingest_tokens: is 10, expected"),
    ("files", a_past_that_was_hardly_read, "metrics.ingest_tokens: is 10, expected"),
    ("attention", fewer_calls, "metrics.ingest_calls: is 1, expected"),
    ("attention", a_past_read_in_no_time, "metrics.ingest_s: took"),
    ("attention", a_past_read_for_longer_than_the_trial, "metrics.ingest_s: took"),
    ("attention", more_files_than_sessions, "metrics.ingest_files: is 99 of"),
    ("turns", turns_appended_for_longer_than_the_trial, "metrics.append_s: took"),
    ("attention", turns_that_nobody_appended, "append_tokens"),
    ("attention", files_of_minus_one, "metrics.ingest_files: is -1, no amount"),
    ("attention", parts_that_were_lost, "metrics.ingest_failed: is 3, expected None"),
    ("attention", fewer_rows, ""),
    ("attention", rows_that_were_evicted, "kv.evicted: is 64"),
    ("one set", prompts_read_once, "kv.recomputed: is 0, expected"),
    ("one set", one_set_as_layers_own, f"{TOLD}: is another than was recorded"),
    ("attention", a_prompt_that_was_never_sent, "prompt_sha: is 'abab"),
]


@pytest.mark.parametrize(
    ("name", "forge", "said"), FORGERIES, ids=[f"{n}-{f.__name__}" for n, f, _ in FORGERIES]
)
def test_a_forged_memory_is_refused(packed: Packed, name: str, forge: Any, said: str) -> None:
    made = packed(name)
    forge(made)
    made.cover()
    findings = [str(each) for each in validate(made.folder).findings]
    assert findings
    assert any(said in line for line in findings), findings[:5]


def test_a_little_more_than_came_back_is_no_proof(packed: Packed) -> None:
    """A near tie may fall otherwise on another machine: told, and not called re-scored."""
    made = packed("attention")
    made.trials(
        lambda row: row["metrics"].update(recalled_total=row["metrics"]["recalled_total"] * 1.01)
    )
    made.cover()
    (run,) = validate(made.folder).runs
    assert not run.findings
    assert run.label is Label.SELF_REPORTED
    assert "another than was recorded in 3 of 3 trials" in run.notes[0]


def test_where_no_model_runs_it_is_said(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> None:
        raise UsageError("no memory for the weights")

    monkeypatch.setattr("agentbench_kv.leaderboard.recalling.start_engine", absent)
    (run,) = validate(packed("attention").folder).runs
    assert (run.findings, run.label) == ([], Label.SELF_REPORTED)
    assert run.notes == [f"{TOLD} is as reported; no model here: no memory for the weights"]


def test_a_model_that_has_no_room_says_nothing_of_the_record(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise CapacityError("the KV cache has no room")

    monkeypatch.setattr(EmbeddedEngine, "memorise", full)
    (run,) = validate(packed("attention").folder).runs
    assert (run.findings, run.label) == ([], Label.SELF_REPORTED)
    assert run.notes == [f"{TOLD} is as reported; no model here: the KV cache has no room"]


def test_what_went_wrong_in_a_replay_is_no_lack_of_a_model(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any) -> None:
        raise UsageError("no such session")

    monkeypatch.setattr(EmbeddedEngine, "memorise", wrong)
    (run,) = validate(packed("attention").folder).runs
    assert run.label is Label.SELF_REPORTED
    assert run.notes == ["micro/memory cannot be played here: no such session"]


@pytest.mark.engine
def test_llama_cpp_plays_its_memory_too(tmp_path: Path, forger_of: Callable[..., Any]) -> None:
    try:
        python_of("llamacpp")
    except PrerequisiteError as error:
        pytest.skip(str(error))
    run = play(tmp_path / "runs", {"topk": "24"}, engine="llamacpp", dtype="float32", limit=1)
    (honest,) = validate(forger_of(run, tmp_path / "honest").folder).runs
    assert (honest.findings, honest.label) == ([], Label.RESCORED)
    assert f"{TOLD} was played again in 1 of 1" in honest.notes
    made = forger_of(run, tmp_path / "forged")
    evidence_of_all(made)
    made.cover()
    (finding,) = validate(made.folder).findings
    assert f"{TOLD}: is another than was recorded in 1 of 1" in str(finding)


@pytest.mark.parametrize("method", ["mem0", "graphiti"])
def test_a_package_that_asks_a_model_is_refused_in_a_line(packed: Packed, method: str) -> None:
    made = packed("attention")
    params = make_method(method, None, {}).settings()
    made.info(lambda info: info["spec"].update(method=method, params=params))
    made.info(lambda info: info["provenance"].update(changed_settings={}))
    made.cover(rename=True)
    (finding,) = validate(made.folder).findings
    assert f"kvbench env create {method}" in str(finding)
    assert "its runs cannot be submitted" in str(finding)
    with pytest.raises(UsageError, match="a check has neither"):
        rerun(evidence_of(made.run), 1, 0)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conversation of two sessions, and three questions."""
    pytest.importorskip("nltk", reason="the extra [locomo] is not installed")
    conversation: dict[str, Any] = {"speaker_a": "Ann", "speaker_b": "Ben"}
    for number in (1, 2):
        conversation[f"session_{number}"] = [
            {"speaker": ("Ann", "Ben")[i % 2], "dia_id": f"D{number}:{i + 1}",
             "text": f"Cat {number}{i} is Tom {i}."}
            for i in range(4)
        ]  # fmt: skip
        conversation[f"session_{number}_date_time"] = f"1:00 pm on {number} May, 2023"
    asked = [
        {"question": f"What is cat 1{i} called?", "answer": f"Tom {i}", "category": 4,
         "evidence": [f"D1:{i + 1}"]}
        for i in range(3)
    ]  # fmt: skip
    folder = tmp_path / "data"
    folder.mkdir()
    sample = {"sample_id": "conv-1", "conversation": conversation, "qa": asked}
    (folder / "locomo10.json").write_text(json.dumps([sample]))
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


@pytest.mark.parametrize("append", ["off", "turns"])
def test_questions_beside_the_session_are_played_by_a_rerun(
    data: Path, tmp_path: Path, forger_of: Callable[..., Any], append: str
) -> None:
    del data
    settings = {"check": "off", "topk": "4", "append": append}
    run = play(tmp_path / "runs", settings, task="probe/locomo", limit=1, max_tokens=8)
    made = forger_of(run, tmp_path / "submission")
    verdict = validate(made.folder, rescore=True)
    assert not verdict.findings, [str(each) for each in verdict.findings[:5]]
    (found,) = verdict.runs
    assert found.label is Label.SELF_REPORTED
    assert "in sessions beside the trial's" in found.notes[0]
    outcome = rerun(evidence_of(made.run), 1, 0)
    assert (outcome.equal, outcome.accounts, outcome.scores) == (1, 1, 1)

    def said(document: dict[str, Any]) -> None:
        document["transcript"]["answers"][0]["answer"] = "Tom 0"

    made.transcripts(said)
    assert rerun(evidence_of(made.run), 1, 0).differs == ["sample conv-1 trial 0: the transcript"]


def test_a_memory_on_an_engine_without_banks_is_no_run(packed: Packed) -> None:
    made = packed("attention")
    made.info(lambda info: info["spec"].update(engine="vllm"))
    made.info(lambda info: info["provenance"].update(engine="vllm"))
    made.cover(rename=True)
    findings = [str(each) for each in validate(made.folder).findings]
    assert any("cannot run method 'memart'" in each for each in findings)


def test_a_trial_that_failed_for_room_is_played_again(
    tmp_path: Path, forger_of: Callable[..., Any]
) -> None:
    """Also one that was recorded before failed trials were asked for their evidence."""
    run = play(tmp_path / "runs", {"topk": "24"}, limit=1, context_limit=500)
    made = forger_of(run, tmp_path / "submission")
    (row,) = made.lines("samples.jsonl")
    assert (row["status"], row["metrics"]["evidence_recall_right"]) == ("context_limit", 0)
    assert not validate(made.folder).findings

    def older(row: dict[str, Any]) -> None:
        for part in ("right", "asked"):
            del row["metrics"][f"evidence_recall_{part}"]

    made.trials(older)
    made.cover()
    assert not validate(made.folder).findings
