"""vLLM's blocks: held by physical length, as a session has fewer rows than tokens; their layouts.

Logically every layer is [blocks, kv_heads, block_size, 2 · head_dim], keys first. On a GPU a row is
that in memory too. On the CPU a (block, head) holds all keys, then all values, each in tiles that
suit the instruction set: `vec` has keys transposed, `amx` has tiles of 16 tokens by 2 elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.engines.core.ledger import Eviction
from agentbench_kv.engines.core.rows import PagedStore
from agentbench_kv.engines.core.transfers import to_device
from agentbench_kv.kernels import compact as compact_rows
from agentbench_kv.kernels import rope_rotate
from agentbench_kv.kernels.layout import PagedRows


class SessionBlocks:
    """The blocks of all requests, running or at rest, in vLLM's `KVCacheManager`.

    Each group of layers has its own; events shorten those of the `evicting` one. Layers with a
    window give theirs back by themselves.
    """

    def __init__(self, kv_cache_manager: Any, evicting: int) -> None:
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._single = self._managers[evicting]
        self.deficits: dict[str, int] = {}  # request -> logical minus physical length
        self.freed = 0  # blocks that events gave back since the start
        self._pool = kv_cache_manager.block_pool
        base: Any = type(self._single)
        self._single.__class__ = _by_physical_length(base)
        self._single.kvbench_deficits = self.deficits

    @property
    def free(self) -> int:
        """Blocks nobody holds."""
        return int(self._pool.get_num_free_blocks())

    @property
    def total(self) -> int:
        """Blocks there are; one of them is vLLM's placeholder."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return int(self._single.block_size)

    def held(self, request: str) -> int:
        """Return how many blocks a request has, over all groups."""
        count = len(self.first(request))
        for manager in self._managers:
            if manager is not self._single:
                # vLLM's placeholder stands for those before the window.
                blocks = reversed(manager.req_to_blocks.get(request, ()))
                count += sum(1 for _ in takewhile(lambda block: not block.is_null, blocks))
        return count

    def first(self, request: str, rows: int | None = None) -> Sequence[Any]:
        """Return a request's blocks in the evicting group, or the full ones of its first rows."""
        blocks: Sequence[Any] = self._single.req_to_blocks.get(request, ())
        return blocks if rows is None else blocks[: rows // self.size]

    def shorten(self, request: str, eviction: Eviction) -> list[int]:
        """Free what an event leaves empty; return the blocks before.

        A block freed here is handed out in a later step, whose forward runs after the event.
        """
        blocks = self._single.req_to_blocks[request]
        before = [block.block_id for block in blocks]
        count = -(-eviction.keep // self.size)
        self._single.req_to_blocks[request] = blocks[:count]
        self._single.num_cached_block[request] = count
        self._pool.free_blocks(reversed(blocks[count:]))
        self.freed += len(blocks) - count
        return before

    def cut(self, request: str, tokens: int, rows: int) -> None:
        """Free what lies behind the first tokens, of which the evicting group has so many rows.

        No block of theirs with a window has been given back.
        """
        for manager in self._managers:
            held = rows if manager is self._single else tokens
            count = -(-held // manager.block_size)
            blocks = manager.req_to_blocks[request]
            manager.req_to_blocks[request] = blocks[:count]
            manager.num_cached_block[request] = min(manager.num_cached_block.get(request, 0), count)
            self._pool.free_blocks(reversed(blocks[count:]))

    def rename(self, old: str, new: str) -> None:
        for manager in self._managers:
            for table in (manager.req_to_blocks, manager.num_cached_block):
                if old in table:
                    table[new] = table.pop(old)

    def drop(self, request: str) -> None:
        for manager in self._managers:
            manager.free(request)

    def share(self, request: str, name: str, tokens: int, given_up: list[str]) -> BlockPrefix:
        """Hold the full blocks of a request's first tokens for others, too.

        `given_up` takes the name when it is freed.
        """
        blocks = self._single.req_to_blocks[request][: tokens // self.size]
        self._pool.touch(blocks)
        return BlockPrefix(name, tokens, blocks, self._pool, given_up)


@dataclass
class BlockPrefix:
    """Full blocks that sessions begin with and none writes; one reference to each is its own."""

    name: str  # what workers call it
    rows: int
    blocks: Sequence[Any]  # vLLM's
    pool: Any
    given_up: list[str]
    freed: bool = False

    @property
    def rows_in_use(self) -> bool:
        # Once they are given back, nothing tells who has them.
        return not self.freed and any(block.ref_cnt > 1 for block in self.blocks)

    def free(self) -> None:
        self.freed = True
        self.pool.free_blocks(reversed(self.blocks))
        self.given_up.append(self.name)


@cache
def _by_physical_length(base: type) -> type:
    """Return `base` with its token counts made physical."""

    class Physical(base):
        kvbench_deficits: Mapping[str, int]

        def get_num_blocks_to_allocate(
            self,
            request_id: str,
            num_tokens: int,
            new_computed_blocks: Any,
            total_computed_tokens: int,
            num_local_computed_tokens: int,
            num_tokens_main_model: int,
            **kwargs: Any,
        ) -> int:
            missing = self.kvbench_deficits.get(request_id, 0)
            needed = super().get_num_blocks_to_allocate(
                request_id,
                num_tokens - missing,
                new_computed_blocks,
                total_computed_tokens - missing,
                num_local_computed_tokens - missing,
                num_tokens_main_model - missing,
                **kwargs,
            )
            return int(needed)

        def add_local_computed_blocks(
            self, request_id: str, new_computed_blocks: Any, *_: int
        ) -> None:
            # vLLM's own prefix cache is off, so these are of a shared prefix.
            self.block_pool.touch(new_computed_blocks)
            self.req_to_blocks[request_id].extend(new_computed_blocks)
            self.num_cached_block[request_id] = len(new_computed_blocks)

        def allocate_new_blocks(
            self, request_id: str, num_tokens: int, num_tokens_main_model: int
        ) -> Any:
            missing = self.kvbench_deficits.get(request_id, 0)
            return super().allocate_new_blocks(
                request_id, num_tokens - missing, num_tokens_main_model - missing
            )

    Physical.__name__ = f"Physical{base.__name__}"
    return Physical


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


class PackedStore:
    """A session's rows in CPU tiles: copied out, compacted, packed into its first blocks again.

    Rows move within the copy as they would in place; packing rewrites whole blocks, from the first
    in which a row moves. One layer at a time.
    """

    def __init__(self, caches: Sequence[Tensor], blocks: list[int], live: int, isa: str) -> None:
        self._caches = caches
        self._isa = isa
        self._size = caches[0].shape[2]
        self._blocks = torch.tensor(blocks[: -(-live // self._size)])
        self._live = live

    def keys(self, layer: int) -> Tensor:
        return self._rows(layer)[0]

    def values(self, layer: int) -> Tensor:
        return self._rows(layer)[1]

    def keep(self, kept: Tensor, positions: Tensor, extras: Sequence[Tensor], *, sort: bool) -> int:
        moved, budget = 0, kept.shape[-1]
        for layer in range(len(self._caches)):
            rows = [part[None] for part in self._rows(layer)]
            here = slice(layer, layer + 1)
            moved += compact_rows(
                *(rows[0], rows[1], positions[here], kept[here], self._live),
                extras=[each[here] for each in extras],
                sort=sort,
            )
            stay = int((kept[layer] == torch.arange(budget)).cumprod(-1).sum(-1).min())
            self._write(layer, rows[0][0, :, :budget], rows[1][0, :, :budget], stay)
        self._live = budget
        return moved

    def rotate(self, shifts: Tensor, frequencies: Tensor) -> None:
        for layer, shift in enumerate(shifts):
            keys, values = self._rows(layer)
            rope_rotate(keys[None, :, : shift.shape[-1]], shift[None], frequencies)
            self._write(layer, keys, values)

    def _rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return copies of a layer's keys and values [kv_heads, live, head_dim]."""
        keys, values = unpack_tiles(self._caches[layer][self._blocks], self._isa)
        # Unpacking may give views of a copy that holds both.
        return (
            _join(keys)[:, : self._live].contiguous(),
            _join(values)[:, : self._live].contiguous(),
        )

    def _write(self, layer: int, keys: Tensor, values: Tensor, stay: int = 0) -> None:
        """Pack a layer's rows into the session's first blocks, but for those that all stay.

        Blocks of a shared prefix are among those, and are not the session's to write.
        """
        first, count = stay // self._size, -(-keys.shape[1] // self._size)
        if first < count:
            behind = first * self._size
            keys, values = (
                _split(part[:, behind:], count - first, self._size) for part in (keys, values)
            )
            self._caches[layer][self._blocks[first:count]] = pack_tiles(keys, values, self._isa)


def paged_rows(caches: Sequence[Tensor]) -> tuple[PagedRows, PagedRows]:
    """Return keys and values of caches whose rows are contiguous in memory."""
    dim = caches[0].shape[-1] // 2
    halves = (slice(dim), slice(dim, None))
    keys, values = (PagedRows.of([cache[..., half] for cache in caches], "bhrd") for half in halves)
    return keys, values


def paged_store(keys: PagedRows, values: PagedRows, blocks: list[int], live: int) -> PagedStore:
    """Return the store of a session in `paged_rows`."""
    table = to_device(blocks, keys.layers[0].device, torch.int32)
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
