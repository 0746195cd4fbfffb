"""Stand-ins that let SGLang 0.5.12 start on a machine without a GPU.

It imports CUDA packages it never calls there. Installed before its first import, in each of its
processes, and only if the server runs on the CPU.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

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
    import torch

    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in _OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # An operator lives as long as the library object.
    globals()["_library"] = library


def _stand_in_for_kernels() -> None:
    """Put empty kernel modules in place; whatever is really called says that it is missing.

    Names other than those imported without a guard must stay absent: SGLang asks for some of them
    to find out what it may use.
    """
    native, submodule = ModuleType(_NATIVE), ModuleType(_SUBMODULE)
    native.__path__ = []
    native.__version__ = "0"  # type: ignore[attr-defined]
    submodule.__getattr__ = _missing  # type: ignore[method-assign]
    native.kvcacheio = submodule  # type: ignore[attr-defined]
    sys.modules[_NATIVE], sys.modules[_SUBMODULE] = native, submodule


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{_SUBMODULE}.{name} needs a GPU")

    return refuse
