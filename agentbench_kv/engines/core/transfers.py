"""Between host and device without waiting, and between the streams of one device."""

from __future__ import annotations

from typing import Any, SupportsInt

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
    """A number on its way from a device to the host, which goes on until it reads it with `int`.

    Read once the host has waited for something later on the same stream, it is there already.
    """

    def __init__(self, number: SupportsInt) -> None:
        self._number = number
        self._copied: torch.cuda.Event | None = None
        if isinstance(number, Tensor) and number.device.type == "cuda":
            self._number = torch.empty_like(number, device="cpu", pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._copied = torch.cuda.current_stream(number.device).record_event()

    def __int__(self) -> int:
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._number)


def used_here(*tensors: Tensor) -> None:
    """Say that the current stream uses tensors of another one.

    Without it, their memory is handed out again as soon as the host lets go of them, though this
    stream has yet to read them.
    """
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
