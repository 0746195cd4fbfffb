"""Continuous batching: one thread that prefills and decodes every running session together.

A running generation, fed by the scheduler's thread and read by the caller's.

Work on a session's cache between two of its turns.

Packing chunks of many sessions into one forward.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, compress, groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from agentbench_kv.engines.base import FinishReason, PhaseLabeller, Sampling
from agentbench_kv.engines.core.rings import QueryBuffer, RingWrite
from agentbench_kv.engines.embedded.attention import DecodeGroup, Segment, StepPlan
from agentbench_kv.engines.embedded.cache import CachePool, CachePools
from agentbench_kv.engines.embedded.model import MOVING_ROPE, LoadedModel, cache_shape
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.engines.embedded.session import EmbeddedSession, Recorder
from agentbench_kv.engines.sampling import Sampler, StreamedGeneration
from agentbench_kv.errors import CapacityError, KVBenchError
from agentbench_kv.methods.base import Method


class EmbeddedGeneration(StreamedGeneration):
    """A generation that the scheduler thread feeds; that thread waits for no reader."""

    def __init__(self, session: EmbeddedSession, sampling: Sampling) -> None:
        super().__init__(sampling)
        self.session = session
        self.sampler = Sampler(sampling)

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self._hand_over(None)

    def fail(self, error: BaseException) -> None:
        self._hand_over(error)


@dataclass(eq=False)
class Command:
    """Work on one session's cache that waits for the engine's thread."""

    session: EmbeddedSession
    work: Callable[[], Any]
    more: int  # rows it adds
    done: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        try:
            self.done.set_result(self.work())
        except Exception as error:  # noqa: BLE001  handed to the caller, who raises it
            self.done.set_exception(error)


SPARSE = 0.5  # share of a range of slots below which each session has a call of its own


@dataclass(frozen=True)
class Packed:
    """A forward's input, session after session."""

    sessions: list[EmbeddedSession]
    tokens: list[int]
    positions: list[int]  # of RoPE
    rows: list[int]  # tokens each session feeds
    plan: StepPlan


def pack(
    sessions: Sequence[EmbeddedSession],
    chunk: int,
    queries: QueryBuffer,
    observer: Observer | None = None,
) -> Packed:
    """Take a chunk of pending tokens from every session and plan their attention.

    Decoding sessions come first, ordered by pool and slot, so that each pool's are neighbours.
    """
    for session in sessions:
        session.cache.reserve(min(chunk, len(session.pending)))
    ordered = sorted(
        sessions, key=lambda s: (len(s.pending) > 1, s.cache.pool.capacity, s.cache.slot)
    )
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    ring_rows: list[int] = []
    ring_slots: list[int] = []
    for session in ordered:
        taken = session.take(chunk)
        stored, slots = session.queries.place([p for _, p in taken], session.fed, len(tokens))
        ring_rows += stored
        ring_slots += slots
        positions += range(session.next_position, session.next_position + len(taken))
        ids = [token for token, _ in taken]
        if observer is not None:
            labels = [int(phase) for _, phase in taken]
            own = [session.fed + i in session.generated for i in range(len(ids))]
            observer.on_rows(session.name, ids, labels, own, session.fed)
        tokens += ids
        rows.append(len(taken))
    prefills, decodes = _attention_plan(ordered, rows)
    write = None
    if ring_rows:
        write = RingWrite(_ids(ring_rows, queries.device), _ids(ring_slots, queries.device))
    plan = StepPlan(prefills, decodes, queries, write, observer)
    return Packed(ordered, tokens, positions, rows, plan)


def _attention_plan(
    sessions: Sequence[EmbeddedSession], rows: Sequence[int]
) -> tuple[list[Segment], list[DecodeGroup]]:
    prefills: list[Segment] = []
    decodes: list[DecodeGroup] = []
    start = 0
    for (single, _), members in groupby(
        zip(sessions, rows, strict=True), key=lambda item: (item[1] == 1, id(item[0].cache.pool))
    ):
        group = list(members)
        neighbours = [session for session, _ in group]
        if single and _is_dense(neighbours):
            decodes.append(_decode_group(neighbours, start))
            start += len(group)
            continue
        for session, n in group:
            prefills.append(Segment(session.cache, start, start + n))
            start += n
    return prefills, decodes


def _is_dense(sessions: Sequence[EmbeddedSession]) -> bool:
    """Whether one call over the slots' range wastes less than calls of their own would."""
    covered = sessions[-1].cache.slot - sessions[0].cache.slot + 1
    return len(sessions) >= SPARSE * covered


def _decode_group(sessions: Sequence[EmbeddedSession], start: int) -> DecodeGroup:
    pool: CachePool = sessions[0].cache.pool
    device = pool.keys.device
    slots = [session.cache.slot for session in sessions]
    lengths = [session.cache.length for session in sessions]
    first, last, tokens = slots[0], slots[-1] + 1, max(lengths) + 1
    # A slot nobody decodes in shows its first row: an empty softmax would be NaN.
    ends = [1] * (last - first)
    for slot, length in zip(slots, lengths, strict=True):
        ends[slot - first] = length + 1
    hidden = torch.arange(tokens, device=device) >= _ids(ends, device)[:, None]
    mask = torch.zeros(hidden.shape, dtype=pool.keys.dtype, device=device)
    mask.masked_fill_(hidden, float("-inf"))
    ids, rows = _ids(slots, device), _ids(lengths, device)
    return DecodeGroup(pool, start, ids, rows, first, last, tokens, mask[:, None, None])


def _ids(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


PREFILL_CHUNK = 512


STEP_TOKENS = 2048


T = TypeVar("T")


@dataclass
class StepTimes:
    """Seconds the scheduler spent, for benchmarks and metrics."""

    forward_s: float = 0.0
    event_s: float = 0.0
    steps: int = 0
    events: int = 0


class Scheduler:
    """Admits generations against a memory limit and steps all of them together.

    Chunk boundaries depend on a session's own tokens only, never on who else is running, so that a
    session's result does not depend on the sessions computed with it.
    """

    def __init__(
        self,
        model: LoadedModel,
        method: Method,
        max_live_tokens: int,
        recorder: Recorder | None = None,
        observer: Observer | None = None,
    ) -> None:
        shape = cache_shape(model, method)
        self.times = StepTimes()
        self.max_live_tokens = max_live_tokens
        self._model = model
        self._method = method
        self._recorder = recorder
        self._observer = observer
        self.pools = CachePools(shape)
        heads = (shape.layers, model.query_heads, shape.kv_heads, shape.head_dim)
        self._queries = QueryBuffer(method.query_plan(), *heads, shape.dtype, shape.device)
        # Keys of a RoPE that changes with the length cannot be moved to other positions.
        self._frequencies = None if model.rope_type in MOVING_ROPE else model.frequencies
        self._leaving: list[EmbeddedSession] = []
        self._commands: deque[Command] = deque()
        self._work = threading.Condition()
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
            self._sessions[name] = EmbeddedSession(
                name, labeller, self._method, self.pools, self._queries, self._frequencies
            )

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
        command = Command(session, partial(work, session, *args), more)
        with self._work:
            if self._stopping:
                raise KVBenchError("the engine has been shut down")
            if any(g.session is session for g in (*self._running, *self._waiting)):
                raise KVBenchError(f"session {name} is generating")
            self._commands.append(command)
            self._work.notify()
        result: T = command.done.result()
        return result

    def stop(self) -> None:
        with self._work:
            self._stopping = True
            self._work.notify()
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
                self._run_commands()
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
        """Rows the session may hold before it ends or an event frees some."""
        session, method = generation.session, generation.session.method
        start = session.cache.length + len(session.pending)
        whole = start + generation.sampling.max_tokens
        if not method.compresses or method.trigger == "turn":
            return whole
        return min(whole, max(start, method.budget_at(session.fed + whole)) + method.interval)

    def _fits(self, generation: EmbeddedGeneration) -> bool:
        others = (s for s in self._sessions.values() if s is not generation.session)
        return sum(s.reserved for s in others) + self._need(generation) <= self.max_live_tokens

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

    def _run_commands(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            session = command.session
            others = sum(s.reserved for s in self._sessions.values() if s is not session)
            if command.more and others + session.cache.length + command.more > self.max_live_tokens:
                problem = (
                    f"the KV cache holds {self.max_live_tokens} tokens and has no room for "
                    f"{command.more} more of session {session.name}"
                )
                command.done.set_exception(CapacityError(problem))
            else:
                command.run()
                session.reserved = session.cache.length

    def _drop_cancelled(self) -> None:
        for generation in [g for g in self._waiting if g.cancelled]:
            self._waiting.remove(generation)
            generation.finish(FinishReason.CANCELLED)

    def _cancel_all(self) -> None:
        for generation in (*self._running, *self._waiting):
            generation.finish(FinishReason.CANCELLED)
        for command in self._commands:
            command.done.set_exception(KVBenchError("the engine has been shut down"))
        self._running.clear()
        self._waiting.clear()
        self._commands.clear()

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
        packed = pack([g.session for g in batch], PREFILL_CHUNK, self._queries, self._observer)
        ends = list(accumulate(packed.rows))
        ready = [not session.pending for session in packed.sessions]
        logits = self._run_network(packed, [end - 1 for end in compress(ends, ready)])
        generations = [by_session[id(session)] for session in packed.sessions]
        for generation, rows in zip(generations, packed.rows, strict=True):
            generation.session.fed_rows(rows, decoding=not generation.session.prefilling)
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
        if session.prefilling:
            session.prefilling = False
            if session.schedule.after_prefill(session.cache.length, session.fed):
                self._compress(session)
        token = best if generation.sampler.greedy else generation.sampler.draw(logits)
        session.accept(token)
        if session.schedule.after_decode(session.cache.length, session.fed):
            self._compress(session)
        generation.push(token)
        reason = self._finish_reason(generation, token)
        if reason is not None:
            if session.schedule.after_turn(session.cache.length, session.fed):
                self._compress(session)
            self._retire(generation)
            generation.finish(reason)

    def _finish_reason(self, generation: EmbeddedGeneration, token: int) -> FinishReason | None:
        sampling = generation.sampling
        if token in sampling.stop_token_ids or (sampling.stop is not None and sampling.stop(token)):
            return FinishReason.STOP
        if generation.cancelled:
            return FinishReason.CANCELLED
        if generation.produced >= sampling.max_tokens:
            return FinishReason.LENGTH
        if generation.session.logical >= self._model.context_limit:
            return FinishReason.CONTEXT_LIMIT
        return None

    def _retire(self, generation: EmbeddedGeneration) -> None:
        with self._work:
            self._running.remove(generation)
            generation.session.reserved = generation.session.cache.length

    def _compress(self, session: EmbeddedSession) -> None:
        started = time.perf_counter()
        session.compress(self._recorder, self._observer)
        self.times.event_s += time.perf_counter() - started
        self.times.events += 1

    def _break(self, batch: list[EmbeddedGeneration], error: Exception) -> None:
        for generation in batch:
            if generation in self._running:
                generation.session.broken = error
                self._retire(generation)
                generation.fail(error)
