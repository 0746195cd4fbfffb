"""The gateway owns text: templates, parsers, phase labels and sessions over an engine.

The client for trials inside the process is in `agentbench_kv.gateway.client`, the HTTP server in
`agentbench_kv.gateway.http`.
"""

from typing import Any

from agentbench_kv.engines.base import Engine
from agentbench_kv.engines.text import TextEngine
from agentbench_kv.gateway.base import AnyGateway
from agentbench_kv.gateway.exchange import ChatResult, Options
from agentbench_kv.gateway.gateway import Gateway
from agentbench_kv.gateway.parsing import Delta
from agentbench_kv.gateway.session import SessionBusyError, SessionLimitError, UnknownSessionError
from agentbench_kv.gateway.text import TextGateway
from agentbench_kv.methods.base import CLOSINGS, Method
from agentbench_kv.methods.dropping.policy import DropMethod
from agentbench_kv.methods.memory.memart import MemArt

__all__ = [
    "AnyGateway",
    "ChatResult",
    "Delta",
    "Gateway",
    "Options",
    "SessionBusyError",
    "SessionLimitError",
    "TextGateway",
    "UnknownSessionError",
    "open_gateway",
]


def open_gateway(
    engine: Engine, method: Method | None = None, *, tool_syntax: str = "auto", **limits: Any
) -> AnyGateway:
    """Return the gateway that fits an engine: over tokens, or over text.

    `method` is the run's: it says how closing markers are read, and may drop messages. An engine at
    text level reads its calls itself and labels nothing: it needs no `tool_syntax`.
    """
    policy = method if isinstance(method, DropMethod) else None
    if isinstance(engine, TextEngine):
        return TextGateway(engine, policy=policy, **limits)
    closing = CLOSINGS[0] if method is None else method.closing_markers
    return Gateway(
        engine,
        policy=policy,
        tool_syntax=tool_syntax,
        closing=closing,
        remembers=method is not None and "memory_blocks" in method.needs,
        appends=isinstance(method, MemArt) and method.append == "turns",
        **limits,
    )
