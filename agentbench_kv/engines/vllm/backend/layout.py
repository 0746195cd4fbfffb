"""vLLM's cache layouts: rows a kernel can read where they lie, or tiles of the CPU backend.

Logically every layer is [blocks, kv_heads, block_size, 2 · head_dim], keys first. On a GPU a row is
that in memory too. On the CPU a (block, head) holds all keys, then all values, each in tiles that
suit the instruction set: `vec` has keys transposed, `amx` has tiles of 16 tokens by 2 elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentbench_kv.engines.serving.backend.stores import CopiedStore, PagedStore
from agentbench_kv.kernels.layout import PagedRows

_TILE = 16


def unpack_tiles(cache: Tensor, isa: str) -> tuple[Tensor, Tensor]:
    """Return keys and values [blocks, kv_heads, block_size, head_dim] of CPU blocks; copies.

    `cache` is [blocks, kv_heads, block_size, 2 · head_dim]; `isa` is vLLM's choice: `vec`, `vec16`
    or `amx`.
    """
    blocks, heads, size, width = cache.shape
    dim = width // 2
    keys, values = cache.reshape(blocks, heads, 2, size * dim).unbind(2)
    if isa == "amx":
        keys = keys.reshape(blocks, heads, size // _TILE, dim // 2, _TILE, 2)
        values = values.reshape(blocks, heads, dim // _TILE, size // 2, _TILE, 2)
        keys, values = keys.permute(0, 1, 2, 4, 3, 5), values.permute(0, 1, 3, 5, 2, 4)
    else:
        keys = keys.reshape(blocks, heads, dim, size).transpose(-1, -2)
    shape = (blocks, heads, size, dim)
    return keys.reshape(shape), values.reshape(shape)


def pack_tiles(keys: Tensor, values: Tensor, isa: str) -> Tensor:
    """Return blocks that `unpack_tiles` takes apart into `keys` and `values`."""
    blocks, heads, size, dim = keys.shape
    if isa == "amx":
        keys = keys.reshape(blocks, heads, size // _TILE, _TILE, dim // 2, 2)
        values = values.reshape(blocks, heads, size // 2, 2, dim // _TILE, _TILE)
        keys, values = keys.permute(0, 1, 2, 4, 3, 5), values.permute(0, 1, 4, 2, 5, 3)
    else:
        keys = keys.transpose(-1, -2)
    flat = (blocks, heads, 1, size * dim)
    return torch.cat([keys.reshape(flat), values.reshape(flat)], 2).reshape(
        blocks, heads, size, 2 * dim
    )


class PackedStore(CopiedStore):
    """A session's rows in CPU tiles: copied out, compacted, packed into its first blocks again.

    Rows move within the copy as they would in place; packing rewrites whole blocks.
    """

    def __init__(self, caches: Sequence[Tensor], blocks: list[int], live: int, isa: str) -> None:
        self._caches = caches
        self._isa = isa
        self._size = caches[0].shape[2]
        self._blocks = torch.tensor(blocks[: -(-live // self._size)])
        rows = [
            [_join(part)[:, :live] for part in unpack_tiles(cache[self._blocks], isa)]
            for cache in caches
        ]
        super().__init__(torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows]))

    def write_back(self) -> None:
        """Pack what is left into the session's first blocks."""
        count = -(-self.keys.shape[2] // self._size)
        for cache, *rows in zip(self._caches, self.keys, self.values, strict=True):
            keys, values = (_split(part, count, self._size) for part in rows)
            cache[self._blocks[:count]] = pack_tiles(keys, values, self._isa)


def paged_store(caches: Sequence[Tensor], blocks: list[int], live: int) -> PagedStore:
    """Return the store of a session whose rows are contiguous in memory."""
    dim = caches[0].shape[-1] // 2
    keys = PagedRows.of([cache[..., :dim] for cache in caches], "bhrd")
    values = PagedRows.of([cache[..., dim:] for cache in caches], "bhrd")
    table = torch.tensor(blocks, dtype=torch.int32, device=caches[0].device)
    return PagedStore(keys, values, table, live)


def _join(blocks: Tensor) -> Tensor:
    """Join blocks [n, kv_heads, size, d] to rows [kv_heads, n · size, d]."""
    return blocks.transpose(0, 1).flatten(1, 2)


def _split(rows: Tensor, count: int, size: int) -> Tensor:
    """Split rows [kv_heads, n, d] into blocks [count, kv_heads, size, d], zeros behind the last."""
    heads, n, dim = rows.shape
    padded = rows.new_zeros(heads, count * size, dim)
    padded[:, :n] = rows
    return padded.reshape(heads, count, size, dim).transpose(0, 1)
