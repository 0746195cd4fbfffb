"""Chunks at the edge of what is kept anyway, whose scores say nothing."""

from __future__ import annotations

import pytest
import torch

from agentbench_kv.analysis.replay import MethodInput
from agentbench_kv.methods.base import LayerView, Queries
from agentbench_kv.registry import make_method

CHUNK, LIVE, WINDOW, HEADS, HEAD_DIM = 32, 200, 32, 2, 16
BUDGET = WINDOW + 2 * CHUNK


def scene(seed: int) -> MethodInput:
    draw = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, HEADS, LIVE, HEAD_DIM, generator=draw)
    vectors = torch.randn(HEADS, WINDOW, HEAD_DIM, generator=draw)
    last = torch.arange(LIVE - WINDOW, LIVE)
    queries = Queries(vectors, last, torch.zeros(WINDOW, dtype=torch.int64))
    view = LayerView(keys, values, torch.arange(LIVE).expand(HEADS, -1).contiguous())
    return MethodInput([view], [queries], LIVE, 0, torch.zeros(LIVE, dtype=torch.int64))


@pytest.mark.parametrize("name", ["snapkv", "rkv"])
def test_a_chunk_is_ranked_by_the_tokens_that_may_leave(name: str) -> None:
    """Windows have placeholders for scores: 0, which is the least of SnapKV's, R-KV's most."""
    chunked = make_method(name, BUDGET, {"chunk": CHUNK, "window": WINDOW})
    plain = make_method(name, BUDGET, {"window": WINDOW})
    edge, seen = (LIVE - WINDOW) // CHUNK, set()
    for seed in range(20):
        given = scene(seed)
        kept, scores = given.select(chunked).kept[0], given.select(plain).scores[0]
        for head in range(HEADS):
            own = scores[head, : LIVE - WINDOW].split(CHUNK)
            best = torch.stack([each.mean() for each in own]).topk(2).indices.tolist()
            assert (edge * CHUNK in kept[head].tolist()) == (edge in best)
            seen.add(edge in best)
    assert seen == {True, False}
