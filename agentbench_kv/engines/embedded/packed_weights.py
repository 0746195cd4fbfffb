"""Weights as the CPU's matrix products read them, laid out once instead of in every product.

A product of a few bf16 rows takes a half to a third of the time (docs/performance.md) and gives the
same bits: oneDNN, on which PyTorch runs, otherwise lays the weights out itself each time.
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


def can_pack() -> bool:
    """Whether this machine's PyTorch multiplies bf16 through oneDNN, and lets weights be packed."""
    operations: Any = torch.ops.mkldnn
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available() or not all(hasattr(operations, n) for n in names):
        return False
    return bool(operations._is_mkldnn_bf16_supported())


def pack_weights(network: nn.Module) -> None:
    """Pack the bf16 linear layers of a network on the CPU, in place; others stay as they are.

    A weight that two layers share, such as the embedding's, stays beside its packed copy.
    """
    if not can_pack():
        return
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and _is_packable(layer.weight):
                setattr(parent, name, PackedLinear(layer))


def _is_packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype is torch.bfloat16
