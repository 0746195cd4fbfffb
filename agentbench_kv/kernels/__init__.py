"""Operations on KV caches: attention, its mass, ring writes, exact top-k, compaction, rotation.

One dispatch for every engine (`kernels.dispatch`): a library compiled from `csrc/` for the CPU or
for CUDA, and PyTorch operations that are the reference and the fallback. `kernels.paged` has the
forms for caches that lie in blocks.
"""

from __future__ import annotations

from agentbench_kv.kernels.dispatch import active_backend, describe_backend, use_backend
from agentbench_kv.kernels.layout import RowsBefore, SeenRows, ascending_rows, by_position
from agentbench_kv.kernels.ops import (
    aabb,
    aabb_score,
    attention,
    attention_mass,
    compact,
    ring_write,
    rope_rotate,
    select_top,
    similarity_column_mean,
)

__all__ = [
    "RowsBefore",
    "SeenRows",
    "aabb",
    "aabb_score",
    "active_backend",
    "ascending_rows",
    "attention",
    "attention_mass",
    "by_position",
    "compact",
    "describe_backend",
    "ring_write",
    "rope_rotate",
    "select_top",
    "similarity_column_mean",
    "use_backend",
]
