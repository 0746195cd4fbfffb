"""A made file of the data set's form, and the real one where the user has it."""

import json
import os
from pathlib import Path

import pytest

from agentbench_kv.adapters.data import VARIABLE
from agentbench_kv.adapters.locomo.data import FILE, load
from agentbench_kv.errors import PrerequisiteError

PLACES = ["Oslo", "Lima", "Cairo", "Quito", "Turin"]
USERS_FOLDER = os.environ.get(VARIABLE)


def utterance(session, turn, speaker, text, **more):
    return {"dia_id": f"D{session}:{turn}", "speaker": speaker, "text": text, **more}


def session(number):
    place = PLACES[number % len(PLACES)]
    return [
        utterance(number, 1, "Ada", f"I was in {place} — lovely!", blip_caption="a grey harbour"),
        utterance(number, 2, "Ben", f"And I read {number} books at home."),
    ]


def questions():
    found = [
        {
            "question": f"Where was Ada in session {number}?",
            "answer": PLACES[number % len(PLACES)],
            "evidence": [f"D{number}:1"],
            "category": 4,
        }
        for number in (2, 10)
    ]
    more = [
        ("How many books did Ben read first?", 1, ["D:1:02"], 2),
        ("Which towns did Ada see?", "Cairo, Lima", ["D2:1; D1:1", "D"], 1),
        ("Would Ada like ports?", "Likely yes; she calls them lovely", [], 3),
    ]
    found += [
        dict(zip(("question", "answer", "evidence", "category"), q, strict=True)) for q in more
    ]
    trick = {"question": "Where was Ben?", "adversarial_answer": "Oslo", "category": 5}
    return [found[0], {**trick, "evidence": ["D1:1"]}, *found[1:]]


def conversation(name):
    talk = {"speaker_a": "Ada", "speaker_b": "Ben"}
    for number in (10, 2, 1):
        talk |= {f"session_{number}_date_time": f"1:56 pm on {number} May, 2023"}
        talk |= {f"session_{number}": session(number)}
    talk["session_99_date_time"] = "never held"
    return {"sample_id": name, "conversation": talk, "qa": questions()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with two made conversations."""
    document = [conversation("talk-1"), conversation("talk-2")]
    (tmp_path / FILE).write_text(json.dumps(document), encoding="utf-8")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def published(monkeypatch):
    """The user's copy of the published file; the folder that was set when the tests began."""
    if USERS_FOLDER is None:
        pytest.skip(f"{VARIABLE} is not set: no copy of {FILE}")
    monkeypatch.setenv(VARIABLE, str(Path(USERS_FOLDER)))
    try:
        return load()
    except PrerequisiteError as error:
        pytest.skip(str(error))
