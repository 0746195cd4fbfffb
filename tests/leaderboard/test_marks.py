"""Scores of answers that no replay gives: marked again from the transcripts' own answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.data import VARIABLE
from agentbench_kv.leaderboard import validate
from agentbench_kv.results.submissions import Label
from agentbench_kv.run.runner import run_all
from agentbench_kv.run.spec import RunSpec, resolve

Document = dict[str, Any]


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
    (folder / "locomo10.json").write_text(json.dumps([sample]))
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
    asked: dict[str, tuple[str, Document]] = {
        "memart": ("probe/locomo", {"check": "off", "topk": "4", "adversarial": "apart"}),
        "full": ("probe/locomo", {"check": "off"}),
        "snapkv": (
            "probe/file",
            {"file": str(data / "sessions.jsonl"), "trigger": "prefill+every"},
        ),
    }
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(data))
        for method, (task, settings) in asked.items():
            budget = 64 if method == "snapkv" else None
            about = {"engine": "embedded", "model": "micro", "max_tokens": 8, "limit": 1}
            spec = resolve(RunSpec(task=task, method=method, budget=budget, **about), settings)
            run_all([spec], root, lambda *_: None)
            found[method] = root / spec.id
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
        method: str,
        trial: Callable[[Document], Any] | None = None,
        transcript: Callable[[Document], Any] | None = None,
    ) -> list[str]:
        made = forger_of(runs[method], tmp_path / "submission")
        if trial is not None:
            made.trials(trial)
        if transcript is not None:
            made.transcripts(lambda document: transcript(document["transcript"]))
        verdict = validate(made.cover())
        assert all(run.label is Label.SELF_REPORTED for run in verdict.runs)
        return [str(each) for each in verdict.findings]

    return check


@pytest.mark.parametrize("method", ["memart", "full", "snapkv"])
def test_an_honest_run_is_what_its_answers_say(
    method: str, forged: Callable[..., list[str]]
) -> None:
    assert forged(method) == []


def _right(document: Document) -> None:
    document["answers"][0]["answer"] = "Tom 0"


TRIALS: list[tuple[str, Callable[[Document], Any], str]] = [
    ("memart", lambda row: row.update(score=0.5), "score: is 0.5, expected"),
    ("full", lambda row: row["metrics"].update(f1=0.5), "metrics.f1: is 0.5, expected"),
    ("full", lambda row: row["metrics"].update(bleu1_right=2.0), "metrics.bleu1_right: is 2.0"),
    ("memart", lambda row: row["metrics"].update(adversarial_right=1.5), "adversarial_right: is"),
    ("memart", lambda row: row["metrics"].update(evidence_recall_right=3.0), "recall_right: is 3"),
    ("full", lambda row: row["metrics"].update(evidence_recall_right=3.0), "recall_right: is 3"),
    ("snapkv", lambda row: row.update(score=0.75), "score: is 0.75, expected"),
    ("snapkv", lambda row: row["metrics"].update(contains_right=9), "contains_right: is 9"),
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


TRANSCRIPTS: list[tuple[str, Callable[[Document], Any], str]] = [
    ("full", _right, "answers[0].f1: is 0"),
    ("full", lambda said: said["answers"][0].update(gold="yes"), "answers[0].gold: is 'yes'"),
    ("full", lambda said: said["answers"][1].update(question="?"), "answers[1].question: is '?'"),
    ("full", lambda said: said["answers"].pop(), "could not be checked: ValueError"),
    ("full", lambda said: said["answers"][0].update(answer=7), "could not be checked"),
    ("full", lambda said: said.update(answers=None), "could not be checked"),
    ("memart", lambda said: said["answers"][0].pop("evidence_recalled"), "evidence_recall_right"),
    ("snapkv", lambda said: said["probes"][0].update(contains=True), "probes[0].contains: is True"),
    ("snapkv", lambda said: said["probes"][0]["probe"].update(value="a"), "probe.value: is 'a'"),
    ("snapkv", lambda said: said.update(floor="none"), "transcript.floor: is 'none'"),
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
