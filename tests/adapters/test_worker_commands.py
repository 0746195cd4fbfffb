"""Commands that ask a worker and no agent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentbench_kv.adapters.bfcl.task import MultiTurnBase
from agentbench_kv.adapters.worker import WorkerDiedError, WorkerTimeoutError
from agentbench_kv.results.records import TrialStatus


def test_a_worker_that_does_not_answer_the_harness_is_no_timeout_of_the_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trial's time is not up: it is played again instead of counting 0."""

    def call(*_: Any, **__: Any) -> None:
        raise WorkerTimeoutError("stalled for 120 s")

    task = MultiTurnBase.create({})
    monkeypatch.setattr(task, "_pool", lambda: SimpleNamespace(call=call))
    with pytest.raises(WorkerDiedError, match="no answer to 'conversations': stalled") as raised:
        task._call("conversations")
    assert raised.value.status is TrialStatus.INFRA_ERROR
