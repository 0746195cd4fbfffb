"""Captures: queries, keys and values of one session, as a model computed them.

A capture is an archive: named arrays with a JSON note in one `.npz` or `.safetensors` file, never a
pickle. What is wrong with a file is one line that names array, finding and need.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.results.files import writing

REQUIRED = ("q", "k", "v")
CALIBRATION = ("q_mean_real", "q_mean_imag", "q_abs_mean", "inv_freq")
COVARIANCE = "q_covariance"
NAMES = (
    *(*REQUIRED, "phase", "positions", "tokens", "decoded", "prompt", "system", "now"),
    *(COVARIANCE, *CALIBRATION),
)
LAST_POSITION = 10**8
"""Far past any session; what comes later would only ask for absurd amounts of memory."""

_SIZES = ("head_dim / 2", "head_dim")  # of a statistic's last axes: one of pairs, two of channels
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# An honest archive of vectors hardly shrinks; one that unpacks to more of both is refused.
_UNPACKED, _GROWTH = 256 << 20, 20


@dataclass(frozen=True)
class Capture:
    """What a model computed for every token of one session, with nothing evicted.

    Tensors per token are int64 unless said otherwise; q, k and v are float16 or float32.
    """

    # Post-RoPE [layers, q_heads, tokens, head_dim]; head h belongs to KV head
    # h // (q_heads // kv_heads).
    q: Tensor
    k: Tensor  # post-RoPE [layers, kv_heads, tokens, head_dim]
    v: Tensor  # [layers, kv_heads, tokens, head_dim]
    positions: Tensor  # logical [tokens], ascending
    now: int  # of the event: tokens at earlier positions are candidates, the others the future
    prompt: int = 0  # tokens of the first prefill
    system: int | None = None  # tokens of the system message with its tools; None: not known
    phases: Tensor | None = None  # [tokens]: 0 think, 1 act, 2 tool, 3 others
    tokens: Tensor | None = None  # ids [tokens]
    decoded: Tensor | None = None  # bool [tokens], generated ones; if absent, all after the prompt
    calibration: Calibration | None = None  # TriAttention's statistics of the model
    layered: bool = True  # whether the file has a layer axis; without one there is a single layer
    meta: dict[str, Any] = field(default_factory=dict)  # model, session, task

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a capture file; UsageError says what is wrong with which array."""
        archive = read_archive(path, NAMES)
        return cls.from_arrays(archive.arrays, archive.meta, str(path), archive.names)

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, Tensor],
        meta: Mapping[str, Any] | None = None,
        source: str = "capture",
        names: Sequence[str] = (),
    ) -> Self:
        """Check arrays as a capture file names them, and build the capture.

        UsageError if an array is missing or wrong; its message starts with `source`. `names` is all
        the file holds, to name what was probably meant.
        """
        checks = _Checks(source, arrays, names or tuple(arrays))
        q, k, v = map(checks.main, REQUIRED)
        positions, decoded = checks.positions(), checks.per_token("decoded", 1)
        return cls(
            *(q, k, v, positions),
            now=checks.scalar("now", int(positions[-1]) + 1, int(positions[0]) + 1),
            prompt=checks.scalar("prompt", 0, 0),
            system=checks.scalar("system", 0, 0) if "system" in arrays else None,
            phases=checks.per_token("phase", 3),
            tokens=checks.per_token("tokens"),
            decoded=None if decoded is None else decoded.bool(),
            calibration=checks.calibration(),
            layered=checks.layered,
            meta=dict(meta or {}),
        )

    def save(self, path: Path) -> None:
        """Write the capture as `.npz` or `.safetensors`, its queries, keys and values as they are.

        UsageError if the suffix is another, PrerequisiteError if the place cannot be written.
        """
        write_archive(path, self.arrays(), self.meta)

    def arrays(self) -> dict[str, Tensor]:
        """Return the arrays of the file by name."""
        layers = slice(None) if self.layered else 0
        arrays = {
            "q": self.q[layers],
            "k": self.k[layers],
            "v": self.v[layers],
            "positions": self.positions,
            "now": torch.tensor(self.now),
            "prompt": torch.tensor(self.prompt),
        }
        if self.system is not None:
            arrays["system"] = torch.tensor(self.system)
        labels = {"phase": self.phases, "tokens": self.tokens, "decoded": self.decoded}
        arrays |= {name: tensor for name, tensor in labels.items() if tensor is not None}
        if self.calibration is not None:
            mean, abs_mean = self.calibration.mean[layers], self.calibration.abs_mean[layers]
            statistics = (mean.real, mean.imag, abs_mean, self.calibration.frequencies)
            arrays |= zip(CALIBRATION, statistics, strict=True)
            if self.calibration.covariance is not None:
                arrays[COVARIANCE] = self.calibration.covariance[layers]
        return arrays

    @property
    def layers(self) -> int:
        return self.q.shape[0]

    @property
    def q_heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def length(self) -> int:
        """Tokens it holds."""
        return self.q.shape[2]

    @property
    def candidates(self) -> int:
        """Tokens before `now`."""
        return self.before(self.now)

    def before(self, now: int) -> int:
        """Return how many of its tokens are at positions before `now`."""
        return int((self.positions < now).sum())

    def at(self, now: int) -> Capture:
        """Move the event to another position; UsageError if no token comes before it."""
        if self.before(now) < 1:
            raise UsageError(f"now={now}: expected a position after the capture's first token")
        return replace(self, now=now)

    def only_layers(self, chosen: Sequence[int]) -> Capture:
        """Return a capture of some layers, of all if none is chosen; UsageError if one is none."""
        for layer in chosen:
            if not 0 <= layer < self.layers:
                raise UsageError(f"layer {layer}: the capture has layers 0 to {self.layers - 1}")
        if not chosen:
            return self
        index = list(chosen)
        statistics = self.calibration
        if statistics is not None:
            statistics = statistics.part(index)
        q, k, v = self.q[index], self.k[index], self.v[index]
        return replace(self, q=q, k=k, v=v, calibration=statistics)

    def labels(self, purpose: str) -> Tensor:
        """Return the phases [tokens]; a UsageError without them names the `purpose`."""
        if self.phases is None:
            raise UsageError(
                f"{purpose} needs the phase of every token: the capture has no array 'phase' "
                "(0 think, 1 act, 2 tool, 3 others)"
            )
        return self.phases


def _shown(name: str) -> str:
    """Return a name of an array for an error; one that would not stay on its line, quoted."""
    return name if name.isidentifier() else repr(name)


class _Checks:
    """Checks the arrays of one capture; every problem is a UsageError that starts with `source`."""

    def __init__(self, source: str, arrays: Mapping[str, Tensor], present: Sequence[str]) -> None:
        """Check that nothing is missing, and no name of the file nearly one we read."""
        self._source = source
        self._arrays = arrays
        for name in REQUIRED:
            if name not in arrays:
                found = ", ".join(map(_shown, sorted(present))) or "nothing"
                raise self._error(f"missing array {name!r}; expected q, k and v, found {found}")
        for name in set(present) - set(NAMES):
            close = difflib.get_close_matches(name, set(NAMES) - set(present), 1, 0.8)
            if close:
                raise self._error(f"unknown array {name!r}; did you mean {close[0]!r}?")
        for name in REQUIRED:
            if arrays[name].dtype not in (torch.float16, torch.float32):
                raise self._dtype(name, "float16 or float32")
            if not arrays[name].numel():
                raise self._shape(name, "at least one token")
            self._check_finite(name)
        self.layered = self._check_shapes()
        self._layers, self._heads, self._length, self._head_dim = self.main("q").shape

    def main(self, name: str) -> Tensor:
        """Return queries, keys or values with a layer axis."""
        return self._arrays[name] if self.layered else self._arrays[name][None]

    def positions(self) -> Tensor:
        """Return the positions [tokens], 0, 1, … if the file has none."""
        positions = self.per_token("positions", LAST_POSITION)
        if positions is None:
            return torch.arange(self._length)
        if self._length > 1 and int(positions.diff().min()) <= 0:
            at = int((positions.diff() <= 0).nonzero()[0]) + 1
            raise self._error(
                f"positions are not ascending: {int(positions[at])} at token {at} follows "
                f"{int(positions[at - 1])}"
            )
        return positions

    def per_token(self, name: str, high: int | None = None) -> Tensor | None:
        """Return an optional array of whole numbers [tokens] in [0, high], as int64."""
        if name not in self._arrays:
            return None
        row = self._shared(name, self._length)
        if row.dtype not in _INTEGERS:
            raise self._dtype(name, "whole numbers")
        wrong = (row < 0) if high is None else (row < 0) | (row > high)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            allowed = "at least 0" if high is None else f"0 to {high}"
            raise self._error(f"{name} {int(row[at])} at token {at}; expected {allowed}")
        return row.long()

    def scalar(self, name: str, default: int, low: int) -> int:
        """Return an optional position of at least `low`."""
        if name not in self._arrays:
            return default
        values = self._arrays[name].reshape(-1)
        if not len(values) or bool((values != values[0]).any()):
            raise self._shape(name, "one number")
        if values.dtype not in _INTEGERS:
            raise self._dtype(name, "a whole number")
        if not low <= int(values[0]) <= LAST_POSITION + 1:
            limits = f"at least {low}, and no more than {LAST_POSITION + 1}"
            raise self._error(f"{name} is {int(values[0])}; expected {limits}")
        return int(values[0])

    def calibration(self) -> Calibration | None:
        """Return TriAttention's statistics if the file has them."""
        found = [name for name in (*CALIBRATION, COVARIANCE) if name in self._arrays]
        if not found:
            return None
        for name in (*CALIBRATION, *found[len(CALIBRATION) :]):
            if name not in found:
                raise self._error(f"missing array {name!r}: it goes with {', '.join(found)}")
            if not self._arrays[name].dtype.is_floating_point:
                raise self._dtype(name, "floating-point numbers")
            self._check_finite(name)
        half, whole = self._head_dim // 2, self._head_dim
        real, imaginary, size = (self._statistic(name, half) for name in CALIBRATION[:3])
        frequencies, mean = (
            self._shared(CALIBRATION[3], half).float(),
            torch.complex(real, imaginary),
        )
        spread = self._statistic(COVARIANCE, whole, whole) if COVARIANCE in found else None
        return Calibration(mean, size, frequencies, covariance=spread)

    def _statistic(self, name: str, *size: int) -> Tensor:
        """Return a statistic [layers, q_heads, *size]; one layer may lack its axis."""
        array, shape = self._arrays[name], (self._layers, self._heads, *size)
        if array.ndim == len(shape) - 1 and self._layers == 1:
            array = array[None]
        if array.shape != shape:
            words = " by ".join(["layers", "q_heads", *[_SIZES[len(size) - 1]] * len(size)])
            raise self._shape(name, f"{list(shape)}, {words}", array)
        return array.float()

    def _check_shapes(self) -> bool:
        """Check how queries, keys and values fit; return whether they have a layer axis."""
        q, k, v = (self._arrays[name] for name in REQUIRED)
        if q.ndim not in (3, 4):
            raise self._shape("q", "[q_heads, tokens, head_dim], with or without a layer axis")
        heads = k.shape[-3] if k.ndim == q.ndim else 0
        expected = (*q.shape[:-3], heads, *q.shape[-2:])
        if not heads or k.shape != expected:
            raise self._shape("k", f"kv_heads by tokens by head_dim of q {list(q.shape)}")
        if v.shape != expected:
            raise self._shape("v", f"the shape of k {list(expected)}")
        if q.shape[-3] % heads:
            raise self._error(f"{q.shape[-3]} query heads are not a multiple of {heads} KV heads")
        return q.ndim == 4

    def _check_finite(self, name: str) -> None:
        array = self._arrays[name]
        # Layer by layer: the marks of a whole memory-mapped file would not be small.
        for part in array if array.ndim == 4 else (array,):
            count = int((~part.isfinite()).sum())
            if count:
                raise self._error(f"array {name!r} has {count} NaN or infinite values")

    def _shared(self, name: str, width: int) -> Tensor:
        """Return [width] of an array that may repeat it for every layer."""
        array = self._arrays[name]
        row = array[0] if array.ndim == 2 and array.shape[0] == self._layers else array
        if tuple(row.shape) != (width,):
            raise self._shape(name, f"[{width}]")
        if bool((array != row).any()):
            raise self._error(f"array {name!r} differs between layers; expected one for all")
        return row

    def _shape(self, name: str, expected: str, array: Tensor | None = None) -> UsageError:
        shape = list((self._arrays[name] if array is None else array).shape)
        return self._error(f"array {name!r} has shape {shape}, expected {expected}")

    def _dtype(self, name: str, expected: str) -> UsageError:
        found = str(self._arrays[name].dtype).removeprefix("torch.")
        return self._error(f"array {name!r} has dtype {found}, expected {expected}")

    def _error(self, message: str) -> UsageError:
        return UsageError(f"{self._source}: {message}")


@dataclass(frozen=True)
class Archive:
    """What a file holds."""

    arrays: dict[str, Tensor]  # those asked for; of a safetensors file they are memory-mapped
    names: tuple[str, ...]  # all arrays of the file
    meta: dict[str, Any]  # the JSON note; empty if the file has none


def check_suffix(path: Path) -> str:
    """Return the suffix of a path; UsageError if it is none we read and write."""
    if path.suffix not in (".npz", ".safetensors"):
        raise UsageError(f"{path}: expected a file name that ends in .npz or .safetensors")
    return path.suffix


def read_archive(path: Path, wanted: Collection[str]) -> Archive:
    """Read the arrays in `wanted`, as far as the file has them; UsageError if it is no archive."""
    reader = {".npz": _read_npz, ".safetensors": _read_safetensors}[check_suffix(path)]
    if not path.is_file():
        raise UsageError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    try:
        return reader(path, wanted)
    except KVBenchError:
        raise
    except Exception as error:  # noqa: BLE001  the libraries that read a damaged file fail in any way
        reason = str(error).strip() or type(error).__name__
        raise UsageError(
            f"cannot read {path}: {reason.splitlines()[0]}; expected a {path.suffix} file as "
            "docs/analysis.md describes"
        ) from None


def _read_npz(path: Path, wanted: Collection[str]) -> Archive:
    # Opened here: numpy leaves a damaged archive open.
    with path.open("rb") as handle:
        _check_packed(path, handle, wanted)
        file = np.load(handle, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array, not an archive of named arrays")
        names = tuple(name for name in file.files if name != "meta")
        arrays = {name: _as_tensor(path, name, file[name]) for name in names if name in wanted}
        note = np.asarray(file["meta"]).reshape(-1).tolist() if "meta" in file.files else []
    return Archive(arrays, names, _parse_note(path, str(note[0]) if note else ""))


def _check_packed(path: Path, handle: BinaryIO, wanted: Collection[str]) -> None:
    """Refuse an archive before any of it is unpacked: too large, or arrays larger than they are."""
    if not zipfile.is_zipfile(handle):
        return
    with zipfile.ZipFile(handle) as archive:
        parts = [each for each in archive.infolist() if _array_name(each) in {*wanted, "meta"}]
        size, packed = sum(each.file_size for each in parts), path.stat().st_size
        if size > max(_UNPACKED, _GROWTH * packed):
            raise UsageError(
                f"{path}: {packed:,} bytes unpack to {size:,}; expected at most {_GROWTH} times as "
                "many: write it with numpy.savez"
            )
        for each in parts:
            _check_header(archive, each)
    handle.seek(0)


def _array_name(member: zipfile.ZipInfo) -> str:
    return member.filename.removesuffix(".npy")


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Refuse an array whose header promises more than there is: numpy would make room for it."""
    with archive.open(member) as file:
        if file.read(1) != np.lib.format.MAGIC_PREFIX[:1]:
            return  # no array, which numpy says itself
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        promised, there = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
    if promised > there and not dtype.hasobject:
        name = _array_name(member)
        raise ValueError(f"its array {name!r} of shape {list(shape)} has {there:,} bytes")


def _as_tensor(path: Path, name: str, array: np.ndarray[Any, Any] | bytes) -> Tensor:
    if isinstance(array, bytes):
        raise ValueError(f"its member {name!r} is not an array")
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{path}: array {name!r} has dtype {array.dtype}, expected numbers")
    if array.dtype.kind == "u":
        array = array.astype(np.int64)
    return torch.from_numpy(np.asarray(array, array.dtype.newbyteorder("="), order="C"))


def _read_safetensors(path: Path, wanted: Collection[str]) -> Archive:
    with safe_open(path, "pt") as file:
        names = tuple(file.keys())
        arrays = {name: _signed(file.get_tensor(name)) for name in names if name in wanted}
        note = (file.metadata() or {}).get("meta", "")
    return Archive(arrays, names, _parse_note(path, note))


def _signed(tensor: Tensor) -> Tensor:
    """Return int64 for the unsigned types that torch can hardly compute with."""
    unsigned = tensor.dtype in (torch.uint16, torch.uint32, torch.uint64)
    return tensor.to(torch.int64) if unsigned else tensor


def _parse_note(path: Path, note: str) -> dict[str, Any]:
    if not note:
        return {}
    try:
        meta = json.loads(note)
    except (ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict):
        raise UsageError(f"{path}: meta is not a JSON object")
    return meta


def write_archive(path: Path, arrays: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write arrays and note; `path` is replaced when all of it is written.

    UsageError if the suffix is not one we write, PrerequisiteError if the place cannot be written.
    """
    writer = {".npz": _write_npz, ".safetensors": _write_safetensors}[check_suffix(path)]
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in arrays.items()}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            writer(temporary, plain, json.dumps(dict(meta)))
            temporary.replace(path)
        except SafetensorError as error:
            # safetensors wraps the operating system's errors in a type of its own.
            raise OSError(str(error)) from error
        finally:
            temporary.unlink(missing_ok=True)


def _write_npz(path: Path, arrays: dict[str, Tensor], note: str) -> None:
    members: dict[str, Any] = {name: tensor.numpy() for name, tensor in arrays.items()}
    with path.open("wb") as file:
        np.savez(file, meta=np.array(note), **members)


def _write_safetensors(path: Path, arrays: dict[str, Tensor], note: str) -> None:
    # safetensors writes files that only their owner can read, whatever the umask.
    path.touch()
    mode = path.stat().st_mode
    save_file(arrays, path, metadata={"meta": note})
    path.chmod(mode)
