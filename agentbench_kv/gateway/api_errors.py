"""Errors as OpenAI clients read them."""

from __future__ import annotations

import logging
from typing import Any

from agentbench_kv.errors import (
    CapacityError,
    EndpointError,
    EngineGoneError,
    KVBenchError,
    MemoryLostError,
    SessionFailedError,
)
from agentbench_kv.gateway.session import SessionBusyError, SessionLimitError, UnknownSessionError
from agentbench_kv.phases.tokens import encodable

_log = logging.getLogger(__name__)
_RETRY = {"Retry-After": "1"}

# First match wins: status, code and headers of a foreseen error.
_KNOWN: list[tuple[type[KVBenchError], int, str | None, dict[str, str]]] = [
    (SessionBusyError, 409, "session_busy", _RETRY),
    (SessionLimitError, 429, "session_limit", _RETRY),
    (UnknownSessionError, 404, "session_not_found", {}),
    (CapacityError, 400, "kv_capacity_exceeded", {}),
    (EndpointError, 502, "endpoint_failed", {}),
    (EngineGoneError, 500, "engine_gone", {}),
    (SessionFailedError, 500, "session_failed", {}),
    (MemoryLostError, 503, "memory_lost", {}),
    (KVBenchError, 400, None, {}),
]


class ApiError(Exception):
    """An error response: HTTP status, machine-readable `code`, and the request field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = encodable(message)
        self.code = code
        self.param = param
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        types = {401: "authentication_error", 429: "rate_limit_error"}
        default = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": types.get(self.status, default)}
        return {"error": {**error, "param": self.param, "code": self.code}}


def as_api_error(error: BaseException) -> ApiError:
    """Return the response an exception stands for; an unforeseen one is logged and hidden."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code, headers in _KNOWN:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code, headers=headers)
    _log.error("request failed", exc_info=error)
    return ApiError(500, "the engine failed; the server's log says how", code="internal_error")
