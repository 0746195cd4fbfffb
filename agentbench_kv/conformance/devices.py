"""Whether a method works on a device that is not the CPU, without one: `meta` stands for a GPU."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentbench_kv.analysis.replay import MethodInput
from agentbench_kv.methods.base import LayerView, Method, Queries

_ACROSS_DEVICES = {
    torch.ops.aten._to_copy, torch.ops.aten.copy_, torch.ops.aten.index, torch.ops.aten.index_put_,
}  # fmt: skip


class _OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations on tensors of the CPU and of another device, as a GPU does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        # A number or an index may be of the CPU.
        kinds = {each.device.type for each in tensors if each.dim()}
        if len(kinds) > 1 and func.overloadpacket not in _ACROSS_DEVICES:
            raise _DeviceError(f"{func} of tensors on the CPU and on the cache's device")
        return func(*args, **kwargs or {})


class _DeviceError(Exception):
    pass


def choose_elsewhere(method: Method, scene: MethodInput) -> None:
    """Let a method choose on `meta`, where tensors have no numbers; an error if the CPU mixes in.

    Only what comes before the first number that is read is checked.
    """

    def there(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.to("meta")

    moved = MethodInput(
        [LayerView(*map(there, (v.keys, v.values, v.positions, v.sums))) for v in scene.layers],
        [Queries(*map(there, (q.vectors, q.positions, q.phases))) for q in scene.queries],
        scene.now,
        scene.prompt,
        there(scene.phases),
        scene.system,
    )
    # Other errors say that it reads numbers, as choosing rows without kernels does.
    with _OneDevice(), suppress(RuntimeError):  # type: ignore[no-untyped-call]
        moved.select(method)
