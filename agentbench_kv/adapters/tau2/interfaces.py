"""What agents and users are derived from, by the names that each release of tau2-bench has."""

from __future__ import annotations

try:  # v1.x
    from tau2.agent.base_agent import HalfDuplexAgent as AgentBase
    from tau2.user.user_simulator_base import STOP, UserState
    from tau2.user.user_simulator_base import HalfDuplexUser as UserBase
except ImportError:  # v0.2.0
    from tau2.agent.base import BaseAgent as AgentBase
    from tau2.user.base import STOP, UserState
    from tau2.user.base import BaseUser as UserBase

__all__ = ["STOP", "AgentBase", "UserBase", "UserState"]
