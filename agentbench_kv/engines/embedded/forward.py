"""A forward pass of the model over what was packed, and the empty caches it writes to."""

from __future__ import annotations

import torch
from torch import Tensor

from agentbench_kv.engines.core.rings import QueryBuffer
from agentbench_kv.engines.embedded.attention import Packed
from agentbench_kv.engines.embedded.model import LoadedModel, cache_shape
from agentbench_kv.engines.embedded.quantization import read_kv_dtype
from agentbench_kv.engines.embedded.session import SessionPools, WindowPools
from agentbench_kv.engines.embedded.slots import CachePools
from agentbench_kv.methods.base import Method

# Chunks depend on a session's own tokens only, so that its result does not on those beside it.
PREFILL_CHUNK = 512


def run_network(model: LoadedModel, packed: Packed, rows: list[int]) -> Tensor:
    """Feed what was packed; return the logits [rows, vocab] of the packed axis' chosen rows."""
    device = model.shape.device
    output = model.network(
        input_ids=torch.tensor([packed.tokens], device=device),
        position_ids=torch.tensor([packed.positions], device=device),
        use_cache=False,
        logits_to_keep=torch.tensor(rows, dtype=torch.int64, device=device),
        kvbench=packed.plan,
    )
    logits: Tensor = output.logits[0].float()
    return logits


def session_pools(model: LoadedModel, method: Method, kv_dtype: str = "") -> SessionPools:
    """Make the empty caches that sessions of a model under a method live in."""
    shape, attention = cache_shape(model, method), model.attention
    windows = None
    if attention.windowed:
        pools = CachePools(model.window_shape)
        windows = WindowPools(pools, attention.window, model.window_frequencies)
    queries = QueryBuffer(method.query_plan(), shape)
    form = read_kv_dtype(kv_dtype, method, windows=windows is not None)
    return SessionPools(CachePools(shape), windows, queries, model.frequencies, form)
