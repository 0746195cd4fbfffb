"""Continuous batching over one llama.cpp context: one thread owns it and does all work on it."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import deque
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.engines.base import KVStats, Sampling
from agentbench_kv.engines.core.commands import CommandQueue
from agentbench_kv.engines.core.ledger import Eviction, EvictionOrder
from agentbench_kv.engines.core.memory import SessionMemory
from agentbench_kv.engines.core.policy import BackendPolicy
from agentbench_kv.engines.core.rings import RingWrite, RowShape
from agentbench_kv.engines.core.rows import Fed, WorkerRows
from agentbench_kv.engines.llamacpp.server.admission import Admission
from agentbench_kv.engines.llamacpp.server.cells import Cells
from agentbench_kv.engines.llamacpp.server.context import Context, DecodeAbortedError, DecodeBatch
from agentbench_kv.engines.llamacpp.server.prefixes import SequencePrefixes
from agentbench_kv.engines.llamacpp.server.session import (
    PREFILL_CHUNK,
    BackendGeneration,
    BackendSession,
    Stream,
)
from agentbench_kv.errors import CapacityError, KVBenchError, UsageError
from agentbench_kv.methods.base import QueryKind
from agentbench_kv.phases.machine import PromptPhases

STEP_TOKENS = 2 * PREFILL_CHUNK + 64  # chunks of two prompts, and who decodes
ASK_S = 0.005  # longest wait for sessions whose reader has not asked for the next token yet


class BatchScheduler:
    """Runs the sessions of one context; chunks are cut as in the embedded engine."""

    def __init__(self, context: Context, policy: BackendPolicy) -> None:
        self.context = context
        self.cells = Cells(context)
        self._bytes = 2 * context.shape.layers * self.cells.form.row_bytes
        self._use(policy)
        self._work = threading.Condition()
        self._commands = CommandQueue(self.wake)
        self.call = self._commands.call  # runs work on the thread that owns the context
        self._waiting: deque[BackendGeneration] = deque()
        self._running: list[BackendGeneration] = []
        self._stepping: list[BackendGeneration] = []  # those in the step under way
        self.sessions: dict[str, BackendSession] = {}
        self._thread = threading.Thread(target=self._loop, name="kvbench-llamacpp", daemon=True)
        self._thread.start()

    def _use(self, policy: BackendPolicy) -> None:
        shape = self.context.shape
        sizes = (shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim)
        rows = RowShape(*sizes, torch.float32, torch.device("cpu"))
        self.policy = policy
        self.worker = WorkerRows(policy, rows, self.cells.form.frequencies.float())
        self.prefixes = SequencePrefixes(policy.method, self.worker, self.context.scratch)
        self.admission = Admission(self.cells, policy.method, self.prefixes)
        needed = policy.method.query_plan().kind is not QueryKind.NONE
        self.context.watch.want_queries(needed)

    def configure(self, policy: BackendPolicy) -> None:
        """Go on with another method; on the own thread."""
        if self.sessions:
            raise UsageError(f"{len(self.sessions)} sessions are open; close them first")
        self.prefixes.clear()
        self._use(policy)

    def start(self, request: dict[str, Any], sampling: Sampling, stream: Stream) -> None:
        """Queue a generation of a session, which is opened if it is new."""
        stream.stepwise = request["stepwise"]

        def begin() -> None:
            name = request["session"]
            session = self.sessions.get(name)
            if session is None:
                session = BackendSession(name, self.policy.method, self.cells, self._bytes)
                self.sessions[name] = session
            self._abandon(session)
            self._match(session, request["known"])
            session.tokens += request["tokens"]
            session.prompt = PromptPhases(**request["phases"])
            # With what was never read of a prompt whose reader hung up; after a loss, all of it.
            if not session.ledger.fed:
                session.ledger.uncount_unread()
            again = session.looking and session.ledger.fed
            fresh = len(request["tokens"]) if again else session.pending - session.ledger.unfed
            session.begin_turn(fresh)
            self.prefixes.plan(session)
            given = deque(request["given"])
            wants = request["predict"]
            self._waiting.append(BackendGeneration(session, sampling, stream, given, wants))

        self.call(begin)

    def _match(self, session: BackendSession, known: int) -> None:
        """Forget what a cancelled generation made after the last token that its caller saw."""
        unwanted = len(session.tokens) > known
        if session.ledger.fed > known or (unwanted and not session.ledger.take_back()):
            self.worker.drop(session.name)
            session.lose()
        del session.tokens[known:]
        if len(session.tokens) != known:
            raise KVBenchError(
                f"session {session.name} has {len(session.tokens)} tokens, not {known}"
            )

    def wake(self) -> None:
        """Look again: a reader has asked for a token, or hung up."""
        with self._work:
            if self._stepping and all(each.stream.closed for each in self._stepping):
                self.context.abort(True)
            self._work.notify_all()

    def _at_rest(self, name: str) -> BackendSession:
        session = self.sessions.get(name)
        if session is None:
            raise KVBenchError(f"session {name} is not open")
        self._abandon(session)
        return session

    def idle_session(self, name: str, more: int = 0) -> BackendSession:
        """Return a session at rest, with its rows and room for `more` in the cache; own thread."""
        session = self._at_rest(name)
        need, packed = session.rows.live + more, self.policy.method.positions == "cache"
        # Shared cells that get other positions, or other labels, are copied.
        copies = session.rows.live if packed else 1 + session.rows.stand_ins
        if not self.admission.bring_in(session, need, self.sessions.values(), copies):
            raise CapacityError(
                f"the KV cache holds {self.context.cells} tokens and has no room for "
                f"{need} of session {name}"
            )
        return session

    def fork(self, name: str, new: str) -> bool:
        """Open a session that goes on from where another one, at rest, is; own thread."""
        source = self._at_rest(name)
        if new in self.sessions:
            raise KVBenchError(f"session {new} is open already")
        sequence = self.admission.lend() if source.rows.resident else -1
        self.sessions[new] = source.fork(new, sequence)
        self.worker.fork(name, new)
        return True

    def rewind(self, name: str, length: int) -> None:
        """Forget a session's tokens from logical position `length` on; own thread."""
        session = self.idle_session(name)
        session.rewind(length)
        self.worker.rewind(name, length)
        self.admission.settle(session)

    def attach(self, name: str, memory: SessionMemory) -> None:
        """Open a session whose prompts bring rows of a memory back; own thread."""
        if name in self.sessions:
            raise KVBenchError(f"session {name} is open already")
        session = BackendSession(name, self.policy.method, self.cells, self._bytes)
        session.attach(memory)
        self.sessions[name] = session

    def drop_prefixes(self) -> None:
        """Drop the prefixes that no session has; on the own thread."""
        self.prefixes.drop_unread()

    def stats(self, name: str) -> KVStats | None:
        """Return a session's accounting; on the own thread."""
        session = self.sessions.get(name)
        return None if session is None else session.stats()

    def close_session(self, name: str) -> KVStats | None:
        """Free a session and return its accounting; on the own thread."""
        session = self.sessions.pop(name, None)
        if session is None:
            return None
        self._abandon(session)
        stats = session.stats()
        session.rows.free()
        self.worker.drop(name)
        self.admission.release(session)
        return stats

    def pool(self) -> dict[str, Any]:
        """Say what the cache holds; on the own thread."""
        return {
            "total_blocks": self.context.cells,
            "free_blocks": self.context.cells - self.cells.used,
            "attended_blocks": self.cells.attended,
            "sessions": len(self.sessions),
            "parked": sum(s.rows.resident < s.rows.live for s in self.sessions.values()),
            "parkings": self.admission.parkings,
            "watch": type(self.context.watch).__name__,
        }

    def _loop(self) -> None:
        """Work until the process ends, which it does rather than go on without this thread."""
        try:
            with torch.inference_mode():
                while True:
                    self._step(self._next_batch())
        except BaseException:  # noqa: BLE001  the harness finds it in the log and starts again
            traceback.print_exc()
            os._exit(1)

    def _step(self, batch: list[BackendGeneration]) -> None:
        """Feed a batch and sample; what fails in one session ends that one's generation."""
        try:
            logits, ready = self._forward(batch) if batch else ((), ())
        except DecodeAbortedError:  # nobody wants it, and the cache is as it was
            return
        except Exception as error:  # noqa: BLE001  all of them were in it
            self._break(batch, error)
            return
        for generation, row in zip(ready, logits, strict=True):
            try:
                self._advance(generation, row)
            except Exception as error:  # noqa: BLE001  the others go on
                self._break([generation], error)

    def _next_batch(self) -> list[BackendGeneration]:
        """Run commands, admit, and choose who takes part in a step; wait if there is nobody."""
        self._commands.run()
        for generation in self._closed():
            self._end(generation)
        self._admit()
        with self._work:
            self._await_readers()
            batch = self._stepping = self._plan()
            self.context.abort(False)
            # A stream that closed since it was looked at has no other wake-up to come.
            if not batch and not self._commands and not self._closed():
                self._work.wait()
        return batch

    def _closed(self) -> list[BackendGeneration]:
        return [each for each in (*self._running, *self._waiting) if each.stream.closed]

    def _await_readers(self) -> None:
        """Wait a moment for readers that have not asked yet, so that they share the next step."""
        deadline = time.monotonic() + ASK_S
        while not self._commands:
            waited = deadline - time.monotonic()
            late = [g for g in self._running if not g.stream.ready and not g.stream.closed]
            if waited <= 0 or not late or len(late) == len(self._running):
                return
            self._work.wait(waited)

    def _admit(self) -> None:
        for generation in list(self._waiting):
            if not self.prefixes.ready(generation.session):
                continue  # others, behind it, need not wait for who computes what it begins with
            try:
                if not self.admission.admit(generation, self.sessions.values()):
                    return
            except KVBenchError as error:
                self._waiting.remove(generation)
                self._fail(generation, error)
            else:
                self._waiting.remove(generation)
                self._running.append(generation)

    def _abandon(self, session: BackendSession) -> None:
        """End what is left of a session's last generation: its caller has gone on already."""
        for generation in [*self._running, *self._waiting]:
            if generation.session is session:
                self._end(generation)

    def _end(self, generation: BackendGeneration) -> None:
        """End a generation that nobody reads any more."""
        session = generation.session
        # Of memories that have yet to be asked, the second reading counts it.
        if session.pending > session.ledger.unfed and not session.looking:
            session.ledger.uncount_unread()
        if generation in self._running:
            try:
                self._finish(generation)
            except Exception as error:  # noqa: BLE001  the others go on
                self._break([generation], error)
        else:
            self._waiting.remove(generation)
            self.prefixes.give_up(session)
            generation.stream.end()

    def _plan(self) -> list[BackendGeneration]:
        """Choose who takes part in a step: all who sample after it, and one or two longer prompts.

        These are the oldest, and the one with the fewest tokens left.
        """
        # If all were read side by side, each would attend over the cells of all from the start.
        ready = [each for each in self._running if each.stream.ready and not each.stream.closed]
        long = [each for each in ready if each.session.next_rows < each.session.pending]
        short = sorted((each for each in ready if each not in long), key=_left)
        shortest = sorted(long, key=_left)[:1]
        batch: list[BackendGeneration] = []
        room = STEP_TOKENS
        for generation in dict.fromkeys([*long[:1], *short, *shortest]):
            if (rows := generation.session.next_rows) <= room:
                batch.append(generation)
                room -= rows
        return batch

    def _forward(self, batch: list[BackendGeneration]) -> tuple[Tensor, list[BackendGeneration]]:
        """Feed a chunk of every session; return logits [ready, vocabulary] of those fully fed."""
        packed, parts, ready = DecodeBatch([], [], [], []), [], []
        for generation in batch:
            session, start = generation.session, len(packed.tokens)
            session.before_forward()
            seen, first = session.ledger.fed, session.rows.next
            tokens = session.tokens[seen : seen + session.next_rows]
            packed.tokens += tokens
            packed.positions += range(first, first + len(tokens))
            packed.sequences += [session.rows.sequence] * len(tokens)
            part = slice(start, len(packed.tokens))
            parts.append((session, Fed(session.name, seen, tokens), part))
            if len(tokens) == session.pending and not session.looking:
                packed.wanted += generation.rows_wanted(part.stop)
                ready.append(generation)
        self._listen([(session, part, session.rows.next) for session, _, part in parts])
        logits, last = self.context.decode(packed), -1
        self._take_in(parts)
        ends = []
        for generation in ready:
            last += len(generation.rows_wanted(0))
            ends.append(last)
            generation.note_best(logits[: last + 1])
        return logits[ends], ready

    def _listen(self, parts: list[tuple[BackendSession, slice, int]]) -> None:
        """Have memories asked while their sessions' tokens, from a position on, are computed."""
        asking = [each for each in parts if each[0].recalls]
        shape = self.context.shape

        def told(layer: int, queries: Tensor) -> None:
            halves = shape.in_halves(queries)
            for session, part, first in asking:
                session.ask(layer, halves[:, part], first)

        sizes = shape.query_heads, shape.head_dim
        self.context.watch.listen(told if asking else None, *sizes)

    def _take_in(self, parts: list[tuple[BackendSession, Fed, slice]]) -> None:
        """Record where the rows went, and keep the queries that the method wants."""
        prompts = {session.name: session.prompt for session, _, _ in parts}
        write = self.worker.feed([fed for _, fed, _ in parts], prompts)
        watch = self.context.watch
        cells = watch.cells()
        for session, _, part in parts:
            session.fed(cells[part])
            if (again := session.looked()) is not None:
                self.worker.rewind(session.name, again)
        if watch.wants_queries:
            self._keep_queries(parts, write)
        for session, _, _ in parts:
            self.admission.leave_prefix(session, self.sessions.values())

    def _keep_queries(
        self, parts: list[tuple[BackendSession, Fed, slice]], write: RingWrite | None
    ) -> None:
        """Store those of a forward's queries that the method wants, and sums of their attention."""
        watch, shape = self.context.watch, self.context.shape
        for layer in range(shape.layers):
            queries = shape.in_halves(watch.queries(layer, shape.query_heads))
            if write is not None:
                self.worker.rings.write(layer, queries, write)
            if self.worker.wants_sums:
                for session, _, part in parts:
                    keys = shape.in_halves(self.cells.keys[layer][:, session.rows.cells])
                    self.worker.sums.add(session.name, layer, queries[:, part], keys.float())

    def _advance(self, generation: BackendGeneration, logits: Tensor) -> None:
        """Take a token for a session whose pending tokens are all fed; run a due event."""
        session = generation.session
        generation.hand_over_stretch()
        token = generation.draw(logits)
        session.tokens.append(token)
        self._event(session, session.ledger.sampled())
        taken = session.positions_taken + len(session.tokens)
        if generation.push(token) or taken >= self.context.shape.context_limit:
            self._finish(generation)
        elif generation.given:
            generation.take_stretch(PREFILL_CHUNK)

    def _event(self, session: BackendSession, eviction: Eviction | None) -> None:
        if eviction is None:
            return
        number = len(session.ledger.stats.events) - 1
        order = EvictionOrder(session.name, number, eviction, blocks=[])
        moved = self.worker.remove(order, session.rows)
        session.ledger.moved(number, moved)
        self.descend()

    def descend(self) -> None:
        """Have rows lie low after an eviction, whose cells others fill; on the own thread."""
        for session in self.sessions.values():
            if session.rows.resident:
                session.rows.descend()

    def _finish(self, generation: BackendGeneration) -> None:
        session = generation.session
        self._running.remove(generation)
        self.prefixes.give_up(session)
        self._event(session, session.ledger.end_turn())
        self.admission.settle(session)
        generation.stream.end()

    def _fail(self, generation: BackendGeneration, error: Exception) -> None:
        if generation in self._running:
            self._running.remove(generation)
        self.prefixes.give_up(generation.session)
        generation.stream.fail(error)

    def _break(self, batch: list[BackendGeneration], error: Exception) -> None:
        """End the generations of a failed step; their sessions are computed again when asked."""
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise error  # more of the same would fail too
        if not isinstance(error, KVBenchError):
            traceback.print_exception(error)
        for generation in batch:
            session = generation.session
            self.worker.drop(session.name)
            session.lose()
            self.admission.release(session)
            self._fail(generation, error)


def _left(generation: BackendGeneration) -> int:
    return generation.session.pending
