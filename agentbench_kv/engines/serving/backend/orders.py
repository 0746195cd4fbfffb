"""What a scheduler tells its workers about one step: plain data, pickled between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentbench_kv.engines.serving.backend.ledger import Cut


@dataclass(frozen=True)
class Removal:
    """An event for the worker: which rows there are, in which blocks."""

    session: str
    number: int  # of the session's events, from 0
    cut: Cut
    blocks: list[int]  # the session's blocks before, in order; the first ones stay its own


@dataclass
class StepPlan:
    """What a worker does around one forward, in this order."""

    method: dict[str, Any] | None = None  # a document: go on with this one, no session is open
    dropped: list[str] = field(default_factory=list)  # sessions whose rows are gone
    # Events of sessions at rest; the step's forward may reuse their blocks.
    before: list[Removal] = field(default_factory=list)
    # Request -> (session, labeller recipe) for every request of the step.
    sessions: dict[str, tuple[str, str]] = field(default_factory=dict)
    # Request -> logical minus physical length during the forward, where it is not 0.
    deficits: dict[str, int] = field(default_factory=dict)
    after: dict[str, Removal] = field(default_factory=dict)  # request -> its event


@dataclass(frozen=True)
class RowsMoved:
    """How many rows a session's event moved, which only a worker knows."""

    session: str
    number: int
    moved: int
