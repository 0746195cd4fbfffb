"""FRAMES and BrowseComp-Plus through the runner with agents whose score is known."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.browser.answers import seal, unseal
from agentbench_kv.adapters.browser.frames import FILE, SHA256, FramesTest, choose, read_questions
from agentbench_kv.adapters.browser.importing import import_corpus
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.registry import load_task
from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.results.store import RunDir, RunStore
from agentbench_kv.run import runner
from agentbench_kv.run.spec import RunSpec, resolve

from .browsing_data import QUESTIONS, WIKI, write_browsecomp, write_frames

pytest.importorskip("bm25s", reason="the extra [browser] is not installed")

SHARED = Path(os.environ.get("KVBENCH_DATA", "no-data"))
Play = Callable[..., tuple[RunDir, list[TrialRecord]]]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a data folder with made files of both benchmarks."""
    folder = tmp_path / "data"
    monkeypatch.setenv("KVBENCH_DATA", str(folder))
    monkeypatch.setattr(FramesTest, "published_sha256", None)
    write_frames(folder)
    write_browsecomp(folder)
    return folder


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Return a function that runs a scripted agent on a task."""

    def run(task: str, agent: str, **settings: Any) -> tuple[RunDir, list[TrialRecord]]:
        texts = {key: str(value) for key, value in settings.items()}
        spec = resolve(RunSpec("scripted", agent, "full", None, task), texts)
        runner.run_one(spec, tmp_path / "runs", lambda *_: None)
        found = RunStore(tmp_path / "runs").find(spec.id)
        return found, found.trials()

    return run


def real_corpus(data: Path) -> None:
    """Import pages for the made questions as a corpus that is not called synthetic."""
    source = data / "pages.jsonl"
    names = dict.fromkeys(page for *_, pages in QUESTIONS for page in pages)
    rows = [{"url": WIKI + page, "title": page, "text": f"About {page}."} for page in names]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    import_corpus(source, data / "corpora" / "mine", "mine")


TASKS = ("frames/synthetic", "browsecomp-plus/synthetic")


@pytest.mark.parametrize("task", TASKS)
def test_the_known_agents(data: Path, play: Play, task: str) -> None:
    assert data.is_dir()
    _, gold = play(task, "gold")
    assert [record.score for record in gold] == [1.0] * len(QUESTIONS)
    assert all(r.metrics["pages_right"] == r.metrics["pages_asked"] > 0 for r in gold)
    assert all(r.session_resets == 0 and r.metrics["tool_errors"] == 0 for r in gold)
    assert all("(synthetic)" in str(r.metrics["corpus"]) for r in gold)
    for agent in ("corrupt", "null"):
        _, records = play(task, agent)
        assert [record.score for record in records] == [0.0] * len(QUESTIONS)
        assert {record.status for record in records} == {TrialStatus.SCORED}


def test_frames_over_a_corpus_of_the_user(data: Path, play: Play) -> None:
    real_corpus(data)
    run, records = play("frames/test", "gold", corpus="mine")
    assert [record.score for record in records] == [1.0] * len(QUESTIONS)
    about = run.info.provenance["task"]
    assert run.info.spec["task_params"]["corpus"] == f"mine@{about['corpus']['sha256'][:12]}"
    assert about["corpus"]["name"] == "mine"
    assert about["corpus"]["synthetic"] is False
    assert len(about["corpus"]["sha256"]) == 64
    assert (about["metric"], about["split"], about["judge"]) == ("em_norm", "all", None)


@pytest.mark.parametrize("task", TASKS)
def test_made_and_real_corpora_are_kept_apart(data: Path, task: str) -> None:
    real_corpus(data)
    import_corpus(data / "pages.jsonl", data / "corpora" / "fake", "fake", synthetic=True)
    real = task.replace("synthetic", "test")
    with pytest.raises(UsageError, match=f"must not be called {real}; use --task {task}"):
        load_task(real).create({"corpus": "fake"}).samples(None, 0)
    with pytest.raises(UsageError, match=f"is not synthetic; use --task {real}"):
        load_task(task).create({"corpus": "mine"}).samples(None, 0)
    assert len(load_task(task).create({"corpus": "fake"}).samples(4, 0)) == 4


def test_a_run_over_synthetic_pages_says_so(data: Path, play: Play) -> None:
    assert data.is_dir()
    run, _ = play("frames/synthetic", "null")
    corpus = run.info.provenance["task"]["corpus"]
    assert corpus["synthetic"] is True
    assert corpus["name"] == "made-for-frames/synthetic"


def test_limits_end_episodes_with_their_reason(data: Path, play: Play) -> None:
    assert data.is_dir()
    _, records = play("frames/synthetic", "gold", context=64)
    assert {record.status for record in records} == {TrialStatus.CONTEXT_LIMIT}
    assert {record.metrics["ended_by"] for record in records} == {"more than 64 estimated tokens"}
    assert all(record.score is None and "em_norm" not in record.metrics for record in records)
    _, short = play("frames/synthetic", "gold", turns=2)
    assert [record.score for record in short] == [1.0] * len(QUESTIONS)
    assert {record.metrics["turns"] for record in short} == {2}


def test_browsecomp_never_lies_in_plain_text_in_a_run(data: Path, play: Play) -> None:
    assert data.is_dir()
    run, records = play("browsecomp-plus/synthetic", "gold")
    written = b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file())
    for question, answer, _ in QUESTIONS[:3]:
        assert question.encode() not in written
        assert answer.encode() not in written
        assert json.dumps(answer).strip('"').encode() not in written
    opened = unseal(run.transcript(records[0])["transcript"])
    assert opened[-1]["question"] in [question for question, *_ in QUESTIONS]


def test_sealing_is_undone() -> None:
    data = [{"role": "user", "content": "é \ud800 水" * 50}, None, 1.5]
    assert unseal(seal(data[1:])) == data[1:]
    assert "content" not in str(seal(data))
    assert unseal(seal(data))[2] == 1.5
    assert unseal({"other": 1}) == {"other": 1}


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("frames/test", {}, "needs a corpus: kvbench data import-corpus"),
        ("browsecomp-plus/test", {}, "needs a corpus: kvbench data import-corpus"),
        ("frames/test", {"corpus": "nowhere"}, "no imported corpus 'nowhere'"),
        ("frames/synthetic", {"turns": "0"}, "turns=0: expected an integer >= 1"),
        ("frames/synthetic", {"split": "sidequest"}, "one of all, kvbench-424"),
        ("frames/synthetic", {"encoder": "e"}, "set corpus too"),
        ("frames/synthetic", {"judge": "qwen"}, "expected URL.MODEL"),
        ("frames/synthetic", {"judge": "http://a:b@host/v1|m"}, "must hold no secret"),
    ],
)
def test_bad_settings(data: Path, task: str, settings: dict[str, str], message: str) -> None:
    assert data.is_dir()
    with pytest.raises(KVBenchError, match=message):
        load_task(task).create(settings).samples(None, 0)


@pytest.mark.parametrize("task", TASKS)
def test_missing_empty_and_wrong_data(data: Path, task: str) -> None:
    name = FILE if task.startswith("frames") else "browsecomp_plus_decrypted.jsonl"
    (data / name).write_text("id,Prompt\n1,x\n")
    with pytest.raises(UsageError, match=r"has no column|is not JSON"):
        load_task(task).create({}).samples(None, 0)
    (data / name).write_text("Prompt,Answer,wiki_links\n" if task.startswith("frames") else "\n")
    with pytest.raises(UsageError, match="holds no question"):
        load_task(task).create({}).samples(None, 0)
    (data / name).unlink()
    real_corpus(data)
    with pytest.raises(PrerequisiteError, match=rf"no {name} in .* then set KVBENCH_DATA"):
        load_task(task.replace("synthetic", "test")).create({"corpus": "mine"}).samples(None, 0)


@pytest.mark.parametrize("task", TASKS)
def test_synthetic_tasks_need_no_data_at_all(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path / "nothing"))
    run, gold = play(task, "gold")
    assert {record.sample_id for record in gold} == {f"made-{i}" for i in range(24)}
    assert {record.score for record in gold} == {1.0}
    assert all(r.metrics["pages_right"] == r.metrics["pages_asked"] == 2 for r in gold)
    about = run.info.provenance["task"]
    assert about["questions"] == "made"
    assert "data_sha256" not in about
    _, corrupt = play(task, "corrupt")
    assert {record.score for record in corrupt} == {0.0}
    first, again = (load_task(task).create({}).samples(None, 0) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("task", TASKS)
def test_questions_of_other_data_are_another_run(data: Path, play: Play, task: str) -> None:
    """The first run without the benchmark's file, the second with it, the third with another."""
    file = data / load_task(task).file
    text = file.read_bytes()
    played: list[tuple[Path, set[bool]]] = []
    for content in (None, text, text + b"\n"):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        run, records = play(task, "null")
        played.append((run.path, {each.sample_id.startswith("made-") for each in records}))
    assert [made for _, made in played] == [{True}, {False}, {False}]
    assert len({path for path, _ in played}) == 3
    with pytest.raises(PrerequisiteError, match=rf"{task} are \w{{12}} now, not made; leave out"):
        load_task(task).create({"source": "made"}).samples(None, 0)


def test_another_file_than_the_published_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path))
    write_frames(tmp_path)
    with pytest.raises(PrerequisiteError, match="is not the published file"):
        load_task("frames/test").create({}).samples(None, 0)


def test_our_split_does_not_depend_on_the_order(data: Path) -> None:
    questions = [
        type(each)(f"q{number}", each.question, each.answer)
        for number, each in enumerate(read_questions(data / FILE) * 100)
    ]
    part = choose(questions, "kvbench-424")
    assert len(part) == 424
    assert {each.id for each in choose(questions[::-1], "kvbench-424")} == {e.id for e in part}
    assert [each.id for each in part] == [e.id for e in questions if e in part]


@pytest.mark.slow
@pytest.mark.skipif(
    not (Path(os.environ.get("KVBENCH_DATA", SHARED)) / FILE).is_file(),
    reason=f"no {FILE}: set KVBENCH_DATA to the folder that holds it",
)
def test_every_published_answer_matches_itself_and_not_its_negation() -> None:
    from agentbench_kv.adapters.browser.answers import matches
    from agentbench_kv.adapters.data import file_sha256

    path = Path(os.environ.get("KVBENCH_DATA", SHARED)) / FILE
    assert file_sha256(path) == SHA256
    questions = read_questions(path)
    assert len(questions) == len({each.id for each in questions}) == 824
    assert all(2 <= len(each.pages) <= 15 for each in questions)
    assert all(matches(each.answer, each.answer) for each in questions)
    assert not any(matches(f"certainly not {each.answer}", each.answer) for each in questions)


@pytest.mark.parametrize("name", ["frames", "browsecomp-plus"])
def test_without_a_corpus_the_synthetic_variant_stands_in(name: str) -> None:
    real, made = load_task(f"{name}/test"), load_task(f"{name}/synthetic")
    assert real.stand_in({}) == made.name
    assert real.stand_in({"corpus": "mine"}) is None
    assert made.stand_in({}) is None
