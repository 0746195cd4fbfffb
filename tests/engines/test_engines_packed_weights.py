"""Packed weights: the same products as PyTorch's linear layers, of bf16 on the CPU only."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from agentbench_kv.conformance.families import build_family, write_family
from agentbench_kv.engines.embedded import packed_weights
from agentbench_kv.engines.embedded.model import load_model
from agentbench_kv.engines.embedded.packed_weights import PackedLinear, can_pack, pack_weights

needs_onednn = pytest.mark.skipif(not can_pack(), reason="PyTorch has no bf16 products of oneDNN")


def packed_layers(network: nn.Module) -> int:
    return sum(isinstance(each, PackedLinear) for each in network.modules())


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (3,), (1, 8), (2, 65), (1, 0)])
def test_products_are_those_of_the_layer(rows: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(len(rows))
    layer = nn.Linear(96, 200, bias=bias).bfloat16()
    given = torch.randn(*rows, 96).bfloat16()
    with torch.inference_mode():
        found = PackedLinear(layer)(given)
    exact = given.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0.0)
    assert found.dtype == torch.bfloat16
    assert found.shape == exact.shape
    # One rounding to 8 bits of a sum that is a float's.
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=1e-5)


@needs_onednn
def test_rows_that_do_not_lie_one_after_the_other() -> None:
    layer = nn.Linear(64, 32, bias=False).bfloat16()
    given = torch.randn(1, 64, 9).bfloat16().transpose(1, 2)
    with torch.inference_mode():
        assert torch.equal(PackedLinear(layer)(given), PackedLinear(layer)(given.contiguous()))


@needs_onednn
@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe", "gpt-oss"])
def test_a_packed_network_predicts_what_it_did(family: str) -> None:
    network: Any = build_family(family).bfloat16().eval()
    packed = copy.deepcopy(network)
    pack_weights(packed)
    assert packed_layers(packed) > 0
    tokens = torch.arange(40)[None]
    with torch.inference_mode():
        wanted, found = network(tokens).logits, packed(tokens).logits
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)


@needs_onednn
def test_the_head_is_packed_beside_the_embedding_it_shares() -> None:
    network: Any = build_family("qwen2").bfloat16()
    network.config.tie_word_embeddings = True
    network.tie_weights()
    before = network.get_input_embeddings().weight.clone()
    pack_weights(network)
    assert isinstance(network.get_output_embeddings(), PackedLinear)
    assert torch.equal(network.get_input_embeddings().weight, before)


def test_other_dtypes_stay(tmp_path: Any) -> None:
    folder = write_family(tmp_path / "model", "qwen2")
    assert packed_layers(load_model(str(folder), "float32", "cpu").network) == 0
    found = packed_layers(load_model(str(folder), "bfloat16", "cpu").network)
    assert bool(found) == can_pack()


def test_without_the_operations_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "can_pack", lambda: False)
    network: Any = build_family("qwen2").bfloat16()
    pack_weights(network)
    assert packed_layers(network) == 0
