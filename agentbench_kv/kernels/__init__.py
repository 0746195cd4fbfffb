"""Row operations on KV caches: ring writes, attention mass, exact top-k, compaction.

One dispatch for every engine. The PyTorch implementations here are the reference; compiled backends
join through `use_backend` and must give the same results.
"""

from __future__ import annotations

from agentbench_kv.kernels.dispatch import active_backend, use_backend
from agentbench_kv.kernels.ops import attention_mass, compact, ring_write, select_top

__all__ = [
    "active_backend",
    "attention_mass",
    "compact",
    "ring_write",
    "select_top",
    "use_backend",
]
