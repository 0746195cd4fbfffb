"""System messages that sessions have in common.

To SGLang a prefix is one more session at rest, which owns its rows and gives them back when it is
released. Sessions that begin with it find them in their own rows of the table as those of another
one, as a fork finds its source's. A session that would begin with what another one is computing
stays in the queue meanwhile.
"""

from __future__ import annotations

import itertools
from typing import Any

from agentbench_kv.engines.core.ledger import PrefixEnd
from agentbench_kv.engines.sglang.plugin.sessions import (
    SglangSession,
    SglangSessions,
    SlotPrefix,
)
from agentbench_kv.engines.sglang.plugin.versions import Sglang0512
from agentbench_kv.engines.sglang.plugin.worker import DeviceWorker


class SharedPrefixes:
    """Gives sessions the prefixes that are there, and keeps those that they compute."""

    def __init__(
        self, table: SglangSessions, worker: DeviceWorker, scheduler: Any, version: Sglang0512
    ) -> None:
        self._table = table
        self._worker = worker
        self._scheduler = scheduler
        self._version = version
        self._numbers = itertools.count(1)

    def offer(self, session: SglangSession) -> None:
        """Let SGLang, about to look what a request finds, find a prefix that is there."""
        stored = self._stored(session)
        if stored is None or session.prefix is not None or not self._free_rows():
            return
        row = self._take(stored.row, stored.rows)
        self._slots[session.name] = self._version.slot(row, stored.rows, stored.rows)
        self._join(session, stored)

    def may_begin(self, session: SglangSession) -> bool:
        """Whether a session may be fed; not while another one computes what it begins with."""
        key = session.prefix_key
        if key is None or session.prefix is not None:
            return True
        return self._stored(session) is None and self._table.prefixes.computed_by(key, session)

    def withdraw(self, session: SglangSession) -> None:
        """Take back what a session was offered that is not admitted: it would hold it waiting."""
        if session.prefix_key is None:
            return
        self._table.prefixes.give_up(session)
        if session.prefix is not None:
            self._scheduler.tree_cache.release_session(session.name)
            self._version.forget_rows(session.request)

    def begin(self, session: SglangSession) -> None:
        """Count what a session finds as it is fed for the first time."""
        if session.prefix_key is None or session.prefix is None:
            return
        session.prefix_key, rows = None, session.prefix.rows
        session.ledger.find(rows, rows)
        self._worker.wait_for_forward()
        self._worker.rows.fork(session.prefix.name, session.name)

    def end(self, session: SglangSession) -> PrefixEnd | None:
        """Keep a prefix for others whose last token is in the forward that is about to run."""
        key, count = session.prefix_key, session.prefix_tokens
        if key is None or session.ledger.fed < count:
            return None
        session.prefix_key = None
        if not self._free_rows():
            self._table.prefixes.give_up(session)
            return None
        held = self._version.rows(session.request)
        row, name = self._take(held.req_pool_idx, count), f"kvbench prefix {next(self._numbers)}"
        self._slots[name] = self._version.slot(row, count, 0)
        held.cache_protected_len = count
        prefix = SlotPrefix(name, count, row, self._release)
        self._table.prefixes.store(key, prefix)
        self._join(session, prefix)
        session.ledger.stats.shared = count
        self._worker.wait_for_forward()
        return PrefixEnd(name, count)

    def _join(self, session: SglangSession, prefix: SlotPrefix) -> None:
        session.prefix, session.shared = prefix, prefix.rows
        prefix.join(session.name)

    def _stored(self, session: SglangSession) -> SlotPrefix | None:
        key = session.prefix_key
        return None if key is None else self._table.prefixes.find(key)

    def _free_rows(self) -> bool:
        return bool(self._scheduler.req_to_token_pool.free_slots)

    def _take(self, source: int, count: int) -> int:
        """Take a row of the table, and let it begin with another one's slots."""
        row = self._version.take_row(self._scheduler.req_to_token_pool)
        slots = self._worker.pool.table
        slots[row, :count] = slots[source, :count]
        return row

    def _release(self, name: str) -> None:
        self._scheduler.tree_cache.release_session(name)
        self._worker.rows.drop(name)

    @property
    def _slots(self) -> dict[str, Any]:
        slots: dict[str, Any] = self._version.sessions(self._scheduler.tree_cache).slots
        return slots
