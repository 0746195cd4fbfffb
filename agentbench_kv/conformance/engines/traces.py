"""What a session was asked and what an engine did in it, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from agentbench_kv.conformance.tracing import Trace
from agentbench_kv.engines.base import FinishReason, KVStats


@dataclass(frozen=True)
class Step:
    """One turn of a session: what to prefill, and when to stop."""

    prompt: tuple[int, ...]
    max_tokens: int  # 0 leaves the prompt for the next step's generation
    stop_ids: frozenset[int] = frozenset()
    stop_text: str = ""
    own_stop: bool = False  # the text is matched by a function the engine cannot look into
    cancel_after: int | None = None  # tokens read before the cancel


@dataclass
class EngineTrace(Trace):
    """A trace of any engine, without logits; lists have one entry per step."""

    turns: list[list[int]] = field(default_factory=list)  # generated ids
    reasons: list[FinishReason | None] = field(default_factory=list)
    after: list[KVStats] = field(default_factory=list)  # accounting after the step
    kept_missing: str = ""  # why `events` are not those of `stats`; empty if they are
    error: Exception | None = None  # what ended the session early


def epochs(trace: EngineTrace) -> list[tuple[list[int], Trace]]:
    """Cut a session where its rows were lost, as its accounting says.

    Each part is the positions of the tokens generated in it, and the session up to its end with
    the events since its start: a loss undoes evictions, as everything before it is computed again
    in one prefill without a mask.
    """
    starts = [(0, 0), *trace.stats.restarts, (len(trace.events), len(trace.tokens))]
    found = []
    for (before, start), (until, end) in pairwise(starts):
        positions = [position for position in trace.decoded_at if start <= position < end]
        if positions:
            # Later events than the last token's query change nothing.
            last = positions[-1]
            events = [event for event in trace.events[before:until] if event.logical < last]
            found.append((positions, Trace(trace.tokens[: last + 1], events=events)))
    return found
