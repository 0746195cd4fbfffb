"""Blocks by physical length: a session holds fewer tokens than it has seen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from agentbench_kv.engines.serving.backend.ledger import Cut


class SessionBlocks:
    """The blocks of all requests, running or at rest, of a model with one KV cache group.

    `manager` is vLLM's `KVCacheManager`.
    """

    def __init__(self, manager: Any) -> None:
        (self._single,) = manager.coordinator.single_type_managers
        self.deficits: dict[str, int] = {}  # request -> logical minus physical length
        self.freed = 0  # blocks that events gave back since the start
        self._pool = manager.block_pool
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

    def shorten(self, request: str, cut: Cut) -> list[int]:
        """Free what an event leaves empty; return the blocks before.

        A block freed here is handed out in a later step, whose forward runs after the event.
        """
        blocks = self._single.req_to_blocks[request]
        before = [block.block_id for block in blocks]
        count = -(-cut.keep // self.size)
        self._single.req_to_blocks[request] = blocks[:count]
        self._single.num_cached_block[request] = count
        self._pool.free_blocks(reversed(blocks[count:]))
        self.freed += len(blocks) - count
        return before

    def rename(self, old: str, new: str) -> None:
        """Hand a request's blocks to another request."""
        for table in (self._single.req_to_blocks, self._single.num_cached_block):
            if old in table:
                table[new] = table.pop(old)

    def drop(self, request: str) -> None:
        """Free all blocks of a request at rest."""
        self._single.free(request)


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

        def allocate_new_blocks(
            self, request_id: str, num_tokens: int, num_tokens_main_model: int
        ) -> Any:
            missing = self.kvbench_deficits.get(request_id, 0)
            return super().allocate_new_blocks(
                request_id, num_tokens - missing, num_tokens_main_model - missing
            )

    Physical.__name__ = f"Physical{base.__name__}"
    return Physical
