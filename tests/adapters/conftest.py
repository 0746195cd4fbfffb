"""Agents whose calls are hostile, through the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.agent_client import call_text, think_block
from agentbench_kv.adapters.worker import Limits
from agentbench_kv.adapters.worker_task import WorkerTask
from agentbench_kv.cli import kvbench
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.store import RunStore

CALL_CPU_S = 2


@dataclass(frozen=True)
class Played:
    """What `kvbench run` left."""

    attempts: dict[str, list[TrialRecord]]  # by sample
    shown: str
    summary: dict[str, Any]


@pytest.fixture
def bombed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Played]:
    """Return a function that runs `kvbench run` on a task with gold agents.

    `bombs[sample]` is said before what gold says: texts, or calls as (name, arguments).
    """
    limits = Limits(call_cpu_s=CALL_CPU_S, address_space=2 << 30)
    monkeypatch.setattr(WorkerTask, "_limits", lambda _: limits)

    def run(task: type[WorkerTask], bombs: dict[str, list[Any]], *options: str) -> Played:
        def script(self: WorkerTask, sample: Any, agent: Any, gold: Any = task.script) -> list[str]:
            said = [
                each if isinstance(each, str) else think_block("Boom.") + call_text(*each)
                for each in bombs.get(sample.id, [])
            ]
            return [*said, *gold(self, sample, agent)]

        out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        fixed = ["--engine", "scripted", "--model", "gold", "--method", "full", "--out", str(out)]
        with monkeypatch.context() as patch:
            patch.setattr(task, "script", script)
            command = ["run", "--task", task.name, *fixed, "--concurrency", "16", *options]
            assert not kvbench.main(command, standalone_mode=False)
        shown = capsys.readouterr().out
        (folder,) = (each for each in out.iterdir() if each.is_dir())
        records: dict[str, list[TrialRecord]] = {}
        for record in RunStore(out).find(folder.name).trial_lines().records:
            records.setdefault(record.sample_id, []).append(record)
        summary = json.loads((folder / "summary.json").read_text())
        return Played(records, shown, summary)

    return run
