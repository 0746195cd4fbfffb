"""BFCL v4 tasks: what they share, and the four multi-turn categories."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agentbench_kv.adapters.base import Outcome, Sample, ScriptedAgent, TrialContext
from agentbench_kv.adapters.worker import WorkerPool
from agentbench_kv.adapters.worker_task import PlayedTrial, WorkerTask
from agentbench_kv.environments import python_of
from agentbench_kv.errors import UsageError
from agentbench_kv.params import param
from agentbench_kv.results.records import Metric, TrialStatus

_RAW_SYNTAXES = ("hermes", "json")  # `WAYS` of worker/session.py
_RAW_FORMAT = "chatml"
_WORKER = Path(__file__).parent / "worker" / "main.py"


@dataclass(kw_only=True)
class BfclTask(WorkerTask):
    """A slice of BFCL v4, played in worker processes and scored by the official checker."""

    environment = "bfcl"
    categories: ClassVar[tuple[str, ...]]

    # `raw`: one append-only text over the completions route, so sessions are exact to the token.
    # `chat`: messages and tools over the chat route.
    route: str = param("raw", "how sessions are sent", choices=("raw", "chat"))

    # Without effect since every trial has a process of its own; it is part of the ids of old runs.
    workers: int = param(1, "has no effect any more", low=1, high=64)

    _scripts: dict[tuple[str, str], list[str]] = field(default_factory=dict, init=False, repr=False)

    @property
    def sends_messages(self) -> bool:
        return self.route == "chat"

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        return [Sample(each["id"], each["scenario"]) for each in self._ask("samples")][:limit]

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        return self._script(sample.id, agent)

    def provenance(self) -> dict[str, Any]:
        return {**self._ask("about"), "route": self.route}

    def _script(self, name: str, agent: ScriptedAgent) -> list[str]:
        key = (name, agent)
        if key not in self._scripts:
            self._scripts[key] = self._ask("script", {"sample": name, "agent": agent})
        return self._scripts[key]

    def _outcome(self, played: PlayedTrial) -> Outcome:
        error = played["verdict"].get("error_message")
        error = None if error is None else str(error)
        status, metrics = TrialStatus(played["status"]), _metrics(played) | self._about_trial()
        transcript = {key: played[key] for key in ("text", "steps", "verdict")}
        return Outcome(status, played["score"], metrics, transcript, error)

    def _about_trial(self) -> dict[str, Metric]:
        """Return what every trial's record must say besides its counts."""
        return {"route": self.route}

    def _line(self, context: TrialContext) -> dict[str, Any]:
        syntax = context.tool_syntax or _RAW_SYNTAXES[0]
        if self.route == "raw":
            _check_raw(syntax, context.chat_format)
        return {**super()._line(context), "route": self.route, "syntax": syntax}

    def _start(self) -> WorkerPool:
        environment = {
            "BFCL_PROJECT_ROOT": "{scratch}/bfcl",
            "OMP_NUM_THREADS": "1",
            "KVBENCH_BFCL": json.dumps({"categories": self.categories, **self._worker_config()}),
        }
        python, limits = python_of("bfcl"), self._limits()
        return WorkerPool(python, _WORKER, environment=environment, limits=limits)

    def _worker_config(self) -> dict[str, Any]:
        """Return what the worker must know besides its categories."""
        return {}


@dataclass(kw_only=True)
class MultiTurn(BfclTask):
    """What the four multi-turn categories share."""

    # The checker goes turn by turn, so that a wrong turn decides: the same score for a fraction of
    # the tokens, and shorter sessions than the benchmark's.
    until: str = param(
        "end", "when a session ends: with its last turn, or when a turn was wrong",
        choices=("end", "decided"), rare=True,
    )  # fmt: skip

    def _line(self, context: TrialContext) -> dict[str, Any]:
        return {**super()._line(context), "until": self.until}


class MultiTurnBase(MultiTurn):
    """`multi_turn_base`: every function and parameter is there."""

    name = "bfcl/multi_turn_base"
    summary = "BFCL v4 multi-turn, base: 200 conversations with simulated APIs"
    categories = ("multi_turn_base",)


class MultiTurnMissFunc(MultiTurn):
    """`multi_turn_miss_func`: a function that is needed is shown only in a later turn."""

    name = "bfcl/multi_turn_miss_func"
    summary = "BFCL v4 multi-turn: 200 with a function that comes too late"
    categories = ("multi_turn_miss_func",)


class MultiTurnMissParam(MultiTurn):
    """`multi_turn_miss_param`: the user leaves out a parameter until asked."""

    name = "bfcl/multi_turn_miss_param"
    summary = "BFCL v4 multi-turn: 200 with a parameter that comes too late"
    categories = ("multi_turn_miss_param",)


class MultiTurnLongContext(MultiTurn):
    """`multi_turn_long_context`: the APIs' answers are long."""

    name = "bfcl/multi_turn_long_context"
    summary = "BFCL v4 multi-turn: 200 whose APIs give long answers"
    categories = ("multi_turn_long_context",)


def _check_raw(syntax: str, chat_format: str | None) -> None:
    """UsageError if the raw route cannot write prompts as the model knows them."""
    if syntax not in _RAW_SYNTAXES:
        found = f"calls of the {syntax} syntax"
    elif chat_format not in (None, _RAW_FORMAT):
        found = f"messages of the {chat_format} format"
    else:
        return
    raise UsageError(
        f"route=raw writes prompts in the {_RAW_FORMAT} format with calls as "
        f"{' or '.join(_RAW_SYNTAXES)}, and this model has {found}; use --set route=chat"
    )


def _metrics(played: PlayedTrial) -> dict[str, Metric]:
    steps = played["steps"]
    return {
        "turns": 1 + max((step["turn"] for step in steps), default=-1),
        "steps": len(steps),
        "calls": sum(len(step["calls"]) for step in steps),
        "refused_calls": sum(step["refused"] for step in steps),
        "unparsable_calls": sum(step["unparsable"] for step in steps),
        "truncated_answers": sum(step["finish_reason"] == "length" for step in steps),
        "first_prompt_tokens": steps[0]["usage"].get("prompt_tokens") if steps else None,
        "error_type": played["verdict"].get("error_type"),
    }
