"""SGLang without a GPU: page tables in Python, and stand-ins for CUDA packages.

It imports CUDA packages it never calls there. The stand-ins are installed before its first import,
in each of its processes, and only if the server runs on the CPU.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

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


_OPERATORS = ("nms", "qnms")
_NATIVE = "sgl_kernel"
_SUBMODULE = "sgl_kernel.kvcacheio"


def install() -> None:
    """Make SGLang's imports work; idempotent."""
    if _NATIVE in sys.modules:
        return
    _declare_torchvision_operators()
    _stand_in_for_kernels()


def _declare_torchvision_operators() -> None:
    """Declare what torchvision's CUDA build would bring, or its import fails."""
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in _OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # An operator lives as long as the library object.
    globals()["_library"] = library


def _stand_in_for_kernels() -> None:
    """Put empty kernel modules in place; whatever is really called says that it is missing.

    Names other than those imported without a guard must stay absent: SGLang asks for some of them
    to find out what it may use. 0.5.12 imports a submodule, 0.5.23 what it calls `…_cpu`, for
    speculative decoding.
    """
    native, submodule = ModuleType(_NATIVE), ModuleType(_SUBMODULE)
    native.__path__ = []
    native.__version__ = "0"  # type: ignore[attr-defined]
    native.__getattr__ = _missing_on_cpu  # type: ignore[method-assign]
    submodule.__getattr__ = _missing  # type: ignore[method-assign]
    native.kvcacheio = submodule  # type: ignore[attr-defined]
    sys.modules[_NATIVE], sys.modules[_SUBMODULE] = native, submodule


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{_NATIVE}'s {name} is not here: this is SGLang without a GPU")

    return refuse


def _missing_on_cpu(name: str) -> Any:
    if not name.endswith("_cpu"):
        raise AttributeError(name)
    return _missing(name)
