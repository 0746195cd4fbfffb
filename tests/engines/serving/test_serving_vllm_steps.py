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

from agentbench_kv.engines.core.ledger import Eviction, EvictionOrder, RowsMoved, StepPlan
from agentbench_kv.engines.core.policy import VARIABLE
from agentbench_kv.phases.machine import PromptPhases
from agentbench_kv.registry import load_method

META = torch.device("meta")
BLOCK, BUDGET = 16, 16


@dataclass
class Turn:
    """A request, as vLLM's scheduler and ours see it."""

    name: str
    prompt: int
    fed: int = 0
    live: int = 0
    events: int = 0

    @property
    def blocks(self) -> list[int]:
        return list(range(-(-self.live // BLOCK)))

    def order(self) -> EvictionOrder:
        eviction = Eviction(self.live, BUDGET, self.fed, self.prompt)
        order = EvictionOrder(self.session, self.events, eviction, self.blocks)
        self.events += 1
        self.live = BUDGET
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
    kvbench: list[RowsMoved] = field(default_factory=list)


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

    def sample_tokens(self) -> Sampled:
        Steps.waited = True
        return Sampled([[1]] * self.input_batch.num_reqs)


RUNNER = Steps


class Moved:
    """A number of rows on the device, which the host may read once vLLM has waited for tokens."""

    def __int__(self) -> int:
        assert Steps.waited, "read in a step"
        return 5


def step(runner: Any, turns: list[Turn], rows: Mapping[str, int], *, evict: bool) -> Sampled:
    """Have the runner carry out a step as our scheduler plans it."""
    plan = StepPlan()
    for row, turn in enumerate(turns):
        runner.input_batch.num_computed_tokens_cpu[row] = turn.fed
        plan.sessions[turn.name] = turn.session
        if not turn.fed:
            plan.prompts[turn.session] = PromptPhases("token-id")
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
    found, path = made(plugin, flash(plugin), name, tmp_path, budget=BUDGET, **settings)
    monkeypatch.setenv(VARIABLE, str(path))
    found.profile_run()
    layers = list(found.compilation_config.static_forward_context)
    found.initialize_kv_cache(cache_of(layers))
    return found


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
    attention: Any = sys.modules[f"{PLUGIN}.attention"]
    builder = attention.CapturingFlash.get_builder_cls()()
    builder.kv_cache_spec = Steps.window
    turns = [Turn("a", 20), Turn("b", 25)]
    runner.set_up(turns, builder)
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
