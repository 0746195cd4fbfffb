"""What an engine's events kept: told by a recorder in this process, or read from a trace folder."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from torch import Tensor

__all__ = ["KeptFiles", "KeptRecorder", "KeptSets", "takes_recorder"]


class KeptSets(Protocol):
    """Gives the kept sets of a session's events, in order."""

    def of(self, names: Sequence[str]) -> list[Tensor]:
        """Return original positions [layers, kv_heads, budget] event by event.

        Parameters
        ----------
        names : sequence of str
            What the engine called the session, one name after the other.
        """
        ...


class KeptRecorder:
    """The recorder of an engine that runs in this process."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Tensor]] = defaultdict(list)

    def on_logits(self, session: str, logical: int, logits: Tensor) -> None:
        """Logits are not compared: other engines do not show theirs."""

    def on_event(self, session: str, logical: int, kept_positions: Tensor) -> None:  # noqa: ARG002
        """Keep the positions an event kept."""
        self._kept[session].append(kept_positions.detach().cpu().clone())

    def of(self, names: Sequence[str]) -> list[Tensor]:
        """Return the kept sets recorded under these names."""
        return [kept for name in names for kept in self._kept[name]]


class KeptFiles:
    """The trace folder of an engine that runs in a process of its own.

    Parameters
    ----------
    folder : Path
        Given to the engine as `EngineOptions.trace`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, names: Sequence[str]) -> list[Tensor]:
        """Return the kept sets written under these names."""
        from safetensors.torch import load_file

        found = [path for name in names for path in self._files(name)]
        return [load_file(path)["kept"] for path in found]

    def _files(self, name: str) -> list[Path]:
        start = quote(name, safe="") + "."
        return sorted(
            path for path in self._folder.glob("*.safetensors") if path.name.startswith(start)
        )


def takes_recorder(create: Any) -> bool:
    """Return whether an engine's `create` takes a recorder."""
    return "recorder" in inspect.signature(create).parameters
