"""Samples that a model was trained on are refused: by task, in probes, and over two trainings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.base import Sample
from agentbench_kv.errors import UsageError
from agentbench_kv.registry import make_method
from agentbench_kv.run.trained import check_trained, joined, refuse_trained_on, trained_on


def model(folder: Path, **mark: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "sidequest.json").write_text(json.dumps(mark))
    return str(folder)


@pytest.mark.parametrize(
    ("task", "sample", "seen"),
    [
        ("tau2/retail", "7", True),
        ("tau2/retail", "8", False),
        ("tau2/airline", "7", False),
        ("probe/tau2/retail", "7@0123abcd", True),
        ("probe/tau2/airline", "7@0123abcd", False),
        ("probe/bfcl", "multi_turn_base_9@0123abcd", True),
        ("bfcl/multi_turn_base", "multi_turn_base_9", True),
        ("probe/file", "7@0123abcd", True),
        ("micro/recall-1k", "old", True),
    ],
)
def test_samples_are_refused_by_their_task(
    task: str, sample: str, seen: bool, tmp_path: Path
) -> None:
    by_task = {"tau2/retail": ["7"], "bfcl/multi_turn_base": ["multi_turn_base_9"], "": ["old"]}
    folder = model(tmp_path, samples=["7", "multi_turn_base_9", "old"], trained_on=by_task)
    samples = [Sample(sample), Sample("free")]
    if seen:
        with pytest.raises(UsageError, match="was trained on 1 of these 2 samples"):
            refuse_trained_on(folder, task, samples)
    else:
        refuse_trained_on(folder, task, samples)


def test_a_list_without_tasks_is_one_of_any(tmp_path: Path) -> None:
    folder = model(tmp_path, samples=["7"])
    for task in ("tau2/retail", "tau2/airline"):
        with pytest.raises(UsageError, match="was trained on"):
            refuse_trained_on(folder, task, [Sample("7")])


def test_a_second_training_remembers_the_first(tmp_path: Path) -> None:
    seen = trained_on(model(tmp_path, samples=["a"], trained_on={"t/one": ["a"]}))
    both = joined(seen, {"t/one": ["b@0123abcd"], "t/two": ["a"]})
    assert both == {"t/one": ["a", "b"], "t/two": ["a"]}


@pytest.mark.parametrize("mark", [{"samples": [1]}, {"samples": [], "trained_on": {"t": "a"}}, {}])
def test_a_damaged_list_is_said(mark: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is damaged: it names no samples"):
        trained_on(model(tmp_path, **mark))


def test_a_folder_called_like_a_shipped_model_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(tmp_path / "micro", samples=["recall-1k-0"])
    monkeypatch.chdir(tmp_path)
    refuse_trained_on("micro", "micro/recall-1k", [Sample("recall-1k-0")])
    with pytest.raises(UsageError, match="was not trained for sidequest"):
        check_trained("micro", make_method("sidequest", None))
