"""Between host and device without waiting, and between the streams of one device."""

from __future__ import annotations

from typing import Any, SupportsInt, cast

import torch
from torch import Tensor


def to_device(numbers: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy a list or an array of numbers to a device; the host goes on before they are there.

    From ordinary memory it would wait until all that the stream has to do before is done.
    """
    on_host = torch.tensor(numbers, dtype=dtype)
    if device.type != "cuda":
        return on_host.to(device)
    # PyTorch hands pinned memory out again only once the copy is over.
    return on_host.pin_memory().to(device, non_blocking=True)


class Arriving:
    """Numbers on their way from a device to the host, which goes on until it reads them.

    Read once the host has waited for something later on the same stream, they are there already.
    """

    def __init__(self, numbers: SupportsInt) -> None:
        self._numbers = numbers
        self._copied: torch.cuda.Event | None = None
        if isinstance(numbers, Tensor) and numbers.device.type == "cuda":
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.current_stream(numbers.device).record_event()

    def __int__(self) -> int:
        return int(self._there())

    def tolist(self) -> list[int]:
        """Return the numbers of a tensor of one dimension."""
        numbers: list[int] = cast("Tensor", self._there()).tolist()
        return numbers

    def _there(self) -> SupportsInt:
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers


def used_here(*tensors: Tensor) -> None:
    """Say that the current stream uses tensors of another one.

    Without it, their memory is handed out again as soon as the host lets go of them, though this
    stream has yet to read them.
    """
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
