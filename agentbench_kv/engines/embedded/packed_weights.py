"""Weights as the CPU's matrix products read them, laid out once instead of in every product.

A product of a few bf16 rows takes a half to a third of the time (docs/performance.md) and gives the
same bits: oneDNN, on which PyTorch runs, otherwise lays the weights out itself each time. On a
processor without bf16 products, where PyTorch multiplies them one by one, weights are float32 from
the start: an eighth of the time for a prompt, for two more bytes a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ROWS = 64  # that a product is expected to have; what is laid out for them is good for any number


class PackedLinear(nn.Module):
    """A linear layer on the CPU whose weight only products can read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # A plain attribute: to the functions of modules it is a tensor of no known layout.
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        """Return what the linear layer returns for rows [..., in_features]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            *(rows, self._packed, self.bias, "none", [], "")
        )
        return product


class WideLinear(nn.Module):
    """A bf16 linear layer that multiplies in float32; what it returns is rounded once."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = linear.weight.detach().float()
        self._bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, rows: Tensor) -> Tensor:
        """Return what the linear layer returns for rows [..., in_features]."""
        product = nn.functional.linear(rows.float(), self._weight, self._bias)
        return product.to(rows.dtype)


def has_bf16_products() -> bool:
    """Whether this machine's PyTorch multiplies bf16 through oneDNN, not element by element."""
    onednn: Any = torch.backends.mkldnn
    known = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return known is not None and bool(onednn.is_available()) and bool(known())


def can_pack() -> bool:
    """Whether such products take weights that were laid out before."""
    operations: Any = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return has_bf16_products() and all(hasattr(operations, name) for name in names)


def pack_weights(network: nn.Module) -> None:
    """Lay out the bf16 linear layers of a network on the CPU, in place; others stay as they are.

    A weight that two layers share, such as the embedding's, stays beside its other copy.
    """
    wide = not has_bf16_products()
    if not wide and not can_pack():
        return
    kind = WideLinear if wide else PackedLinear
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and _is_bf16(layer.weight):
                setattr(parent, name, kind(layer))


def _is_bf16(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype is torch.bfloat16
