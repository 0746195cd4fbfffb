"""Continuous batching: one thread that prefills and decodes every running session together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress
from math import isfinite
from typing import Any, TypeVar

import torch

from agentbench_kv.engines.base import FinishReason, PhaseLabeller
from agentbench_kv.engines.core.commands import CommandQueue
from agentbench_kv.engines.core.ledger import Eviction
from agentbench_kv.engines.core.prefixes import PREFIXES
from agentbench_kv.engines.embedded.attention import pack
from agentbench_kv.engines.embedded.forward import PREFILL_CHUNK, run_network, session_pools
from agentbench_kv.engines.embedded.generation import (
    EmbeddedGeneration,
    Predicted,
    add_stretch,
    next_token,
)
from agentbench_kv.engines.embedded.model import LoadedModel
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.engines.embedded.prefixes import PrefixStore
from agentbench_kv.engines.embedded.quantization import on_write
from agentbench_kv.engines.embedded.session import EmbeddedSession
from agentbench_kv.errors import (
    CapacityError,
    EngineGoneError,
    KVBenchError,
    SessionFailedError,
)
from agentbench_kv.methods.base import Method

STEP_TOKENS = 2048
_STOP_S = 20.0  # for the step under way to end

T = TypeVar("T")


@dataclass
class StepTimes:
    """Seconds the scheduler spent, for benchmarks and metrics."""

    forward_s: float = 0.0
    event_s: float = 0.0
    steps: int = 0
    events: int = 0


class EmbeddedScheduler:
    """Admits generations against a memory limit and steps all of them together.

    What goes wrong in one session ends that session, with `SessionFailedError` to its reader; a
    forward that fails ends those it was for. What ends the thread is what everybody who waits, and
    who comes later, is told: `EngineGoneError`.
    """

    def __init__(
        self,
        model: LoadedModel,
        method: Method,
        max_live_tokens: int,
        recorder: Observer | None = None,
        kv_dtype: str = "",
        prefixes: int = PREFIXES,
    ) -> None:
        self.times = StepTimes()
        self.max_live_tokens = max_live_tokens
        self._model = model
        self._method = method
        self._recorder = recorder
        self.pools = session_pools(model, method, kv_dtype)
        self.prefixes = PrefixStore(prefixes)
        self._leaving: list[EmbeddedSession] = []
        self._work = threading.Condition()
        self._commands = CommandQueue(self._wake)
        self._waiting: deque[EmbeddedGeneration] = deque()
        self._running: list[EmbeddedGeneration] = []
        self._sessions: dict[str, EmbeddedSession] = {}
        self._gone: EngineGoneError | None = None  # why nothing will be done any more
        self._rounds = 0
        self._peak = 0  # bytes
        self._thread = threading.Thread(target=self._loop, name="kvbench-engine", daemon=True)
        self._thread.start()

    def open(self, name: str, labeller: PhaseLabeller) -> None:
        with self._work:
            self._check()
            if name in self._sessions:
                raise KVBenchError(f"session {name} is open already")
            shared = (self._method, self.pools, self._recorder)
            self._sessions[name] = EmbeddedSession(name, labeller, *shared)

    def get(self, name: str) -> EmbeddedSession:
        with self._work:
            return self._sessions[name]

    def fork(self, name: str, new: str, labeller: PhaseLabeller) -> None:
        """Open a session that goes on from where another one is."""
        self.between_turns(name, self._fork, new, labeller)

    def _fork(self, source: EmbeddedSession, new: str, labeller: PhaseLabeller) -> None:
        if source.broken is not None:
            raise KVBenchError(f"session {source.name} broke earlier: {source.broken}")
        if new in self._sessions:
            raise KVBenchError(f"session {new} is open already")
        self._sessions[new] = source.fork(new, labeller)

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
        # Who watches the attention of every row needs every row computed.
        if self._recorder is None or type(self._recorder).on_attention is Observer.on_attention:
            generation.session.name_prefix()
        with self._work:
            self._check()
            self._waiting.append(generation)
            self._work.notify()

    def progress(self) -> int | None:
        """Return how often the thread has looked for work; None while there is none."""
        # Without the lock: a thread that hangs may hold it.
        busy = self._running or self._waiting or self._commands.busy
        return self._rounds if busy else None

    def pool_peak(self) -> int | None:
        """Return the most bytes in used slots since the last call; None if they are not known."""
        used = self.pools.used
        if used is None:
            return None
        peak, self._peak = max(self._peak, used), 0
        return peak

    def drop_prefixes(self) -> None:
        """Drop the prefixes that nobody reads, those of sessions just closed too."""
        self._commands.call(self._drop_prefixes)

    def _drop_prefixes(self) -> None:
        self._free_closed()
        self.prefixes.drop_unread()

    def between_turns(self, name: str, work: Callable[..., T], *args: Any, more: int = 0) -> T:
        """Run `work(session, *args)`, which adds `more` rows, on the engine's thread."""
        session = self.get(name)
        command = partial(self._at_rest, session, partial(work, session, *args), more)
        return self._commands.call(command)

    def _at_rest(self, session: EmbeddedSession, work: Callable[[], T], more: int) -> T:
        if any(g.session is session for g in (*self._running, *self._waiting)):
            raise KVBenchError(f"session {session.name} is generating")
        held = self._held_by_others(session) + session.cache.held
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
        self._gone = self._gone or EngineGoneError("the engine has been shut down")
        # A step that hangs keeps its thread, and the lock if it has it; nobody waits for either.
        if self._work.acquire(timeout=_STOP_S):
            self._work.notify()
            self._work.release()
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            self._fail_all(self._gone)

    def _check(self) -> None:
        if self._gone is not None:
            raise self._gone

    def _loop(self) -> None:
        try:
            with torch.inference_mode():
                while self._admit():
                    self._step(self._plan())
        except BaseException as error:  # noqa: BLE001  whoever waits for this thread must hear of it
            self._gone = EngineGoneError(f"the embedded engine ended: {_described(error)}")
            self._gone.__cause__ = error
        with self._work:
            self._fail_all(self._gone or EngineGoneError("the embedded engine ended"))

    def _admit(self) -> bool:
        """Wait for work and move what fits to the running list; False when stopping."""
        with self._work:
            while self._gone is None:
                self._rounds += 1
                self._drop_cancelled()
                self._commands.run()
                self._free_closed()
                self._start_waiting()
                if self._running:
                    return True
                self._refuse_stuck()
                self._work.wait(0.05 if self._waiting else None)
            return False

    def _start_waiting(self) -> None:
        while self._waiting:
            generation = self._waiting[0]
            with self._isolated(generation):
                if self._need(generation) > self.max_live_tokens:
                    self._refuse_first()
                    continue
                session = generation.session
                while not self._fits(generation):
                    if not self.prefixes.make_room(session):
                        return
                session.reserved = self._need(generation)
                session.begin_turn()
                self._running.append(generation)
                self._waiting.popleft()
                self.prefixes.admit(session)

    @contextmanager
    def _isolated(self, generation: EmbeddedGeneration) -> Iterator[None]:
        """End this generation and its session, and nothing else, with what goes wrong within."""
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001  its reader raises it
            self._fail(generation, error)

    def _fail(self, generation: EmbeddedGeneration, error: BaseException) -> None:
        session, told = generation.session, error
        if not isinstance(error, KVBenchError):
            told = SessionFailedError(f"session {session.name} failed: {_described(error)}")
            told.__cause__ = error
        session.broken = told
        self.prefixes.give_up(session)
        if generation in self._waiting:
            self._waiting.remove(generation)
        if generation in self._running:
            self._retire(generation)
        generation.fail(told)

    def _fail_all(self, error: EngineGoneError) -> None:
        self._commands.close(error)
        for generation in (*self._running, *self._waiting):
            generation.fail(error)
        self._running.clear()
        self._waiting.clear()

    def _need(self, generation: EmbeddedGeneration) -> int:
        session = generation.session
        return session.ledger.rows_needed(len(session.pending), generation.sampling.max_tokens)

    def _held_by_others(self, session: EmbeddedSession) -> int:
        """Return the rows of all other sessions; what sessions at rest share counts once.

        Whoever generates may have to move to a slot of its own, and counts in full, but for a
        prefix that it will leave as it is.
        """
        busy = {id(generation.session) for generation in self._running}
        rows, at_rest = self.prefixes.rows, dict[tuple[int, int], int]()
        # One that was closed holds its rows until its generation has noticed.
        closed = [each for each in self._leaving if id(each) in busy]
        for other in (*self._sessions.values(), *closed):
            if other is session:
                continue
            if id(other) in busy or other.cache.slot < 0:
                rows += max(0, other.reserved - other.rows_elsewhere)
            else:
                place = (id(other.cache.pool), other.cache.slot)
                held = other.reserved - other.cache.shared
                at_rest[place] = max(at_rest.get(place, 0), held)
        return rows + sum(at_rest.values())

    def _fits(self, generation: EmbeddedGeneration) -> bool:
        session = generation.session
        need = self._need(generation) - self._found(session)
        return self._held_by_others(session) + need <= self.max_live_tokens

    def _found(self, session: EmbeddedSession) -> int:
        """Return the rows of a session at rest that its prefix holds, and will."""
        return self.prefixes.expected(session) if session.prefix_key else session.rows_elsewhere

    def _refuse_stuck(self) -> None:
        """Fail the first waiting generation if nothing that could free memory will come."""
        if not self._waiting:
            return
        # Whoever waits for what its fork says will free nothing before the fork has room.
        waiting = [generation.session for generation in self._waiting]
        stuck = {name for session in waiting for name in (session.name, *session.sources)}
        holders = {s.name for s in self._sessions.values() if s.reserved}
        if holders <= stuck:
            with self._isolated(self._waiting[0]):
                self._refuse_first()

    def _refuse_first(self) -> None:
        generation = self._waiting[0]
        name, need = generation.session.name, self._need(generation)
        others = self._held_by_others(generation.session)
        beside = f" beside {others} of other sessions" if others else ""
        problem = (
            f"the KV cache holds {self.max_live_tokens} tokens, session {name} needs "
            f"{need}{beside}; lower --concurrency, the budget or max tokens"
        )
        self._waiting.popleft()
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
        for generation in [g for g in self._running if g.cancelled and _reads_on(g)]:
            # Nobody waits for the rest of the prompt; the next turn reads it first.
            generation.session.put_off_prompt()
            self._retire(generation)
            generation.finish(FinishReason.CANCELLED)

    def _plan(self) -> list[EmbeddedGeneration]:
        """Choose the next forward's generations: all that decode, prefills while they fit."""
        batch: list[EmbeddedGeneration] = []
        room = STEP_TOKENS
        for generation in list(self._running):
            if not self._has_prefix(generation):
                continue
            rows = min(len(generation.session.pending), PREFILL_CHUNK)
            if rows == 1 or room >= rows or not batch:
                batch.append(generation)
                room -= rows
        return batch

    def _has_prefix(self, generation: EmbeddedGeneration) -> bool:
        """Whether a session may be fed, or has to wait for who computes its prefix."""
        if generation.session.prefix_key is None:
            return True
        with self._isolated(generation):
            return self.prefixes.admit(generation.session)
        return False

    def _step(self, batch: list[EmbeddedGeneration]) -> None:
        started = time.perf_counter()
        for generation in batch:
            with self._isolated(generation):
                generation.session.take(PREFILL_CHUNK)
        whole = [generation for generation in batch if generation.session.broken is None]
        fed = self._forward(whole) if whole else []
        self._peak = max(self._peak, self.pools.used or 0)
        self.times.forward_s += time.perf_counter() - started
        self.times.steps += 1
        for each in fed:
            with self._isolated(each.generation):
                self._advance(each)

    def _forward(self, batch: list[EmbeddedGeneration]) -> list[Predicted]:
        """Feed every session its chunk; return the predictions of those that are fully fed."""
        try:
            return self._forward_together(batch)
        except Exception as error:  # noqa: BLE001  a failed forward must not end the engine
            # Sums have been added to already; everything else is as before.
            if len(batch) == 1 or self.pools.full.shape.with_sums:
                self._break(batch, error)
                return []
        # One of them may be to blame, or there may be memory for fewer.
        return [each for generation in batch for each in self._forward([generation])]

    def _forward_together(self, batch: list[EmbeddedGeneration]) -> list[Predicted]:
        by_session = {id(generation.session): generation for generation in batch}
        places = self._model.attention.places
        pools, sessions = self.pools, [generation.session for generation in batch]
        packed = pack(sessions, pools.queries, places, self._recorder, on_write(pools.kv_dtype))
        ends = list(accumulate(packed.rows))
        ready = [session.all_taken for session in packed.sessions]
        generations = [by_session[id(session)] for session in packed.sessions]
        chosen = list(compress(generations, ready))
        wanted = [g.rows_wanted(e) for g, e in zip(chosen, compress(ends, ready), strict=True)]
        logits = run_network(self._model, packed, [row for rows in wanted for row in rows])
        highest, best = logits.max(-1)
        # Waits for the device, once a forward; before that nothing says that it went well.
        values, ids = torch.stack([highest.double(), best.double()]).tolist()
        for generation, rows in zip(generations, packed.rows, strict=True):
            with self._isolated(generation):
                generation.session.fed_rows(rows)
                self._store_prefix(generation.session)
        found, last = [], -1
        for generation, own in zip(chosen, wanted, strict=True):
            last += len(own)
            if generation.predict:
                generation.best += map(int, ids[last + 1 - len(own) : last + 1])
            found.append(Predicted(generation, logits[last], ids[last], values[last]))
        return [each for each in found if each.generation.session.broken is None]

    def _store_prefix(self, session: EmbeddedSession) -> None:
        if not self.prefixes.take(session):
            return
        # A prefix that sessions copy is held besides what they were admitted with.
        own = session.reserved - session.rows_elsewhere
        while self._held_by_others(session) + own > self.max_live_tokens:
            if not self.prefixes.make_room(session):
                break

    def _advance(self, predicted: Predicted) -> None:
        """Sample one token for a session whose pending tokens are all fed; run due events."""
        generation, logits = predicted.generation, predicted.logits
        session = generation.session
        if not isfinite(predicted.value):
            raise ValueError("the model's logits are no numbers")
        if self._recorder is not None:
            self._recorder.on_logits(session.name, session.fed, logits)
        token = next_token(predicted)
        self._compress(session, session.accept(token))
        generation.push(token)
        reason = self._finish_reason(generation, token)
        if reason is None and generation.given:
            add_stretch(generation, PREFILL_CHUNK)
        if reason is not None:
            self._compress(session, session.ledger.end_turn())
            self._retire(generation)
            generation.finish(reason)

    def _finish_reason(self, generation: EmbeddedGeneration, token: int) -> FinishReason | None:
        reason = generation.sampling.ends(token, generation.produced)
        if reason is not FinishReason.STOP and generation.cancelled:
            return FinishReason.CANCELLED
        taken = generation.session.positions_taken + generation.session.logical
        if reason is None and taken >= self._model.context_limit:
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
            self._fail(generation, error)
        # An error that a device does not get over, such as an illegal access, fails this too.
        torch.zeros(1, device=self._model.shape.device).tolist()


def _reads_on(generation: EmbeddedGeneration) -> bool:
    """Whether there is more of its prompt than a chunk that it alone needs."""
    session = generation.session
    alone = session.memory is None and session.prefix_key is None and not generation.given
    return alone and len(session.pending) > PREFILL_CHUNK


def _described(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
