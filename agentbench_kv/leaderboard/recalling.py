"""What a memory brings back in a replay: from the model itself, in trials that the check draws.

Lengths follow from the records, so every trial's account does; which rows come back only the model
knows. It is told the same past, is given the recorded answers, and says what came back.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.engines.base import Engine
from agentbench_kv.errors import CapacityError, EngineGoneError, KVBenchError, MemoryLostError
from agentbench_kv.leaderboard.evidence import CUT_OFF, Checks, Fault, Note, RunEvidence, Stop
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.memory.memart import MemArt
from agentbench_kv.phases import TokenPhases
from agentbench_kv.results.records import Metric, TrialRecord
from agentbench_kv.results.run_reader import TrialKey
from agentbench_kv.run.engines import start_engine
from agentbench_kv.run.runner import engine_options

T = TypeVar("T")

_DRAWN = 5  # trials that the model plays, as a rerun does
# Metrics of a task that hang on which rows came back: sums over them, and what follows from these.
_SUMS = ("evidence_recall_right", "recalled_total")
_DERIVED = (
    *("best_layer_evidence_right", "best_layer_evidence_asked"),
    *("best_layer_message_right", "best_layer_message_asked"),
)
_NAMES = (*_SUMS, *_DERIVED)
# Near ties may fall otherwise on another machine; they change some blocks of many.
_MOST_OTHERS = 0.05
# No room for a model, or an engine that died.
_OF_THIS_MACHINE = (CapacityError, EngineGoneError, MemoryLostError, OSError)


@dataclass
class RecordedBanks:
    """The banks of a replay: their lengths, and a model's own ones while it plays along."""

    method: MemArt
    model: Engine | None = None
    failed: str = ""  # why the model plays along no more
    _rows: Counter[str] = field(default_factory=Counter)

    def open(self, session: str) -> None:
        self._play(lambda model: model.open(session, TokenPhases()))

    def extend(self, session: str, tokens: Sequence[int]) -> None:
        phases = [Phase.OTHERS] * len(tokens)
        self._play(lambda model: model.extend(session, tokens, phases))

    def answer(self, session: str, tokens: Sequence[int]) -> None:
        """Have the model take recorded tokens as its answer."""
        if tokens:
            self._play(lambda model: deque(model.force(session, tokens), maxlen=0))

    def memorise(self, session: str, bank: str, tokens: int, start: int) -> int:
        self._rows[bank] += tokens - start
        self._play(lambda model: model.memorise(session, bank, tokens, start))
        return tokens - start

    @property
    def passes(self) -> int:
        """How often a prompt is read behind a bank."""
        return self.method.passes

    def attach(self, session: str, bank: str) -> int:
        """Return how many rows a session gets."""
        self._play(lambda model: model.attach(session, bank))
        return min(self.method.topk * self.method.block, self._rows[bank])

    def recalled(self, session: str) -> NDArray[np.int64]:
        found = self._play(lambda model: model.recalled(session))
        return np.zeros((0, 0), np.int64) if found is None else found

    def close(self, session: str) -> None:
        self._play(lambda model: model.close(session))

    def forget(self, bank: str) -> None:
        self._rows.pop(bank, None)
        self._play(lambda model: model.forget(bank))

    def _play(self, call: Callable[[Engine], T]) -> T | None:
        """Ask the model; what this machine cannot do says nothing of the record."""
        if self.model is None:
            return None
        try:
            return call(self.model)
        except _OF_THIS_MACHINE as error:
            self.failed, self.model = str(error), None
            return None


class RecallCheck:
    """Draws trials, starts their model and compares what came back in them."""

    def __init__(self, evidence: RunEvidence, folder: Path, banks: RecordedBanks) -> None:
        self._evidence = evidence
        self._folder = folder
        self._banks = banks
        known = [k for k, record in evidence.trials.items() if record.status not in CUT_OFF]
        # Nobody can know them in advance.
        self._drawn = set(random.SystemRandom().sample(sorted(known), min(_DRAWN, len(known))))
        self._model: Engine | None = None
        self._off = dict.fromkeys(_NAMES, 0.0)  # over the drawn trials
        self._whole = dict.fromkeys(_NAMES, 0.0)
        self._differ: list[TrialKey] = []
        self._edited = False  # whether what follows from equal sums is not equal

    def __enter__(self) -> RecallCheck:
        return self

    def __exit__(self, *_: object) -> None:
        if self._model is not None:
            self._model.shutdown()

    def start(self) -> None:
        """Load the model, if this machine can."""
        spec = self._evidence.spec
        try:
            options = engine_options(replace(spec, model=str(self._folder), device="auto"))
            self._model = start_engine(spec.engine, options)
        except KVBenchError as error:
            self._banks.failed = str(error)

    def begin(self, key: TrialKey) -> None:
        """Have the model play along in a trial, if it was drawn."""
        playing = key in self._drawn and not self._banks.failed
        self._banks.model = self._model if playing else None

    def compared(
        self, key: TrialKey, said: TrialRecord, parts: dict[str, Metric]
    ) -> dict[str, Metric]:
        """Return a trial's derived metrics, with what only a model can tell as it was said."""
        if key in self._drawn and not self._banks.failed:
            pairs = {n: (_number(said.metrics.get(n)), _number(parts.get(n))) for n in _NAMES}
            for name in _NAMES:
                self._off[name] += abs(pairs[name][0] - pairs[name][1])
                self._whole[name] += max(map(abs, pairs[name]))
            differ = [n for n, (one, other) in pairs.items() if not math.isclose(one, other)]
            self._edited |= bool(differ) and not set(differ) & set(_SUMS)
            self._differ += [key] * bool(differ)
        left = {name: value for name, value in parts.items() if name not in _NAMES}
        return left | {name: said.metrics[name] for name in _NAMES if name in said.metrics}

    def verdict(self) -> Checks:
        """Say what came of the drawn trials."""
        count, trials = len(self._drawn), len(self._evidence.trials)
        if self._banks.failed:
            text = (
                f"what the memory brought back is as reported; no model here: {self._banks.failed}"
            )
            yield Stop(text)
            return
        if not count:
            return
        share = max(self._off[n] / self._whole[n] if self._whole[n] else 0.0 for n in _NAMES)
        if not self._differ:
            yield Note(f"what the memory brought back was played again in {count} of {trials}")
            return
        sample, trial = self._differ[0]
        text = (
            f"another than was recorded in {len(self._differ)} of {count} trials that were played "
            f"again, by {share:.1%}; first in sample {sample} trial {trial}"
        )
        far = share > _MOST_OTHERS and self._evidence.spec.dtype == "float32"
        if far or self._edited:
            yield Fault("what the memory brought back", f"is {text}")
        else:
            yield Stop(f"what the memory brought back is {text}")


def _number(value: Metric) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
