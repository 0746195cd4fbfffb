"""A pool of blocks that behaves like vLLM's, and its single-type manager, without vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

BLOCK, POOL = 8, 48


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False
    rows: dict[int, int] = field(default_factory=dict)  # offset -> the token written there


class Pool:
    def __init__(self, blocks: int = POOL) -> None:
        self.num_gpu_blocks = blocks + 1
        self.blocks = [Block(number) for number in range(1, blocks + 1)]

    def get_num_free_blocks(self) -> int:
        return sum(not block.ref_cnt for block in self.blocks)

    def get(self) -> Block:
        block = next(block for block in self.blocks if not block.ref_cnt)
        block.ref_cnt, block.rows = 1, {}
        return block

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "freed twice"
            block.ref_cnt -= 1


class Manager:
    """What the table uses of vLLM's single-type manager."""

    def __init__(self, pool: Pool) -> None:
        self.block_size, self.block_pool = BLOCK, pool
        self.req_to_blocks: dict[str, list[Block]] = {}
        self.num_cached_block: dict[str, int] = {}

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, found: Sequence[Block], *_: Any
    ) -> int:
        held = len(found) + len(self.req_to_blocks.get(request_id, ()))
        return max(0, -(-num_tokens // BLOCK) - held)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, _: int) -> None:
        held = self.req_to_blocks.setdefault(request_id, [])
        while len(held) * BLOCK < num_tokens:
            held.append(self.block_pool.get())

    def free(self, request_id: str) -> None:
        self.block_pool.free_blocks(self.req_to_blocks.pop(request_id, []))
        self.num_cached_block.pop(request_id, None)
