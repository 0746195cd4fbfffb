"""A GPU that nobody may wait for, where there is none: the device `meta`.

Its tensors have shapes and nothing that a host could read: reading one is an error.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentbench_kv.engines.core.transfers import to_device
from agentbench_kv.kernels import dispatch, torch_backend
from agentbench_kv.registry import load_method, names

# What lets events fire, and methods find something to rank, in sessions of a few tokens.
_SHORT: dict[str, dict[str, Any]] = {
    "lagkv": {"lag": 4},
    "rkv": {"window": 8},
    "snapkv": {"window": 8},
    "triattention": {"protect": "none", "trigger": "every"},
}


def ranking() -> dict[str, dict[str, Any]]:
    """Return every method that ranks rows in an engine, with settings for short sessions."""
    classes = {name: load_method(name) for name in names("method")}
    return {
        name: _SHORT.get(name, {})
        for name, cls in classes.items()
        if cls.compresses and not (cls.spans or cls.messages or cls.offline)
    }


class Launched:
    """Stands for compiled kernels on `meta`: results have their shapes, nobody waits.

    Attention is added up by PyTorch, as on a GPU.
    """

    name = "launched"

    def ring_write(self, ring: Tensor, rows: Tensor, slots: Tensor) -> None:
        assert len(rows) == len(slots) <= len(ring)

    attention_mass = torch_backend.TorchBackend.attention_mass

    def select_top(self, scores: Tensor, budget: int, *_: Any) -> Tensor:
        return torch.empty((*scores.shape[:-1], budget), dtype=torch.int64, device=scores.device)

    def similarity_column_mean(self, keys: Tensor, _: float) -> Tensor:
        return torch.empty(keys.shape[:2], device=keys.device)

    def rope_rotate(self, keys: Any, table: Tensor | None, lengths: Any, *_: Any) -> None:
        assert (table is None) == (lengths is None)
        assert len(keys.layers)

    def compact_paged(self, tensors: Any, table: Tensor, kept: Tensor, *_: Any) -> Tensor:
        assert len(table) == len(kept)
        assert len(tensors)
        return torch.zeros((), dtype=torch.int64, device=kept.device)


# The last ones copy indices and values that are not where the tensor is.
_COPY = {
    getattr(torch.ops.aten, name)
    for name in ("_to_copy", "copy_", "index", "index_put", "index_put_")
}


class NoCopies(TorchDispatchMode):
    """Refuses copies between host and device, but for those of `to_device`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _COPY:
            places = {each.device.type for each in tree_leaves(args) if isinstance(each, Tensor)}
            places.add(torch.device(kwargs.get("device") or args[0].device).type)
            if len(places) > 1 and not called_by(to_device):
                raise AssertionError(f"{func} between {places} waits for the device")
        return func(*args, **kwargs)


def called_by(function: Any) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is function.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def refuse_waiting(monkeypatch: pytest.MonkeyPatch) -> NoCopies:
    """Make what would wait for the device `meta` an error, the rest of it within the result."""
    made = torch.tensor

    def tensor(*args: Any, **kwargs: Any) -> Tensor:
        if torch.device(kwargs.get("device") or "cpu").type != "cpu":
            raise AssertionError("torch.tensor(..., device=...) waits for the device: to_device")
        return made(*args, **kwargs)

    monkeypatch.setattr(dispatch, "active_backend", lambda _device="cpu": Launched())
    for module in ("ops", "paged"):
        monkeypatch.setattr(f"agentbench_kv.kernels.{module}.active_backend", lambda *_: Launched())
    monkeypatch.setattr(torch, "tensor", tensor)
    # As of long caches, whose attention is added up in parts.
    monkeypatch.setattr(torch_backend, "BLOCK_LOGITS", 8)
    return NoCopies()
