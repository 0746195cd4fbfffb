"""Span-level methods: the budget holds, fixed blocks stay, logits equal those of a masked model.

The method manages sessions of the embedded engine while everything that is visible is written
down; the plain model then reads the same ids, blind to the blocks that were away (`masked_cache`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from agentbench_kv.conformance.masked_reference import largest_difference, tiny_model, visible
from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.conformance.tracing import TokenPhases, Trace, TraceRecorder, Turn, default_turns
from agentbench_kv.engines.base import Hints, Sampling, Source, TurnNotes
from agentbench_kv.engines.blocks import BlockEngine
from agentbench_kv.engines.embedded import EmbeddedEngine
from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.methods.blocks import SpanMethod

__all__ = ["check_spans", "drive_spans"]

TOLERANCE = 1e-4
PINNED = 2
"""The turn, from 0, whose prompt must never leave; a short one, for which every budget has room."""


def check_spans(
    method: SpanMethod,
    model: Any = None,
    *,
    turns: Sequence[Turn] | None = None,
    tolerance: float = TOLERANCE,
) -> list[CheckResult]:
    """Drive the embedded engine under a span-level method and check what it did.

    Parameters
    ----------
    method : SpanMethod
        Budget included; it must be below the tokens of the turns for blocks to leave.
    model : transformers causal LM, optional
        A tiny random Qwen3 if not given.
    turns : sequence of Turn, optional
        `default_turns` if not given.
    """
    model = tiny_model(layers=2) if model is None else model
    turns = list(turns or default_turns(int(model.config.vocab_size)))
    trace, resident = drive_spans(model, method, turns)
    over = [live for live in resident if live > method.budget_at(len(trace.tokens))]
    positions = "cache" if method.below().positions == "cache" else "logical"
    results = [
        CheckResult("blocks leave", trace.stats.evicted > 0),
        CheckResult("within the budget after every turn", not over, f"resident {over}"),
        CheckResult("accounting", *_accounting(trace)),
    ]
    results += [
        CheckResult("the pinned turn stays", *_pinned(model, trace, turns)),
        _recovery(method, trace),
    ]
    largest = largest_difference(model, trace, positions)
    detail = f"largest logit difference {largest:.2e} over {len(trace.logits)} positions"
    return [*results, CheckResult("masked-cache equality", largest <= tolerance, detail)]


def drive_spans(model: Any, method: SpanMethod, turns: Sequence[Turn]) -> tuple[Trace, list[int]]:
    """Run one session; return its trace and the tokens in the cache after every turn.

    The prompt of every turn counts as said by the user, as read from a document, in turn; that of
    turn `PINNED` is pinned.
    """
    recorder = TraceRecorder(["only"])
    options = EngineOptions(
        model="in-memory", method=method.below(), device="cpu", max_live_tokens=10**6
    )
    below = EmbeddedEngine.create(options, model=copy.deepcopy(model), recorder=recorder)
    engine = BlockEngine(below, method)
    trace, resident = recorder.traces["only"], []
    try:
        engine.open("only", TokenPhases())
        for number, turn in enumerate(turns):
            _play(engine, trace, turn, number)
            resident.append(engine.stats("only").live)
        trace.stats = engine.close("only")
    finally:
        engine.shutdown()
    return trace, resident


def _play(engine: BlockEngine, trace: Trace, turn: Turn, number: int) -> None:
    source = (Source.USER, Source.DOCUMENT)[number % 2]
    hints = Hints(pinned=number == PINNED)
    engine.note("only", turn.prompt, TurnNotes([(len(turn.prompt), source)], hints))
    engine.extend("only", turn.prompt, [TokenPhases().label(token) for token in turn.prompt])
    trace.add(turn.prompt, decoded=False)
    sampling = Sampling(max_tokens=turn.decode, temperature=1.0, seed=number)
    trace.add(list(engine.generate("only", sampling)), decoded=True)


def _pinned(model: Any, trace: Trace, turns: Sequence[Turn]) -> tuple[bool, str]:
    """Check that the last query sees all that was pinned."""
    if len(turns) <= PINNED:
        return True, "no such turn"
    first = sum(len(turn.prompt) + turn.decode for turn in turns[:PINNED])
    pinned = range(first, first + len(turns[PINNED].prompt))
    config = model.config
    seen = visible(trace, config.num_hidden_layers, config.num_key_value_heads)[:, :, -1]
    missing = [position for position in pinned if not bool(seen[:, :, position].all())]
    return not missing, f"gone: {missing}"


def _recovery(method: SpanMethod, trace: Trace) -> CheckResult:
    restores, restored = "restore_block" in method.needs, trace.stats.restored
    if restores and not restored:
        why = "none did in these turns; with a smaller budget and smaller blocks some do"
        return CheckResult("blocks come back", True, why, skipped=True)
    return CheckResult("blocks come back", restores or not restored, f"{restored} tokens")


def _accounting(trace: Trace) -> tuple[bool, str]:
    """Check that what came and went adds up; the last id is never fed."""
    stats = trace.stats
    expected = len(trace.tokens) - 1 - stats.evicted + stats.restored
    return stats.live == expected, f"live {stats.live}, expected {expected}"
