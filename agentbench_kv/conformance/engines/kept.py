"""What an engine's events kept: told to a recorder in this process, or read from a trace folder."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch import Tensor


class KeptRecorder:
    """Kept sets of an engine that runs in this process."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Tensor]] = defaultdict(list)

    def on_logits(self, session: str, logical: int, logits: Tensor) -> None:
        """Logits are not compared: other engines do not show theirs."""

    def on_event(self, session: str, logical: int, kept_positions: Tensor) -> None:  # noqa: ARG002
        self._kept[session].append(kept_positions.detach().cpu().clone())

    def of(self, names: Sequence[str]) -> list[Tensor]:
        """Return original positions [layers, kv_heads, budget] of every event, in order.

        `names` is what the engine called the session, one name after the other.
        """
        return [kept for name in names for kept in self._kept[name]]


def read_kept(folder: Path, names: Sequence[str]) -> list[Tensor]:
    """As `KeptRecorder.of`, from the files that an engine wrote to its `EngineOptions.trace`."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    starts = [quote(name, safe="") + "." for name in names]
    return [load_file(f)["kept"] for start in starts for f in files if f.name.startswith(start)]


def takes_recorder(create: Any) -> bool:
    return "recorder" in inspect.signature(create).parameters
