"""What a running engine's cache does to recorded tool calls: fidelity's `calls_exact`, anywhere.

Divergences need two caches at once, and only the embedded engine has them. Whether a call's every
token is the cache's own best needs one, on any engine that takes given answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentbench_kv.analysis.fidelity import FidelityCounts
from agentbench_kv.engines.base import Engine
from agentbench_kv.errors import KVBenchError
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.spans import Source, TurnNotes
from agentbench_kv.phases import PhaseMachine, PhaseTable, load_tokenizer, system_tokens
from agentbench_kv.run.recordings import Recording


@dataclass(frozen=True)
class ExactCalls:
    """Recorded calls, and those whose every token is the best by the cache as it then was."""

    right: int
    asked: int
    events: int  # evictions in those sessions
    seconds: float  # that playing them took


def exact_calls(engine: Engine, recordings: Sequence[Recording], protect: str = "") -> ExactCalls:
    """Play recorded sessions one after the other, with their answers given.

    `protect` is the method's. A KVBenchError if the engine has no room for one, or does not say
    what it would have drawn.
    """
    table = PhaseTable.for_tokenizer(load_tokenizer(engine.info.model_path))
    counts, events, began = FidelityCounts(), 0, time.perf_counter()
    for number, recording in enumerate(recordings):
        session = f"given|{number}|{recording.sample}"
        machine = PhaseMachine(table)
        engine.open(session, machine)
        try:
            for turn in recording.turns:
                ids, phases = zip(*turn.prompt, strict=True)
                if engine.wants_notes:
                    system = system_tokens(table, ids) if protect == "system" else 0
                    notes = TurnNotes([(len(ids), Source.DOCUMENT)], system=system)
                    engine.note(session, ids, notes)
                machine.label_many(ids)  # what is answered is labelled from where they end
                engine.extend(session, ids, phases)
                _count(engine, session, turn.answer, counts)
        finally:
            events += len(engine.close(session).events)
    right, asked = counts.sums["calls_exact"]
    return ExactCalls(int(right), int(asked), events, time.perf_counter() - began)


def _count(
    engine: Engine, session: str, answer: Sequence[tuple[int, Phase]], counts: FidelityCounts
) -> None:
    given = [token for token, _ in answer]
    generation = engine.force(session, given, predict=True)
    for _ in generation:
        pass
    if len(generation.best) != len(given):
        raise KVBenchError(
            f"engine {engine.info.name!r} said what it would have drawn of {len(generation.best)} "
            f"of {len(given)} given tokens"
        )
    right = [own == token for own, token in zip(generation.best, given, strict=True)]
    counts.add_calls(right, right, [phase is Phase.ACT for _, phase in answer])
    counts.end_call()
