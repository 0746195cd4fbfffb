"""Raw completions of a fixed length: the model's own turn end is not a stop."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from agentbench_kv.engines.base import Generation, Sampling
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import BackgroundServer


@pytest.mark.parametrize("ignored", [True, False])
def test_ignore_eos_takes_the_turn_end_from_the_stops(
    engine_of: Callable[..., ScriptedEngine], monkeypatch: pytest.MonkeyPatch, ignored: bool
) -> None:
    engine = engine_of("some text")
    seen: list[Sampling] = []
    generate = engine.generate

    def noting(session: str, sampling: Sampling) -> Generation:
        seen.append(sampling)
        return generate(session, sampling)

    monkeypatch.setattr(engine, "generate", noting)
    with BackgroundServer(Gateway(engine)) as server:
        body = {"model": "gold", "prompt": [5, 6], "ignore_eos": ignored, "stop": ["<|endoftext|>"]}
        assert httpx.post(f"{server.url}/completions", json=body).status_code == 200
    (eos,) = engine.info.eos_token_ids
    (sampling,) = seen
    assert (eos in sampling.stop_token_ids) is not ignored
    # A stop that the request names is one all the same.
    assert len(sampling.stop_token_ids - {eos}) == 1
