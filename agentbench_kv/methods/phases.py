"""The four phases of an agent's token stream (AgentKV, section 3.2 and appendix D.2)."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """What a token is part of; the values are the ones capture files use."""

    THINK = 0
    ACT = 1
    TOOL = 2
    OTHERS = 3


PHASE_NAMES = tuple(phase.name.lower() for phase in Phase)
