"""The litellm transport, against a module that behaves as litellm does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.engines.api.asking import RetryPolicy
from agentbench_kv.engines.api.endpoints import parse_model
from agentbench_kv.engines.api.engine import ApiEngine
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.gateway import TextGateway

MODULE = """
calls = []


class RateLimitError(Exception):
    status_code = 429


class AuthenticationError(Exception):
    status_code = 401


class Reply:
    def model_dump(self):
        message = {"role": "assistant", "content": "hello"}
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}


async def acompletion(**fields):
    calls.append(fields)
    if fields["model"] == "p/locked":
        raise AuthenticationError("bad key")
    if len(calls) == 1:
        raise RateLimitError("slow down")
    return Reply()
"""


@pytest.fixture
def gateway_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], TextGateway]]:
    (tmp_path / "litellm.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "litellm", raising=False)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    engines: list[ApiEngine] = []

    def build(model: str) -> TextGateway:
        policy = RetryPolicy(retries=1, first_pause_s=0.0)
        engines.append(ApiEngine(parse_model(model), model=model, policy=policy))
        return TextGateway(engines[-1])

    yield build
    for engine in engines:
        engine.shutdown()
    sys.modules.pop("litellm", None)


def test_a_model_of_litellm_is_asked_and_asked_again(gateway_of: Callable[..., Any]) -> None:
    gateway = gateway_of("litellm/p/name")
    result = gateway.chat("s", [{"role": "user", "content": "hi"}])
    assert result.content == "hello"
    assert result.report.usage == {"prompt_tokens": 3, "completion_tokens": 2, "requests": 1}
    first, second = sys.modules["litellm"].calls
    assert first == second
    assert (first["model"], first["num_retries"]) == ("p/name", 0)
    assert gateway.provenance()["api_endpoint"] == "litellm/p/name"


def test_its_errors_have_their_meaning(gateway_of: Callable[..., Any]) -> None:
    with pytest.raises(PrerequisiteError, match="provider's key"):
        gateway_of("litellm/p/locked").chat("s", [{"role": "user", "content": "hi"}])
