"""Who wrote which prompt tokens: read from the markers, as phases are."""

from __future__ import annotations

from collections.abc import Sequence

from agentbench_kv.engines.base import Hints, Phase, Source, TurnNotes
from agentbench_kv.phases.machine import PhaseMachine

_ROLES = {"user": Source.USER, "assistant": Source.ASSISTANT}


def notes_for(machine: PhaseMachine, ids: Sequence[int], hints: Hints) -> TurnNotes:
    """Return the messages that prompt ids consist of, and the client's hints about them.

    `machine` is the session's, before these ids; it is not advanced.
    """
    machine = machine.copy()
    messages: list[_Message] = []
    opens = machine.table.family.message_open
    for token in ids:
        # What closes the message before goes with the first one: it is too little to be apart.
        begins = machine.table.atomic.get(token) == opens
        if not messages or (begins and messages[-1].header):
            messages.append(_Message())
        messages[-1].add(machine.label(token), machine.state.header)
    return TurnNotes([(message.size, message.source) for message in messages], hints)


class _Message:
    """One message while its tokens are read."""

    def __init__(self) -> None:
        self.size = 0
        self.header = ""
        self._tool = False

    def add(self, phase: Phase, header: str) -> None:
        self.size += 1
        self.header = header or self.header
        self._tool = self._tool or phase is Phase.TOOL

    @property
    def source(self) -> Source:
        # Tool results are documents, whoever sends them.
        role = self.header.strip().partition("<")[0].split()
        return _ROLES.get(role[0] if role and not self._tool else "", Source.DOCUMENT)
