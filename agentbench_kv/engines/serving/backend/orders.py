"""What a scheduler tells its workers about one step: plain data, pickled between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentbench_kv.engines.serving.backend.ledger import Cut

__all__ = ["Orders", "Outcome", "Removal"]


@dataclass(frozen=True)
class Removal:
    """An event for the worker: which rows there are, in which blocks.

    Attributes
    ----------
    session : str
    number : int
        Of the session's events, from 0.
    blocks : list of int
        The session's blocks before, in order; the first ones stay its own.
    """

    session: str
    number: int
    cut: Cut
    blocks: list[int]


@dataclass
class Orders:
    """One step's orders, in the order they are carried out.

    Attributes
    ----------
    method : dict or None
        A method's document: no session is open, go on with this one.
    dropped : list of str
        Sessions whose rows are gone.
    before : list of Removal
        Events of sessions at rest; before the step's forward, which may reuse their blocks.
    sessions : dict
        Request -> (session, labeller recipe) for every request of the step.
    deficits : dict
        Request -> logical minus physical length during the forward, where it is not 0.
    after : dict
        Request -> event once the forward has run.
    """

    method: dict[str, Any] | None = None
    dropped: list[str] = field(default_factory=list)
    before: list[Removal] = field(default_factory=list)
    sessions: dict[str, tuple[str, str]] = field(default_factory=dict)
    deficits: dict[str, int] = field(default_factory=dict)
    after: dict[str, Removal] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a worker did: rows moved by a session's event."""

    session: str
    number: int
    moved: int
