"""What cached rows take at lower precision: codes with their scales and zero points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentbench_kv.errors import UsageError

_SCALE = 4  # bytes of a float32 scale, or of a float16 scale and a float16 zero point


@dataclass(frozen=True)
class KVDtype:
    """A precision of cached rows. Bytes are of the keys, or the values, of one row in one head."""

    name: str
    bits: int
    meaning: str
    scaled: bool = True  # whether every row has a scale of its own
    # KIVI: keys share scales over so many tokens, channel by channel, values over so many channels;
    # the last `residual` rows are held as the model computes them.
    group: int = 0
    residual: int = 0

    def side_bytes(self, head_dim: int) -> int:
        return -(-head_dim * self.bits // 8) + _SCALE * self.scaled

    def row_bytes(self, heads: int, head_dim: int) -> int:
        """Return bytes of keys and values of a token over some (layer, KV head)s."""
        return 2 * heads * self.side_bytes(head_dim)

    def held(self, heads: int, head_dim: int, itemsize: int) -> Callable[[int], int]:
        """Return what gives the bytes of so many rows over some (layer, KV head)s.

        `itemsize` is that of a value as the model computes it.
        """
        if not self.residual:
            return lambda rows: rows * self.row_bytes(heads, head_dim)
        codes = -(-head_dim * self.bits // 8)
        # A scale and a zero point for every channel of a group of tokens, or group of channels.
        value = codes + _SCALE * -(-head_dim // min(self.group, head_dim))
        whole = head_dim * itemsize

        def held(rows: int) -> int:
            keys, values = self.settled(rows)
            of_keys = keys * codes + keys // self.group * head_dim * _SCALE
            return heads * (
                of_keys + (rows - keys) * whole + values * value + (rows - values) * whole
            )

        return held

    def settled(self, rows: int) -> tuple[int, int]:
        """Return of how many rows KIVI has quantised the keys, and the values.

        Keys wait until a whole residual of them is there, values leave it one by one.
        """
        return rows // self.residual * self.residual, max(0, rows - self.residual)


# What llama.cpp stores itself, in blocks of so many values with a float16 scale: bytes of one.
BLOCK = 32
BLOCKS = {"q8_0": 34, "q4_0": 18}


KV_DTYPES = {
    each.name: each
    for each in (
        KVDtype(
            "int8", 8, "symmetric, a float32 scale per token and head (vLLM's int8_per_token_head)"
        ),
        KVDtype("int4", 4, "asymmetric, float16 scale and zero point per token and head"),
        KVDtype("fp8", 8, "e4m3 without scales, as vLLM's fp8 uncalibrated", scaled=False),
        KVDtype("kivi4", 4, "KIVI: 4 bits, groups of 32, residual of 128", group=32, residual=128),
        KVDtype("kivi2", 2, "KIVI: 2 bits, groups of 32, residual of 128", group=32, residual=128),
    )
}


def unknown_kv_dtype(asked: str, known: object) -> UsageError:
    names = ", ".join(known) if isinstance(known, tuple | dict) and known else "none but the dtype"
    return UsageError(f"--kv-dtype {asked}: the engine's cache has no such rows; it knows: {names}")
