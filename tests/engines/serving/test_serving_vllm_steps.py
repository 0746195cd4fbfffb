"""vLLM's runner of ours, step by step on a device that nobody may wait for.

vLLM prepares a step, runs the layers (or replays a graph, which runs no Python), and waits for the
device once, for the tokens it samples: 0.32.0 in `_to_list`, by an event.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import Launched, ranking, refuse_waiting
from torch import Tensor
from vllm_stand_ins import DIM, HEADS, PLUGIN, Runner, cache_of, flash, made

from agentbench_kv.engines.core.ledger import (
    Eviction,
    EvictionOrder,
    OwnBest,
    PrefixEnd,
    Rewind,
    RowsMoved,
    StepPlan,
)
from agentbench_kv.engines.core.policy import VARIABLE
from agentbench_kv.engines.core.transfers import Arriving
from agentbench_kv.phases.machine import PromptPhases
from agentbench_kv.registry import load_method

META = torch.device("meta")
BLOCK, BUDGET = 16, 16
SYSTEM = 16  # tokens of a system message, one block
SHARED = {"protect": "system", "prefix": "shared"}
WITH_SYSTEM = 48  # the budget, if that is protected


@dataclass
class Turn:
    """A request, as vLLM's scheduler and ours see it."""

    name: str
    prompt: int
    fed: int = 0
    live: int = 0
    events: int = 0
    budget: int = BUDGET
    known: bool = False

    @property
    def blocks(self) -> list[int]:
        return list(range(-(-self.live // BLOCK)))

    def order(self) -> EvictionOrder:
        system = SYSTEM if self.budget == WITH_SYSTEM else 0
        eviction = Eviction(self.live, self.budget, self.fed, self.prompt, system)
        order = EvictionOrder(self.session, self.events, eviction, self.blocks)
        self.events += 1
        self.live = self.budget
        return order

    @property
    def session(self) -> str:
        return f"session {self.name}"


class Table:
    """Stands for a group's table of blocks; rows are arrays of the host."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.mapped: list[tuple[int, int]] = []

    def add_row(self, blocks: list[int], row: int) -> None:
        self.rows[row] = list(blocks)

    def compute_slot_mapping(self, requests: int, starts: Tensor, positions: Tensor) -> None:
        assert {starts.device, positions.device} == {META}
        assert len(starts) == requests + 1
        self.mapped.append((requests, len(positions)))


@dataclass
class Sampled:
    """As vLLM's output of a step, as far as we look."""

    sampled_token_ids: list[list[int]]
    kvbench: list[RowsMoved | OwnBest] = field(default_factory=list)

    @property
    def moved(self) -> list[RowsMoved]:
        return [each for each in self.kvbench if isinstance(each, RowsMoved)]

    @property
    def best(self) -> list[OwnBest]:
        return [each for each in self.kvbench if isinstance(each, OwnBest)]


class Steps(Runner):
    """Runs layers as vLLM does; where it replays a graph, their Python does not run."""

    window = SimpleNamespace(sliding_window=8)
    graphs = False
    waited = False

    def set_up(self, turns: list[Turn], builder: Any) -> None:
        self.optimistic_seq_lens_cpu = torch.zeros(8, dtype=torch.int32)
        self.positions = torch.zeros(99, dtype=torch.int64, device=META)
        self.query_start_loc = SimpleNamespace(gpu=torch.zeros(9, dtype=torch.int32, device=META))
        self.table, self.builder = Table(), builder
        names = [turn.name for turn in turns]
        self.requests = {name: SimpleNamespace(block_ids=[[]]) for name in names}
        self.input_batch = SimpleNamespace(
            num_reqs=len(names), req_ids=names, block_table=[self.table],
            req_id_to_index={name: row for row, name in enumerate(names)},
            token_ids_cpu=np.arange(len(names) * 99).reshape(len(names), 99),
            num_computed_tokens_cpu=np.zeros(len(names), np.int32),
        )  # fmt: skip

    def execute_model(self, scheduler_output: Any) -> None:
        Steps.waited = False
        scheduled = np.array([*scheduler_output.num_scheduled_tokens.values()])
        self._prepare_inputs(scheduler_output, scheduled)
        lengths = SimpleNamespace(seq_lens=self.seq_lens[: len(scheduled)])
        lengths.replace = lambda **changed: changed
        self.builder.build(0, lengths)
        query = torch.zeros(int(scheduled.sum()), HEADS, DIM, dtype=self.dtype, device=META)
        if self.graphs and len(query) <= 8:
            return
        for layer in self.compilation_config.static_forward_context.values():
            layer.impl.forward(layer, query)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled: Any) -> str:
        assert scheduler_output.total_num_scheduled_tokens == num_scheduled.sum()
        return "prepared"

    def _sample(self, *_: Any) -> Any:
        drawn = torch.zeros(self.input_batch.num_reqs, 1, dtype=torch.int32, device=META)
        return SimpleNamespace(sampled_token_ids=drawn)

    def sample_tokens(self) -> Sampled:
        self._sample(None, None)
        Steps.waited = True
        return Sampled([[1]] * self.input_batch.num_reqs)


RUNNER = Steps


class Moved:
    """A number of rows on the device, which the host may read once vLLM has waited for tokens."""

    def __int__(self) -> int:
        assert Steps.waited, "read in a step"
        return 5


def arrived(numbers: Arriving) -> list[int]:
    """What was drawn on the device, which the host may read at the same time as rows moved."""
    assert Steps.waited, "read in a step"
    (drawn,) = vars(numbers)["_numbers"].shape
    return [9] * drawn


def step(
    runner: Any, turns: list[Turn], rows: Mapping[str, int], *, evict: bool, **more: Any
) -> Sampled:
    """Have the runner carry out a step as our scheduler plans it; `more` goes into the plan."""
    plan = StepPlan(**more)
    for row, turn in enumerate(turns):
        runner.input_batch.num_computed_tokens_cpu[row] = turn.fed
        plan.sessions[turn.name] = turn.session
        if not turn.known:
            plan.prompts[turn.session] = PromptPhases("token-id")
            turn.known = True
        if turn.fed != turn.live:
            plan.deficits[turn.name] = turn.fed - turn.live
        turn.fed += rows[turn.name]
        turn.live += rows[turn.name]
        runner.requests[turn.name].block_ids[0][:] = turn.blocks
        if evict:
            plan.after[turn.name] = turn.order()
    output = SimpleNamespace(
        num_scheduled_tokens=rows, total_num_scheduled_tokens=sum(rows.values()), kvbench=plan
    )
    assert runner.execute_model(output) is None
    sampled: Sampled = runner.sample_tokens()
    return sampled


@pytest.fixture
def runner(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Any:
    """Our runner above `Steps`, with a cache; the parameter is a method and its settings."""
    name, settings = request.param
    monkeypatch.setattr(Launched, "compact_paged", lambda *_: Moved())
    monkeypatch.setattr(Arriving, "tolist", arrived)
    budget = WITH_SYSTEM if "protect" in settings else BUDGET
    size = budget if load_method(name).compresses else None
    found, path = made(plugin, flash(plugin), name, tmp_path, budget=size, **settings)
    monkeypatch.setenv(VARIABLE, str(path))
    found.profile_run()
    layers = list(found.compilation_config.static_forward_context)
    found.initialize_kv_cache(cache_of(layers))
    return found


def window_builder() -> Any:
    attention: Any = sys.modules[f"{PLUGIN}.attention"]
    builder = attention.CapturingFlash.get_builder_cls()()
    builder.kv_cache_spec = Steps.window
    return builder


METHODS: list[tuple[str, dict[str, Any]]] = [
    *(
        (name, short)
        for name, short in ranking().items()
        if not load_method(name).needs_calibration
    ),
    ("agentkv", {"kept_set": "per_layer"}),
    ("streamingllm", {"positions": "cache"}),
]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("runner", METHODS, indirect=True, ids=str)
def test_no_step_waits_for_the_device(
    runner: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [Turn("a", 20), Turn("b", 25)]
    runner.set_up(turns, window_builder())
    with refuse_waiting(monkeypatch):
        first = step(runner, turns, {"a": 20, "b": 25}, evict=True)
        assert first.kvbench == [RowsMoved(turn.session, 0, 5) for turn in turns]
        runner.graphs = graphs
        for number in range(1, 7):
            due = number % 3 == 0
            sampled = step(runner, turns, {"a": 1, "b": 1}, evict=due)
            moved = [RowsMoved(turn.session, number // 3, 5) for turn in turns] if due else []
            assert sampled.kvbench == moved
    assert [turn.fed for turn in turns] == [26, 31]
    assert runner.table.mapped == [(2, 2)] * 6
    assert runner.table.rows == {0: [0], 1: [0]}


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    "runner",
    [
        *((name, {**short, **SHARED}) for name, short in METHODS if short.get("positions") is None),
        ("full-constrained", {"prefix": "shared"}),
    ],
    indirect=True,
    ids=str,
)
def test_no_step_waits_that_takes_a_prefix_or_draws_what_is_given(
    runner: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session leaves a prefix and ends, another one begins with it and is given tokens."""
    first, second = (Turn(name, rows, budget=WITH_SYSTEM) for name, rows in (("a", 52), ("b", 57)))
    both, builder = [first, second], window_builder()
    evicts = runner._kvbench_rows.policy.method.compresses
    rows = runner._kvbench_rows
    with refuse_waiting(monkeypatch):
        runner.set_up([first], builder)
        step(runner, [first], {"a": 52}, evict=evicts, left={first.session: PrefixEnd("p", SYSTEM)})
        second.fed = second.live = SYSTEM  # which it finds
        runner.set_up(both, builder)
        begun, given = {second.session: "p"}, {"b": 7}
        step(runner, both, {"a": 1, "b": 41}, evict=evicts, begun=begun, given=given)
        runner.graphs = graphs
        for number in range(1, 7):
            due = evicts and number % 3 == 0
            sampled = step(runner, both, {"a": 1, "b": 1}, evict=due, given=given)
            assert sampled.best == [OwnBest("b", 9)]
            assert len(sampled.moved) == 2 * due
        runner.set_up([second], builder)
        rests = first.order() if evicts else Rewind(first.session, 30)
        step(runner, [second], {"b": 1}, evict=False, before=[rests], given=given, given_up=["p"])
        assert set(rows._sessions) == {first.session, second.session}
        step(runner, [second], {"b": 1}, evict=False, dropped=[first.session])
    assert set(rows._sessions) == {second.session}
