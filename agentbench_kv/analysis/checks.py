"""Whether arrays are a capture: every problem is one line that names array, finding and need."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.calibration import Calibration

FLOATS = (torch.float16, torch.float32)
LAST_POSITION = 10**8
"""Far past any session; what comes later would only ask for absurd amounts of memory."""

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class CaptureChecks:
    """Checks the arrays of one capture; every problem is a UsageError.

    Messages start with `source`; `present` is all names of the file, also those that are not read.
    """

    def __init__(self, source: str, arrays: Mapping[str, Tensor], present: Sequence[str]) -> None:
        self._source = source
        self._arrays = arrays
        self._present = present

    def names(self, required: Sequence[str], known: Sequence[str]) -> None:
        """Check that nothing is missing, and no name nearly one we read."""
        for name in required:
            if name not in self._arrays:
                found = ", ".join(sorted(self._present)) or "nothing"
                raise self._error(f"missing array {name!r}; expected q, k and v, found {found}")
        for name in set(self._present) - set(known):
            close = difflib.get_close_matches(name, set(known) - set(self._present), 1, 0.8)
            if close:
                raise self._error(f"unknown array {name!r}; did you mean {close[0]!r}?")

    def main(self) -> bool:
        """Check queries, keys and values; return whether they have a layer axis."""
        q, k, v = (self._main_array(name) for name in ("q", "k", "v"))
        if q.ndim not in (3, 4):
            raise self._shape("q", q, "[q_heads, tokens, head_dim], with or without a layer axis")
        heads = k.shape[-3] if k.ndim == q.ndim else 0
        expected = (*q.shape[:-3], heads, *q.shape[-2:])
        if not heads or k.shape != expected:
            raise self._shape("k", k, f"kv_heads by tokens by head_dim of q {list(q.shape)}")
        if v.shape != expected:
            raise self._shape("v", v, f"the shape of k {list(expected)}")
        if q.shape[-3] % heads:
            raise self._error(f"{q.shape[-3]} query heads are not a multiple of {heads} KV heads")
        return q.ndim == 4

    def positions(self, layers: int, length: int) -> Tensor:
        """Return the positions [tokens], 0, 1, … if the file has none."""
        positions = self.per_token("positions", layers, length, LAST_POSITION)
        if positions is None:
            return torch.arange(length)
        if length > 1 and int(positions.diff().min()) <= 0:
            at = int((positions.diff() <= 0).nonzero()[0]) + 1
            raise self._error(
                f"positions are not ascending: {int(positions[at])} at token {at} follows "
                f"{int(positions[at - 1])}"
            )
        return positions

    def per_token(
        self, name: str, layers: int, length: int, high: int | None = None
    ) -> Tensor | None:
        """Return an optional array of whole numbers [tokens] in [0, high], as int64."""
        array = self._arrays.get(name)
        if array is None:
            return None
        row = self._shared(name, array, layers, length)
        if array.dtype not in _INTEGERS:
            raise self._dtype(name, array, "whole numbers")
        wrong = (row < 0) if high is None else (row < 0) | (row > high)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            allowed = "at least 0" if high is None else f"0 to {high}"
            raise self._error(f"{name} {int(row[at])} at token {at}; expected {allowed}")
        return row.long()

    def moment(self, name: str, default: int, low: int) -> int:
        """Return an optional scalar position of at least `low`."""
        array = self._arrays.get(name)
        if array is None:
            return default
        values = array.reshape(-1)
        if not len(values) or bool((values != values[0]).any()):
            raise self._shape(name, array, "one number")
        if array.dtype not in _INTEGERS:
            raise self._dtype(name, array, "a whole number")
        if not low <= int(values[0]) <= LAST_POSITION + 1:
            limits = f"at least {low}, and no more than {LAST_POSITION + 1}"
            raise self._error(f"{name} is {int(values[0])}; expected {limits}")
        return int(values[0])

    def calibration(
        self, names: Sequence[str], layers: int, heads: int, head_dim: int
    ) -> Calibration | None:
        """Return TriAttention's statistics if the file has them."""
        found = [name for name in names if name in self._arrays]
        if not found:
            return None
        if missing := [name for name in names if name not in found]:
            raise self._error(f"missing array {missing[0]!r}: it goes with {', '.join(found)}")
        half = head_dim // 2
        real, imaginary, size = (self._statistic(n, (layers, heads, half)) for n in names[:3])
        frequencies = self._shared(names[3], self._numbers(names[3]), layers, half).float()
        return Calibration(torch.complex(real, imaginary), size, frequencies)

    def _statistic(self, name: str, shape: tuple[int, int, int]) -> Tensor:
        """Return a statistic [layers, q_heads, head_dim / 2]; one layer may lack its axis."""
        array = self._numbers(name)
        if array.ndim == 2 and shape[0] == 1:
            array = array[None]
        if tuple(array.shape) != shape:
            raise self._shape(name, array, f"{list(shape)}, layers by q_heads by head_dim / 2")
        return array.float()

    def _main_array(self, name: str) -> Tensor:
        array = self._arrays[name]
        if array.dtype not in FLOATS:
            raise self._dtype(name, array, "float16 or float32")
        if not array.numel():
            raise self._shape(name, array, "at least one token")
        return self._finite(name, array)

    def _numbers(self, name: str) -> Tensor:
        array = self._arrays[name]
        if not array.dtype.is_floating_point:
            raise self._dtype(name, array, "floating-point numbers")
        return self._finite(name, array)

    def _finite(self, name: str, array: Tensor) -> Tensor:
        # Layer by layer: the marks of a whole memory-mapped file would not be small.
        for part in array if array.ndim == 4 else (array,):
            finite = part.isfinite()
            if not bool(finite.all()):
                count = int((~finite).sum())
                raise self._error(f"array {name!r} has {count} NaN or infinite values")
        return array

    def _shared(self, name: str, array: Tensor, layers: int, width: int) -> Tensor:
        """Return [width] of an array that may repeat it for every layer."""
        row = array[0] if array.ndim == 2 and array.shape[0] == layers else array
        if tuple(row.shape) != (width,):
            raise self._shape(name, array, f"[{width}]")
        if bool((array != row).any()):
            raise self._error(f"array {name!r} differs between layers; expected one for all")
        return row

    def _shape(self, name: str, array: Tensor, expected: str) -> UsageError:
        return self._error(f"array {name!r} has shape {list(array.shape)}, expected {expected}")

    def _dtype(self, name: str, array: Tensor, expected: str) -> UsageError:
        found = str(array.dtype).removeprefix("torch.")
        return self._error(f"array {name!r} has dtype {found}, expected {expected}")

    def _error(self, message: str) -> UsageError:
        return UsageError(f"{self._source}: {message}")
