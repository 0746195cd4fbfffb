"""Traces: what every event of a session had before it, what it kept, and by which scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from agentbench_kv.analysis.captures import read_archive, write_archive
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Selection

REQUIRED = ("logical", "live", "positions", "kept", "score")
NAMES = (*REQUIRED, "phase")


@dataclass(frozen=True)
class EventTrace:
    """One event; tensors are [layers, heads, live], by ascending position in every head."""

    logical: int  # tokens ever seen
    positions: Tensor  # original position of every token that was cached before the event
    kept: Tensor  # bool, whether the event kept it
    scores: Tensor  # float32, NaN where always kept

    @classmethod
    def from_selection(cls, logical: int, positions: Tensor, selection: Selection) -> Self:
        """Build one from what an engine's observer sees; tensors are copied.

        `positions` is in cache order, which `selection.kept` indexes; the selection's scores go by
        ascending position.
        """
        ordered, order = positions.sort(-1)
        kept = torch.zeros_like(positions, dtype=torch.bool).scatter_(-1, selection.kept, True)
        parts = (ordered, kept.gather(-1, order), selection.scores)
        return cls(logical, *(part.detach().cpu().clone() for part in parts))

    @property
    def live(self) -> int:
        """Tokens per head before the event."""
        return self.positions.shape[-1]

    @property
    def budget(self) -> int:
        """Tokens per head after it."""
        return int(self.kept[0, 0].sum())

    @property
    def kept_positions(self) -> Tensor:
        """Original positions [layers, heads, budget] that stay, ascending."""
        return self.positions[self.kept].view(*self.positions.shape[:2], -1)


@dataclass(frozen=True)
class Trace:
    """The events of one session, in order."""

    events: list[EventTrace]
    phases: Tensor | None = None  # by logical position, [tokens]
    meta: dict[str, Any] = field(default_factory=dict)  # method, settings, model, session

    def save(self, path: Path) -> None:
        """Write the trace as `.npz` or `.safetensors`; UsageError if there is no event.

        Events lie one after the other along the last axis.
        """
        if not self.events:
            raise UsageError("the trace has no event: nothing was evicted in this session")
        arrays = {
            "logical": torch.tensor([event.logical for event in self.events]),
            "live": torch.tensor([event.live for event in self.events]),
            "positions": torch.cat([event.positions for event in self.events], -1).int(),
            "kept": torch.cat([event.kept for event in self.events], -1),
            "score": torch.cat([event.scores for event in self.events], -1),
        }
        if self.phases is not None:
            arrays["phase"] = self.phases
        write_archive(path, arrays, self.meta)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a trace file; UsageError says what is wrong with a file that is none."""
        archive = read_archive(path, NAMES)
        for name in REQUIRED:
            if name not in archive.arrays:
                found = ", ".join(archive.names) or "nothing"
                raise UsageError(
                    f"{path}: missing array {name!r}; expected a trace with "
                    f"{', '.join(REQUIRED)}, found {found}"
                )
        problem = _shape_problem(archive.arrays)
        events = [] if problem else list(_split(archive.arrays))
        problem = problem or _event_problem(events) or _phase_problem(archive.arrays, events)
        if problem:
            raise UsageError(f"{path}: {problem}")
        phases = archive.arrays.get("phase")
        return cls(events, None if phases is None else phases.long(), archive.meta)


def _shape_problem(arrays: Mapping[str, Tensor]) -> str:
    logical, live = arrays["logical"], arrays["live"]
    if logical.ndim != 1 or live.shape != logical.shape or not len(live):
        return "logical and live: expected two lists with one number per event"
    if logical.is_floating_point() or live.is_floating_point() or int(live.min()) < 1:
        return "logical and live: expected whole numbers, live at least 1"
    expected = (*arrays["positions"].shape[:2], int(live.sum()))
    for name in ("positions", "kept", "score"):
        shape = tuple(arrays[name].shape)
        if len(shape) != 3 or shape != expected or not all(shape):
            return f"array {name!r} has shape {list(shape)}, expected {list(expected)}"
    return ""


def _split(arrays: Mapping[str, Tensor]) -> Iterator[EventTrace]:
    sizes = arrays["live"].tolist()
    parts = (torch.split(arrays[name], sizes, -1) for name in ("positions", "kept", "score"))
    for logical, places, kept, scores in zip(arrays["logical"].tolist(), *parts, strict=True):
        yield EventTrace(logical, places.long(), kept.bool(), scores.float())


def _event_problem(events: Sequence[EventTrace]) -> str:
    for number, event in enumerate(events):
        places = event.positions
        if bool((places[..., 1:] <= places[..., :-1]).any()):
            return f"event {number}: positions are not ascending in every head"
        if int(places.min()) < 0 or int(places.max()) >= event.logical:
            return f"event {number}: a position is not in [0, {event.logical})"
        if bool((event.kept.sum(-1) != event.budget).any()) or not event.budget:
            return f"event {number}: heads keep different numbers of tokens, or none"
    return ""


def _phase_problem(arrays: Mapping[str, Tensor], events: Sequence[EventTrace]) -> str:
    phases = arrays.get("phase")
    if phases is None:
        return ""
    if phases.ndim != 1 or len(phases) < events[-1].logical:
        return f"phase has shape {list(phases.shape)}, expected at least {events[-1].logical}"
    if phases.is_floating_point() or int(phases.min()) < 0 or int(phases.max()) > 3:
        return "phase: expected 0 (think), 1 (act), 2 (tool) or 3 (others)"
    return ""
