"""Settings of tasks reach the task, the record and the run id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from agentbench_kv.adapters.base import Outcome, Sample, Task
from agentbench_kv.errors import UsageError
from agentbench_kv.params import param
from agentbench_kv.run import spec as specs
from agentbench_kv.run.spec import RunSpec, resolve


@dataclass(kw_only=True)
class Told(Task):
    name: ClassVar[str] = "told"
    summary: ClassVar[str] = "a task with settings"

    route: str = param("raw", "how it asks", choices=("raw", "chat"))
    turns: int = param(5, "most turns", low=1)
    corpus: str = param("", "a folder")

    def samples(self, limit, seed):  # noqa: ARG002
        return [Sample("a")]

    def run_trial(self, sample, context) -> Outcome:
        raise NotImplementedError

    def script(self, sample, agent):  # noqa: ARG002
        return []


@pytest.fixture(autouse=True)
def _told(monkeypatch):
    monkeypatch.setattr(specs, "load_task", lambda _: Told)


BASE = RunSpec("embedded", "micro", "agentkv", 64, "told")


def test_settings_go_to_the_one_that_knows_them():
    resolved = resolve(BASE, {"route": "chat", "turns": "7", "interval": "16"})
    assert resolved.task_params == {"route": "chat", "turns": 7, "corpus": ""}
    assert resolved.params["interval"] == 16
    assert "route" not in resolved.params


def test_they_are_part_of_record_and_run_id():
    plain, changed = resolve(BASE, {}), resolve(BASE, {"route": "chat"})
    assert plain.id != changed.id
    assert changed.document()["task_params"]["route"] == "chat"
    assert resolve(changed, {}) == changed


def test_tasks_without_settings_leave_none_in_the_record(monkeypatch):
    monkeypatch.undo()
    document = resolve(RunSpec("embedded", "micro", "full", None, "micro/recall-1k"), {}).document()
    assert "task_params" not in document


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"route": "post"}, "route=post: expected one of raw, chat"),
        ({"turns": "0"}, "turns=0: expected an integer >= 1"),
        ({"rout": "raw"}, "rout"),
    ],
)
def test_wrong_settings_are_named(setting, said):
    with pytest.raises(UsageError, match=said):
        resolve(BASE, setting)


def test_changed_settings_are_what_differs_from_the_defaults():
    resolved = resolve(BASE, {"route": "chat", "interval": "16"})
    assert resolved.changed_settings == {"interval": 16, "route": "chat"}


def test_what_a_task_fills_in_from_this_machine_is_no_changed_setting(monkeypatch):
    """Else a run would have another name where other data is."""
    resolved = resolve(BASE, {})
    filled = {"route": "raw", "turns": 5, "corpus": "pages@here"}
    monkeypatch.setattr(Told, "settings", lambda _: filled)
    elsewhere = RunSpec(**vars(BASE) | {"task_params": {"corpus": "pages@there"}})
    assert resolved.changed_settings == {}
    assert elsewhere.changed_task_settings == {}
