"""Random walks of sessions that answer, fork, drop and close: rows, books and memory agree.

After every step a book of our own says which logical positions each session must hold; rows of
sessions that the step did not touch are bit for bit as they were. At the end nothing is left.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from agentbench_kv.engines.base import EngineOptions, PhaseLabeller
from agentbench_kv.engines.core.ledger import SessionLedger
from agentbench_kv.engines.embedded import engine as engine_module
from agentbench_kv.engines.embedded import span_rows
from agentbench_kv.engines.embedded.cache import SessionCache
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.session import EmbeddedSession
from agentbench_kv.engines.embedded.slots import CachePool, SlotCache
from agentbench_kv.gateway import Gateway, Options
from agentbench_kv.gateway.aside import Aside
from agentbench_kv.gateway.cursors import places_of_cursors
from agentbench_kv.gateway.reports import SessionReport
from agentbench_kv.gateway.session import Session
from agentbench_kv.methods.dropping.policy import DropMethod
from agentbench_kv.methods.dropping.sidequest import SideQuestPrompted
from agentbench_kv.methods.spans import SpanRange
from agentbench_kv.registry import make_method

STEPS = 200
MOST_SESSIONS = 5
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]
ARMS = [
    (name, execution)
    for name in ("clear-tools", "sidequest-prompted")
    for execution in ("text", "span", "span+move")
]
Rows = tuple[Tensor, Tensor, Tensor]  # keys, values, original positions


class Book:
    """Which logical positions every session must hold, from what its engine was told alone."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.gone: dict[str, set[int]] = {}  # positions that left, of each open session
        self.evicted: dict[str, int] = {}  # how many ever did, since it was opened or forked
        self._watch("open", self._open)
        self._watch("fork", self._fork)
        self._watch("rewind", self._rewind)
        self._watch("evict_spans", self._evict)
        self._watch("close", self._close)

    def _watch(self, name: str, note: Callable[..., None]) -> None:
        method = getattr(self.engine, name)

        def watched(*given: Any) -> Any:
            found = method(*given)
            note(*given)
            return found

        setattr(self.engine, name, watched)

    def _open(self, session: str, labeller: PhaseLabeller) -> None:
        del labeller
        self.gone[session], self.evicted[session] = set(), 0

    def _fork(self, session: str, new: str, labeller: PhaseLabeller) -> None:
        del labeller
        self.gone[new], self.evicted[new] = set(self.gone[session]), 0

    def _rewind(self, session: str, length: int) -> None:
        self.gone[session] = {n for n in self.gone[session] if n < length}

    def _evict(self, session: str, spans: Sequence[SpanRange]) -> None:
        leaving = {n for begin, end in spans for n in range(begin, end)}
        self.evicted[session] += len(leaving - self.gone[session])
        self.gone[session] |= leaving

    def _close(self, session: str) -> None:
        del self.gone[session], self.evicted[session]

    def check(self, session: str, tokens: int, rows: Rows) -> None:
        """Compare a session of so many tokens, the last of which is never fed, with its rows."""
        held = sorted(set(range(tokens - 1)) - self.gone[session])
        everywhere = rows[2].sort(-1).values
        assert (everywhere == torch.tensor(held)).all(), f"{session} holds other rows"
        stats = self.engine.stats(session)
        assert stats.live == len(held)
        assert stats.logical == tokens
        assert stats.evicted == self.evicted[session]
        assert stats.peak_live >= stats.live


class Answering(Gateway):
    """What a fork really says is replaced by cursors drawn by lot; the fork itself is real."""

    draw = random.Random(0)

    def _aside(self, state: Session, messages: Sequence[Any], *rest: Any) -> Aside:
        inner = super()._aside(state, messages, *rest)
        cursors = [c for c in places_of_cursors(messages) if self.draw.random() < 0.3]

        def ask() -> str:
            answer = inner.result()
            assert not answer.error, answer.error
            return json.dumps({"del_cursors": cursors})

        return Aside(ask, lambda: inner.result().stats, inner.cancel, inner.reads)


class Walk:
    """Steps drawn from a seed over one gateway; `log` says what they were."""

    def __init__(self, name: str, execution: str, seed: int) -> None:
        settings = {"exec": execution}
        if name == "clear-tools":
            method = make_method(name, 300, settings | {"keep": "1"})
        else:
            method = make_method(name, None, settings | {"fork_every": "2", "fork_tokens": "6"})
        assert isinstance(method, DropMethod)
        options = EngineOptions("micro", method.below(), device="cpu", max_live_tokens=60_000)
        self.engine = EmbeddedEngine.create(options)
        self.book = Book(self.engine)
        self.gateway = Answering(self.engine, policy=method)
        self.gateway.draw = random.Random(seed)
        self.draw = random.Random(seed)
        self.histories: dict[str, list[dict[str, Any]]] = {}
        self.rows: dict[str, Rows] = {}
        self.log: list[str] = []
        self.made = self.left = 0
        self.asks = isinstance(method, SideQuestPrompted)

    def step(self) -> None:
        """Do one thing, and look at everything."""
        names = sorted(self.histories)
        kind = self.draw.choice(["open", *["call"] * 5, "say", "fork", "fork", "retell", "close"])
        if not names:
            kind = "open"
        elif kind in ("fork", "open") and len(names) >= MOST_SESSIONS:
            kind = "close"
        touched = self._open() if kind == "open" else self._on(kind, self.draw.choice(names))
        self.log.append(f"{kind} {touched}")
        self.look(touched)

    def _on(self, kind: str, name: str) -> str:
        """Do it to a session; return which one's rows may have changed."""
        return str(getattr(self, f"_{kind}")(name))

    def _open(self) -> str:
        name = f"run|0|1|{self.made}"
        self.made += 1
        self.histories[name] = [{"role": "user", "content": f"Look at {name}."}]
        return self._call(name)

    def _call(self, name: str) -> str:
        """Have it call one or two tools, and have their results at hand."""
        history, number = self.histories[name], len(self.histories[name])
        calls = [
            {
                "id": f"c{number}x{n}",
                "type": "function",
                "function": {"name": "look", "arguments": json.dumps({"at": number + n})},
            }
            for n in range(self.draw.choice([1, 1, 2]))
        ]
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        self.gateway.force(name, history, said, TOOLS)
        history.append(said)
        for call in calls:
            words = " ".join(f"w{self.draw.randrange(99)}" for _ in range(self.draw.randrange(40)))
            history.append({"role": "tool", "tool_call_id": call["id"], "content": f"so {words}"})
        return name

    def _say(self, name: str) -> str:
        """Have it say something of its own."""
        history = self.histories[name]
        said = self.gateway.chat(
            name, history, TOOLS, Options(max_tokens=self.draw.randrange(1, 6))
        )
        history += [said.message, {"role": "user", "content": "Go on."}]
        return name

    def _fork(self, name: str) -> str:
        new = f"run|0|1|{self.made}"
        self.made += 1
        self.gateway.fork(name, new)
        self.histories[new] = list(self.histories[name])
        self.rows[new] = self.rows[name]
        return ""

    def _retell(self, name: str) -> str:
        """Tell another story: the session starts over."""
        self.histories[name] = [{"role": "user", "content": f"Story {len(self.log)}."}]
        return self._call(name)

    def _close(self, name: str) -> str:
        report = self.gateway.close_report(name)
        self.left += report.stats.evicted
        del self.histories[name], self.rows[name]
        return name

    def look(self, touched: str) -> None:
        """Check every session; those that were not touched hold the very same rows."""
        assert self.gateway.sessions() == sorted(self.histories)
        for name in self.histories:
            rows = held_rows(self.engine, name)
            self.book.check(name, len(self.gateway.token_log(name)[0]), rows)
            before = self.rows.get(name)
            if name != touched and before is not None:
                assert all(map(torch.equal, before, rows)), f"rows of {name} changed"
            self.rows[name] = rows
        if not self.asks:  # else forks come and go meanwhile
            self._check_slots()

    def _check_slots(self) -> None:
        """Check that slots are taken by those sessions, and each of them by none twice."""
        at_rest(self.engine)
        sessions = [self.engine._scheduler.get(name) for name in self.histories]
        used = [id(cache) for pool in pools(self.engine) for cache in users(pool)]
        assert sorted(used) == sorted(id(session.cache) for session in sessions)

    def end(self) -> None:
        """Close everything in any order; nothing may be left of it anywhere."""
        names = sorted(self.histories)
        self.draw.shuffle(names)
        for name in names:
            self.look(self._close(name))
        assert not [t for t in threading.enumerate() if t.name == "kvbench-aside"]
        assert not self.gateway.sessions()
        assert not self.book.gone, f"never closed: {sorted(self.book.gone)}"
        at_rest(self.engine)
        scheduler = self.engine._scheduler
        assert not scheduler._sessions
        assert not scheduler._leaving
        assert [users(pool) for pool in pools(self.engine)] == [[]] * len(pools(self.engine))
        assert self.engine.pool_bytes == 0


def users(pool: CachePool) -> list[SlotCache]:
    return [cache for caches in pool._users.values() for cache in caches]


def pools(engine: EmbeddedEngine) -> list[CachePool]:
    return list(engine._scheduler.pools.full._pools.values())


def at_rest(engine: EmbeddedEngine) -> None:
    """Wait until the engine's thread has freed what was closed."""
    scheduler = engine._scheduler
    while scheduler._leaving:
        time.sleep(0.001)
    scheduler._commands.call(lambda: None)  # behind the round that emptied it


def held_rows(engine: EmbeddedEngine, name: str) -> Rows:
    """Return copies of a session's rows, taken on the engine's thread."""

    def copies(session: EmbeddedSession) -> Rows:
        cache, end = session.cache, session.cache.length
        held = (cache.keys[:, :, :end], cache.values[:, :, :end], cache.positions[:, :, :end])
        return tuple(part.clone() for part in held)  # type: ignore[return-value]

    return engine._scheduler.between_turns(name, copies)


@contextmanager
def walking(name: str, execution: str, seed: int) -> Iterator[Walk]:
    walk = Walk(name, execution, seed)
    try:
        yield walk
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, after {walk.log[-8:]}: {error}") from error
    finally:
        walk.engine.shutdown()


def walked(name: str, execution: str, seed: int, steps: int = STEPS) -> Walk:
    with walking(name, execution, seed) as walk:
        for _ in range(steps):
            walk.step()
        walk.end()
    return walk


@pytest.mark.parametrize(("name", "execution"), ARMS)
def test_any_walk_keeps_its_books_and_leaves_nothing(name: str, execution: str) -> None:
    walk = walked(name, execution, seed=22)
    done = {step.split()[0] for step in walk.log}
    assert done == {"open", "call", "say", "fork", "retell", "close"}
    assert walk.left > 0


def aside(walk: Walk, name: str) -> None:
    """Have a fork go on until it has dropped something, and a fork of that one."""
    drawn = walk.draw.getstate()
    walk.gateway.fork(name, "side")
    walk.histories["side"] = list(walk.histories[name])
    for _ in range(3):
        walk._call("side")
    walk.gateway.fork("side", "second")
    walk.histories["second"] = list(walk.histories["side"])
    walk._call("second")
    for fork in ("side", "second"):
        walk.gateway.close_report(fork)
        del walk.histories[fork]
    walk.draw.setstate(drawn)


@pytest.mark.parametrize("execution", ["text", "span", "span+move"])
def test_a_fork_changes_nothing_of_the_session_it_is_of(execution: str) -> None:
    """Play a session twice, the second time with forks that go on, drop and close in between."""
    ends = []
    for forks in (False, True):
        walk = Walk("clear-tools", execution, seed=5)
        try:
            walk.step()
            (name,) = walk.histories
            for number in range(8):
                if forks:
                    aside(walk, name)
                (walk._say if number % 3 == 2 else walk._call)(name)
            log = walk.gateway.token_log(name)
            ends.append((log, held_rows(walk.engine, name), walk.gateway.stats(name)))
        finally:
            walk.engine.shutdown()
    (log, rows, stats), (other_log, other_rows, other_stats) = ends
    assert log == other_log
    assert all(map(torch.equal, rows, other_rows))
    assert stats.evicted > 0
    assert stats == other_stats


# ---- and the walks can fail ----


def fork_that_is_never_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Session.close

    def forget(session: Session) -> SessionReport:
        return session.report() if " aside " in session.id else close(session)

    monkeypatch.setattr(Session, "close", forget)


def rows_that_are_freed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachePool, "join", lambda *_: None)


def rows_that_are_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionCache, "_overwrites", lambda *_: False)


def other_rows_that_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    evict = span_rows.evict_spans

    def one_on(session: EmbeddedSession, spans: Sequence[SpanRange]) -> int:
        return evict(session, [(begin + 1, end + 1) for begin, end in spans])

    monkeypatch.setattr(engine_module, "evict_spans", one_on)


def evictions_that_are_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = SessionLedger.fork

    def empty(ledger: SessionLedger) -> SessionLedger:
        twin = fork(ledger)
        twin.stats.evicted = 1
        return twin

    monkeypatch.setattr(SessionLedger, "fork", empty)


@pytest.mark.parametrize(
    ("arm", "breaks", "found"),
    [
        (("sidequest-prompted", "span"), fork_that_is_never_closed, "never closed"),
        (("clear-tools", "span"), rows_that_are_freed_twice, ""),
        (("clear-tools", "text"), rows_that_are_written_over, "rows of .* changed"),
        (("clear-tools", "span"), other_rows_that_leave, "holds other rows"),
        (("clear-tools", "span"), evictions_that_are_counted_twice, ""),
    ],
)
def test_a_break_is_found(
    arm: tuple[str, str],
    breaks: Callable[[pytest.MonkeyPatch], None],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    breaks(monkeypatch)
    with pytest.raises(AssertionError, match=f"seed 22.*{found}"):
        walked(*arm, seed=22, steps=100)
