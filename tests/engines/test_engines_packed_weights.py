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
from agentbench_kv.engines.embedded.packed_weights import (
    PackedLinear,
    WideLinear,
    can_pack,
    has_bf16_products,
    pack_weights,
)

needs_onednn = pytest.mark.skipif(not can_pack(), reason="PyTorch has no bf16 products of oneDNN")


KINDS = [pytest.param(PackedLinear, marks=needs_onednn), WideLinear]


def packed_layers(network: nn.Module) -> int:
    return sum(isinstance(each, PackedLinear | WideLinear) for each in network.modules())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (3,), (1, 8), (2, 65), (1, 0)])
def test_products_are_those_of_the_layer(kind: Any, rows: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(len(rows))
    layer = nn.Linear(96, 200, bias=bias).bfloat16()
    given = torch.randn(*rows, 96).bfloat16()
    with torch.inference_mode():
        found = kind(layer)(given)
    exact = given.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0.0)
    assert found.dtype == torch.bfloat16
    assert found.shape == exact.shape
    # One rounding to 8 bits of a sum that is a float's.
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_do_not_lie_one_after_the_other(kind: Any) -> None:
    layer = nn.Linear(64, 32, bias=False).bfloat16()
    given = torch.randn(1, 64, 9).bfloat16().transpose(1, 2)
    with torch.inference_mode():
        assert torch.equal(kind(layer)(given), kind(layer)(given.contiguous()))


@pytest.mark.parametrize("products", [pytest.param(True, marks=needs_onednn), False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe", "gpt-oss"])
def test_a_packed_network_predicts_what_it_did(
    family: str, products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "has_bf16_products", lambda: products)
    network: Any = build_family(family).bfloat16().eval()
    packed = copy.deepcopy(network)
    pack_weights(packed)
    assert packed_layers(packed) > 0
    tokens = torch.arange(40)[None]
    with torch.inference_mode():
        plain, found = network(tokens).logits, packed(tokens).logits
        exact = network.float()(tokens).logits
    # Rounding takes other ways, none of them farther from the same weights in float32.
    assert (found - exact).abs().mean() <= 1.1 * (plain - exact).abs().mean()


def test_the_head_is_packed_beside_the_embedding_it_shares() -> None:
    network: Any = build_family("qwen2").bfloat16()
    network.config.tie_word_embeddings = True
    network.tie_weights()
    before = network.get_input_embeddings().weight.clone()
    pack_weights(network)
    assert isinstance(network.get_output_embeddings(), PackedLinear | WideLinear)
    assert torch.equal(network.get_input_embeddings().weight, before)


def test_other_dtypes_stay(tmp_path: Any) -> None:
    folder = write_family(tmp_path / "model", "qwen2")
    assert packed_layers(load_model(str(folder), "float32", "cpu").network) == 0
    found = packed_layers(load_model(str(folder), "bfloat16", "cpu").network)
    assert bool(found) == (can_pack() or not has_bf16_products())


def test_without_the_operations_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "has_bf16_products", lambda: True)
    monkeypatch.setattr(packed_weights, "can_pack", lambda: False)
    network: Any = build_family("qwen2").bfloat16()
    pack_weights(network)
    assert packed_layers(network) == 0
