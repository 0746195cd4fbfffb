"""MemArt on the embedded engine: against whole contexts, and against its definition layer by layer.

The reference is Hugging Face's model over a cache that is given the rows which the definition
chooses for the queries that the model itself computes.
"""

from __future__ import annotations

import random
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from agentbench_kv.conformance.driver import TraceRecorder
from agentbench_kv.engines.base import EngineOptions, Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.errors import ContextLimitError, UsageError
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.memory.memart import MemArt
from agentbench_kv.registry import make_method

BLOCK = 8
NORMS, SUMS = ("softmax", "rr"), ("max", "sum")


class Others:
    def label(self, token: int) -> Phase:  # noqa: ARG002
        return Phase.OTHERS


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 64) for _ in range(count)]


def feed(engine: Any, name: str, tokens: list[int], answer: int = 1) -> list[int]:
    engine.extend(name, tokens, [Phase.OTHERS] * len(tokens))
    return list(engine.generate(name, Sampling(max_tokens=answer)))


def remember(engine: Any, bank: str, past: list[list[int]]) -> None:
    for number, tokens in enumerate(past):
        name = f"past {number}"
        engine.open(name, Others())
        feed(engine, name, tokens)
        engine.memorise(name, bank, len(tokens))
        engine.close(name)


def ask(engine: Any, name: str, question: list[int], answer: int = 1) -> list[int]:
    engine.open(name, Others())
    engine.attach(name, "bank")
    return feed(engine, name, question, answer)


def logits_of(network: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        found: Tensor = network(torch.tensor([tokens])).logits[0]
    return found


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("rope", ["raw", "last"])
@pytest.mark.parametrize("sets", ["layer", "shared"])
def test_with_all_blocks_it_is_the_whole_context(
    family: str, rope: str, sets: str, tiny_model: Any, make_engine: Any
) -> None:
    network, rng, seen = tiny_model(family), random.Random(1), TraceRecorder()
    reference = deepcopy(network)
    settings = {"topk": "100", "block": str(BLOCK), "retrieval_rope": rope, "sets": sets}
    engine = make_engine(network, "memart", None, settings, recorder=seen)
    past, question = ids(rng, 61), ids(rng, 9)
    remember(engine, "bank", [past])
    answer = ask(engine, "s", question, 20)
    whole = logits_of(reference, past + question + answer)
    for position, found in seen.logits["s"].items():
        torch.testing.assert_close(found, whole[len(past) + position - 1], rtol=1e-4, atol=1e-4)
    stats, again = engine.close("s"), 9 * (sets == "shared")
    assert (stats.restored, stats.prefill_tokens, stats.logical) == (61, 9 + again, 29)
    assert (stats.recomputed, stats.longest_prefill) == (again, 9)
    assert stats.peak_live == 61 + 9 + 19  # the newest token is not fed
    engine.shutdown()


class Spliced(DynamicCache):
    """A cache that begins, in every layer, with given rows."""

    def __init__(self, rows: list[tuple[Tensor, Tensor]], config: Any) -> None:
        super().__init__(config=config)
        for layer, (keys, values) in enumerate(rows):
            self.update(keys[None], values[None], layer)


def turned(keys: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """RoPE in float64, from its definition: channel pairs (f, f + d/2) as complex numbers."""
    half = keys.shape[-1] // 2
    pairs = torch.complex(keys[..., :half].double(), keys[..., half:].double())
    angles = positions[:, None].double() * frequencies.double()
    out = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([out.real, out.imag], -1)


def relevance(queries: Tensor, blocks: list[Tensor], normalise: str, aggregate: str) -> list[float]:
    """Equation 4 in plain loops: queries [q_heads, n, d], blocks of keys [kv_heads, rows, d]."""
    group = queries.shape[0] // blocks[0].shape[0]
    scores = torch.zeros(*queries.shape[:2], len(blocks), dtype=torch.float64)
    for head, rows in enumerate(queries.double()):
        for number, block in enumerate(blocks):
            own = block[head // group].double()
            best = torch.maximum(rows * own.amax(0), rows * own.amin(0)).sum(-1)
            scores[head, :, number] = best
    if normalise == "softmax":
        scores = scores.softmax(-1)
    else:
        ranks = (scores[..., None, :] > scores[..., :, None]).sum(-1) + 1
        scores = 1 / (ranks + 60.0)
    mean = scores.mean(0)
    found: list[float] = (mean.amax(0) if aggregate == "max" else mean.sum(0)).tolist()
    return found


@pytest.mark.parametrize(
    ("normalise", "aggregate", "scale", "rope"),
    [
        *((normalise, aggregate, "off", "raw") for normalise in NORMS for aggregate in SUMS),
        ("softmax", "max", "on", "raw"),
        ("softmax", "sum", "on", "last"),
        ("softmax", "max", "off", "last"),
        ("rr", "sum", "off", "last"),
    ],
)
def test_every_layer_brings_back_what_the_definition_says(
    normalise: str,
    aggregate: str,
    scale: str,
    rope: str,
    tiny_model: Any,
    make_engine: Any,
    monkeypatch: Any,
) -> None:
    network, rng, seen = tiny_model("qwen3"), random.Random(2), TraceRecorder()
    settings = {
        "topk": "3", "block": str(BLOCK), "normalise": normalise, "aggregate": aggregate,
        "scale": scale, "retrieval_rope": rope,
    }  # fmt: skip
    reference = deepcopy(network)
    engine = make_engine(network, "memart", None, settings, recorder=seen)
    past, question = [ids(rng, count) for count in (29, 8, 43)], ids(rng, 7)
    remember(engine, "bank", past)
    chosen: list[list[int]] = []
    choose = MemArt.choose

    def spy(self: MemArt, *asked: Any) -> Tensor:
        found = choose(self, *asked)
        chosen.append(found.tolist())
        return found

    monkeypatch.setattr(MemArt, "choose", spy)
    answer = ask(engine, "s", question, 12)
    layers = network.config.num_hidden_layers
    assert len(chosen) == layers
    assert all(rows == sorted(set(rows)) for rows in chosen)
    assert len({tuple(rows) for rows in chosen}) > 1, "layers choose for themselves"
    bank = [_raw(reference, tokens) for tokens in past]
    keys = [torch.cat([each[layer][0] for each in bank], 1) for layer in range(layers)]
    values = [torch.cat([each[layer][1] for each in bank], 1) for layer in range(layers)]
    frequencies, count = reference.model.rotary_emb.inv_freq, 3 * BLOCK
    at_front = torch.arange(count)
    spliced = [
        (turned(keys[n][:, rows], at_front, frequencies).float(), values[n][:, rows])
        for n, rows in enumerate(chosen)
    ]
    queries = _queries(reference)
    with torch.no_grad():
        cache = Spliced(spliced, reference.config)
        whole = reference(torch.tensor([question + answer]), None, None, cache).logits[0]
    for position, found in seen.logits["s"].items():
        torch.testing.assert_close(found, whole[position - 1], rtol=1e-4, atol=1e-4)
    starts, edges = [], [0, 29, 37, 80]
    for first, last in pairwise(edges):
        starts += list(range(first, last, BLOCK))
    ends = [*starts[1:], 80]
    for layer in range(layers):
        asked = queries[layer][:, : len(question)].double()
        if rope == "last":
            asked = turned(asked, count + torch.arange(len(question)), frequencies)
        if scale == "on":
            asked = asked / asked.shape[-1] ** 0.5
        blocks = [keys[layer][:, a:b] for a, b in zip(starts, ends, strict=True)]
        scores = relevance(asked, blocks, normalise, aggregate)
        order = sorted(range(len(blocks)), key=lambda n: (-scores[n], n))
        wanted: list[int] = []
        for number in order:
            wanted += list(range(starts[number], ends[number]))[: count - len(wanted)]
        assert chosen[layer] == sorted(wanted)
    engine.shutdown()


def _raw(network: Any, tokens: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Return each layer's keys before RoPE and values [kv_heads, tokens, head_dim]."""
    cache: Any = DynamicCache(config=network.config)
    with torch.no_grad():
        network(torch.tensor([tokens]), None, None, cache)
    back, frequencies = -torch.arange(len(tokens)), network.model.rotary_emb.inv_freq
    return [
        (turned(layer.keys[0], back, frequencies).float(), layer.values[0])
        for layer in cache.layers
    ]


def _queries(network: Any) -> dict[int, Tensor]:
    """Keep each layer's queries [q_heads, n, head_dim], before RoPE, of the next forward."""
    found: dict[int, Tensor] = {}
    for number, layer in enumerate(network.model.layers):

        def keep(_: Any, __: Any, out: Tensor, number: int = number) -> None:
            found[number] = out[0].transpose(0, 1)

        layer.self_attn.q_norm.register_forward_hook(keep)
    return found


@pytest.mark.parametrize("sets", ["layer", "shared"])
def test_forks_and_later_prompts_bring_back_their_own(
    sets: str, tiny_model: Any, make_engine: Any
) -> None:
    network, rng = tiny_model("qwen3"), random.Random(3)
    settings = {"topk": "2", "block": str(BLOCK), "sets": sets}
    engine = make_engine(network, "memart", None, settings)
    remember(engine, "bank", [ids(rng, 50), ids(rng, 40)])
    first, second, other = ids(rng, 5), ids(rng, 6), ids(rng, 4)
    said = ask(engine, "alone", first, 4)
    alone = feed(engine, "alone", second, 10)
    assert ask(engine, "s", first, 4) == said
    engine.fork("s", "twin", Others())
    twin = feed(engine, "twin", other, 10)
    assert feed(engine, "s", second, 10) == alone, "a fork's prompt changed its source's memory"
    assert ask(engine, "again", first, 4) == said
    assert feed(engine, "again", other, 10) == twin
    engine.rewind("again", 0)
    assert feed(engine, "again", first, 4) == said, "rewound to its beginning it is as new"
    engine.shutdown()


def test_a_bank_grows_by_what_a_session_said(tiny_model: Any, make_engine: Any) -> None:
    network, rng = tiny_model("qwen3"), random.Random(4)
    engine = make_engine(network, "memart", None, {"topk": "1", "block": str(BLOCK)})
    remember(engine, "bank", [ids(rng, 20)])
    ask(engine, "s", ids(rng, 9), 3)
    engine.memorise("s", "bank")
    assert engine._banks["bank"].rows == 20 + 9 + 2
    with pytest.raises(UsageError, match="has seen 11 tokens"):
        engine.memorise("s", "bank", 12)
    with pytest.raises(UsageError, match="has begun"):
        engine.attach("s", "bank")
    engine.forget("bank")
    engine.open("late", Others())
    with pytest.raises(KeyError):
        engine.attach("late", "bank")
    engine.shutdown()


def test_what_a_session_has_no_room_for_is_refused(tiny_model: Any, make_engine: Any) -> None:
    network, rng = tiny_model("qwen3"), random.Random(5)
    engine = make_engine(network, "memart", None, {"topk": "4", "block": str(BLOCK)})
    remember(engine, "bank", [ids(rng, 40)])
    engine.open("s", Others())
    engine.attach("s", "bank")
    room = engine.info.context_limit - 4 * BLOCK
    with pytest.raises(ContextLimitError):
        engine.extend("s", [1] * room, [Phase.OTHERS] * room)
    plain = make_engine(network, "full", None, {})
    plain.open("s", Others())
    feed(plain, "s", [1, 2, 3])
    with pytest.raises(UsageError, match="has no memory"):
        plain.memorise("s", "bank")
    for each in (engine, plain):
        each.shutdown()


def test_a_model_without_files_keeps_none(tiny_model: Any, tmp_path: Path) -> None:
    """Nothing tells it from another one."""
    method = make_method("memart", None, {})
    options = EngineOptions("mine", method, device="cpu", banks=tmp_path)
    with pytest.raises(UsageError, match="in memory alone"):
        EmbeddedEngine.create(options, model=tiny_model("qwen3"))
