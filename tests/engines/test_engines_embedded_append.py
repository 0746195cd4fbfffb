"""A session's turns, memorised as they end, make the bank that all of them at once make."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentbench_kv.engines.base import Sampling
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Phase

SETTINGS = {"topk": "4", "block": "8"}
LENGTHS = st.lists(st.tuples(st.integers(1, 25), st.integers(1, 9)), min_size=1, max_size=5)


class Others:
    def label(self, token: int) -> Phase:  # noqa: ARG002
        return Phase.OTHERS


@pytest.fixture(params=["layer", "shared"])
def engine(request: Any, tiny_model: Any, make_engine: Any) -> Iterator[Any]:
    made = make_engine(tiny_model("qwen3"), "memart", None, {**SETTINGS, "sets": request.param})
    yield made
    made.shutdown()


def feed(engine: Any, name: str, tokens: list[int], answer: int) -> list[int]:
    engine.extend(name, tokens, [Phase.OTHERS] * len(tokens))
    return list(engine.generate(name, Sampling(max_tokens=answer)))


def begin(engine: Any, name: str, bank: str) -> None:
    engine.open(name, Others())
    engine.attach(name, bank)


def tensors(bank: Any) -> list[torch.Tensor]:
    every = torch.arange(bank.rows)
    rows = [each for layer in range(len(bank.lows)) for each in bank.gather(layer, every)]
    return [bank.lows, bank.highs, bank.starts, bank.sizes, *rows]


@given(turns=LENGTHS, seed=st.integers(0, 99), looks=st.integers(0, 31))
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_appended_is_as_memorised_at_once(
    engine: Any, turns: list[tuple[int, int]], seed: int, looks: int
) -> None:
    """Of a session with a memory, to the last bit; also where others ask in the meantime."""
    rng = random.Random(seed)
    past = [rng.randrange(1, 64) for _ in range(37)]
    for bank in ("turns", "whole"):
        engine.open("past", Others())
        feed(engine, "past", past, 1)
        engine.memorise("past", bank, len(past))
        engine.close("past")
    begin(engine, "told", "turns")
    rows, others = 0, 0
    for number, (prompt, answer) in enumerate(turns):
        feed(engine, "told", [rng.randrange(1, 64) for _ in range(prompt)], answer)
        rows += engine.memorise("told", "turns", start=rows)
        assert (engine.recalled("told") < len(past)).all(), "its own do not come back to it"
        if looks >> number & 1:
            begin(engine, "other", "turns")
            feed(engine, "other", past[: prompt + 1], 2)
            others += int((engine.recalled("other") >= len(past)).any())
            engine.close("other")
    assert rows == engine.memorise("told", "whole") == sum(p + a for p, a in turns) - 1
    engine.close("told")
    banks = [engine._banks[name] for name in ("turns", "whole")]
    for wanted, found in zip(*map(tensors, banks), strict=True):
        assert torch.equal(wanted, found)
    question, found = past[5:20], []
    for bank in ("turns", "whole"):
        begin(engine, "later", bank)
        said = feed(engine, "later", question, 6)
        found.append((said, engine.recalled("later").tolist()))
        engine.close("later")
        engine.forget(bank)
    assert found[0] == found[1]


def test_a_part_that_is_not_there_is_one_line(engine: Any) -> None:
    engine.open("s", Others())
    feed(engine, "s", [3] * 10, 1)
    with pytest.raises(UsageError, match="has seen 10 tokens, not 11 to 10"):
        engine.memorise("s", "bank", start=11)
    assert engine.memorise("s", "bank", start=10) == 0
