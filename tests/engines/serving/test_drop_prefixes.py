"""Shared prefixes of measurements before are dropped where the plug-in has them, and only there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentbench_kv.engines.core.prefixes import PrefixTable
from agentbench_kv.engines.serving.engine import ServingEngine
from agentbench_kv.engines.sglang.plugin.runtime import Commands
from agentbench_kv.registry import make_method


class Prefix:
    """Rows that somebody reads, or nobody."""

    rows = 1

    def __init__(self, *, read: bool) -> None:
        self.rows_in_use = read

    def free(self) -> None:
        """Nothing is behind it."""


@pytest.mark.parametrize(("prefix", "told"), [("shared", ["drop_prefixes"]), ("own", [])])
def test_a_server_is_told_where_its_method_shares(prefix: str, told: list[str]) -> None:
    asked: list[str] = []
    method = make_method("full-constrained", None, {"prefix": prefix})
    wire = SimpleNamespace(stock=False, options=SimpleNamespace(method=method))
    engine: Any = SimpleNamespace(_wire=wire, _control=SimpleNamespace(call=asked.append))
    ServingEngine.drop_prefixes(engine)
    assert asked == told


def test_the_plugin_keeps_what_sessions_read() -> None:
    table: PrefixTable[str, Prefix] = PrefixTable()
    for key, read in ((b"read", True), (b"unread", False)):
        assert table.computed_by(key, "somebody")
        table.store(key, Prefix(read=read))
    runtime: Any = SimpleNamespace(table=SimpleNamespace(prefixes=table, sessions={}))
    commands = Commands.__new__(Commands)
    commands._runtime = runtime
    commands._sessions = {}
    commands.handlers()["drop_prefixes"]({})
    assert b"read" in table
    assert b"unread" not in table
