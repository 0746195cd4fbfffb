"""The data set as it is published: conversations of several sessions, and questions about them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.data import data_file, file_sha256
from agentbench_kv.errors import PrerequisiteError

FILE = "locomo10.json"
SHA256 = "79fa87e90f04081343b8c8debecb80a9a6842b76a7aa537dc9fdf651ea698ff4"
HINT = (
    "get data/locomo10.json from https://github.com/snap-research/locomo (CC BY-NC 4.0) "
    "and put it there"
)
# By the numbers in the file, which are not the paper's order (decision 50).
CATEGORIES = {
    1: "cat1_multi_hop",
    2: "cat2_temporal",
    3: "cat3_open_domain",
    4: "cat4_single_hop",
}
# Questions whose premise is false: asked apart, never part of a score of answers.
ADVERSARIAL = 5
ABSENT = "Not mentioned in the conversation."  # the right answer to those
_SESSION = re.compile(r"session_(\d+)")
# A few references of the published file are written `D:11:26`, `D30:05`, or several in one string.
_REFERENCE = re.compile(r"D:?(\d+):0*(\d+)")


@dataclass(frozen=True)
class Utterance:
    """One turn of the dialogue."""

    id: str
    speaker: str
    text: str
    caption: str | None  # of the image that came with it


@dataclass(frozen=True)
class DialogueSession:
    """What was said on one occasion."""

    date: str  # as the file writes it
    utterances: tuple[Utterance, ...]

    @property
    def when(self) -> datetime | None:
        """The date, if it is of the published file's form (`1:56 pm on 8 May, 2023`)."""
        try:
            return datetime.strptime(self.date, "%I:%M %p on %d %B, %Y")
        except ValueError:
            return None


@dataclass(frozen=True)
class Question:
    """A question about a conversation."""

    index: int  # in the file's list of the conversation, adversarial ones counted
    text: str
    answer: str  # some of the file's are numbers; here all are text
    category: int  # key of `CATEGORIES`, or `ADVERSARIAL`
    evidence: tuple[str, ...]  # ids of the utterances it comes from; those that exist
    trap: str = ""  # what an adversarial question wants to hear


@dataclass(frozen=True)
class Dialogue:
    """Two people's sessions in order, and the questions about them."""

    id: str
    speakers: tuple[str, str]
    sessions: tuple[DialogueSession, ...]
    questions: tuple[Question, ...]  # of categories 1 to 4
    adversarial: tuple[Question, ...] = ()

    @property
    def utterances(self) -> dict[str, Utterance]:
        return {each.id: each for session in self.sessions for each in session.utterances}


@dataclass(frozen=True)
class Dataset:
    """The conversations by id, in the file's order, and the hash of the file."""

    conversations: dict[str, Dialogue]
    sha256: str


def load(*, check: bool = True) -> Dataset:
    """Read the user's copy, which must be the published file unless `check` is False.

    PrerequisiteError if it is missing, is another file, or is not of the published form.
    """
    path = data_file(FILE, SHA256 if check else None, HINT)
    return Dataset(_read(path), file_sha256(path))


def _read(path: Path) -> dict[str, Dialogue]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        conversations = {each["sample_id"]: _conversation(each) for each in document}
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}"
        raise PrerequisiteError(
            f"{path} is not a file of LoCoMo's form ({problem.strip()}): {HINT}"
        ) from error
    if not any(each.questions for each in conversations.values()):
        raise PrerequisiteError(f"{path} holds no question of categories 1 to 4: {HINT}")
    return conversations


def _conversation(entry: Mapping[str, Any]) -> Dialogue:
    talk = entry["conversation"]
    # By number, not by date: some dates of the file have no session.
    numbers = sorted(int(found[1]) for found in map(_SESSION.fullmatch, talk) if found)
    sessions = tuple(
        DialogueSession(
            str(talk[f"session_{number}_date_time"]),
            tuple(
                Utterance(each["dia_id"], each["speaker"], each["text"], each.get("blip_caption"))
                for each in talk[f"session_{number}"]
            ),
        )
        for number in numbers
    )
    known = {each.id for session in sessions for each in session.utterances}
    asked = [_question(index, each, known) for index, each in enumerate(entry["qa"])]
    questions = tuple(each for each in asked if each.category in CATEGORIES)
    adversarial = tuple(each for each in asked if each.category == ADVERSARIAL)
    speakers = (str(talk["speaker_a"]), str(talk["speaker_b"]))
    return Dialogue(str(entry["sample_id"]), speakers, sessions, questions, adversarial)


def _question(index: int, entry: Mapping[str, Any], known: set[str]) -> Question:
    found = _REFERENCE.findall(" ".join(entry.get("evidence", ())))
    ids = dict.fromkeys(f"D{session}:{turn}" for session, turn in found)
    evidence = tuple(each for each in ids if each in known)
    text, category = str(entry["question"]), entry["category"]
    if category != ADVERSARIAL:
        return Question(index, text, str(entry["answer"]), category, evidence)
    trap = str(entry.get("adversarial_answer", ""))
    return Question(index, text, str(entry.get("answer", ABSENT)), category, evidence, trap)
