"""Continuous batching: one thread that prefills and decodes every running session together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress
from typing import Any, TypeVar

import torch
from torch import Tensor

from agentbench_kv.engines.base import FinishReason, PhaseLabeller, Sampling
from agentbench_kv.engines.core.commands import CommandQueue
from agentbench_kv.engines.core.ledger import Eviction
from agentbench_kv.engines.core.rings import QueryBuffer
from agentbench_kv.engines.embedded.attention import Packed, pack
from agentbench_kv.engines.embedded.cache import CachePools
from agentbench_kv.engines.embedded.model import MOVING_ROPE, LoadedModel, cache_shape
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.engines.embedded.session import EmbeddedSession
from agentbench_kv.engines.sampling import Sampler, StreamedGeneration
from agentbench_kv.errors import CapacityError, KVBenchError
from agentbench_kv.methods.base import Method

# Chunks depend on a session's own tokens only, so that its result does not on those beside it.
PREFILL_CHUNK = 512
STEP_TOKENS = 2048

T = TypeVar("T")


class EmbeddedGeneration(StreamedGeneration):
    """A generation that the scheduler thread feeds; that thread waits for no reader."""

    def __init__(self, session: EmbeddedSession, sampling: Sampling) -> None:
        super().__init__(sampling)
        self.session = session
        self.sampler = Sampler(sampling)
        self.logprobs = self.sampler.logprobs


@dataclass
class StepTimes:
    """Seconds the scheduler spent, for benchmarks and metrics."""

    forward_s: float = 0.0
    event_s: float = 0.0
    steps: int = 0
    events: int = 0


class EmbeddedScheduler:
    """Admits generations against a memory limit and steps all of them together."""

    def __init__(
        self,
        model: LoadedModel,
        method: Method,
        max_live_tokens: int,
        recorder: Observer | None = None,
    ) -> None:
        shape = cache_shape(model, method)
        self.times = StepTimes()
        self.max_live_tokens = max_live_tokens
        self._model = model
        self._method = method
        self._recorder = recorder
        self.pools = CachePools(shape)
        self._queries = QueryBuffer(method.query_plan(), shape)
        # Keys of a RoPE that changes with the length cannot be moved to other positions.
        self._frequencies = None if model.rope_type in MOVING_ROPE else model.frequencies
        self._leaving: list[EmbeddedSession] = []
        self._work = threading.Condition()
        self._commands = CommandQueue(self._wake)
        self._waiting: deque[EmbeddedGeneration] = deque()
        self._running: list[EmbeddedGeneration] = []
        self._sessions: dict[str, EmbeddedSession] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="kvbench-engine", daemon=True)
        self._thread.start()

    def open(self, name: str, labeller: PhaseLabeller) -> None:
        with self._work:
            if name in self._sessions:
                raise KVBenchError(f"session {name} is open already")
            shared = (self._method, self.pools, self._queries, self._frequencies, self._recorder)
            self._sessions[name] = EmbeddedSession(name, labeller, *shared)

    def get(self, name: str) -> EmbeddedSession:
        with self._work:
            return self._sessions[name]

    def remove(self, name: str) -> EmbeddedSession:
        """Forget a session and free its memory; a generation of it in flight is cancelled."""
        with self._work:
            session = self._sessions.pop(name)
            for generation in (*self._running, *self._waiting):
                if generation.session is session:
                    generation.cancel()
            self._leaving.append(session)
            self._work.notify()
        return session

    def submit(self, generation: EmbeddedGeneration) -> None:
        with self._work:
            if self._stopping:
                raise KVBenchError("the engine has been shut down")
            self._waiting.append(generation)
            self._work.notify()

    def between_turns(self, name: str, work: Callable[..., T], *args: Any, more: int = 0) -> T:
        """Run `work(session, *args)`, which adds `more` rows, on the engine's thread."""
        session = self.get(name)
        command = partial(self._at_rest, session, partial(work, session, *args), more)
        return self._commands.call(command)

    def _at_rest(self, session: EmbeddedSession, work: Callable[[], T], more: int) -> T:
        if any(g.session is session for g in (*self._running, *self._waiting)):
            raise KVBenchError(f"session {session.name} is generating")
        held = self._held_by_others(session) + session.cache.length
        if more and held + more > self.max_live_tokens:
            raise CapacityError(
                f"the KV cache holds {self.max_live_tokens} tokens and has no room for "
                f"{more} more of session {session.name}"
            )
        result = work()
        session.reserved = session.cache.length
        return result

    def _wake(self) -> None:
        with self._work:
            self._work.notify()

    def stop(self) -> None:
        with self._work:
            self._stopping = True
            self._work.notify()
        self._commands.close(KVBenchError("the engine has been shut down"))
        self._thread.join()

    def _loop(self) -> None:
        with torch.inference_mode():
            while self._admit():
                batch = self._plan()
                try:
                    self._step(batch)
                except Exception as error:  # noqa: BLE001  a failed step must not end the engine
                    self._break(batch, error)

    def _admit(self) -> bool:
        """Wait for work and move what fits to the running list; False when stopping."""
        with self._work:
            while True:
                if self._stopping:
                    self._cancel_all()
                    return False
                self._drop_cancelled()
                self._commands.run()
                self._free_closed()
                while self._waiting and self._fits(self._waiting[0]):
                    generation = self._waiting.popleft()
                    generation.session.reserved = self._need(generation)
                    generation.session.begin_turn()
                    self._running.append(generation)
                if self._running:
                    return True
                self._refuse_stuck()
                self._work.wait(0.05 if self._waiting else None)

    def _need(self, generation: EmbeddedGeneration) -> int:
        session = generation.session
        return session.ledger.rows_needed(len(session.pending), generation.sampling.max_tokens)

    def _held_by_others(self, session: EmbeddedSession) -> int:
        return sum(other.reserved for other in self._sessions.values() if other is not session)

    def _fits(self, generation: EmbeddedGeneration) -> bool:
        others = self._held_by_others(generation.session)
        return others + self._need(generation) <= self.max_live_tokens

    def _refuse_stuck(self) -> None:
        """Fail the first waiting generation if nothing that could free memory will come."""
        if not self._waiting:
            return
        stuck = {generation.session.name for generation in self._waiting}
        holders = {s.name for s in self._sessions.values() if s.reserved}
        if holders <= stuck:
            generation = self._waiting.popleft()
            name, need = generation.session.name, self._need(generation)
            problem = (
                f"the KV cache holds {self.max_live_tokens} tokens, session {name} needs {need} "
                "beside the others; lower --concurrency, the budget or max tokens"
            )
            generation.fail(CapacityError(problem))

    def _free_closed(self) -> None:
        """Free closed sessions here: only this thread may touch the pools."""
        busy = {id(generation.session) for generation in self._running}
        for session in [s for s in self._leaving if id(s) not in busy]:
            self._leaving.remove(session)
            session.free()

    def _drop_cancelled(self) -> None:
        for generation in [g for g in self._waiting if g.cancelled]:
            self._waiting.remove(generation)
            generation.finish(FinishReason.CANCELLED)

    def _cancel_all(self) -> None:
        for generation in (*self._running, *self._waiting):
            generation.finish(FinishReason.CANCELLED)
        self._running.clear()
        self._waiting.clear()

    def _plan(self) -> list[EmbeddedGeneration]:
        """Choose the next forward's generations: all that decode, prefills while they fit."""
        batch: list[EmbeddedGeneration] = []
        room = STEP_TOKENS
        for generation in self._running:
            rows = min(len(generation.session.pending), PREFILL_CHUNK)
            if rows == 1 or room >= rows or not batch:
                batch.append(generation)
                room -= rows
        return batch

    def _step(self, batch: list[EmbeddedGeneration]) -> None:
        started = time.perf_counter()
        logits, ready = self._forward(batch)
        best = logits.argmax(-1).tolist()  # waits for the device, once a step
        self.times.forward_s += time.perf_counter() - started
        self.times.steps += 1
        for row, generation in enumerate(ready):
            self._advance(generation, logits[row], best[row])

    def _forward(self, batch: list[EmbeddedGeneration]) -> tuple[Tensor, list[EmbeddedGeneration]]:
        """Feed a chunk of every session; return logits [ready, vocab] of those fully fed."""
        by_session = {id(generation.session): generation for generation in batch}
        packed = pack([g.session for g in batch], PREFILL_CHUNK, self._queries, self._recorder)
        ends = list(accumulate(packed.rows))
        ready = [not session.pending for session in packed.sessions]
        logits = self._run_network(packed, [end - 1 for end in compress(ends, ready)])
        generations = [by_session[id(session)] for session in packed.sessions]
        for generation, rows in zip(generations, packed.rows, strict=True):
            generation.session.fed_rows(rows)
        return logits, list(compress(generations, ready))

    def _run_network(self, packed: Packed, last: list[int]) -> Tensor:
        device = self._model.shape.device
        output = self._model.network(
            input_ids=torch.tensor([packed.tokens], device=device),
            position_ids=torch.tensor([packed.positions], device=device),
            use_cache=False,
            logits_to_keep=torch.tensor(last, dtype=torch.int64, device=device),
            kvbench=packed.plan,
        )
        logits: Tensor = output.logits[0].float()
        return logits

    def _advance(self, generation: EmbeddedGeneration, logits: Tensor, best: int) -> None:
        """Sample one token for a session whose pending tokens are all fed; run due events."""
        session = generation.session
        if self._recorder is not None:
            self._recorder.on_logits(session.name, session.fed, logits)
        token = best if generation.sampler.greedy else generation.sampler.draw(logits)
        self._compress(session, session.accept(token))
        generation.push(token)
        reason = self._finish_reason(generation, token)
        if reason is not None:
            self._compress(session, session.ledger.end_turn())
            self._retire(generation)
            generation.finish(reason)

    def _finish_reason(self, generation: EmbeddedGeneration, token: int) -> FinishReason | None:
        reason = generation.sampling.ends(token, generation.produced)
        if reason is not FinishReason.STOP and generation.cancelled:
            return FinishReason.CANCELLED
        if reason is None and generation.session.logical >= self._model.context_limit:
            return FinishReason.CONTEXT_LIMIT
        return reason

    def _retire(self, generation: EmbeddedGeneration) -> None:
        with self._work:
            self._running.remove(generation)
            generation.session.reserved = generation.session.cache.length

    def _compress(self, session: EmbeddedSession, eviction: Eviction | None) -> None:
        if eviction is None:
            return
        started = time.perf_counter()
        session.compress(eviction)
        self.times.event_s += time.perf_counter() - started
        self.times.events += 1

    def _break(self, batch: list[EmbeddedGeneration], error: Exception) -> None:
        for generation in batch:
            if generation in self._running:
                generation.session.broken = error
                self._retire(generation)
                generation.fail(error)
