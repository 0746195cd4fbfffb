"""Which implementation of the operations is in use, per kind of device.

`KVBENCH_KERNELS` chooses: `auto` (the compiled library of a tensor's device, PyTorch where there is
none), `torch`, `cpu` or `cuda`. A library that cannot be built is replaced by PyTorch with one
warning under `auto`, and is an error where it was asked for by name.
"""

from __future__ import annotations

import logging
import os

import torch

from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.kernels import build
from agentbench_kv.kernels.native import NativeBackend
from agentbench_kv.kernels.torch_backend import TorchBackend

VARIABLE = "KVBENCH_KERNELS"
CHOICES = ("auto", "torch", "cpu", "cuda")

logger = logging.getLogger(__name__)

# Shapes and meaning of the operations are those of `kernels.ops` and `kernels.paged`.
Backend = NativeBackend | TorchBackend

_TORCH = TorchBackend()
_chosen: list[str] = []
_loaded: dict[str, Backend] = {}


def use_backend(name: str) -> None:
    """Switch to a backend of `CHOICES` for good; PrerequisiteError if it cannot be built."""
    if name not in CHOICES:
        raise UsageError(
            f"unknown kernel backend {name!r}; expected one of {', '.join(CHOICES)} ({VARIABLE})"
        )
    if name in ("cpu", "cuda"):
        _loaded[name] = _load(name)
    _chosen[:] = [name]


def active_backend(device: str | torch.device = "cpu") -> Backend:
    kind = torch.device(device).type
    if not _chosen:
        use_backend(os.environ.get(VARIABLE) or "auto")
    if _chosen[0] == "torch" or kind not in ("cpu", "cuda"):
        return _TORCH
    if _chosen[0] == "auto":
        return _loaded[kind] if kind in _loaded else _load_or_fall_back(kind)
    return _loaded[kind] if kind == _chosen[0] else _TORCH


def describe_backend(device: str | torch.device = "cpu") -> str:
    """Name the backend for a device, and what it was built with."""
    backend = active_backend(device)
    return f"{backend.name} ({backend.about})"


def _load(kind: str) -> Backend:
    path = build.library(kind)
    try:
        return NativeBackend(kind, path, build.toolchain(kind).about)
    except (OSError, AttributeError) as error:
        raise PrerequisiteError(
            f"the {kind} kernels at {path} do not load ({error}); delete that file"
        ) from error


def _load_or_fall_back(kind: str) -> Backend:
    try:
        _loaded[kind] = _load(kind)
    except KVBenchError as error:
        logger.warning(
            "kvbench: no compiled %s kernels, using PyTorch's operations instead: %s", kind, error
        )
        _loaded[kind] = TorchBackend(f"in place of {kind} kernels: {error}")
    return _loaded[kind]
