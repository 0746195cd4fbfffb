"""Given answers: how servers take them, and what the model would have said in their place."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentbench_kv.engines.base import FinishReason
from agentbench_kv.engines.core.control import GivenAnswer
from agentbench_kv.engines.core.ledger import OwnBest, StepPlan
from agentbench_kv.engines.sglang.plugin.worker import GivenRow, put_given
from agentbench_kv.errors import ContextLimitError, KVBenchError, UsageError
from agentbench_kv.phases import TokenPhases

sys.path.insert(0, str(Path(__file__).parent))

import fake_backend
import vllm_stand_ins
from fake_engine import FACTS, PROMPT, Build, expected, extend, folder_of, kill, turn

GIVEN = [3, 96, 0, 41, 41, 7, 12, 80, 5]


def asked(engine: Any) -> list[list[int]]:
    """Return the tokens of each prompt that the server got, and how many it was to answer."""
    return [json.loads(line) for line in (folder_of(engine) / "asked").read_text().splitlines()]


def own(prompt: list[int], given: list[int]) -> list[int]:
    return [fake_backend.next_token([*prompt, *given[:place]]) for place in range(len(given))]


def test_a_server_as_shipped_reads_what_it_is_given_with_its_next_prompt_in_mind(
    build: Build,
) -> None:
    engine = build(stock=True)
    engine.open("s", TokenPhases())
    extend(engine, "s", PROMPT)
    generation = engine.force("s", GIVEN)
    assert list(generation) == GIVEN
    assert generation.finish_reason is FinishReason.LENGTH
    assert not generation.best
    # The last one is fed with the next prompt, as after any answer.
    assert asked(engine) == [[len(PROMPT) + len(GIVEN) - 1, 1]]
    assert turn(engine, "s", [9], 4) == expected([*PROMPT, *GIVEN, 9], 4)
    stats = engine.close("s")
    # The fake has nothing cached: all that the session had before is computed again.
    assert stats.recomputed == len(PROMPT) + len(GIVEN) - 1
    assert (stats.prefill_tokens, stats.decode_tokens) == (len(PROMPT) + 1, len(GIVEN) + 4)


def test_a_server_as_shipped_says_its_best_in_each_place(build: Build) -> None:
    engine = build(stock=True)
    engine.open("s", TokenPhases())
    extend(engine, "s", PROMPT)
    generation = engine.force("s", GIVEN, predict=True)
    assert list(generation) == GIVEN
    assert generation.best == own(PROMPT, GIVEN)
    assert asked(engine) == [[len(PROMPT) + place, 1] for place in range(len(GIVEN))]
    assert engine.close("s").decode_tokens == len(GIVEN)


def test_a_given_answer_outlives_its_backend_unless_the_models_own_is_wanted(build: Build) -> None:
    engine = build({"dies": "Segmentation fault"}, {})
    engine.open("s", TokenPhases())
    extend(engine, "s", PROMPT)
    assert list(engine.force("s", GIVEN)) == GIVEN
    assert asked(engine) == [
        [len(PROMPT), len(GIVEN)],
        [len(PROMPT) + fake_backend.HELD, len(GIVEN) - fake_backend.HELD],
    ]
    engine.open("t", TokenPhases())
    extend(engine, "t", PROMPT)
    hold = folder_of(engine) / "hold"
    hold.touch()
    generation = iter(engine.force("t", GIVEN, predict=True))
    read = [next(generation) for _ in range(fake_backend.HELD)]
    kill(engine, "core")
    hold.unlink()
    with pytest.raises(KVBenchError, match="lost in the middle of a given answer"):
        list(generation)
    assert read == GIVEN[: fake_backend.HELD]


def test_ids_that_the_model_has_not_and_answers_without_room_are_refused(build: Build) -> None:
    engine = build()
    engine.open("s", TokenPhases())
    extend(engine, "s", PROMPT)
    for wrong in ([], [3, FACTS.vocabulary], [-1, 3]):
        with pytest.raises(UsageError, match=r"no tokens to force|numbered from 0"):
            engine.force("s", wrong)
    room = FACTS.context_limit - len(PROMPT)
    with pytest.raises(ContextLimitError):
        engine.force("s", [1] * (room + 2))


def test_sglang_puts_given_tokens_in_place_of_its_own() -> None:
    first, second = GivenAnswer([5, 6, 7]), GivenAnswer([8, 9])
    drawn = torch.tensor([10, 11, 12], dtype=torch.int32)
    found = put_given(drawn, [GivenRow(0, first, 2), GivenRow(2, second, 0)])
    assert found.tolist() == [7, 11, 8]
    assert found.dtype == torch.int32
    # A request that was put back draws in a place again; the others came before it.
    put_given(torch.tensor([20]), [GivenRow(0, first, 0)])
    put_given(torch.tensor([21]), [GivenRow(0, first, 1)])
    put_given(torch.tensor([22]), [GivenRow(0, first, 1)])
    assert (first.own(), second.own()) == ([20, 22, 10], [12])


class Drawing(vllm_stand_ins.Runner):
    """Draws numbers from 100 on."""

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        assert (logits, spec_decode_metadata) == ("logits", None)
        drawn = 100 + torch.arange(len(self.input_batch.req_ids), dtype=torch.int32)
        return SimpleNamespace(sampled_token_ids=drawn[:, None])

    input_batch: Any


RUNNER = Drawing


def test_vllm_puts_given_tokens_in_place_of_its_own(plugin: Any) -> None:
    runner = plugin.EvictingRunner([], plugin.CAPTURE)
    runner.input_batch = SimpleNamespace(num_reqs=3, req_ids=["a", "b", "c"])
    runner._kvbench_moved, runner._kvbench_plan = [], StepPlan(given={"c": 7, "a": 5})
    output = runner._sample("logits", None)
    assert output.sampled_token_ids.tolist() == [[5], [101], [7]]
    assert runner._kvbench_said() == [OwnBest("a", 100), OwnBest("c", 102)]
    # The next step gives nobody anything.
    runner._kvbench_plan = StepPlan()
    assert runner._sample("logits", None).sampled_token_ids.tolist() == [[100], [101], [102]]
    assert runner._kvbench_said() == []
