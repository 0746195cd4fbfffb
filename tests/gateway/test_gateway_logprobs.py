"""Log probabilities are the model's own: before temperature, cut-offs and constraint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentbench_kv.engines.base import EngineOptions, Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.sampling import Sampler
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.registry import make_method

USER = [{"role": "user", "content": "What does a lamp cost?"}]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    engine = EmbeddedEngine.create(EngineOptions("micro", make_method("full", None)))
    yield Gateway(engine)
    engine.shutdown()


@pytest.fixture(scope="module")
def server(gateway: Gateway) -> Iterator[str]:
    with BackgroundServer(gateway) as running:
        yield running.url


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/{path}", json={"model": "micro", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def expected(gateway: Gateway, prompt: list[int], drawn: list[int]) -> torch.Tensor:
    """Log probabilities [drawn, vocab] of Hugging Face's own forward, in float64."""
    path = gateway.engine.info.model_path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *drawn]])).logits[0].double()
    return torch.log_softmax(logits[len(prompt) - 1 : -1], -1)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "top_p": 0.9, "seed": 4}])
def test_they_are_those_of_the_plain_model(
    gateway: Gateway, server: str, sampling: dict[str, Any]
) -> None:
    body = {"prompt": "the lamp", "logprobs": 3, "max_tokens": 12, "return_token_ids": True}
    choice = post(server, "completions", ignore_eos=True, **body, **sampling)["choices"][0]
    eos = gateway.engine.info.eos_token_ids
    drawn = choice["token_ids"]
    right = expected(gateway, gateway.codec.encode("the lamp"), drawn)
    shown = [place for place, token in enumerate(drawn) if token not in eos]
    found = choice["logprobs"]
    assert found["tokens"] == [gateway.codec.piece(drawn[place]) for place in shown]
    for row, place in enumerate(shown):
        assert math.isclose(
            found["token_logprobs"][row], right[place, drawn[place]].item(), abs_tol=1e-4
        )
        best = right[place].topk(3)
        assert sorted(found["top_logprobs"][row].values(), reverse=True) == pytest.approx(
            best.values.tolist(), abs=1e-4
        )
    assert found["text_offset"][:2] == [0, len(found["tokens"][0])]


def test_asking_for_them_changes_no_token(server: str) -> None:
    body = {"messages": USER, "max_tokens": 20, "return_token_ids": True}
    plain, asked = (
        post(server, "chat/completions", **body, **more)["choices"][0]
        for more in ({}, {"logprobs": True, "top_logprobs": 2})
    )
    assert plain["token_ids"] == asked["token_ids"]
    assert "logprobs" not in plain
    assert [len(token["top_logprobs"]) for token in asked["logprobs"]["content"]] == [2] * len(
        asked["logprobs"]["content"]
    )


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_stream_shows_each_token_once(server: str, path: str) -> None:
    prompt = {"messages": USER} if path.startswith("chat") else {"prompt": "the lamp"}
    wish = {"logprobs": True} if path.startswith("chat") else {"logprobs": 0}
    body = {"model": "micro", "max_tokens": 25, **prompt, **wish}
    whole = post(server, path, **body)["choices"][0]["logprobs"]
    text = httpx.post(f"{server}/{path}", json={**body, "stream": True}, timeout=60).text
    chunks = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    parts = [json.loads(chunk)["choices"][0].get("logprobs") for chunk in chunks]
    key = "content" if path.startswith("chat") else "tokens"
    joined = [each for part in parts if part for each in part[key]]
    assert joined == whole[key]
    if key == "tokens":
        offsets = [each for part in parts if part for each in part["text_offset"]]
        assert offsets == whole["text_offset"]


def test_responses_show_them_in_the_text(server: str) -> None:
    asked = {"input": "the lamp", "max_output_tokens": 30}
    body = post(server, "responses", include=["message.output_text.logprobs"], **asked)
    (message,) = [item for item in body["output"] if item["type"] == "message"]
    assert len(message["content"][0]["logprobs"]) == body["usage"]["output_tokens"]


class OnlyThird:
    """Allows one id, an unlikely one."""

    def allowed(self) -> Any:
        allowed = torch.zeros(4, dtype=torch.bool).numpy()
        allowed[3] = True
        return allowed

    def accept(self, token: int) -> None:
        assert token == 3


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_forced_token_shows_how_unlikely_it_was(temperature: float) -> None:
    logits = torch.tensor([5.0, 1.0, 0.0, -4.0, 9.0])
    sampler = Sampler(Sampling(1, temperature, constraint=OnlyThird(), logprobs=1))
    assert not sampler.greedy
    assert sampler.draw(logits) == 3
    (noted,) = sampler.logprobs
    right = torch.log_softmax(logits.double(), -1)
    assert noted.logprob == pytest.approx(right[3].item())
    assert noted.top == ((4, pytest.approx(right[4].item())),)
