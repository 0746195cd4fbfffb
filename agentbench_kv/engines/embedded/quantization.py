"""Rows as a cache of lower precision would give them back: quantised and dequantised when written.

A simulation, for accuracy: rows lie in the pool as the model computes them, and are counted at the
bytes that codes, scales and zero points would take. Whoever scores, moves or attends to rows sees
the dequantised ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from agentbench_kv.engines.core.kv_dtype import KV_DTYPES, KVDtype, unknown_kv_dtype
from agentbench_kv.engines.embedded.cache import SessionCache
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method

Quantise = Callable[[Tensor], Tensor]
_FP8_MOST = 448.0  # of e4m3


def symmetric(rows: Tensor, bits: int) -> Tensor:
    """Quantise rows [..., head_dim] with a float32 scale each: codes from -top to top."""
    top = 2 ** (bits - 1) - 1
    exact = rows.float()
    scale = exact.abs().amax(-1, keepdim=True) / top
    codes = (exact / torch.where(scale > 0, scale, 1.0)).round().clamp(-top, top)
    found: Tensor = (codes * scale).to(rows.dtype)
    return found


def asymmetric(rows: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Quantise along `dim`, all of which shares a float16 scale and a float16 zero point."""
    levels = 2**bits - 1
    exact = rows.float()
    low, high = exact.amin(dim, keepdim=True), exact.amax(dim, keepdim=True)
    zero, scale = low.half().float(), ((high - low) / levels).half().float()
    codes = ((exact - zero) / torch.where(scale > 0, scale, 1.0)).round().clamp(0, levels)
    found: Tensor = (codes * scale + zero).to(rows.dtype)
    return found


def fp8(rows: Tensor) -> Tensor:
    return rows.clamp(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn).to(rows.dtype)


_ON_WRITE: dict[str, Quantise] = {
    "int8": partial(symmetric, bits=8),
    "int4": partial(asymmetric, bits=4),
    "fp8": fp8,
}


def on_write(kv_dtype: KVDtype | None) -> Quantise | None:
    """Return what is done to new rows of every head; None where nothing is, or not yet."""
    return None if kv_dtype is None else _ON_WRITE.get(kv_dtype.name)


def read_kv_dtype(name: str, method: Method, *, windows: bool = False) -> KVDtype | None:
    """Return a precision by its name, None for none; UsageError where it is not simulated."""
    if not name:
        return None
    if name not in KV_DTYPES:
        raise unknown_kv_dtype(name, KV_DTYPES)
    found = KV_DTYPES[name]
    if method.positions == "cache":
        raise UsageError(
            f"--kv-dtype {name}: {method.label} turns cached keys to other positions, which would "
            "quantise them again; use --set positions=logical or another preset"
        )
    if method.offline or method.spans:
        raise UsageError(
            f"--kv-dtype {name}: {method.label} brings saved rows back to the cache, which is not "
            "simulated at lower precision"
        )
    if found.residual and method.compresses:
        raise UsageError(
            f"--kv-dtype {name}: KIVI's keys share scales over {found.group} tokens, and "
            f"{method.label} evicts some of them; use --kv-dtype int8 or int4, or --method full"
        )
    if found.residual and windows:
        raise UsageError(f"--kv-dtype {name}: not simulated for layers that see a window")
    return found


def settle(cache: SessionCache, kv_dtype: KVDtype, before: tuple[int, int]) -> tuple[int, int]:
    """Quantise the rows that left KIVI's residual; return how many keys and values are.

    `before` is what this returned for the cache's rows so far.
    """
    (keys, values), (old_keys, old_values) = kv_dtype.settled(cache.length), before
    if keys <= old_keys and values <= old_values:
        return before
    cache.own()  # a fork still sees these rows as they were
    group = kv_dtype.group
    if keys > old_keys:
        # Whole groups, also behind a rewind into one.
        part = cache.keys[:, :, old_keys // group * group : keys]
        layers, heads, _, size = part.shape
        grouped = part.reshape(layers, heads, -1, group, size)
        part.copy_(asymmetric(grouped, kv_dtype.bits, dim=3).flatten(2, 3))
    if values > old_values:
        part = cache.values[:, :, old_values:values]
        channels = part.reshape(*part.shape[:3], -1, min(group, part.shape[3]))
        part.copy_(asymmetric(channels, kv_dtype.bits).flatten(3, 4))
    return max(keys, old_keys), max(values, old_values)
