"""Floors of a task: under whose table they stand, and what the table says of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentbench_kv.results.runs import Setting
from agentbench_kv.results.stats import Scores
from agentbench_kv.results.tables import floors
from agentbench_kv.results.tables.floors import floor_note, floors_of


def run(
    floor: str | None,
    *,
    task: str = "probe/bfcl",
    valid: bool = True,
    sha: str = "a",
    **more: Any,
) -> Any:
    settings = more if floor is None else {"floor": floor, **more}
    setting = Setting(task, "m", "embedded")
    info = SimpleNamespace(provenance={"model_sha": sha})
    return SimpleNamespace(spec={"task_params": settings}, setting=setting, valid=valid, info=info)


def group(share: float, floor: str, method: str = "full") -> Any:
    scores = Scores.of_trials({f"s{n}": [share] for n in range(20)}, {})
    return SimpleNamespace(method=method, first=run(floor), scores=lambda _: scores)


def test_floors_stand_under_what_differs_in_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(floors, "grouped", lambda runs: asked.extend(runs) or [])
    own = run("none", questions=8)
    others = [
        run("none", questions=4),
        run("none", task="probe/file", questions=8),
        run("removed", valid=False, questions=8),
        run("removed", sha="b", questions=8),
        run("off", questions=8),
        run(None, questions=8),
        own,
    ]
    floors_of([run("off", questions=8)], others)
    assert asked == [own]
    asked.clear()
    floors_of([own], others)
    assert not asked


@pytest.mark.parametrize(
    ("full", "none", "removed", "said"),
    [
        (0.9, 0.0, 0.3, "full is at least 3 times its floors"),
        (0.9, 0.0, 0.31, "full is below 3 times its floor: the task says nothing"),
        (0.9, 0.31, 0.0, "full is below 3 times its floor: the task says nothing"),
        (0.0, 0.0, 0.0, "full is below 3 times its floor: the task says nothing"),
        (0.9, 0.1, None, "full is at least 3 times its floors; not played: floor=removed"),
    ],
)
def test_what_is_said_of_floors(full: float, none: float, removed: float | None, said: str) -> None:
    known = [group(none, "none")] + ([] if removed is None else [group(removed, "removed")])
    note = floor_note(group(full, "off"), known, "score")
    assert note.startswith(said)
    assert ("not played" in note) == (removed is None)
    assert floor_note(None, known, "score") == ""
    assert floor_note(group(full, "off"), [group(0.9, "none", "agentkv")], "score") == ""


def test_a_floor_of_other_samples_says_nothing_of_the_task() -> None:
    """One session that scores 0 without its evidence made every score above a floor's."""
    full, one = group(0.9, "off"), group(0.0, "removed")
    one.scores = lambda _: Scores.of_trials({"s0": [0.0]}, {})
    assert floor_note(full, [one], "score").startswith("floors were played on 1 of the 20 samples")
    most = Scores.of_trials({f"s{n}": [0.0 if n else 1.0] for n in range(19)}, {})
    one.scores = lambda _: most
    assert floor_note(full, [one], "score").startswith("full is at least 3 times its floors")


def test_less_of_what_is_read_is_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(floors, "grouped", lambda runs: asked.extend(runs) or [])
    full = run(None, task="locomo/qa", ingest="question")
    about = {"task": "locomo/qa", "ingest": "question"}
    last, none = run(None, **about, context="turns", last=50), run(None, **about, context="none")
    other = run(None, task="locomo/qa", ingest="conversation", context="none")
    floors_of([full], [full, last, none, other])
    assert asked == [last, none]
    assert [floors.floor_of(each) for each in asked] == ["last 50 turns", "none"]
    assert floors.floor_of(full) == floors.OFF


def test_the_last_n_are_a_baseline_and_no_floor() -> None:
    """A run that reads less may well be as good; one that reads nothing must not be."""
    full = group(0.6, "off")
    last, none = group(0.6, "off"), group(0.1, "off")
    last.first = run(None, context="sessions", last=5)
    none.first = run(None, context="none")
    assert floor_note(full, [last], "score") == ""
    assert floor_note(full, [last, none], "score") == "full is at least 3 times its floors"
