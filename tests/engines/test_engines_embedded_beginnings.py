"""Plays that go on behind what earlier ones have read, against plays that read everything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from agentbench_kv.engines.base import KVStats
from agentbench_kv.engines.embedded import forced
from agentbench_kv.engines.embedded.beginnings import BEGINNINGS, Beginnings
from agentbench_kv.engines.embedded.forced import ForcedPlay
from agentbench_kv.engines.embedded.model import LoadedModel, wrap_model
from agentbench_kv.methods.base import Phase
from agentbench_kv.registry import make_method

CHUNK = 16
ARMS: list[tuple[str, int | None, dict[str, str]]] = [
    ("full", None, {}),
    ("agentkv", 40, {"interval": "8", "trigger": "prefill+every"}),
    ("agentkv@system", 60, {"interval": "8"}),
    ("snapkv", 40, {"interval": "8"}),
    ("random", 40, {"interval": "8"}),
]
SUMS = ("h2o", 40, {"interval": "8"})
Turn = tuple[list[int], list[int]]  # a prompt and an answer
Played = tuple[list[torch.Tensor], list[KVStats]]


def made_for(model: LoadedModel, arms: Sequence[Any] = ARMS) -> Beginnings:
    return Beginnings(model, [make_method(*arm) for arm in arms], CHUNK)


def labelled(ids: Sequence[int]) -> list[tuple[int, Phase]]:
    return [(token, Phase(token % 4)) for token in ids]


def stem(number: int, tokens: int) -> list[int]:
    """Return the first tokens of one of a few endless texts; the texts begin differently."""
    return [1 + (17 * at + 31 * number + at * at) % 96 for at in range(tokens)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def model(
    request: pytest.FixtureRequest, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> LoadedModel:
    monkeypatch.setattr(forced, "PREFILL_CHUNK", CHUNK)
    return wrap_model(tiny_model("qwen3").to(request.param), Path(), "in-memory")


def played(
    model: LoadedModel,
    turns: Sequence[Turn],
    beginnings: Beginnings | None,
    arms: Sequence[tuple[str, int | None, dict[str, str]]] = ARMS,
) -> Played:
    """Return every prediction of every cache, and the accounts."""
    methods = [make_method(*arm) for arm in arms]
    play = ForcedPlay(model, methods, 20, beginnings=beginnings)
    found = []
    try:
        for prompt, answer in turns:
            for stretch in play.turn(labelled(prompt), labelled(answer)):
                found.append(stretch.full)
                found += [logits for logits in stretch.of_methods if logits is not None]
        return found, play.stats()
    finally:
        play.close()


def assert_same(one: Played, other: Played) -> None:
    assert len(one[0]) == len(other[0])
    assert all(map(torch.equal, one[0], other[0]))
    assert one[1] == other[1]


def slots_in_use(beginnings: Beginnings) -> int:
    return sum(len(pool._users) for pool in beginnings.pools.full._pools.values())


SESSIONS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which text it begins with
        st.integers(0, 90),  # tokens of it
        st.lists(st.integers(1, 96), min_size=1, max_size=30),  # the rest of its prompt
        st.lists(st.integers(1, 96), min_size=1, max_size=20),  # its answer
    ),
    min_size=2,
    max_size=6,
)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sessions=SESSIONS)
@pytest.mark.parametrize("arms", [ARMS, [*ARMS, SUMS]], ids=["plain", "sums"])
def test_every_play_is_the_same_to_the_bit(
    model: LoadedModel, arms: list[Any], sessions: list[tuple[int, int, list[int], list[int]]]
) -> None:
    beginnings = made_for(model, arms)
    for text, tokens, rest, answer in sessions:
        turns = [(stem(text, tokens) + rest, answer), (rest, answer)]
        assert_same(played(model, turns, beginnings, arms), played(model, turns, None, arms))
        assert slots_in_use(beginnings) == len(beginnings._kept) <= BEGINNINGS
    beginnings.close()
    assert slots_in_use(beginnings) == 0


def tokens_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the rows of every forward."""
    seen: list[int] = []
    network = forced.run_network

    def counted(model: LoadedModel, packed: Any, wanted: list[int]) -> torch.Tensor:
        seen.append(sum(packed.rows))
        return network(model, packed, wanted)

    monkeypatch.setattr(forced, "run_network", counted)
    return seen


def test_whole_chunks_in_common_are_not_read_again(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    beginnings, seen = made_for(model), tokens_read(monkeypatch)
    full = ARMS[:1]
    for turns, read in [
        ([(stem(0, 70), [1])], 70),
        ([(stem(0, 70), [1])], 70 - 64),
        ([(stem(0, 40) + [9] * 30, [1])], 70 - 32),
        ([(stem(0, 64), [1])], 64 - 48),  # one token at least is read
        ([(stem(0, 15), [1])], 15),
        ([(stem(1, 70), [1])], 70),
    ]:
        seen.clear()
        played(model, turns, beginnings, full)
        assert sum(seen) == read


def test_the_newest_beginnings_are_kept(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    beginnings, seen = made_for(model), tokens_read(monkeypatch)
    texts = range(BEGINNINGS + 1)
    for number in [*texts[:-1], 0, texts[-1]]:  # text 1 is the least recently used
        played(model, [(stem(number, 40), [1])], beginnings, ARMS[:1])
    for number, read in [(0, 40 - 32), (1, 40)]:
        seen.clear()
        played(model, [(stem(number, 40), [1])], beginnings, ARMS[:1])
        assert sum(seen) == read


def test_sums_go_on_from_where_they_stood(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = [*ARMS, SUMS]
    beginnings, turns = made_for(model, arms), [(stem(0, 70), list(range(1, 30)))]
    played(model, turns, beginnings, arms)
    seen = tokens_read(monkeypatch)
    # Behind an earlier chunk than the last one, and by what was itself begun so.
    for tokens, read in [(40, 40 - 32), (70, 70 - 64), (60, 60 - 48)]:
        seen.clear()
        turns = [(stem(0, tokens), list(range(1, 30)))]
        with_sums = played(model, turns, beginnings, arms)
        assert seen[0] == min(read, CHUNK)
        assert_same(with_sums, played(model, turns, None, arms))
    # A play without such a method starts from them as well.
    assert_same(played(model, turns, beginnings), played(model, turns, None))


def test_a_play_that_broke_off_leaves_no_beginning(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    beginnings = made_for(model)
    turns = [(stem(0, 70), [1, 2])]
    network, calls = forced.run_network, iter(range(100))

    def failing(*given: Any) -> torch.Tensor:
        if next(calls) == 2:
            raise RuntimeError("out of memory")
        return network(*given)

    monkeypatch.setattr(forced, "run_network", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        played(model, turns, beginnings)
    assert not beginnings._kept
    assert_same(played(model, turns, beginnings), played(model, turns, None))
    assert len(beginnings._kept) == 1


def test_a_window_of_attention_leaves_no_beginning() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], num_local_experts=2,
        num_experts_per_tok=1, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    network = AutoModelForCausalLM.from_config(config).eval()
    model = wrap_model(network, Path(), "in-memory")
    beginnings = made_for(model)
    turns = [(stem(0, 70), [1, 2])]
    for _ in range(2):
        assert_same(played(model, turns, beginnings), played(model, turns, None))
    assert not beginnings._kept
