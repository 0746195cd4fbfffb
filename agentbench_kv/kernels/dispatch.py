"""Which implementation of the operations is in use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import torch_backend


class Backend(Protocol):
    """The operations a backend implements; shapes and meaning are those of `kernels.ops`."""

    name: str

    def ring_write(self, ring: Tensor, rows: Tensor, slots: Tensor) -> None:
        """See `kernels.ops.ring_write`."""
        ...

    def attention_mass(
        self,
        queries: Tensor,
        keys: Tensor,
        gqa: str,
        query_positions: Tensor | None,
        key_positions: Tensor | None,
    ) -> Tensor:
        """See `kernels.ops.attention_mass`."""
        ...

    def select_top(self, scores: Tensor, budget: int, always: Tensor | None) -> Tensor:
        """See `kernels.ops.select_top`."""
        ...

    def compact(self, caches: Sequence[Tensor], kept: Tensor, length: int, sort: bool) -> int:
        """See `kernels.ops.compact`."""
        ...


_BACKENDS: dict[str, Backend] = {"torch": torch_backend.TorchBackend()}
_active: list[str] = []


def use_backend(name: str) -> None:
    """Switch to the backend called `name` for the rest of the process.

    Raises
    ------
    UsageError
        If there is no such backend in this installation.
    """
    if name not in _BACKENDS:
        raise UsageError(
            f"unknown kernel backend {name!r}; this installation has: {', '.join(_BACKENDS)} "
            "(set KVBENCH_KERNELS to one of them)"
        )
    _active[:] = [name]


def active_backend() -> Backend:
    """Return the backend in use; `KVBENCH_KERNELS` chooses the first one."""
    if not _active:
        use_backend(os.environ.get("KVBENCH_KERNELS", "torch"))
    return _BACKENDS[_active[0]]
