"""The gateway owns text: templates, parsers, phase labels and sessions over an engine.

The client for trials inside the process is in `agentbench_kv.gateway.client`, the HTTP server in
`agentbench_kv.gateway.server`.
"""

from agentbench_kv.gateway.accounting import SessionReport, TurnInfo
from agentbench_kv.gateway.cancellation import Cancellation
from agentbench_kv.gateway.gateway import Gateway
from agentbench_kv.gateway.parsing import Delta
from agentbench_kv.gateway.phases import PhaseMachine, PhaseTable
from agentbench_kv.gateway.types import (
    ChatResult,
    Options,
    SessionBusyError,
    SessionLimitError,
    UnknownSessionError,
)

__all__ = [
    "Cancellation",
    "ChatResult",
    "Delta",
    "Gateway",
    "Options",
    "PhaseMachine",
    "PhaseTable",
    "SessionBusyError",
    "SessionLimitError",
    "SessionReport",
    "TurnInfo",
    "UnknownSessionError",
]
