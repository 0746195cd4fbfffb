"""Scores of answers that no replay gives: marked again from the transcripts' own answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.browser.questions import MADE
from agentbench_kv.adapters.data import VARIABLE
from agentbench_kv.adapters.probe.asking import stands
from agentbench_kv.adapters.probe.questions import Probe
from agentbench_kv.adapters.probe.session import ChatSession
from agentbench_kv.adapters.probe.values import may_be_exact
from agentbench_kv.leaderboard import validate
from agentbench_kv.results.submissions import Label
from agentbench_kv.run.runner import run_all
from agentbench_kv.run.spec import RunSpec, resolve

Document = dict[str, Any]
NO_ROOM, ONE_ANSWERED, ONE_OF_TWO, LAST_LEFT = 100, 400, 500, 540


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversation with questions, one with a false premise, and a session for `probe/file`."""
    folder = tmp_path_factory.mktemp("data")
    said = [
        {"speaker": ("Ann", "Ben")[i % 2], "dia_id": f"D1:{i + 1}", "text": f"Cat {i} is Tom {i}."}
        for i in range(4)
    ]
    talk = {"speaker_a": "Ann", "speaker_b": "Ben", "session_1": said,
            "session_1_date_time": "1:00 pm on 1 May, 2023"}  # fmt: skip
    asked: list[Document] = [
        {"question": f"What is cat {i} called?", "answer": f"Tom {i}", "category": 4,
         "evidence": [f"D1:{i + 1}"]}
        for i in range(3)
    ]  # fmt: skip
    asked.append({"question": "Where does dog 9 live?", "adversarial_answer": "Rome",
                  "category": 5, "evidence": ["D1:1"]})  # fmt: skip
    sample = {"sample_id": "conv-1", "conversation": talk, "qa": asked}
    # And one of four times the length.
    turns = [{**each, "dia_id": f"D1:{at + 1}"} for at, each in enumerate(said * 4)]
    long = {**sample, "sample_id": "conv-2", "conversation": {**talk, "session_1": turns}}
    (folder / "locomo10.json").write_text(json.dumps([sample, long]))
    calls = [{"id": "a", "type": "function",
              "function": {"name": "look_up", "arguments": '{"order_id": "W1234"}'}}]  # fmt: skip
    messages = [
        {"role": "user", "content": "My order is W1234."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": '{"status": "shipped", "carrier": "DHL"}'},
        {"role": "assistant", "content": "It is shipped."},
    ]
    (folder / "sessions.jsonl").write_text(json.dumps({"id": "one", "messages": messages}) + "\n")
    return folder


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("marked")
    talk, file = {"check": "off"}, {"file": str(data / "sessions.jsonl")}
    apart = {**talk, "adversarial": "apart"}
    # By a short name: task, method, settings, tokens of the context where not all fits.
    asked: dict[str, tuple[str, str, Document, int]] = {
        "memart": ("probe/locomo", "memart", {**apart, "topk": "4"}, 0),
        "full": ("probe/locomo", "full", talk, 0),
        "snapkv": ("probe/file", "snapkv", {**file, "trigger": "prefill+every"}, 0),
        "floor": ("probe/file", "full", {**file, "floor": "removed"}, 0),
        "qa": ("locomo/qa", "full", talk, 0),
        "qa, encoder": ("locomo/qa", "full", {**talk, "similarity_model": "hash"}, 0),
        "no room": ("probe/file", "full", file, NO_ROOM),
        "no room at all": ("locomo/qa", "full", talk, NO_ROOM),
        "one answered": ("locomo/qa", "full", talk, ONE_ANSWERED),
        "memart, one of two": ("probe/locomo", "memart", {**apart, "topk": "4"}, ONE_OF_TWO),
        "last one left": ("locomo/qa", "full", apart, LAST_LEFT),
    }
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(data))
        for name, (task, method, settings, room) in asked.items():
            budget = 64 if method == "snapkv" else None
            about: Document = {"engine": "embedded", "model": "micro", "max_tokens": 8}
            about["limit"] = 2 if room == ONE_OF_TWO else 1
            spec = RunSpec(task=task, method=method, budget=budget, context_limit=room, **about)
            spec = resolve(spec, settings)
            run_all([spec], root, lambda *_: None)
            found[name] = root / spec.id
    return found


@pytest.fixture
def forged(
    runs: dict[str, Path],
    data: Path,
    tmp_path: Path,
    forger_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., list[str]]:
    """Return a function that edits an honest run and returns what a check says of it."""
    monkeypatch.setenv(VARIABLE, str(data))

    def check(
        name: str,
        trial: Callable[[Document], Any] | None = None,
        transcript: Callable[[Document], Any] | None = None,
        *,
        bare: bool = False,
        info: Callable[[Document], Any] | None = None,
    ) -> list[str]:
        made = forger_of(runs[name], tmp_path / "submission")
        if bare:
            shutil.rmtree(made.run / "transcripts")
            made.trials(lambda row: row.update(transcript=None))
        if trial is not None:
            made.trials(trial)
        if transcript is not None:
            made.transcripts(lambda document: transcript(document["transcript"]))
        if info is not None:
            made.info(info)
        verdict = validate(made.cover(rename=info is not None))
        assert all(run.label is Label.SELF_REPORTED for run in verdict.runs)
        return [str(each) for each in verdict.findings]

    return check


SCORED = ["memart", "full", "snapkv", "floor", "qa", "qa, encoder", "last one left"]
FAILED = ["no room", "no room at all", "one answered", "memart, one of two"]


@pytest.mark.parametrize("bare", [False, True], ids=["whole", "without transcripts"])
@pytest.mark.parametrize("name", [*SCORED, *FAILED])
def test_an_honest_run_is_what_its_answers_say(
    name: str, bare: bool, runs: dict[str, Path], forged: Callable[..., list[str]]
) -> None:
    rows = map(json.loads, (runs[name] / "samples.jsonl").read_text().splitlines())
    assert ("context_limit" in [row["status"] for row in rows]) is (name in FAILED)
    assert forged(name, bare=bare) == []


def _right(document: Document) -> None:
    document["answers"][0]["answer"] = "Tom 0"


def _invent(row: Document) -> None:
    row["metrics"].update(needle_right=10, needle_asked=10, farther_right=5, farther_asked=5)
    row["metrics"].update(invented_total=5, invented_count=1)


def _resemble(row: Document) -> None:
    row["metrics"].update(similarity=1.0, similarity_right=3, similarity_asked=3)


def _recall(row: Document) -> None:
    row["metrics"].update(recalled_total=5, recalled_count=1)


def _all_right(row: Document) -> None:
    asked = [name for name in row["metrics"] if name.endswith("_asked")]
    row["metrics"] |= {name.replace("_asked", "_right"): row["metrics"][name] for name in asked}


def _fail(row: Document) -> None:
    row.update(status="context_limit", score=None, timing=dict.fromkeys(row["timing"]))
    _all_right(row)


TRIALS: list[tuple[str, Callable[[Document], Any], str]] = [
    ("memart", lambda row: row.update(score=0.5), "score: is 0.5, expected"),
    ("full", lambda row: row["metrics"].update(f1=0.5), "metrics.f1: is 0.5, expected"),
    ("full", lambda row: row["metrics"].update(bleu1_right=2.0), "metrics.bleu1_right: is 2.0"),
    ("memart", lambda row: row["metrics"].update(adversarial_right=1.5), "adversarial_right: is"),
    ("memart", lambda row: row["metrics"].update(evidence_recall_right=3.0), "recall_right: is 3"),
    ("full", lambda row: row["metrics"].update(evidence_recall_right=3.0), "recall_right: is 3"),
    ("snapkv", lambda row: row.update(score=0.75), "score: is 0.75, expected"),
    ("snapkv", lambda row: row["metrics"].update(contains_right=9), "contains_right: is 9"),
    ("snapkv", lambda row: row["metrics"].pop("to1k_asked"), "to1k_asked: is None, expected 2"),
    *((name, _invent, "metrics.needle_right: is nothing that") for name in (*SCORED, *FAILED)),
    *((name, _invent, "metrics.farther_right: is nothing that") for name in SCORED),
    ("qa", _resemble, "metrics.similarity_right: is 3, expected None"),
    ("full", _recall, "metrics.recalled_total: is nothing that the answers give"),
    *((name, _all_right, "expected 0") for name in FAILED),
    *((name, _fail, "score: is None, expected 0.0") for name in SCORED),
]


@pytest.mark.parametrize(("method", "change", "finding"), TRIALS)
def test_a_figure_that_its_answers_do_not_give_is_found(
    method: str,
    change: Callable[[Document], Any],
    finding: str,
    forged: Callable[..., list[str]],
) -> None:
    found = forged(method, trial=change)
    assert any(finding in each for each in found), found


@pytest.mark.parametrize("edited", [False, True], ids=["honest", "edited"])
@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("qa", "similarity_model", "/elsewhere/model"),
        ("memart", "similarity_model", "hash"),
        ("memart", "bertscore_model", "/elsewhere/model"),
    ],
)
def test_an_encoder_that_is_not_here_keeps_nobody_from_being_marked(
    name: str,
    setting: str,
    value: str,
    edited: bool,
    forged: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("an encoder was opened for a submission")

    for each in ("encoder_sha", "Similarity", "BertScore"):
        monkeypatch.setattr(f"agentbench_kv.adapters.locomo.task.{each}", refuse)

    def named(info: Document) -> None:
        info["spec"]["task_params"][setting] = value
        info["provenance"]["changed_settings"][setting] = value

    def more(row: Document) -> None:
        row["metrics"]["f1_right"] = 2.5

    found = forged(name, info=named, trial=more if edited else None)
    assert bool(found) is edited, found
    assert all("metrics.f1_right: is 2.5" in each for each in found)


@pytest.mark.parametrize("setting", ["corpus", "judge", "web"])
def test_a_setting_that_the_task_has_not_keeps_nobody_from_being_marked(
    setting: str, forged: Callable[..., list[str]]
) -> None:
    def named(info: Document) -> None:
        info["spec"]["task_params"][setting] = "../elsewhere"

    found = forged("qa", info=named, trial=lambda row: row.update(score=0.9))
    assert any(setting in each for each in found), found


def test_made_questions_of_a_task_that_makes_none_keep_nobody_from_being_marked(
    forged: Callable[..., list[str]],
) -> None:
    def made(info: Document) -> None:
        info["provenance"]["task"]["questions"] = MADE

    assert forged("qa", info=made, trial=lambda row: row.update(score=0.9))


def _exact(said: Document) -> None:
    for each in said["probes"]:
        each.update(exact=True, answer=f"<think></think> no {each['probe']['key']}")


def _nowhere(said: Document) -> None:
    for each in said["probes"]:
        each["place"] = None


def _somewhere(said: Document) -> None:
    said["probes"][0]["place"] = {"distance": 5, "seen_again": 0}


TRANSCRIPTS: list[tuple[str, Callable[[Document], Any], str]] = [
    ("full", _right, "answers[0].f1: is 0"),
    ("full", lambda said: said["answers"][0].update(gold="yes"), "answers[0].gold: is 'yes'"),
    ("full", lambda said: said["answers"][1].update(question="?"), "answers[1].question: is '?'"),
    ("full", lambda said: said["answers"].pop(), "score: is 0.0, expected None"),
    ("full", lambda said: said["answers"].append(said["answers"][0]), "checked: ValueError"),
    ("full", lambda said: said["answers"][0].update(answer=7), "could not be checked"),
    ("full", lambda said: said.update(answers=None), "could not be checked"),
    ("memart", lambda said: said["answers"][0].pop("evidence_recalled"), "evidence_recall_right"),
    ("snapkv", lambda said: said["probes"][0].update(contains=True), "probes[0].contains: is True"),
    ("snapkv", lambda said: said["probes"][0]["probe"].update(value="a"), "probe.value: is 'a'"),
    ("snapkv", lambda said: said.update(floor="none"), "transcript.floor: is 'none'"),
    ("snapkv", lambda said: said["probes"].pop(), "score: is 0.0, expected None"),
    ("snapkv", lambda said: said["probes"][1].update(rank=0), "ranks of its questions are [0, 0]"),
    ("snapkv", _exact, "probes[0].exact: is True, expected False"),
    ("snapkv", _nowhere, "probes[0].place: is missing, and the session has it"),
    ("floor", _somewhere, "probes[0].place: is {'distance': 5, 'seen_again': 0}, expected None"),
]


@pytest.mark.parametrize(("method", "change", "finding"), TRANSCRIPTS)
def test_answers_that_do_not_give_what_is_said_of_them_are_found(
    method: str,
    change: Callable[[Document], Any],
    finding: str,
    forged: Callable[..., list[str]],
) -> None:
    found = forged(method, transcript=change)
    assert any(finding in each for each in found), found


BARE: list[tuple[str, Callable[[Document], Any], str]] = [
    ("snapkv", lambda row: row.update(score=1.0), "score: is 1.0, expected 0"),
    ("qa", lambda row: row.update(score=1.0), "score: is 1.0, expected 0"),
    ("memart", lambda row: row["metrics"].pop("f1_right") or row.update(score=0.5), "score: is"),
    ("snapkv", lambda row: row["metrics"].update(tool_asked=9), "tool_asked: is 9, expected 1"),
    *((name, _fail, "status: is context_limit, and everything is right") for name in SCORED),
]


@pytest.mark.parametrize(("name", "change", "finding"), BARE)
def test_without_transcripts_a_score_is_still_what_its_parts_come_to(
    name: str,
    change: Callable[[Document], Any],
    finding: str,
    forged: Callable[..., list[str]],
) -> None:
    found = forged(name, trial=change, bare=True)
    assert any(finding in each for each in found), found


def test_a_recall_that_only_the_transcript_of_a_run_without_a_memory_knows_is_found(
    forged: Callable[..., list[str]],
) -> None:
    def invent(row: Document) -> None:
        row["metrics"].update(evidence_recall_right=3.0, evidence_recall_asked=3)

    def recalled(said: Document) -> None:
        for each in said["answers"]:
            each["evidence_recalled"] = 1.0

    found = forged("full", trial=invent, transcript=recalled)
    assert any("evidence_recall_right: is 3.0, expected None" in each for each in found), found


@pytest.mark.parametrize(
    ("raw", "may"),
    [
        ("DHL", True),
        (" 'dhl'. ", True),
        ("<think>Which one?</think>\n\nDHL", True),
        ("It is DHL", False),
        ("<think></think>UPS", False),
        ("UPS", False),
    ],
)
def test_an_answer_without_markup_is_all_that_is_seen_of_it(raw: str, may: bool) -> None:
    assert may_be_exact(raw, "DHL") is may


@pytest.mark.parametrize(
    ("role", "text", "value", "there"),
    [
        ("user", "My order is W1234.", "W1234", True),
        ("tool", '{"carrier": "DHL"}', "DHL", True),
        ("system", "The code is W1234.", "W1234", False),  # templates put it where they like
        ("user", "Her name is Zo\u00eb1.", "Zo\u00eb1", False),  # as \\u00eb in JSON
        ("tool", "orders:\nW1234", "W1234", False),  # as \\nW1234 in JSON
        ("user", "My order is W12345.", "W1234", False),
    ],
)
def test_where_a_value_must_be_found_whatever_the_template(
    role: str, text: str, value: str, there: bool
) -> None:
    messages = ({"role": role, "content": text}, {"role": "assistant", "content": "Yes."})
    probe = Probe("?", value, "others", "order", 0)
    assert stands(ChatSession("one", messages), probe) is there
    assert not stands(ChatSession("one", messages[:1]), probe)  # nothing is read behind it


@pytest.mark.parametrize("name", ["snapkv", "full", "memart"])
@pytest.mark.parametrize("rescore", [False, True])
def test_what_cannot_be_rescored_says_so_at_once(
    name: str,
    rescore: bool,
    runs: dict[str, Path],
    data: Path,
    tmp_path: Path,
    forger_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, str(data))
    made = forger_of(runs[name], tmp_path / "submission")
    (run,) = validate(made.folder, rescore=rescore).runs
    reason = "cannot be re-scored: questions are asked in sessions beside the trial's"
    assert any(note.startswith(reason) for note in run.notes), run.notes
    assert not any("--rescore does it" in note or "has no force" in note for note in run.notes)
