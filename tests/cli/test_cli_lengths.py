"""`kvbench ls tasks --lengths`: figures from real first prompts, and what is left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from transformers import AutoTokenizer

from agentbench_kv.adapters.base import Outcome, Sample, ScriptedAgent, Task, TrialContext
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.results.records import TrialStatus
from agentbench_kv.run import lengths, spec
from agentbench_kv.run.lengths import PromptLengths, prompt_lengths

MICRO = Path(str(files("agentbench_kv.models"))) / "micro"
TEXTS = {"short": "hello " * 5, "long": "hello " * 400}


class Two(Task):
    """A short and a long sample, over HTTP as raw text."""

    name: ClassVar[str] = "two"
    summary: ClassVar[str] = ""
    needs_endpoint: ClassVar[bool] = True

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        return [Sample(id=name) for name in TEXTS][:limit]

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        answer = httpx.post(
            f"{context.endpoint}/completions",
            json={"model": "null", "prompt": TEXTS[sample.id]},
            headers={"X-KVBench-Session": context.session},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return Outcome(TrialStatus.SCORED, score=0.0)

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:  # noqa: ARG002
        return ["no"]


class Silent(Two):
    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:  # noqa: ARG002
        return Outcome(TrialStatus.INFRA_ERROR, error="the worker died")


class NoData(Two):
    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        raise PrerequisiteError("no two.json in data")


def test_lengths_are_those_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {"two": Two, "silent": Silent, "none": NoData}
    for module in (lengths, spec):
        monkeypatch.setattr(module, "load_task", classes.__getitem__)
    told: dict[str, str] = {}
    rows = prompt_lengths(list(classes), "micro", None, {}, (100, 300), left_out=told.__setitem__)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(MICRO))
    sizes = [len(tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS.values()]
    share = {size: sum(n > size for n in sizes) / 2 for size in (100, 300)}
    figures = (min(sizes), sum(sizes) / 2, max(sizes), share)
    assert rows == [PromptLengths("two", "micro", len(tokenizer), 2, *figures)]
    assert share[100] == 0.5
    assert set(told) == {"silent", "none"}
    assert "the worker died" in told["silent"]
    assert told["none"] == "no two.json in data"


def test_the_table(kvbench: Callable[..., Any]) -> None:
    done = kvbench("ls", "tasks", "--lengths", "--task", "micro/*", "--limit", "2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["task"]: row for row in json.loads(done.stdout)}
    assert set(rows) == {"micro/memory", "micro/recall-1k", "micro/recall-5k"}
    one, five = rows["micro/recall-1k"], rows["micro/recall-5k"]
    assert 0 < one["shortest"] <= one["median"] <= one["longest"] < five["longest"]
    assert (one["samples"], one["over"]["1024"]) == (2, 0.0)
    assert one["tokenizer"] == "micro"
    shown = kvbench("ls", "tasks", "--lengths", "--task", "micro/recall-1k", "--limit", "1")
    assert "> 3,072" in shown.stdout
    assert "first prompt" in shown.stdout
    assert f"tokenizer and chat template of micro ({one['vocabulary']:,} entries)" in shown.stdout
    assert "count with --model FOLDER" in shown.stdout
    assert "later turns come on top" in shown.stdout


def test_another_tokenizer_is_named(
    kvbench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(MICRO, folder)
    asked = ("ls", "tasks", "--lengths", "--task", "micro/recall-1k", "--limit", "1")
    monkeypatch.setenv("COLUMNS", "300")
    shown = kvbench(*asked, "--model", str(folder))
    assert f"chat template of {folder}" in shown.stdout
    assert "small" not in shown.stdout
    (row,) = json.loads(kvbench(*asked, "--model", str(folder), "--json").stdout)
    assert row["tokenizer"] == str(folder)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["ls", "runs", "--lengths"], "is for tasks"),
        (["ls", "tasks", "--lengths", "--task", "nothing"], "no task is called"),
        (["ls", "tasks", "--lengths", "--model", "no-such-folder"], "no-such-folder"),
    ],
)
def test_wrong_requests(args: list[str], said: str, kvbench: Callable[..., Any]) -> None:
    done = kvbench(*args)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert said in done.stderr
