"""Span-level methods: the budget holds, fixed blocks stay, logits equal those of a masked model.

The method manages sessions of the embedded engine while everything that is visible is recorded; the
plain model then reads the same ids, blind to the blocks that were away (`reference`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.driver import (
    DrivenSession,
    SessionTrace,
    TraceRecorder,
    TurnPlan,
    default_turns,
    in_memory_engine,
    random_sampling,
)
from agentbench_kv.conformance.reference import TOLERANCE, largest_difference, tiny_model, visible
from agentbench_kv.engines.core.block_engine import BlockEngine
from agentbench_kv.methods.spans import Hints, Source, SpanMethod, TurnNotes

PINNED = 2
"""The turn, from 0, whose prompt must never leave; a short one, for which every budget has room."""


def check_spans(
    method: SpanMethod,
    model: Any = None,
    *,
    turns: Sequence[TurnPlan] | None = None,
    tolerance: float = TOLERANCE,
) -> list[CheckResult]:
    """Drive the embedded engine under a span-level method and check what it did.

    By default `default_turns` on a tiny random Qwen3. The budget must be below the tokens of the
    turns for blocks to leave.
    """
    model = tiny_model(layers=2) if model is None else model
    turns = list(turns or default_turns(int(model.config.vocab_size)))
    trace, resident = drive_spans(model, method, turns)
    over = [live for live in resident if live > method.budget_at(len(trace.tokens))]
    positions = "cache" if method.below().positions == "cache" else "logical"
    stats = trace.stats
    # What came and went adds up; the last id is never fed.
    live = len(trace.tokens) - 1 - stats.evicted + stats.restored
    largest = largest_difference(model, trace, positions)
    detail = f"largest logit difference {largest:.2e} over {len(trace.logits)} positions"
    return [
        CheckResult("blocks leave", stats.evicted > 0),
        CheckResult("within the budget after every turn", not over, f"resident {over}"),
        CheckResult("accounting", stats.live == live, f"live {stats.live}, expected {live}"),
        CheckResult("the pinned turn stays", *_pinned(model, trace, turns)),
        _recovery(method, trace),
        CheckResult("masked-cache equality", largest <= tolerance, detail),
    ]


def drive_spans(
    model: Any, method: SpanMethod, turns: Sequence[TurnPlan]
) -> tuple[SessionTrace, list[int]]:
    """Run one session; return its trace and the tokens in the cache after every turn.

    The prompt of every turn counts as said by the user, as read from a document, in turn; that of
    turn `PINNED` is pinned.
    """
    recorder = TraceRecorder()
    engine = BlockEngine(in_memory_engine(model, method.below(), recorder), method)
    resident = []
    try:
        session = DrivenSession(engine, "only")
        for number, turn in enumerate(turns):
            source = (Source.USER, Source.DOCUMENT)[number % 2]
            notes = TurnNotes([(len(turn.prompt), source)], Hints(pinned=number == PINNED))
            engine.note("only", turn.prompt, notes)
            session.read(session.start(turn, random_sampling(turn, number)))
            resident.append(engine.stats("only").live)
        session.close()
    finally:
        engine.shutdown()
    trace = session.trace
    trace.logits, trace.events = recorder.logits["only"], recorder.events["only"]
    return trace, resident


def _pinned(model: Any, trace: SessionTrace, turns: Sequence[TurnPlan]) -> tuple[bool, str]:
    """Check that the last query sees all that was pinned; return the outcome and its detail."""
    if len(turns) <= PINNED:
        return True, "no such turn"
    first = sum(len(turn.prompt) + turn.max_tokens for turn in turns[:PINNED])
    pinned = range(first, first + len(turns[PINNED].prompt))
    config = model.config
    seen = visible(trace, config.num_hidden_layers, config.num_key_value_heads)[:, :, -1]
    missing = [position for position in pinned if not bool(seen[:, :, position].all())]
    return not missing, f"gone: {missing}"


def _recovery(method: SpanMethod, trace: SessionTrace) -> CheckResult:
    restores, restored = "restore_block" in method.needs, trace.stats.restored
    if restores and not restored:
        why = "none did in these turns; with a smaller budget and smaller blocks some do"
        return CheckResult("blocks come back", True, why, skipped=True)
    return CheckResult("blocks come back", restores or not restored, f"{restored} tokens")
