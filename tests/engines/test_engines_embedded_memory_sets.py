"""MemArt's one set for all layers (`sets=shared`), found by reading every prompt twice.

The reference is Hugging Face's model: the set is computed in numpy of its own queries and keys, and
logits are those behind the rows of that set.
"""

from __future__ import annotations

import random
from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from agentbench_kv.conformance.driver import TraceRecorder
from agentbench_kv.engines.base import Sampling
from agentbench_kv.engines.embedded import scheduler
from agentbench_kv.methods.base import Phase

BLOCK, TOPK = 8, 3
ROWS = BLOCK * TOPK
Array = NDArray[np.float64]


class Others:
    def label(self, token: int) -> Phase:  # noqa: ARG002
        return Phase.OTHERS


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 64) for _ in range(count)]


def give(engine: Any, name: str, tokens: list[int]) -> None:
    engine.extend(name, tokens, [Phase.OTHERS] * len(tokens))


def feed(engine: Any, name: str, tokens: list[int], answer: int) -> list[int]:
    give(engine, name, tokens)
    return list(engine.generate(name, Sampling(max_tokens=answer)))


def remember(engine: Any, past: list[list[int]]) -> None:
    for tokens in past:
        engine.open("past", Others())
        feed(engine, "past", tokens, 1)
        engine.memorise("past", "bank", len(tokens))
        engine.close("past")


def begin(engine: Any, name: str) -> None:
    engine.open(name, Others())
    engine.attach(name, "bank")


def turned(rows: Array, positions: NDArray[np.signedinteger[Any]], frequencies: Array) -> Array:
    """RoPE from its definition: channel pairs (f, f + d/2) as complex numbers."""
    half = rows.shape[-1] // 2
    pairs = (rows[..., :half] + 1j * rows[..., half:]) * np.exp(
        1j * positions[:, None] * frequencies
    )
    return np.concatenate([pairs.real, pairs.imag], -1)


def relevance(queries: Array, blocks: list[Array], normalise: str, aggregate: str) -> Array:
    """Equation 4: queries [q_heads, n, d], blocks of keys [kv_heads, rows, d] -> [blocks]."""
    copies = queries.shape[0] // blocks[0].shape[0]
    asked, scores = queries[:, :, None], []
    for block in blocks:
        low, high = (edge.repeat(copies, 0) for edge in (block.min(1), block.max(1)))
        scores.append(np.maximum(asked * low[:, None, None], asked * high[:, None, None]).sum(-1))
    whole = np.concatenate(scores, -1)
    if normalise == "softmax":
        shares = np.exp(whole - whole.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
    else:
        shares = 1 / (61.0 + (whole[..., None, :] > whole[..., :, None]).sum(-1))
    mean = shares.mean(0)
    found: Array = mean.max(0) if aggregate == "max" else mean.sum(0)
    return found


class Rows(DynamicCache):
    """A cache that holds given rows [kv_heads, n, head_dim] of every layer."""

    def __init__(self, rows: list[tuple[Tensor, Tensor]], config: Any) -> None:
        super().__init__(config=config)
        for layer, (keys, values) in enumerate(rows):
            self.update(keys[None], values[None], layer)


class Reference:
    """A session behind the past, read by Hugging Face's model."""

    def __init__(self, network: Any, past: list[list[int]], settings: dict[str, str]) -> None:
        self.network, self.settings = network, settings
        self.frequencies = network.model.rotary_emb.inv_freq.double().numpy()
        self.own: list[tuple[Tensor, Tensor]] = []  # the session's rows, by layer
        caches = [self._read(tokens, [], 0)[1] for tokens in past]
        self.keys, self.values = [], []
        for layer in range(network.config.num_hidden_layers):
            each = [cache[layer] for cache in caches]
            back = [turned(k.double().numpy(), -np.arange(k.shape[1]), self.frequencies)
                    for k, _ in each]  # fmt: skip
            self.keys.append(np.concatenate(back, 1))
            self.values.append(torch.cat([values for _, values in each], 1))
        edges = np.cumsum([0, *map(len, past)]).tolist()
        self.blocks = [
            list(range(start, min(start + BLOCK, last)))
            for first, last in pairwise(edges)
            for start in range(first, last, BLOCK)
        ]

    @property
    def held(self) -> int:
        return self.own[0][0].shape[1] if self.own else 0

    def wanted(self, tokens: list[int]) -> list[int]:
        """Return the rows that tokens need which see the session's own rows and no others."""
        first = ROWS + self.held
        queries = self._queries(tokens, first)
        if self.settings["retrieval_rope"] == "last":
            places = np.arange(first, first + len(tokens))
            queries = [turned(rows, places, self.frequencies) for rows in queries]
        ways = self.settings["normalise"], self.settings["aggregate"]
        layers = [
            relevance(asked, [keys[:, block] for block in self.blocks], *ways)
            for asked, keys in zip(queries, self.keys, strict=True)
        ]
        found: list[int] = []
        for number in np.argsort(-np.mean(layers, 0), kind="stable"):
            found += self.blocks[number][: ROWS - len(found)]
        return sorted(found)

    def follow(self, tokens: list[int], rows: list[int]) -> Tensor:
        """Read tokens behind rows of the past; return their logits."""
        before = []
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            front = turned(keys[:, rows], np.arange(ROWS), self.frequencies)
            parts = [(torch.from_numpy(front).float(), values[:, rows]), *self.own[layer:][:1]]
            keys_before, values_before = (torch.cat(each, 1) for each in zip(*parts, strict=True))
            before.append((keys_before, values_before))
        logits, cache = self._read(tokens, before, ROWS + self.held)
        self.own = [(keys[:, ROWS:], values[:, ROWS:]) for keys, values in cache]
        return logits

    def _queries(self, tokens: list[int], first: int) -> list[Array]:
        """Return each layer's queries [q_heads, n, head_dim] before RoPE."""
        found: list[Array] = []
        hooks = [
            layer.self_attn.q_norm.register_forward_hook(
                lambda _, __, out: found.append(out[0].transpose(0, 1).double().numpy())
            )
            for layer in self.network.model.layers
        ]
        self._read(tokens, self.own, first)
        for hook in hooks:
            hook.remove()
        return found

    def _read(
        self, tokens: list[int], before: list[tuple[Tensor, Tensor]], first: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        cache: Any = Rows(before, self.network.config)
        places = torch.arange(first, first + len(tokens))[None]
        with torch.no_grad():
            logits = self.network(torch.tensor([tokens]), None, places, cache).logits[0]
        return logits, [(layer.keys[0], layer.values[0]) for layer in cache.layers]


WAYS = [("softmax", "max", "raw"), ("softmax", "sum", "last"), ("rr", "max", "last"),
        ("rr", "sum", "raw")]  # fmt: skip


@pytest.mark.parametrize(("normalise", "aggregate", "rope"), WAYS)
@pytest.mark.parametrize("chunk", [512, 4])
def test_the_set_is_what_the_definition_says(
    normalise: str, aggregate: str, rope: str, chunk: int,
    tiny_model: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of two prompts, the second behind the first; one that is read in parts counts whole."""
    monkeypatch.setattr(scheduler, "PREFILL_CHUNK", chunk)
    network, rng, seen = tiny_model("qwen3"), random.Random(2), TraceRecorder()
    settings = {
        "topk": str(TOPK), "block": str(BLOCK), "normalise": normalise, "aggregate": aggregate,
        "retrieval_rope": rope, "sets": "shared",
    }  # fmt: skip
    past = [ids(rng, count) for count in (29, 8, 43)]
    reference = Reference(deepcopy(network), past, settings)
    engine = make_engine(network, "memart", None, settings, recorder=seen)
    remember(engine, past)
    begin(engine, "s")
    unfed: list[int] = []
    sets: list[list[int]] = []
    for question in (ids(rng, 7), ids(rng, 13)):
        begun = reference.held
        answer = feed(engine, "s", question, 6)
        rows = engine.recalled("s")
        assert rows.shape == (network.config.num_hidden_layers, ROWS)
        assert (rows == rows[0]).all()
        sets.append(rows[0].tolist())
        assert sets[-1] == reference.wanted([*unfed, *question])
        told = [*unfed, *question, *answer[:-1]]
        whole = reference.follow(told, sets[-1])
        for number in range(len(told) - len(answer), len(told)):
            found = seen.logits["s"][begun + number + 1]
            torch.testing.assert_close(found, whole[number], rtol=1e-4, atol=1e-4)
        unfed = answer[-1:]
    assert sets[0] != sets[1], "every prompt finds its own"
    stats = engine.close("s")
    assert (stats.prefill_tokens, stats.recomputed, stats.longest_prefill) == (40, 20, 13)
    assert (stats.decode_tokens, stats.logical, stats.live) == (12, 32, ROWS + 31)
    assert stats.peak_live == ROWS + 31


@pytest.mark.parametrize("pick", ["random", "last"])
def test_controls_find_it_without_looking(pick: str, tiny_model: Any, make_engine: Any) -> None:
    network, rng = tiny_model("qwen3"), random.Random(7)
    past, question = [ids(rng, 50), ids(rng, 41)], ids(rng, 9)
    found = []
    for sets in ("layer", "shared"):
        settings = {"topk": "3", "block": str(BLOCK), "pick": pick, "sets": sets}
        engine = make_engine(deepcopy(network), "memart", None, settings)
        remember(engine, past)
        begin(engine, "s")
        answer = feed(engine, "s", question, 8)
        found.append((answer, engine.recalled("s").tolist(), engine.close("s")))
    assert found[0] == found[1]
    rows = found[0][1]
    assert all(layer == rows[0] for layer in rows)
    # Blocks of 8 begin at 0, ..., 48 and at 50, ..., 90, where the last one has one row.
    if pick == "last":
        assert rows[0] == [*range(66, 73), *range(74, 91)]
    else:
        assert len(set(rows[0])) == len(rows[0]) == 3 * BLOCK
        assert rows[0] not in ([*range(24)], [*range(66, 73), *range(74, 91)])
    assert (found[1][2].prefill_tokens, found[1][2].recomputed) == (9, 0)


def test_it_hangs_on_nobody_beside(tiny_model: Any, make_engine: Any) -> None:
    """Alone, again, beside others in one forward, and after one that failed: the same."""
    network, rng = tiny_model("qwen3"), random.Random(8)
    settings = {"topk": "2", "block": str(BLOCK), "sets": "shared", "aggregate": "sum"}
    engine = make_engine(network, "memart", None, settings)
    remember(engine, [ids(rng, 50), ids(rng, 40)])
    questions = [ids(rng, count) for count in (6, 1, 700)]
    failures = [RuntimeError("no memory")]

    def fail(*_: Any) -> None:
        if failures:
            raise failures.pop()

    def play(part: str) -> list[Any]:
        names = [f"{part} {number}" for number in range(len(questions))]
        for name, tokens in zip(names, questions, strict=True):
            begin(engine, name)
            give(engine, name, tokens)
        with engine._scheduler._work:  # all in one forward
            running = [engine.generate(name, Sampling(max_tokens=5)) for name in names]
        answers = [list(each) for each in running]
        return [(said, engine.recalled(n).tolist(), engine.close(n))
                for n, said in zip(names, answers, strict=True)]  # fmt: skip

    alone = []
    for number, tokens in enumerate(questions):
        begin(engine, f"alone {number}")
        answer = feed(engine, f"alone {number}", tokens, 5)
        rows = engine.recalled(f"alone {number}").tolist()
        alone.append((answer, rows, engine.close(f"alone {number}")))
    assert play("beside") == alone
    # The last layer fails: all others have been asked, and are asked again.
    network.model.layers[-1].self_attn.q_proj.register_forward_pre_hook(fail)
    assert play("again") == alone
    assert not failures


def test_a_bank_that_grows_between_the_passes(tiny_model: Any, make_engine: Any) -> None:
    """What is added while a prompt is looked at comes back to the next one only."""
    network, rng = tiny_model("qwen3"), random.Random(9)
    settings = {"topk": "2", "block": str(BLOCK), "sets": "shared"}
    past, more, question = ids(rng, 40), ids(rng, 30), ids(rng, 600)
    engine = make_engine(network, "memart", None, settings)
    remember(engine, [past])
    begin(engine, "before")
    said, rows = feed(engine, "before", question, 3), engine.recalled("before")
    engine.open("late", Others())
    feed(engine, "late", more, 1)
    bank, state = engine._banks["bank"], engine._scheduler.get("late")
    begin(engine, "s")
    give(engine, "s", question)
    forwards = 0

    def grow(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 2:  # the second part of the first pass
            engine._memorise(state, bank, len(more))

    network.model.register_forward_pre_hook(grow)
    assert list(engine.generate("s", Sampling(max_tokens=3))) == said
    assert (engine.recalled("s") == rows).all()
    assert bank.rows == 70
    assert forwards == 4 + 2
