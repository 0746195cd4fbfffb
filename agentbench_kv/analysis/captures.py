"""Captures: queries, keys and values of one session, as a model computed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from agentbench_kv.analysis.archives import read_archive, write_archive
from agentbench_kv.analysis.checks import CaptureChecks
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.calibration import Calibration

REQUIRED = ("q", "k", "v")
OPTIONAL = ("phase", "positions", "tokens", "decoded", "prompt", "now")
CALIBRATION = ("q_mean_real", "q_mean_imag", "q_abs_mean", "inv_freq")
NAMES = (*REQUIRED, *OPTIONAL, *CALIBRATION)


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
        checks = CaptureChecks(source, arrays, names or tuple(arrays))
        checks.names(REQUIRED, NAMES)
        layered = checks.main()
        q, k, v = (arrays[name] if layered else arrays[name][None] for name in REQUIRED)
        layers, heads, length, head_dim = q.shape
        positions = checks.positions(layers, length)
        decoded = checks.per_token("decoded", layers, length, 1)
        return cls(
            q,
            k,
            v,
            positions,
            now=checks.moment("now", int(positions[-1]) + 1, int(positions[0]) + 1),
            prompt=checks.moment("prompt", 0, 0),
            phases=checks.per_token("phase", layers, length, 3),
            tokens=checks.per_token("tokens", layers, length),
            decoded=None if decoded is None else decoded.bool(),
            calibration=checks.calibration(CALIBRATION, layers, heads, head_dim),
            layered=layered,
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
        labels = {"phase": self.phases, "tokens": self.tokens, "decoded": self.decoded}
        arrays |= {name: tensor for name, tensor in labels.items() if tensor is not None}
        if self.calibration is not None:
            mean, abs_mean = self.calibration.mean[layers], self.calibration.abs_mean[layers]
            statistics = (mean.real, mean.imag, abs_mean, self.calibration.frequencies)
            arrays |= zip(CALIBRATION, statistics, strict=True)
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
            statistics = replace(
                statistics, mean=statistics.mean[index], abs_mean=statistics.abs_mean[index]
            )
        return replace(
            self, q=self.q[index], k=self.k[index], v=self.v[index], calibration=statistics
        )

    def labels(self, purpose: str) -> Tensor:
        """Return the phases [tokens]; a UsageError without them names the `purpose`."""
        if self.phases is None:
            raise UsageError(
                f"{purpose} needs the phase of every token: the capture has no array 'phase' "
                "(0 think, 1 act, 2 tool, 3 others)"
            )
        return self.phases
