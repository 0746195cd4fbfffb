"""Where a session's system message with its tools ends, which `protect=system` goes by."""

from __future__ import annotations

from collections.abc import Sequence

from agentbench_kv.phases.machine import PhaseMachine, PhaseState, PhaseTable

# Whoever may give instructions before anybody speaks; Kimi lists its tools in a message of its own.
_ROLES = {"system", "developer", "tool_declare"}


def system_tokens(table: PhaseTable, ids: Sequence[int]) -> int:
    """Return how many of a session's first ids come before its first other message.

    That is all of them if there are only system messages, and 0 if there is no message at all.
    What comes before the first message belongs to it: the token that begins a text, and DeepSeek's
    system prompt, which has no marker. Where a template puts the system prompt into the user's
    message, nobody can tell where it ends, and it does not count.
    """
    machine, start, opened = PhaseMachine(table), 0, False
    for place, token in enumerate(ids):
        if table.atomic.get(token) in table.family.opens:
            if _speaks(machine.state):
                return start
            start, opened = place, True
        machine.label(token)
        if machine.state.place == "message" and _speaks(machine.state):
            return start
    if _speaks(machine.state):
        return start
    return len(ids) if opened else 0


def _speaks(state: PhaseState) -> bool:
    """Return whether a message is under way whose role, as far as it is known, is no system's."""
    role = state.header.strip().partition("<")[0].split()
    return state.place != "outside" and bool(role) and role[0] not in _ROLES
