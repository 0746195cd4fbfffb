"""What a session was asked and what an engine did in it, engine by engine the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from agentbench_kv.conformance.tracing import Event, Trace
from agentbench_kv.engines.base import FinishReason, KVStats

__all__ = ["EngineTrace", "Epoch", "Step", "epochs"]


@dataclass(frozen=True)
class Step:
    """One turn of a session: what to prefill, and when to stop.

    Attributes
    ----------
    max_tokens : int
        0 leaves the prompt for the next step's generation.
    stop_ids : frozenset of int
        As `Sampling.stop_token_ids`.
    stop_text : str
        A text that ends the generation; empty for none.
    own_stop : bool
        The text is matched by a function the engine cannot look into.
    cancel_after : int or None
        Cancel once so many tokens were read.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    stop_text: str = ""
    own_stop: bool = False
    cancel_after: int | None = None


@dataclass
class EngineTrace(Trace):
    """A trace of any engine, without logits.

    Attributes
    ----------
    turns : list of list of int
        Ids every step generated.
    reasons : list of FinishReason
        Why every step ended.
    after : list of KVStats
        Accounting after every step.
    kept_missing : str
        Why `events` are not those of `stats`; empty if they are.
    error : Exception or None
        What ended the session early.
    """

    turns: list[list[int]] = field(default_factory=list)
    reasons: list[FinishReason | None] = field(default_factory=list)
    after: list[KVStats] = field(default_factory=list)
    kept_missing: str = ""
    error: Exception | None = None


@dataclass(frozen=True)
class Epoch:
    """Part of a session between two losses of its rows.

    A loss undoes evictions: everything before it is computed again as one prefill without a mask.

    Attributes
    ----------
    positions : list of int
        Positions of the tokens that were generated in it.
    trace : Trace
        The session up to its end, with the events since its beginning.
    """

    positions: list[int]
    trace: Trace


def epochs(trace: EngineTrace) -> list[Epoch]:
    """Cut a session where its rows were lost, as its accounting says."""
    starts = [(0, 0), *trace.stats.restarts, (len(trace.events), len(trace.tokens))]
    found = []
    for (before, start), (until, end) in pairwise(starts):
        positions = [position for position in trace.decoded_at if start <= position < end]
        if positions:
            events = _seen(trace.events[before:until], positions)
            found.append(Epoch(positions, Trace(trace.tokens[: positions[-1] + 1], events=events)))
    return found


def _seen(events: list[Event], positions: list[int]) -> list[Event]:
    """Return the events some query of the epoch came after."""
    return [event for event in events if event.logical < positions[-1]]
