"""Page tables without a GPU: SGLang fills them with Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

_ALLOCATOR = "sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator."


def register() -> None:
    """Put functions with the same results in the kernels' places."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for function in (alloc_extend, alloc_decode):
        HookRegistry.register(_ALLOCATOR + function.__name__, function, HookType.REPLACE)


def alloc_extend(
    allocator: Any,
    prefix_lens: Any,  # noqa: ARG001  the same on the device
    prefix_lens_cpu: torch.Tensor,
    seq_lens: Any,  # noqa: ARG001
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,  # noqa: ARG001
    num_new_pages: int | None = None,  # noqa: ARG001
) -> torch.Tensor | None:
    """Return slots for requests that grow from one length to another; None without room."""
    return _extend(allocator, prefix_lens_cpu, seq_lens_cpu, last_loc)


def alloc_decode(
    allocator: Any,
    seq_lens: Any,  # noqa: ARG001
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
) -> torch.Tensor | None:
    """Return a slot for each of some requests, given their lengths with it; None without room."""
    return _extend(allocator, seq_lens_cpu - 1, seq_lens_cpu, last_loc)


def _extend(
    allocator: Any, before: torch.Tensor, after: torch.Tensor, last: torch.Tensor
) -> torch.Tensor | None:
    page = allocator.page_size
    first, end = -(-before // page), -(-after // page)
    wanted = int((end - first).sum())
    if wanted > len(allocator.free_pages) and allocator.need_sort:
        allocator.merge_and_sort_free()
    if wanted > len(allocator.free_pages):
        return None
    pages = allocator.free_pages[:wanted].split((end - first).tolist())
    allocator.free_pages = allocator.free_pages[wanted:]
    slots = []
    lengths = zip(before.tolist(), after.tolist(), last.tolist(), pages, strict=True)
    for old, new, at, mine in lengths:
        held = min(-(-old // page) * page, new) - old
        fresh = (mine[:, None] * page + torch.arange(page)).flatten()[: new - old - held]
        slots.append(torch.cat([torch.arange(at + 1, at + 1 + held), fresh]))
    return torch.cat(slots)
