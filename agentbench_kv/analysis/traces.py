"""Traces: what every event of a session had before it, what it kept, and by which scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from agentbench_kv.analysis.captures import read_archive, write_archive
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Selection

_PER_ROW = ("positions", "kept", "score")
REQUIRED = ("logical", "live", *_PER_ROW)
NAMES = (*REQUIRED, "phase")


@dataclass(frozen=True)
class CacheEvent:
    """What one compression of a session left, which every engine can tell."""

    logical: int  # tokens ever seen
    kept: Tensor  # original positions [layers, heads, budget], in the order of the cache's rows

    @property
    def budget(self) -> int:
        """Tokens per head after it."""
        return self.kept.shape[-1]


@dataclass(frozen=True)
class ScoredEvent(CacheEvent):
    """A compression with what was there before it; tensors are [layers, heads, live]."""

    positions: Tensor  # original ones of the tokens cached before it, ascending in every head
    scores: Tensor  # of those tokens, float32; NaN where always kept

    @classmethod
    def from_selection(cls, logical: int, positions: Tensor, selection: Selection) -> Self:
        """Build one from what an engine's observer sees; tensors are copied.

        `positions` is in cache order, which `selection.kept` indexes; the selection's scores go by
        ascending position.
        """
        kept = positions.gather(-1, selection.kept)
        parts = (kept, positions.sort(-1).values, selection.scores)
        return cls(logical, *(part.detach().cpu().clone() for part in parts))

    @property
    def live(self) -> int:
        """Tokens per head before the event."""
        return self.positions.shape[-1]

    @cached_property
    def survived(self) -> Tensor:
        """Whether the event kept each token, bool."""
        rows = torch.searchsorted(self.positions.contiguous(), self.kept)
        return torch.zeros_like(self.positions, dtype=torch.bool).scatter_(-1, rows, True)


@dataclass(frozen=True)
class Trace:
    """The events of one session, in order."""

    events: list[ScoredEvent]
    phases: Tensor | None = None  # by logical position, [tokens]
    meta: dict[str, Any] = field(default_factory=dict)  # method, settings, model, session

    def save(self, path: Path) -> None:
        """Write the trace as `.npz` or `.safetensors`; UsageError if there is no event.

        Events lie one after the other along the last axis.
        """
        events = self.events
        if not events:
            raise UsageError("the trace has no event: nothing was evicted in this session")
        arrays = {
            "logical": torch.tensor([event.logical for event in events]),
            "live": torch.tensor([event.live for event in events]),
            "positions": torch.cat([event.positions for event in events], -1).int(),
            "kept": torch.cat([event.survived for event in events], -1),
            "score": torch.cat([event.scores for event in events], -1),
        }
        if self.phases is not None:
            arrays["phase"] = self.phases
        write_archive(path, arrays, self.meta)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a trace file; UsageError says what is wrong with a file that is none."""
        archive = read_archive(path, NAMES)
        arrays = archive.arrays
        for name in REQUIRED:
            if name not in arrays:
                found = ", ".join(archive.names) or "nothing"
                raise UsageError(
                    f"{path}: missing array {name!r}; expected a trace with "
                    f"{', '.join(REQUIRED)}, found {found}"
                )
        problem = _shape_problem(arrays) or _event_problem(arrays) or _phase_problem(arrays)
        if problem:
            raise UsageError(f"{path}: {problem}")
        phases = arrays.get("phase")
        events = [
            ScoredEvent(logical, places[kept].view(*places.shape[:2], -1), places, scores)
            for logical, places, kept, scores in _split(arrays)
        ]
        return cls(events, None if phases is None else phases.long(), archive.meta)


def _split(arrays: Mapping[str, Tensor]) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """Return every event's logical length, positions, kept marks and scores."""
    columns = zip(_PER_ROW, (torch.int64, torch.bool, torch.float32), strict=True)
    sizes = arrays["live"].tolist()
    parts = (torch.split(arrays[name].to(dtype), sizes, -1) for name, dtype in columns)
    return list(zip(arrays["logical"].tolist(), *parts, strict=True))


def _shape_problem(arrays: Mapping[str, Tensor]) -> str:
    logical, live = arrays["logical"], arrays["live"]
    if logical.ndim != 1 or live.shape != logical.shape or not len(live):
        return "logical and live: expected two lists with one number per event"
    if logical.is_floating_point() or live.is_floating_point() or int(live.min()) < 1:
        return "logical and live: expected whole numbers, live at least 1"
    expected = (*arrays["positions"].shape[:2], int(live.sum()))
    for name in _PER_ROW:
        shape = tuple(arrays[name].shape)
        if len(shape) != 3 or shape != expected or not all(shape):
            return f"array {name!r} has shape {list(shape)}, expected {list(expected)}"
    return ""


def _event_problem(arrays: Mapping[str, Tensor]) -> str:
    for number, (logical, places, kept, _) in enumerate(_split(arrays)):
        if bool((places[..., 1:] <= places[..., :-1]).any()):
            return f"event {number}: positions are not ascending in every head"
        if int(places.min()) < 0 or int(places.max()) >= logical:
            return f"event {number}: a position is not in [0, {logical})"
        budgets = kept.sum(-1)
        if bool((budgets != budgets[0, 0]).any()) or not int(budgets[0, 0]):
            return f"event {number}: heads keep different numbers of tokens, or none"
    return ""


def _phase_problem(arrays: Mapping[str, Tensor]) -> str:
    phases, last = arrays.get("phase"), int(arrays["logical"][-1])
    if phases is None:
        return ""
    if phases.ndim != 1 or len(phases) < last:
        return f"phase has shape {list(phases.shape)}, expected at least {last}"
    if phases.is_floating_point() or int(phases.min()) < 0 or int(phases.max()) > 3:
        return "phase: expected 0 (think), 1 (act), 2 (tool) or 3 (others)"
    return ""
