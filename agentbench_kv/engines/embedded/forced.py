"""One session played under many methods at once: its tokens are given, its caches differ.

Every token of an answer is fed as if the model had drawn it: the same phases, kept queries, sums,
triggers and events as a decode of the same tokens. Between two events a cache only grows, so the
tokens in between run as one forward. A method whose first event is not due has the full cache's
rows, and shares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentbench_kv.engines.base import KVStats
from agentbench_kv.engines.core.ledger import Eviction, SessionLedger
from agentbench_kv.engines.embedded.attention import pack
from agentbench_kv.engines.embedded.beginnings import Beginning, Beginnings, Labelled, full_cache
from agentbench_kv.engines.embedded.forward import PREFILL_CHUNK, run_network, session_pools
from agentbench_kv.engines.embedded.model import LoadedModel
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.engines.embedded.quantization import on_write
from agentbench_kv.engines.embedded.session import EmbeddedSession, SessionPools
from agentbench_kv.errors import ContextLimitError, KVBenchError
from agentbench_kv.methods.base import Method, Phase


@dataclass(frozen=True)
class Stretch:
    """Predictions of neighbouring tokens of an answer, by every cache.

    `of_methods` are in the methods' order; None where nothing has been evicted, so that they are
    the full cache's.
    """

    first: int  # of the answer's tokens, the one that row 0 predicts
    full: Tensor  # logits [tokens, vocab], float32
    of_methods: Sequence[Tensor | None]


class ForcedPlay:
    """A session whose tokens are given, turn by turn, on the caller's thread.

    `system` of its first tokens are the system message with its tools. With `by_token` every
    forward feeds one token of an answer, as a decode does: the same to the last bit, and slower.
    `recorders`, one a method if any, see the events of its session.
    `kv_dtypes` are the precisions that the methods' rows are simulated at, as in `EngineOptions`.
    `beginnings` are those of earlier plays of the same model: what the first prompt has in common
    with one of them is not read again, to the same bits. They must have been made for
    these methods.
    Raises UsageError if the model has no place for one of the methods.
    """

    def __init__(
        self,
        model: LoadedModel,
        methods: Sequence[Method],
        system: int = 0,
        *,
        by_token: bool = False,
        recorders: Sequence[Observer] = (),
        kv_dtypes: Sequence[str] = (),
        beginnings: Beginnings | None = None,
    ) -> None:
        self._model = model
        base = full_cache(methods) if beginnings is None else beginnings.base
        self._log = _QueryLog(model.shape.layers)
        self._sums: dict[int, Tensor] = {}  # of the full cache, behind each chunk of its prompt
        self._beginnings = beginnings
        pools = session_pools(model, base) if beginnings is None else beginnings.pools
        self._full = _Member(model, base, self._log)
        self._full.start(ForcedSession("full", base, pools))
        self._first_prompt: Labelled = ()
        precisions = kv_dtypes or [""] * len(methods)
        seen: Sequence[Observer | None] = recorders or [None] * len(methods)
        self._arms = [
            _Member(model, method, recorder=recorder, kv_dtype=precision)
            for method, precision, recorder in zip(methods, precisions, seen, strict=True)
        ]
        self._longest = 1 if by_token else PREFILL_CHUNK
        for arm, precision in zip(self._arms, precisions, strict=True):
            if precision:  # its rows are others than the full cache's from the first on
                first = ForcedSession(arm.method.label, arm.method, arm.pools, arm.recorder)
                arm.start(first)
                self._longest = arm.session.longest_stretch(self._longest)
            arm.ledger.opens_with(system=system)

    def turn(self, prompt: Labelled, answer: Labelled) -> Iterator[Stretch]:
        """Feed a prompt, then an answer's tokens; yield what each cache predicts of the latter.

        The answer is not empty. Raises ContextLimitError where the model's context ends.
        """
        first = self._full.session
        if first.logical + len(prompt) + len(answer) > self._model.context_limit:
            raise ContextLimitError(
                f"the session has more than the {self._model.context_limit} tokens of the context"
            )
        yield self._stretch(0, self._begin_turn(prompt))
        at = 0
        while True:
            for member in self._members():
                self._accept(member, *answer[at])
            left = len(answer) - at - 1
            if not left:
                break
            quiet = min(member.ledger.quiet(left) for member in self._members())
            rows = min(quiet + 1, left, self._longest)
            more = answer[at + 1 : at + rows]
            yield self._stretch(at + 1, [member.feed_drawn(more) for member in self._members()])
            at += rows
        for member in self._members():
            self._evict(member, member.ledger.end_turn())

    def stats(self) -> list[KVStats]:
        """Return the accounting of every method's session so far."""
        return [arm.ledger.snapshot() for arm in self._arms]

    def sessions(self) -> list[EmbeddedSession]:
        """Return the full cache's session, then each method's; the full cache's before an event."""
        full = self._full.session
        return [full, *(arm.session if arm.started else full for arm in self._arms)]

    def close(self) -> None:
        if self._beginnings is None:
            self._full.free()
        else:
            self._beginnings.keep(
                self._first_prompt, self._full.session, self._log.first, self._sums
            )
        for arm in self._arms:
            arm.free()

    def _begin_turn(self, prompt: Labelled) -> list[Tensor | None]:
        """Feed a prompt to every cache; the first one behind what an earlier play has read."""
        first, rest = self._full.session, prompt
        begins = self._beginnings is not None and not first.logical
        if self._beginnings is not None and begins:
            self._first_prompt = prompt
            found = self._beginnings.find(prompt)
            if found is not None:
                known, rows = found
                first.begin_as(known, rows)
                self._log.begin_as(known, rows)
                self._sums = {at: sums for at, sums in known.sums.items() if at <= rows}
                rest = prompt[rows:]
        logits = self._full.begin_turn(rest, self._sums if begins else None)
        return [logits, *(arm.begin_turn(prompt) for arm in self._arms)]

    def _members(self) -> list[_Member]:
        # The full cache first: what starts from it needs what it was fed.
        return [self._full, *self._arms]

    def _stretch(self, first: int, logits: list[Tensor | None]) -> Stretch:
        full, *others = logits
        if full is None:
            raise KVBenchError("the full cache was not fed")
        return Stretch(first, full, others)

    def _accept(self, member: _Member, token: int, phase: Phase) -> None:
        """Take an answer's token, which the next forward feeds, and run the event due with it."""
        if member.started:
            self._evict(member, member.session.accept_given(token, phase))
            return
        eviction = member.ledger.sampled()
        self._evict(member, eviction)

    def _evict(self, member: _Member, eviction: Eviction | None) -> None:
        if eviction is None:
            return
        if not member.started:
            first = self._full.session
            member.start(first.twin(member.method, member.pools, self._log, member.recorder))
        member.session.compress(eviction)


class ForcedSession(EmbeddedSession):
    """A session that is told which tokens it drew."""

    def __init__(
        self, name: str, method: Method, pools: SessionPools, recorder: Observer | None = None
    ) -> None:
        super().__init__(name, _NoLabeller(), method, pools, recorder)

    def accept_given(self, token: int, phase: Phase) -> Eviction | None:
        """Add a token that was drawn; see `accept`."""
        self.generated.add(self.logical)
        self.pending.append((token, phase))
        return self.ledger.sampled()

    @torch.inference_mode()
    def begin_as(self, known: Beginning, rows: int) -> None:
        """Start as another session did, with its first rows."""
        self._follow(known.session)
        self.ledger = known.session.ledger.fork()
        self.rewind(rows)
        if self.cache.shape.with_sums:
            self.cache.own()
            self.cache.pool.sums[self.cache.slot, :, :, :rows] = known.sums[rows]

    def twin(
        self, method: Method, pools: SessionPools, log: _QueryLog, recorder: Observer | None
    ) -> ForcedSession:
        """Return a session of a method that starts from this one's rows, queries and tokens."""
        new = ForcedSession(method.label, method, pools, recorder)
        new.cache.copy_rows(self.cache)
        if self.window is not None and new.window is not None:
            new.window.copy_rows(self.window)
        phases = [Phase(phase) for phase in self._phases]
        rows, slots = new.queries.place(phases, 0, 0)
        if rows:
            device = new.cache.shape.device
            vectors = log.queries(torch.tensor(rows, device=device))
            pools.queries.write_all(vectors, torch.tensor(slots, device=device))
        new.pending.extend(self.pending)
        new.generated = set(self.generated)
        new.rope, new._next, new._phases = list(self.rope), self._next, list(self._phases)
        return new


class _Member:
    """One cache of a play: a session of its own from its first event on, until then a ledger."""

    def __init__(
        self,
        model: LoadedModel,
        method: Method,
        observer: Observer | None = None,
        recorder: Observer | None = None,
        kv_dtype: str = "",
    ) -> None:
        self.method = method
        self.recorder = recorder
        self.pools = session_pools(model, method, kv_dtype)
        self._model = model
        self._observer = observer
        self._session: ForcedSession | None = None
        self._own = self.pools.new_ledger(method)
        self._waiting = 0  # tokens that the next forward would be fed, were there a session

    @property
    def started(self) -> bool:
        return self._session is not None

    @property
    def session(self) -> ForcedSession:
        if self._session is None:
            raise KVBenchError(f"{self.method.label} has no session of its own yet")
        return self._session

    @property
    def ledger(self) -> SessionLedger:
        return self._own if self._session is None else self._session.ledger

    def start(self, session: ForcedSession) -> None:
        """Go on with a session of one's own, which holds what was counted so far."""
        if self._own.fed:
            session.ledger = self._own
        self._session = session

    def begin_turn(self, prompt: Labelled, sums: dict[int, Tensor] | None = None) -> Tensor | None:
        """Prefill what is pending and a prompt; return the logits [1, vocab] behind it.

        `sums` gets those behind each forward, by tokens read, if the cache has some.
        """
        if self._session is None:
            self._own.begin_turn(len(prompt))
            self._own.forward(len(prompt) + self._waiting)
            self._waiting = 1
            return None
        session = self._session
        session.extend([token for token, _ in prompt], [phase for _, phase in prompt])
        session.begin_turn()
        logits = None
        while session.pending:
            logits = self._forward(PREFILL_CHUNK, all_rows=False)
            held = session.cache.sums
            if sums is not None and held is not None:
                sums[session.fed] = held[:, :, : session.fed].clone()
        return logits

    def feed_drawn(self, more: Labelled) -> Tensor | None:
        """Feed the token that waits and those drawn behind it; return logits [1 + more, vocab]."""
        if self._session is None:
            self._own.forward_drawn(1 + len(more))
            return None
        self._session.add_drawn(more)
        return self._forward(1 + len(more), all_rows=True)

    def _forward(self, limit: int, *, all_rows: bool) -> Tensor:
        session = self.session
        with torch.inference_mode():
            session.take(limit)
            places = self._model.attention.places
            quantise = on_write(self.pools.kv_dtype)
            packed = pack([session], self.pools.queries, places, self._observer, quantise)
            (rows,) = packed.rows
            wanted = list(range(rows)) if all_rows else [rows - 1]
            logits = run_network(self._model, packed, wanted)
            session.fed_rows(rows)
        return logits

    def free(self) -> None:
        if self._session is not None:
            self._session.free()


class _QueryLog(Observer):
    """All queries of the full cache's session, from which any method's kept ones are taken."""

    def __init__(self, layers: int) -> None:
        self._parts: list[list[Tensor]] = [[] for _ in range(layers)]

    def on_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        del key, value
        self._parts[layer].append(query.transpose(0, 1).clone())

    def begin_as(self, known: Beginning, rows: int) -> None:
        """Start with the first queries of another session."""
        self._parts = [[layer[:rows]] for layer in known.queries]

    def queries(self, rows: Tensor) -> Tensor:
        """Return queries [layers, n, heads, head_dim] of the tokens at some logical positions."""
        return torch.stack([layer[rows] for layer in self._layers()])

    def first(self, rows: int) -> list[Tensor]:
        """Return copies [rows, heads, head_dim] of every layer's first queries."""
        return [layer[:rows].clone() for layer in self._layers()]

    def _layers(self) -> list[Tensor]:
        for parts in self._parts:
            parts[:] = [torch.cat(parts)]
        return [parts[0] for parts in self._parts]


class _NoLabeller:
    """Stands where phases come with the tokens."""

    def label(self, token: int) -> Phase:
        raise KVBenchError(f"token {token} came without its phase")
